"""Peers that average with four bits a value hold the same weights, in an eighth of the bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distributed_training.exchange.sn38.swarm import HivemindSwarm
from distributed_training.protocol.types import AllReduceError, AllReduceFault, AllReduceResult
from distributed_training.training.outer_rule import nesterov_sgd
from tests.tools.swarm_world import (
    SETTINGS,
    Rounds,
    everybody,
    open_swarm,
    open_swarms,
    processes,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("forked_hosts"),
]

SHAPES = [(1000, 700), (64,), (3, 333, 200), (7,), (300_001,)]
VALUES = sum(torch.Size(shape).numel() for shape in SHAPES)
FOUR = replace(SETTINGS, compression="4bit", run_id="four")


class Peer:
    """A peer's weights: each round moves them by its pseudo-gradient, and then to the average's."""

    def __init__(self, number: int, swarm: HivemindSwarm, *, validator: bool) -> None:
        self.swarm = swarm
        self.validator = validator
        self._generator = torch.Generator().manual_seed(number)
        common = torch.Generator().manual_seed(99)
        self.weights = [torch.randn(shape, generator=common) for shape in SHAPES]
        self._momenta: list[Tensor | None] = [None] * len(SHAPES)
        self.result: AllReduceResult | None = None

    def round(self, number: int, peers: int) -> None:
        scale = 1e-4 * (1 + number % 3)
        for i, buffer in enumerate(self.swarm.buffers):
            toward = torch.randn(buffer.shape, generator=torch.Generator().manual_seed(i))
            own = torch.randn(buffer.shape, generator=self._generator)
            buffer.copy_(scale * (toward + own) if not self.validator else torch.zeros(()))
        # A validator without a checkpoint contributes nothing and takes the average.
        weight = 1e-6 if self.validator else 1.0
        request = replace(everybody([None] * peers, 80), min_matchmaking_time=timedelta(seconds=1))
        self.result = self.swarm.average(request, weight=weight)
        for i, average in enumerate(self.swarm.buffers):
            self.weights[i], self._momenta[i] = nesterov_sgd(
                self.weights[i], average, self._momenta[i]
            )


def average(peers: Sequence[Peer], number: int) -> int:
    """Take one outer step at all peers. Return the bytes that they sent and received."""
    before = moved(peers)
    threads = [threading.Thread(target=p.round, args=(number, len(peers))) for p in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    for peer in peers:
        result, peer.result = peer.result, None
        assert result is not None, "the round failed"
        assert len(result.peers) == len(peers) and not result.partial, result
    return moved(peers) - before


def moved(peers: Sequence[Peer]) -> int:
    """Return the bytes that p2pd wrote, to the network and of the network's to its peer."""
    daemons = [processes(peer.swarm)["p2pd"] for peer in peers]
    return sum(daemon.io_counters().write_chars for daemon in daemons)


def peers_of(swarms: Sequence[HivemindSwarm]) -> list[Peer]:
    """The last one is the validator."""
    return [Peer(i, s, validator=s is swarms[-1]) for i, s in enumerate(swarms)]


@pytest.fixture(scope="module")
def swarms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[HivemindSwarm]]:
    with open_swarms(tmp_path_factory.mktemp("four"), 4, SHAPES, FOUR) as opened:
        yield opened


def test_three_peers_and_a_validator_are_equal_to_the_bit_after_ten_rounds(
    swarms: list[HivemindSwarm], tmp_path: Path
) -> None:
    with open_swarms(tmp_path, 4, SHAPES, replace(SETTINGS, run_id="float32")) as plain:
        whole = average(peers_of(plain), 0)
    peers = peers_of(swarms)
    start = [weights.clone() for weights in peers[0].weights]
    sent = [average(peers, number) for number in range(10)]
    for peer in peers[1:]:
        for ours, theirs in zip(peers[0].weights, peer.weights, strict=True):
            assert torch.equal(ours, theirs)
    assert not any(map(torch.equal, start, peers[0].weights))
    four = sorted(sent)[len(sent) // 2]
    per_value = [total / len(peers) / VALUES for total in (whole, four)]
    print(f"bytes a value, both ways: float32 {per_value[0]:.2f}, four bits {per_value[1]:.2f}")
    # Of n = 4 peers each moves 2 (n-1)/n of the values each way.
    assert 12 <= per_value[0] <= 12.5
    assert per_value[1] <= per_value[0] / 7


def test_a_peer_of_another_compression_is_refused_in_one_line(
    swarms: list[HivemindSwarm], tmp_path: Path
) -> None:
    """Both sides refuse it, as leader and as follower: the others average without it."""
    pair = swarms[:2]
    plain = replace(FOUR, compression="none")
    other = open_swarm(tmp_path, SHAPES, swarms[0].visible_maddrs, plain)
    try:
        for swarm in (*pair, other):
            for buffer in swarm.buffers:
                buffer.fill_(1e-4)
        ids = tuple(swarm.peer_id for swarm in (*pair, other))
        # The third peer hears the reason when its time is up.
        alone = Rounds(other, request=replace(everybody(pair, 15), peers=ids), fill=False)
        both = Rounds(*pair, request=replace(everybody(pair, 60), peers=ids), fill=False)
        outcomes = both.join() | alone.join()
    finally:
        other.close()
    for swarm in pair:
        outcome = outcomes[swarm]
        assert isinstance(outcome, AllReduceResult) and len(outcome.peers) == 2, outcome
    refused = outcomes[other]
    assert isinstance(refused, AllReduceError) and refused.fault is AllReduceFault.NO_GROUP
    assert "another round.compression than ours, 'none'" in refused.detail
    assert "\n" not in refused.detail
