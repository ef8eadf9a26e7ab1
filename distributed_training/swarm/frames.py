"""How parts travel: hivemind's messages on a stream, with the values left where they are.

On the wire a message is a marker byte, eight bytes of length (big-endian) and an ``AveragingData``
in protobuf's encoding; a stream ends with an empty error message (hivemind 1.1.12,
``P2P.send_protobuf``). The values, uncompressed float32, are one field in the middle of it. So the
bytes before and after them are made by protobuf from a message without values, and the values go
from the tensor to the socket and from the socket into a tensor. What any other peer sends, or a
compressed part, is left to protobuf and hivemind as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.proto import averaging_pb2, p2pd_pb2, runtime_pb2
from torch import Tensor

from .streams import Stream, varint

NONE = runtime_pb2.CompressionType.NONE
_MESSAGE, _ERROR = b"\x00", b"\x01"
END = _ERROR + bytes(8)
_LENGTH = 8
# Protobuf's tags (field number << 3 | wire type) of AveragingData's and Tensor's fields on the way
# to the values, with 2 for bytes and 0 for numbers.
_CODE, _GROUP_ID, _PEER_ID, _TENSOR_PART, _BUFFER = 0x08, 0x12, 0x1A, 0x22, 0x0A
#: Bytes of a message that are read first: more than what can stand before the values.
_HEAD = 64
#: What a message may be longer than the values in it, uncompressed.
_MOST_AROUND = 4096


class FrameError(ConnectionError):
    """A peer sent what is no part of an all-reduce, or not the one that was due."""


def encode(
    values: Tensor,
    *,
    compression: int = NONE,
    code: int = averaging_pb2.NO_CODE,
    group_id: bytes = b"",
    weight: float = 0.0,
) -> tuple[bytes | memoryview, ...]:
    """The chunks of a message with ``values`` (float32, one dimension, contiguous).

    Together they are, byte for byte, what hivemind sends for the same part.
    """
    before = averaging_pb2.AveragingData(code=code, group_id=group_id)
    after = averaging_pb2.AveragingData(weight=weight).SerializeToString()
    if compression != NONE:
        before.weight = weight
        before.tensor_part.CopyFrom(serialize_torch_tensor(values, compression))
        return _framed(before.SerializeToString())
    view = _bytes_of(values)
    rest = runtime_pb2.Tensor(size=[len(values)], dtype="float32").SerializeToString()
    buffer = bytes([_BUFFER]) + varint(len(view))
    tensor = bytes([_TENSOR_PART]) + varint(len(buffer) + len(view) + len(rest))
    head, tail = before.SerializeToString() + tensor + buffer, rest + after
    length = len(head) + len(view) + len(tail)
    return _MESSAGE + length.to_bytes(_LENGTH, "big") + head, view, tail


def encode_code(code: int) -> bytes:
    """A message without values: why a part is not taken."""
    return b"".join(_framed(averaging_pb2.AveragingData(code=code).SerializeToString()))


def _bytes_of(values: Tensor) -> memoryview:
    array: Any = values.numpy()
    return memoryview(array).cast("B")


def _framed(data: bytes) -> tuple[bytes, bytes]:
    return _MESSAGE + len(data).to_bytes(_LENGTH, "big"), data


@dataclass
class Arriving:
    """A message of which the beginning was read. ``group_id`` and ``code`` are known already."""

    group_id: bytes
    code: int
    _length: int
    _head: bytes
    _values_at: tuple[int, int, int] | None  # of the tensor's field, of the values; their bytes


async def begin(stream: Stream, *, part_bytes: int) -> Arriving | None:
    """The beginning of the next message; None at the end of the stream.

    ``part_bytes``: of the longest part, uncompressed. Raises OSError, FrameError among them.
    """
    marker = await stream.receive(1 + _LENGTH)
    length = int.from_bytes(marker[1:], "big")
    if length > part_bytes + _MOST_AROUND:
        raise FrameError(f"a message of {length} bytes where parts have {part_bytes}")
    if marker[:1] == _ERROR:
        if not length:
            return None
        data = await stream.receive(length)
        try:
            said = p2pd_pb2.RPCError.FromString(data).message
        except DecodeError:
            said = "it does not say why"
        raise FrameError(f"the peer failed: {said}")
    if marker[:1] != _MESSAGE:
        raise FrameError("neither a message nor the end of the stream")
    head = await stream.receive(min(length, _HEAD))
    values_at = _find_values(head, length)
    if values_at is None:  # laid out in another way, or without values
        head += await stream.receive(length - len(head))
    known = _parse(head if values_at is None else head[: values_at[0]])
    return Arriving(known.group_id, known.code, length, head, values_at)


async def finish(stream: Stream, arriving: Arriving, values: Tensor) -> averaging_pb2.AveragingData:
    """The rest of the message. Its values are in ``values`` then (float32, one dimension).

    The answer's ``tensor_part`` says how they were compressed. Raises OSError, FrameError among
    them: also when there are more or fewer values.
    """
    if arriving._values_at is None:
        message = _parse(arriving._head)
        _decompress(message.tensor_part, values)
        return message
    tensor_at, at, count = arriving._values_at
    view = _bytes_of(values)
    direct = count == len(view)
    received = view if direct else memoryview(bytearray(count))
    known = arriving._head[at : at + count]
    received[: len(known)] = known
    await stream.receive_into(received[len(known) :])
    end = at + count
    tail = arriving._head[end:]
    tail += await stream.receive(arriving._length - max(end, len(arriving._head)))
    tensor_length, tensor_from = _read_varint(arriving._head, tensor_at + 1) or (0, 0)
    rest = tail[: tensor_from + tensor_length - end]
    message = _parse(arriving._head[:tensor_at] + tail[len(rest) :])
    try:
        message.tensor_part.ParseFromString(rest)
    except DecodeError as error:
        raise FrameError(f"a damaged part: {error}") from None
    part = message.tensor_part
    if not (direct and part.compression == NONE and part.dtype == "float32"):
        part.buffer = bytes(received)
        _decompress(part, values)
    elif list(part.size) != [len(values)]:
        raise FrameError(f"a part of shape {list(part.size)} instead of {len(values)} values")
    return message


def _decompress(part: runtime_pb2.Tensor, values: Tensor) -> None:
    try:
        whole = deserialize_torch_tensor(part).detach().reshape(-1)
    except Exception as error:  # noqa: BLE001 - numpy, torch and hivemind each raise their own
        raise FrameError(f"a part that cannot be read: {error}") from None
    if len(whole) != len(values):
        raise FrameError(f"a part of {len(whole)} values instead of {len(values)}")
    values.copy_(whole)


def _parse(data: bytes) -> averaging_pb2.AveragingData:
    try:
        return averaging_pb2.AveragingData.FromString(data)
    except DecodeError as error:
        raise FrameError(f"not a message of an all-reduce: {error}") from None


def _find_values(head: bytes, length: int) -> tuple[int, int, int] | None:
    """Where the tensor's field begins, where its values begin, and how many bytes they have.

    None if ``head``, the first bytes of a message of ``length``, is laid out in another way.
    """
    at = 0
    while at < len(head) and head[at] != _TENSOR_PART:
        tag = head[at]
        number = _read_varint(head, at + 1)
        if number is None or tag not in (_CODE, _GROUP_ID, _PEER_ID):
            return None
        value, at = number
        at += 0 if tag == _CODE else value
    tensor = _read_varint(head, at + 1)
    if tensor is None or tensor[1] >= len(head) or head[tensor[1]] != _BUFFER:
        return None
    buffer = _read_varint(head, tensor[1] + 1)
    if buffer is None:
        return None
    count, values_at = buffer
    inside = values_at + count <= tensor[1] + tensor[0] <= length
    return (at, values_at, count) if inside else None


def _read_varint(data: bytes, at: int) -> tuple[int, int] | None:
    """A number and the place after it; None if ``data`` ends before it does."""
    number = 0
    for i, byte in enumerate(data[at : at + 10]):
        number |= (byte & 0x7F) << 7 * i
        if not byte & 0x80:
            return number, at + i + 1
    return None
