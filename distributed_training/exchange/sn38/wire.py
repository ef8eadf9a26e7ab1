"""The wire between peers: streams of p2pd, and hivemind's messages on them.

p2pd, the libp2p daemon, speaks to the network; a program asks it over its control socket to open a
stream to a peer, or to deliver streams that peers open. hivemind puts asyncio's StreamReader and
StreamWriter on these sockets, which is fine for small messages; the parts of an all-reduce would be
copied several times. A :class:`Stream` moves bytes between a tensor's memory and the socket.

A message on the wire is a marker byte, eight bytes of length (big-endian) and an ``AveragingData``
in protobuf's encoding; a stream ends with an empty error message (hivemind 1.1.12,
``P2P.send_protobuf``). The values, uncompressed float32, are one field in the middle of it.
Protobuf makes the bytes before and after them from a message without values, and the values go from
the tensor to the socket and from the socket into a tensor. Protobuf and hivemind read every other
message as a whole: compressed parts, and all messages of other kinds of peers. Values of four bits,
which hivemind does not know, are that same field too (:mod:`~.protocol.four_bits`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from google.protobuf.message import DecodeError, Message
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, p2pd_pb2, runtime_pb2
from hivemind.utils.multiaddr import Multiaddr
from torch import Tensor

from distributed_training.protocol import four_bits

log = logging.getLogger(__name__)

_INTRODUCTION = 10.0  # seconds p2pd may take to say whose stream it delivers
_MOST_CONTROL_BYTES = 1 << 20  # of one message of p2pd
_MOST_LENGTH_BYTES = 4  # of the varint before it
_BACKLOG = 128
_ACCEPT_AGAIN = 1.0  # seconds, after a stream could not be accepted


class StreamError(ConnectionError):
    """The stream could not be opened, or ended too early."""


class Stream:
    """One libp2p stream. ``peer`` is who is at the other end, as libp2p authenticated it.

    One task may send while another receives. Both raise OSError (StreamError is one) when the
    stream breaks. Leave the context that opened it only when neither is running.
    """

    def __init__(self, connection: socket.socket, peer: PeerID) -> None:
        self.peer = peer
        self._socket = connection
        self._loop = asyncio.get_running_loop()

    async def receive_into(self, view: memoryview) -> None:
        """Fill all of ``view``, a view of bytes."""
        while view:
            count = await self._loop.sock_recv_into(self._socket, view)
            if not count:
                raise StreamError("the stream ended in the middle of a message")
            view = view[count:]

    async def receive(self, count: int) -> bytes:
        data = bytearray(count)
        await self.receive_into(memoryview(data))
        return bytes(data)

    async def receive_end(self) -> None:
        """Wait until the other side has closed. Raises StreamError if it sends anything."""
        if await self._loop.sock_recv(self._socket, 1):
            raise StreamError("more than was expected")

    async def send(self, *chunks: bytes | memoryview) -> None:
        """Send all ``chunks`` (views of bytes) one after the other, without joining them first."""
        left = [memoryview(chunk) for chunk in chunks]
        while left:
            try:
                # One call for head, values and tail: joined, megabytes would be copied.
                count = self._socket.sendmsg(left)
            except (BlockingIOError, InterruptedError):
                writable = asyncio.Event()
                self._loop.add_writer(self._socket, writable.set)
                try:
                    await writable.wait()
                finally:
                    self._loop.remove_writer(self._socket)
                continue
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    async def send_message(self, message: Message) -> None:
        """Send to p2pd itself: length as a varint, then the message."""
        data = message.SerializeToString()
        await self.send(varint(len(data)), data)

    async def receive_message(self, message: Message) -> None:
        """Receive a message from p2pd itself."""
        head, length = b"", None
        # p2pd is our own process; its bug must not take the memory that training needs.
        while length is None and len(head) < _MOST_LENGTH_BYTES:
            head += await self.receive(1)
            length = _read_varint(head, 0)
        if length is None or length[0] > _MOST_CONTROL_BYTES:
            raise StreamError("p2pd sent a message that is too long")
        data = await self.receive(length[0])
        try:
            message.ParseFromString(data)
        except DecodeError as error:
            raise StreamError(f"p2pd sent bytes that are no message: {error}") from None

    def end_sending(self) -> None:
        """End the stream in this direction: the other side reads the end after the data.

        p2pd may reset the stream instead, which overtakes the last data: let the other side take
        that first.
        """
        with contextlib.suppress(OSError):  # it is broken already
            self._socket.shutdown(socket.SHUT_WR)


def varint(number: int) -> bytes:
    """Encode an unsigned number as Protobuf does: seven bits a byte, the lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


class Daemon:
    """p2pd, by the path of its control socket."""

    def __init__(self, control: str) -> None:
        self._control = control

    @contextlib.asynccontextmanager
    async def open_stream(self, peer: PeerID, protocol: str) -> AsyncIterator[Stream]:
        """Open a stream to ``peer``, closed at the end.

        Raises OSError, also if the peer refuses it.
        """
        request = p2pd_pb2.StreamOpenRequest(peer=peer.to_bytes(), proto=[protocol])
        async with self._call(peer, "STREAM_OPEN", streamOpen=request) as (stream, _):
            yield stream

    async def connect(self, peer: PeerID, addresses: Iterable[str]) -> None:
        """Connect to ``peer`` at one of its full addresses. Raises OSError."""
        # p2pd's own form of an address has no peer id at the end.
        places = [Multiaddr(a.rpartition("/p2p/")[0]).to_bytes() for a in addresses]
        request = p2pd_pb2.ConnectRequest(peer=peer.to_bytes(), addrs=places)
        async with self._call(peer, "CONNECT", connect=request):
            pass

    async def addresses(self, peer: PeerID) -> list[str]:
        """Return the full addresses under which p2pd knows ``peer``. Raises OSError."""
        request = p2pd_pb2.DHTRequest(type=p2pd_pb2.DHTRequest.FIND_PEER, peer=peer.to_bytes())
        async with self._call(peer, "DHT", dht=request) as (_, response):
            return [f"{Multiaddr(place)}/p2p/{peer}" for place in response.dht.peer.addrs]

    @contextlib.asynccontextmanager
    async def serve(
        self,
        protocol: str,
        path: Path,
        handle: Callable[[Stream], Awaitable[None]],
        *,
        most: int,
    ) -> AsyncIterator[None]:
        """Handle each stream that a peer opens for ``protocol`` by a task, inside this context.

        ``path``: of the Unix socket on which p2pd delivers them; it must not exist. ``most``: of
        the streams at once; a further one is closed unread.
        """
        loop = asyncio.get_running_loop()
        handlers: set[asyncio.Task[None]] = set()

        async def accept() -> None:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:  # no descriptor or no memory is left
                    log.warning("What peers send cannot be accepted now: %s", error)
                    await asyncio.sleep(_ACCEPT_AGAIN)
                    continue
                if len(handlers) >= most:
                    connection.close()
                    continue
                task = asyncio.create_task(self._deliver(connection, handle))
                handlers.add(task)
                task.add_done_callback(handlers.discard)

        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.setblocking(False)
            listener.bind(str(path))
            # Before p2pd learns of it: a stream that comes at once would be refused.
            listener.listen(_BACKLOG)
            accepting = asyncio.create_task(accept())
            try:
                address = Multiaddr(f"/unix{path}").to_bytes()
                request = p2pd_pb2.StreamHandlerRequest(
                    addr=address, proto=[protocol], balanced=False
                )
                # p2pd keeps the handler when this connection ends.
                async with self._call(PeerID(b""), "STREAM_HANDLER", streamHandler=request):
                    pass
                yield
            finally:
                # The one that accepts too: a stream that comes now would have no handler.
                for task in (accepting, *handlers):
                    task.cancel()
                await asyncio.gather(accepting, *handlers, return_exceptions=True)
                path.unlink(missing_ok=True)

    @contextlib.asynccontextmanager
    async def _call(
        self, peer: PeerID, kind: str, **request: Message
    ) -> AsyncIterator[tuple[Stream, p2pd_pb2.Response]]:
        """Call p2pd, on a connection that stays open inside. Raises OSError."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, self._control)
            stream = Stream(connection, peer)
            number = p2pd_pb2.Request.Type.Value(kind)
            await stream.send_message(p2pd_pb2.Request(type=number, **request))
            response = p2pd_pb2.Response()
            await stream.receive_message(response)
            if response.type != p2pd_pb2.Response.OK:
                raise StreamError(response.error.msg)
            yield stream, response

    async def _deliver(
        self, connection: socket.socket, handle: Callable[[Stream], Awaitable[None]]
    ) -> None:
        connection.setblocking(False)
        with connection:
            try:
                stream = Stream(connection, PeerID(b""))
                whose = p2pd_pb2.StreamInfo()
                async with asyncio.timeout(_INTRODUCTION):
                    await stream.receive_message(whose)
                stream.peer = PeerID(whose.peer)
                await handle(stream)
            except (OSError, TimeoutError) as error:
                log.debug("A stream that a peer opened ended: %s", error)


NONE = runtime_pb2.CompressionType.NONE
#: Ours: hivemind has 0 to 5. All peers of a group use it, or none does (protocol page, section 6).
FOUR_BITS = 104
_MESSAGE, _ERROR = b"\x00", b"\x01"
END = _ERROR + bytes(8)
_LENGTH = 8
# Protobuf's tags (field number << 3 | wire type) of AveragingData's and Tensor's fields on the way
# to the values, with 2 for bytes and 0 for numbers.
_CODE, _GROUP_ID, _PEER_ID, _TENSOR_PART, _BUFFER = 0x08, 0x12, 0x1A, 0x22, 0x0A
#: Bytes of a message that are read first: more than can stand before the values.
_HEAD = 64
#: Bytes by which a message may be longer than its uncompressed values.
_MOST_AROUND = 4096
_FLOATS = ("float32", "float16", "bfloat16", "float64")
#: Raised by hivemind, numpy and torch for data of a peer that makes no sense. An ImportError: a
#: compression of hivemind's needs a package that is not here.
NONSENSE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


_Short = TypeVar("_Short", bound=Message)


class FrameError(ConnectionError):
    """A peer sent a message that is no part of an all-reduce, or not the part that was due."""


def encode(
    values: Tensor,
    *,
    compression: int = NONE,
    code: int = averaging_pb2.NO_CODE,
    group_id: bytes = b"",
    weight: float = 0.0,
) -> tuple[bytes | memoryview, ...]:
    """Return the chunks of a message with ``values`` (float32, one dimension, contiguous).

    Together they are, byte for byte, hivemind's message for the same part, except in four bits.
    """
    before = averaging_pb2.AveragingData(code=code, group_id=group_id)
    if compression not in (NONE, FOUR_BITS):
        before.weight = weight
        before.tensor_part.CopyFrom(serialize_torch_tensor(values, compression))
        return framed(before.SerializeToString())
    data = four_bits.encode(values) if compression == FOUR_BITS else values
    return _encode_around(data, len(values), compression, before, weight)


def encode_average(data: Tensor, count: int) -> tuple[bytes | memoryview, ...]:
    """Return the chunks of a message with an average of ``count`` values: ``data``, of four bits.

    They are the average itself; other compressions send its difference to the received values.
    """
    before = averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART)
    return _encode_around(data, count, FOUR_BITS, before, 0.0)


def _encode_around(
    data: Tensor, count: int, compression: int, before: averaging_pb2.AveragingData, weight: float
) -> tuple[bytes | memoryview, ...]:
    # Around protobuf, which would copy all values into the message first.
    view = _bytes_of(data)
    after = averaging_pb2.AveragingData(weight=weight).SerializeToString()
    rest = runtime_pb2.Tensor(
        size=[count], dtype="float32", compression=compression
    ).SerializeToString()
    buffer = bytes([_BUFFER]) + varint(len(view))
    tensor = bytes([_TENSOR_PART]) + varint(len(buffer) + len(view) + len(rest))
    head, tail = before.SerializeToString() + tensor + buffer, rest + after
    length = len(head) + len(view) + len(tail)
    return _MESSAGE + length.to_bytes(_LENGTH, "big") + head, view, tail


def encode_code(code: int) -> bytes:
    """Encode a message without values: the reason why a part is not taken."""
    return b"".join(framed(averaging_pb2.AveragingData(code=code).SerializeToString()))


def _bytes_of(values: Tensor) -> memoryview:
    array: Any = values.numpy()
    return memoryview(array).cast("B")


def framed(data: bytes) -> tuple[bytes, bytes]:
    """Return the chunks of a message, as hivemind's P2P frames it."""
    return _MESSAGE + len(data).to_bytes(_LENGTH, "big"), data


@dataclass
class Arriving:
    """A message whose beginning was read: ``group_id`` and ``code`` are known already."""

    group_id: bytes
    code: int
    _length: int
    _head: bytes
    _values_at: tuple[int, int, int] | None  # of the tensor's field, of the values; their bytes


async def begin(stream: Stream, *, part_bytes: int) -> Arriving | None:
    """Read the beginning of the next message; None at the end of the stream.

    ``part_bytes``: of the longest part, uncompressed. Raises OSError, FrameError among them.
    """
    marker = await stream.receive(1 + _LENGTH)
    length = int.from_bytes(marker[1:], "big")
    # Before memory is taken for it: the peer only claims this length.
    if length > part_bytes + _MOST_AROUND:
        raise FrameError(f"a message of {length} bytes where parts have {part_bytes}")
    if marker[:1] == _ERROR:
        if not length:
            return None
        if length > _MOST_AROUND:
            raise FrameError(f"an error of {length} bytes")
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
    if values_at is None:  # without values, or few of them laid out in another way
        if length > _MOST_AROUND:
            raise FrameError(f"a message of {length} bytes that is laid out in another way")
        head += await stream.receive(length - len(head))
    known = _parse(head if values_at is None else head[: values_at[0]])
    return Arriving(known.group_id, known.code, length, head, values_at)


async def receive_short(stream: Stream, kind: type[_Short]) -> _Short:
    """Receive one message that is not a part. Raises OSError, FrameError among them."""
    marker = await stream.receive(1 + _LENGTH)
    length = int.from_bytes(marker[1:], "big")
    if marker[:1] != _MESSAGE or length > _MOST_AROUND:
        raise FrameError(f"no message, or one of {length} bytes")
    try:
        return kind.FromString(await stream.receive(length))
    except DecodeError as error:
        raise FrameError(f"not a {kind.__name__}: {error}") from None


async def finish(
    stream: Stream, arriving: Arriving, values: Tensor, *, four: bool = False
) -> averaging_pb2.AveragingData:
    """Read the rest of the message, with its values into ``values`` (float32, one dimension).

    ``four``: they must have four bits, and otherwise they must not. The answer's ``tensor_part``
    holds how they were compressed. Raises OSError, FrameError among them: also when there are more
    or fewer values.
    """
    if arriving._values_at is None:
        message = _parse(arriving._head)
        _decompress(message.tensor_part, values, four)
        return message
    tensor_at, at, count = arriving._values_at
    if four and count != (expected := four_bits.bytes_of(len(values))):
        # Before memory is taken for them.
        raise FrameError(f"a part of {count} bytes instead of the {expected} of four bits a value")
    view = _bytes_of(values)
    direct = not four and count == len(view)
    received = view if direct else memoryview(bytearray(count))
    known = arriving._head[at : at + count]
    # The first values came with the head.
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
        _decompress(part, values, four)
    elif list(part.size) != [len(values)]:
        raise FrameError(f"a part of shape {list(part.size)} instead of {len(values)} values")
    return message


def _decompress(part: runtime_pb2.Tensor, values: Tensor, four: bool) -> None:
    if (part.compression == FOUR_BITS) != four:
        raise FrameError(f"a part of compression {part.compression}, which this group does not use")
    if four:
        if part.dtype != "float32" or list(part.size) != [len(values)]:
            raise FrameError(f"a part of shape {list(part.size)} instead of {len(values)} values")
        try:
            four_bits.decode(torch.frombuffer(bytearray(part.buffer), dtype=torch.uint8), values)
        except ValueError as error:
            raise FrameError(f"a part that cannot be read: {error}") from None
        return
    # numpy makes any type that it is named: of strings of 20 KB each, gigabytes of a small part.
    if part.dtype not in _FLOATS:
        raise FrameError(f"a part of type {part.dtype[:20]!r}")
    try:
        whole = deserialize_torch_tensor(part).detach().reshape(-1)
    except NONSENSE as error:
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
    """Locate the tensor's field, its values, and the number of their bytes.

    None if ``head``, the first bytes of a message of ``length``, is laid out in another way.
    """
    at = 0
    # hivemind's order. Another one is sound protobuf too: it is read whole then.
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
    # Lengths are the peer's. A field that ends outside is left to protobuf, which refuses it.
    inside = values_at + count <= tensor[1] + tensor[0] <= length
    return (at, values_at, count) if inside else None


def _read_varint(data: bytes, at: int) -> tuple[int, int] | None:
    """Read a number; return it and the place after it, None if ``data`` ends before it does."""
    number = 0
    # Ten bytes hold 64 bits: a longer number is none.
    for i, byte in enumerate(data[at : at + 10]):
        number |= (byte & 0x7F) << 7 * i
        if not byte & 0x80:
            return number, at + i + 1
    return None
