"""A reducer's sums in any order of peers and failures; reducers with any answer."""

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

from distributed_training.exchange.sn38 import wire
from distributed_training.exchange.sn38.all_reduce import (
    AllReduce,
    Buffers,
    Group,
    GroupFailed,
    Reducer,
    Terms,
)
from distributed_training.exchange.sn38.wire import Stream
from tests.tools.swarm_world import stream_pair

pytestmark = pytest.mark.timeout(120)
logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames it for the whole process

OWN, OTHER = PeerID(b"a" * 34), PeerID(b"b" * 34)
PART = 1024  # values
CHUNK = 0.2  # seconds
Answering = Callable[[Stream], Coroutine[Any, Any, None]]


def run_with(reducer: Answering, *, parts: int, chunk: float = CHUNK) -> AllReduce:
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


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(answers)
def test_round_continues_after_any_answer_of_a_reducer(answer: bytes) -> None:
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
        assert set(all_reduce.reducer.causes) == {OTHER}
        return [float(part.mean()) for part in tensor.split(PART)]

    assert asyncio.run(run()) == [2.0, 1.0, 1.0]


@pytest.mark.parametrize("code", [99, averaging_pb2.CANCELLED])
def test_a_reducers_refusal_is_logged_even_with_an_unknown_code(
    code: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def reducer(stream: Stream) -> None:
        await stream.send(wire.encode_code(code))
        await asyncio.Event().wait()

    run_with(reducer, parts=3)
    assert f"it answered {'CANCELLED' if code != 99 else 99}" in caplog.text


@pytest.mark.slow
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


def peer(number: int) -> PeerID:
    return PeerID(bytes([number]))


def reducer_of(own: torch.Tensor, *, weight: float = 1.0, senders: int = 2) -> Reducer:
    return Reducer(
        list(own),
        weight=weight,
        senders=[peer(i) for i in range(senders)],
        buffers=Buffers(PART),
    )


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_each_part_is_the_weighted_mean_of_its_senders(data: st.DataObject) -> None:
    """Senders interleave at will; each stops after some of its parts, or sends all."""
    count = data.draw(st.integers(1, 4), "parts")
    senders = data.draw(st.integers(1, 3), "senders")
    weights = [data.draw(st.sampled_from([1.0, 1e-6])) for _ in range(senders + 1)]
    sends = [data.draw(st.integers(0, count)) for _ in range(senders)]
    turns = data.draw(st.permutations([i for i, n in enumerate(sends) for _ in range(n + 1)]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    own = torch.randn(count, PART)
    values = torch.randn(senders, count, PART)
    expected = own * weights[-1]
    total = torch.full((count, 1), weights[-1])
    for sender, sent in enumerate(sends):
        expected[:sent] += weights[sender] * values[sender, :sent]
        total[:sent] += weights[sender]
    expected /= total

    async def run() -> None:
        averaged = own.clone()
        reducer = reducer_of(averaged, weight=weights[-1], senders=senders)
        came = values.clone()
        sent = [0] * senders
        waiting: list[tuple[int, int, asyncio.Event]] = []
        for sender in turns:
            index, sent[sender] = sent[sender], sent[sender] + 1
            if index == sends[sender]:  # its turns are over
                if index < count:
                    reducer.leave_out(peer(sender))
                continue
            done = reducer.add(peer(sender), index, came[sender, index], weights[sender])
            waiting.append((sender, index, done))
        assert reducer.complete.is_set()
        assert torch.allclose(averaged, expected, atol=1e-6)
        for sender, index, done in waiting:
            assert done.is_set()
            difference = averaged[index] - values[sender, index]
            assert torch.allclose(came[sender, index], difference, atol=1e-6)
        failed = {peer(i) for i, n in enumerate(sends) if n < count}
        assert set(reducer.causes) == failed
        assert reducer.alone == (len(failed) == senders)

    asyncio.run(run())


def test_a_reducer_is_complete_at_once_without_parts_or_without_senders() -> None:
    async def run() -> None:
        assert reducer_of(torch.empty(0, PART)).complete.is_set()
        assert reducer_of(torch.ones(2, PART), senders=0).complete.is_set()
        assert not reducer_of(torch.ones(2, PART)).complete.is_set()

    asyncio.run(run())


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0, 0.0, 0.5, 2.0, 1e6, 1e300])
def test_a_weight_other_than_one_is_refused(weight: float) -> None:
    async def run() -> None:
        with pytest.raises(ValueError, match="weight"):
            reducer_of(torch.zeros(1, PART)).add(peer(0), 0, torch.zeros(PART), weight)

    asyncio.run(run())


def test_peer_left_out_does_not_come_back() -> None:
    async def run() -> None:
        reducer = reducer_of(torch.zeros(1, PART))
        reducer.leave_out(peer(0))
        reducer.leave_out(peer(0))
        with pytest.raises(ValueError, match="left out"):
            reducer.add(peer(0), 0, torch.zeros(PART), 1.0)

    asyncio.run(run())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("at", [0, PART // 2, PART - 1])
def test_values_that_are_not_finite_are_refused(value: float, at: int) -> None:
    async def run() -> None:
        own = torch.ones(2, PART)
        reducer, spoiled = reducer_of(own), torch.ones(PART)
        spoiled[at] = value
        reducer.add(peer(0), 0, torch.full((PART,), 2.0), 1.0)
        with pytest.raises(ValueError, match="NaN"):
            reducer.add(peer(0), 1, spoiled, 1.0)
        reducer.leave_out(peer(0), "it sent NaN")
        reducer.add(peer(1), 0, torch.full((PART,), 1.5), 1.0)
        reducer.add(peer(1), 1, torch.full((PART,), 1.5), 1.0)
        assert reducer.complete.is_set()
        # What it sent before stays, and the rest is averaged without it.
        assert torch.allclose(own, torch.tensor([1.5, 1.25]).unsqueeze(1))
        assert reducer.causes == {peer(0): "it sent NaN"}

    asyncio.run(run())
