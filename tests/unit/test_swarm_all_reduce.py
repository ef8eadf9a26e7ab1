"""A reducer that answers anything at all: it costs its own share, never the round."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import torch
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_training.swarm import wire
from distributed_training.swarm.all_reduce import AllReduce, Group, GroupFailed, Terms
from distributed_training.swarm.wire import Stream
from tests.tools.swarm_world import stream_pair

pytestmark = pytest.mark.timeout(120)
logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames it for the whole process

OWN, OTHER = PeerID(b"a" * 34), PeerID(b"b" * 34)
PART = 1024  # values
CHUNK = 0.2  # seconds
Reducer = Callable[[Stream], Coroutine[Any, Any, None]]


def run_with(reducer: Reducer, *, parts: int, chunk: float = CHUNK) -> AllReduce:
    """One all-reduce with a peer whose reducer is ``reducer`` and which sends us nothing."""

    async def run() -> AllReduce:
        @contextlib.asynccontextmanager
        async def open_stream(_: PeerID) -> AsyncIterator[Stream]:
            with stream_pair(OWN, OTHER) as (ours, theirs):
                answering = asyncio.create_task(reducer(theirs))
                try:
                    yield ours
                finally:
                    answering.cancel()
                    await asyncio.gather(answering, return_exceptions=True)

        all_reduce = AllReduce(
            Group(b"group", (OWN, OTHER), (parts * PART, parts * PART)),
            OWN,
            tensors=[torch.ones(2 * parts * PART)],
            terms=Terms(weight=1.0, part_values=PART, compression=0, chunk_timeout=chunk),
            open_stream=open_stream,
        )
        async with asyncio.timeout(20):  # the round's own deadline is many times as long
            with contextlib.suppress(GroupFailed):
                await all_reduce.run()
            await asyncio.gather(*all_reduce.closing)
        return all_reduce

    return asyncio.run(run())


def framed(marker: bytes, body: bytes) -> bytes:
    return marker + len(body).to_bytes(8, "big") + body


codes = st.integers(-(2**31), 2**31 - 1).map(
    lambda code: averaging_pb2.AveragingData(code=code).SerializeToString()
)
answers = st.one_of(
    st.builds(framed, st.sampled_from([b"\x00", b"\x01", b"\x02"]), st.binary(max_size=80) | codes),
    st.binary(max_size=80),
)


@settings(max_examples=40, deadline=None)
@given(answers)
def test_whatever_a_reducer_answers_the_round_goes_on(answer: bytes) -> None:
    async def reducer(stream: Stream) -> None:
        await stream.send(answer)
        stream.end_sending()
        with contextlib.suppress(OSError):
            await stream.receive_end()
        await asyncio.Event().wait()

    all_reduce = run_with(reducer, parts=3)
    assert all_reduce.kept_local == 3 * PART


@pytest.mark.parametrize("then", [framed(b"\x02", b"no message"), b""], ids=["nonsense", "gone"])
def test_a_sender_that_fails_after_its_first_part_is_left_out(then: bytes) -> None:
    """Its first part stays in the average; nobody waits for its others."""

    async def run() -> list[float]:
        tensor = torch.ones(3 * PART)
        all_reduce = AllReduce(
            Group(b"group", (OWN, OTHER), (3 * PART, 0)),
            OWN,
            tensors=[tensor],
            terms=Terms(weight=1.0, part_values=PART, compression=0, chunk_timeout=60.0),
            open_stream=lambda peer: pytest.fail(f"{peer} averages nothing"),
        )
        with stream_pair(OWN, OTHER) as (stream, sender):
            code = averaging_pb2.PART_FOR_AVERAGING
            part = wire.encode(torch.full((PART,), 3.0), code=code, group_id=b"group", weight=1.0)
            await sender.send(*part, then)
            sender.end_sending()
            first = await all_reduce._next(stream)
            assert first is not None
            serving = asyncio.create_task(all_reduce.serve(stream, first))
            async with asyncio.timeout(30):  # of the 60 s that a part may take
                with contextlib.suppress(GroupFailed):  # the only other one
                    await all_reduce.run()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        assert all_reduce.reducer.failed == {OTHER}
        return [float(part.mean()) for part in tensor.split(PART)]

    assert asyncio.run(run()) == [2.0, 1.0, 1.0]


@pytest.mark.parametrize("code", [99, averaging_pb2.CANCELLED])
def test_why_a_reducer_refuses_is_told_also_if_nobody_knows_its_code(
    code: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def reducer(stream: Stream) -> None:
        await stream.send(wire.encode_code(code))
        await asyncio.Event().wait()

    run_with(reducer, parts=3)
    assert f"it answered {'CANCELLED' if code != 99 else 99}" in caplog.text


def test_a_reducer_that_answers_all_and_reads_nothing_does_not_hold_the_round() -> None:
    parts = 400  # more than fits into the sockets between

    async def reducer(stream: Stream) -> None:
        for _ in range(parts):
            zeros = torch.zeros(PART)
            await stream.send(*wire.encode(zeros, code=averaging_pb2.AVERAGED_PART))
        await asyncio.Event().wait()

    # Enough for an answer on a busy machine. A round that is held ends with an error.
    all_reduce = run_with(reducer, parts=parts, chunk=2.0)
    assert all_reduce.kept_local == 0
