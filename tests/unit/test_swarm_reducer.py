"""The sums of a reducer: whoever comes in whatever order, and fails wherever."""

from __future__ import annotations

import asyncio
import logging

import pytest
import torch
from hivemind.p2p import PeerID
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_training.swarm.all_reduce import Buffers, Reducer

pytestmark = pytest.mark.timeout(60)
logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames it for the whole process

PART = 8


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
def test_each_part_is_the_weighted_mean_of_who_sent_it(data: st.DataObject) -> None:
    """Senders interleave at will; each stops after some of its parts, or sends all."""
    count = data.draw(st.integers(1, 4), "parts")
    senders = data.draw(st.integers(1, 3), "senders")
    weights = [data.draw(st.sampled_from([0.5, 1.0, 3.0])) for _ in range(senders + 1)]
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
        assert reducer.failed == failed
        assert reducer.alone == (len(failed) == senders)

    asyncio.run(run())


def test_it_is_complete_at_once_without_parts_or_without_senders() -> None:
    async def run() -> None:
        assert reducer_of(torch.empty(0, PART)).complete.is_set()
        assert reducer_of(torch.ones(2, PART), senders=0).complete.is_set()
        assert not reducer_of(torch.ones(2, PART)).complete.is_set()

    asyncio.run(run())


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    async def run() -> None:
        with pytest.raises(ValueError, match="weight"):
            reducer_of(torch.zeros(1, PART)).add(peer(0), 0, torch.zeros(PART), weight)

    asyncio.run(run())


def test_who_was_left_out_does_not_come_back() -> None:
    async def run() -> None:
        reducer = reducer_of(torch.zeros(1, PART))
        reducer.leave_out(peer(0))
        reducer.leave_out(peer(0))
        with pytest.raises(ValueError, match="left out"):
            reducer.add(peer(0), 0, torch.zeros(PART), 1.0)

    asyncio.run(run())
