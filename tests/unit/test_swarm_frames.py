"""Parts on the wire, byte for byte hivemind's; refused messages; streams that peers open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import tracemalloc
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hivemind.compression import serialize_torch_tensor
from hivemind.p2p import P2P, PeerID
from hivemind.proto import averaging_pb2, p2pd_pb2, runtime_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_training.exchange.sn38 import wire
from distributed_training.exchange.sn38.wire import (
    Daemon,
    FrameError,
    Stream,
    StreamError,
    varint,
)
from distributed_training.protocol import four_bits
from tests.tools.swarm_world import stream_pair
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(60)
logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames it for the whole process

PART_BYTES = 4 * 4096
CODES = averaging_pb2.MessageCode.values()
COMPRESSIONS = [wire.NONE, runtime_pb2.CompressionType.FLOAT16]


def hiveminds(message: Any) -> bytes:
    """Return hivemind's bytes of a message."""

    class Writer:
        data = b""

        def write(self, data: bytes) -> None:
            self.data += bytes(data)

        async def drain(self) -> None: ...

    writer = Writer()
    asyncio.run(P2P.send_protobuf(message, writer))
    return writer.data


def part_of(values: torch.Tensor, compression: int = wire.NONE, **fields: Any) -> Any:
    tensor = serialize_torch_tensor(values, compression)
    return averaging_pb2.AveragingData(tensor_part=tensor, **fields)


def ramp(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) / 7


def received(
    data: bytes, act: Callable[[Stream], Coroutine[Any, Any, Any]], *, piece: int = 1 << 20
) -> Any:
    """Return what ``act`` makes of a stream on which a peer sends ``data``, in pieces, and ends."""

    async def run() -> Any:
        with stream_pair(PeerID(b"own"), PeerID(b"peer")) as (ours, theirs):

            async def send() -> None:
                for at in range(0, len(data), piece):
                    await theirs.send(data[at : at + piece])
                    await asyncio.sleep(0)
                theirs.end_sending()

            sending = asyncio.create_task(send())
            try:
                async with asyncio.timeout(5):
                    return await act(ours)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    return asyncio.run(run())


async def take(stream: Stream, count: int, *, four: bool = False) -> tuple[Any, torch.Tensor]:
    values = torch.full((count,), -1.0)
    arriving = await wire.begin(stream, part_bytes=PART_BYTES)
    assert arriving is not None
    return await wire.finish(stream, arriving, values, four=four), values


async def take_four(stream: Stream, count: int = 1000) -> tuple[Any, torch.Tensor]:
    return await take(stream, count, four=True)


parts = st.integers(1, 4096)
fields = st.fixed_dictionaries(
    {
        "code": st.sampled_from(CODES),
        "group_id": st.binary(max_size=20),
        "weight": st.floats(allow_nan=False),
    }
)


@settings(max_examples=60, deadline=None)
@given(parts, fields, st.sampled_from(COMPRESSIONS))
def test_sent_frame_is_hiveminds_own_message(
    count: int, fields: dict[str, Any], compression: int
) -> None:
    ours = b"".join(wire.encode(ramp(count), compression=compression, **fields))
    assert ours == hiveminds(part_of(ramp(count), compression, **fields))


def test_the_values_are_sent_from_where_they_lie() -> None:
    values = ramp(100)
    _, view, _ = wire.encode(values)
    values[3] = 42.0
    assert torch.frombuffer(bytearray(view), dtype=torch.float32)[3] == 42.0


@settings(max_examples=60, deadline=None)
@given(parts, fields, st.sampled_from(COMPRESSIONS), st.integers(1, 3000))
def test_frame_of_hivemind_is_received(
    count: int, fields: dict[str, Any], compression: int, piece: int
) -> None:
    data = hiveminds(part_of(ramp(count), compression, **fields))
    message, values = received(data, lambda stream: take(stream, count), piece=piece)
    assert {name: getattr(message, name) for name in fields} == fields
    assert message.tensor_part.compression == compression
    assert torch.allclose(values, ramp(count), rtol=1e-3)
    assert compression != wire.NONE or torch.equal(values, ramp(count))


@given(parts, fields, st.integers(1, 3000))
def test_four_bits_are_received_in_an_eighth_of_the_bytes(
    count: int, fields: dict[str, Any], piece: int
) -> None:
    sent = wire.encode(ramp(count), compression=wire.FOUR_BITS, **fields)
    data = b"".join(sent)
    assert len(data) < count / 2 + 4 * (count / 256 + 1) + 100
    expected = torch.empty(count)
    four_bits.decode(four_bits.encode(ramp(count)), expected)
    message, values = received(data, lambda stream: take_four(stream, count), piece=piece)
    assert {name: getattr(message, name) for name in fields} == fields
    assert torch.equal(values, expected)


def test_an_average_of_four_bits_is_sent_as_it_lies() -> None:
    average = four_bits.encode(ramp(1000))
    message, values = received(b"".join(wire.encode_average(average, 1000)), take_four)
    assert message.code == averaging_pb2.AVERAGED_PART and message.weight == 0
    expected = torch.empty(1000)
    four_bits.decode(average, expected)
    assert torch.equal(values, expected)


def four_part(data: torch.Tensor, **changed: Any) -> bytes:
    """Return a message of 1000 values of four bits, with the fields of ``changed``."""
    fields: dict[str, Any] = {"size": [1000], "dtype": "float32", "compression": wire.FOUR_BITS}
    tensor = runtime_pb2.Tensor(buffer=bytes(data.numpy()), **fields | changed)
    return hiveminds(averaging_pb2.AveragingData(tensor_part=tensor))


def with_scale(value: float) -> torch.Tensor:
    data = four_bits.encode(ramp(1000))
    data[4:8] = torch.tensor([value]).view(torch.uint8)
    return data


SOUND = four_bits.encode(ramp(1000))


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (four_part(SOUND[:-1]), "bytes instead of"),
        (four_part(torch.cat([SOUND, SOUND[:1]])), "bytes instead of"),
        (four_part(SOUND[:0]), "cannot be read|bytes instead of"),
        (four_part(SOUND[:20]), "bytes instead of"),
        (four_part(with_scale(float("nan"))), "a scale"),
        (four_part(with_scale(float("inf"))), "a scale"),
        (four_part(with_scale(-1.0)), "a scale"),
        (four_part(with_scale(1e-45)), "a scale"),
        (four_part(SOUND, size=[999]), "of shape"),
        (four_part(SOUND, size=[10, 100]), "of shape"),
        (four_part(SOUND, dtype="float64"), "of shape"),
        (four_part(SOUND, compression=wire.NONE), "compression 0"),
        (four_part(SOUND, compression=runtime_pb2.CompressionType.FLOAT16), "compression 2"),
        (four_part(SOUND, compression=105), "compression 105"),
        (hiveminds(part_of(ramp(1000))), "bytes instead of"),
        (hiveminds(part_of(ramp(1000), runtime_pb2.CompressionType.FLOAT16)), "bytes instead of"),
        (hiveminds(part_of(ramp(5))), "compression 0|bytes instead of"),
        (four_part(SOUND)[:-9] + b"\xff" * 9, "."),
    ],
)
def test_malformed_part_of_four_bits_is_refused(data: bytes, cause: str) -> None:
    with pytest.raises(FrameError, match=cause):
        received(data, take_four)


def test_four_bits_are_refused_where_a_group_does_not_use_them() -> None:
    for count in (5, 1000):
        data = b"".join(wire.encode(ramp(count), compression=wire.FOUR_BITS))
        with pytest.raises(FrameError, match="compression 104"):
            received(data, partial(take, count=count))


def test_no_memory_is_taken_for_a_message_too_long_for_four_bits() -> None:
    """Its length is claimed, and is not above a part's."""
    claimed = four_part(torch.zeros(PART_BYTES, dtype=torch.uint8))
    with pytest.raises(FrameError, match="bytes instead of"):
        received(claimed[:80], take_four)  # what is claimed does not come


def field(number: int, kind: int, data: bytes) -> bytes:
    return varint(number << 3 | kind) + data


def long_field(number: int, data: bytes) -> bytes:
    return field(number, 2, varint(len(data)) + data)


def framed(body: bytes) -> bytes:
    return b"\x00" + len(body).to_bytes(8, "big") + body


def compressed(how: int, dtype: str, buffer: bytes) -> bytes:
    tensor = runtime_pb2.Tensor(compression=how, dtype=dtype, size=[10], buffer=buffer)
    return hiveminds(averaging_pb2.AveragingData(tensor_part=tensor))


BUFFER = long_field(1, bytes(40))
SHAPE, DTYPE = long_field(2, b"\x0a"), long_field(4, b"float32")


@pytest.mark.parametrize(
    "body",
    [
        long_field(4, SHAPE + DTYPE + BUFFER),  # the values last
        field(5, 1, bytes(8)) + long_field(4, BUFFER + SHAPE + DTYPE),  # the weight first
        long_field(3, b"x" * 90) + long_field(4, BUFFER + SHAPE + DTYPE),  # a long peer id first
        long_field(9, b"unknown") + long_field(4, BUFFER + SHAPE + DTYPE),
    ],
)
def test_another_layout_of_the_same_message_is_understood(body: bytes) -> None:
    _, values = received(framed(body), lambda stream: take(stream, 10))
    assert torch.equal(values, torch.zeros(10))


NO_PARTS = {
    "fewer bytes than values": framed(long_field(4, long_field(1, bytes(36)) + SHAPE + DTYPE)),
    "another shape": framed(long_field(4, BUFFER + long_field(2, b"\x0b") + DTYPE)),
    "no type of a number": framed(long_field(4, BUFFER + SHAPE + long_field(4, b"int32x"))),
    "compressed nobody knows how": framed(
        long_field(4, BUFFER + SHAPE + DTYPE + field(5, 0, b"\x63"))
    ),
    "bytes after the tensor": framed(long_field(4, BUFFER + SHAPE + DTYPE + b"\xff\xff")),
    "an empty tensor": framed(long_field(4, b"")),
    "cut within the tensor": framed(long_field(4, BUFFER)[:-3] + b"\xff\xff\xff"),
    "nothing": framed(b""),
    "noise": framed(b"\xff" * 80),
    "a code without values": framed(field(1, 0, b"\x0f")),
    "endless": b"\x00" + (1 << 60).to_bytes(8, "big") + bytes(100),
    "too long": b"\x00" + (PART_BYTES + 5000).to_bytes(8, "big") + bytes(100),
    "an unknown marker": b"\x02" + bytes(8),
    "an error message": b"\x01" + (3).to_bytes(8, "big") + b"\x0a\x01x",
    "an error message that is none": b"\x01" + (5).to_bytes(8, "big") + b"\xff" * 5,
    "one value more": hiveminds(part_of(ramp(11))),
    "one value fewer, compressed": hiveminds(part_of(ramp(9), runtime_pb2.CompressionType.FLOAT16)),
    "compressed by a package that is not here": compressed(
        runtime_pb2.CompressionType.BLOCKWISE_8BIT, "float32", bytes(20)
    ),
    "numbers of an empty table": compressed(
        runtime_pb2.CompressionType.UNIFORM_8BIT, "float32", bytes(18)
    ),
}


@pytest.mark.parametrize("data", NO_PARTS.values(), ids=NO_PARTS)
def test_malformed_part_is_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        received(data, lambda stream: take(stream, 10))


@pytest.mark.parametrize("marker", [0, 1])
@pytest.mark.parametrize("length", [4097, 5000, PART_BYTES])
def test_long_malformed_part_is_refused_by_its_beginning(marker: int, length: int) -> None:
    """Every peer that opens a stream may send one: it must not fill memory first."""
    data = bytes([marker]) + length.to_bytes(8, "big") + b"\x31" + bytes(63)
    with pytest.raises(FrameError, match=r"laid out in another way|an error of"):
        received(data, lambda stream: wire.begin(stream, part_bytes=PART_BYTES))


def test_no_memory_is_taken_for_values_that_are_no_numbers() -> None:
    """numpy would make a string of 2 MB of each value of a small part."""
    data = compressed(runtime_pb2.CompressionType.FLOAT16, "S2000000", bytes(20))
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            received(data, lambda stream: take(stream, 10))
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_a_stream_that_ends_in_the_middle_is_an_error() -> None:
    whole = hiveminds(part_of(ramp(1000)))
    for cut in (0, 5, 9, 40, 2000):
        with pytest.raises(StreamError):
            received(whole[:cut], lambda stream: take(stream, 1000))


def test_a_receiver_that_is_slow_gets_all_of_it() -> None:
    async def run() -> None:
        values = ramp(300_000)
        with stream_pair(PeerID(b"own"), PeerID(b"peer")) as (ours, stream):
            sending = asyncio.create_task(ours.send(b"ab", *wire.encode(values)))
            await asyncio.sleep(0.05)
            assert not sending.done()
            assert await stream.receive(2) == b"ab"
            arriving = await wire.begin(stream, part_bytes=values.nbytes)
            got = torch.zeros(len(values))
            assert arriving is not None
            await wire.finish(stream, arriving, got)
            await sending
            assert torch.equal(got, values)

    asyncio.run(run())


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.dup(0)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _p2pd(connection: Stream) -> None:
    """Agrees to every question."""
    await connection.receive_message(p2pd_pb2.Request())
    await connection.send_message(p2pd_pb2.Response(type=p2pd_pb2.Response.OK))


def test_streams_are_accepted_again_once_there_are_descriptors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        handled = asyncio.Event()
        control = socket.socket(socket.AF_UNIX)
        control.bind(str(tmp_path / "control"))
        control.listen()
        control.setblocking(False)

        async def answer() -> None:
            asked, _ = await loop.sock_accept(control)
            asked.setblocking(False)
            with asked:
                await _p2pd(Stream(asked, PeerID(b"")))

        async def handle(stream: Stream) -> None:
            assert stream.peer == PeerID(b"peer")
            handled.set()

        p2pd = asyncio.create_task(answer())
        path, peer = tmp_path / "parts", socket.socket(socket.AF_UNIX)
        peer.setblocking(False)
        with control, peer:
            async with Daemon(str(tmp_path / "control")).serve("parts", path, handle, most=9):
                await p2pd
                with no_descriptor_left():
                    await loop.sock_connect(peer, str(path))
                    told = lambda: "cannot be accepted" in caplog.text
                    await asyncio.to_thread(wait_for, told, "the refusal is logged")
                whose = p2pd_pb2.StreamInfo(peer=b"peer", addr=b"", proto="parts")
                await Stream(peer, PeerID(b"")).send_message(whose)
                async with asyncio.timeout(10):
                    await handled.wait()

    asyncio.run(run())
