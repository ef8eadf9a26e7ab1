"""Rounds in a row with faults drawn from a seed: all survivors end with equal weights.

Four peers, each with a host process of its own. Peer 0 stands for the validator: what it holds
after a round is the global state. What the others do with a round and with the global state is
decided by the product (``miner/state_machine.py``, ``miner/global_state.py``), and so is the outer
step.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from distributed_training.exchange.sn38.swarm import HivemindSwarm
from distributed_training.miner.events import Action, Mode
from distributed_training.miner.global_state import TOLERANCE, drift
from distributed_training.protocol.types import AllReduceResult, RoundRequest
from distributed_training.training.outer_rule import nesterov_sgd
from distributed_training.training.outer_step import Rows
from tests.tools.decided_miner import DecidedMiner, Published
from tests.tools.swarm_world import REQUEST, everybody, open_swarms, signal_host

SHAPES = [(1500, 1000)] * 4
PEERS = 4
SHORT = {"none": 2, "kill": 1, "nan": 1, "absent": 1}
LONG = {"none": 4, "kill": 6, "stop": 3, "nan": 3, "late": 2, "absent": 2}
TROUBLED = replace(REQUEST, timeout=timedelta(seconds=8), allreduce_timeout=timedelta(seconds=6))
LATE = 3.0  # seconds: the others have begun
STOPPED = 2.5


class Peer(DecidedMiner):
    """Weights are the tensors and their momentum; its rounds are the swarm's."""

    def __init__(self, swarm: HivemindSwarm, weights: list[torch.Tensor]) -> None:
        super().__init__((weights, None))
        self.swarm = swarm
        self.averaged: list[torch.Tensor] = []
        self._drawn = (0, False, REQUEST)

    def round(self, seed: int, *, delay: float, spoil: bool, request: RoundRequest) -> None:
        """Take a call after ``delay``."""
        time.sleep(delay)
        self._drawn = (seed, spoil, request)
        self.call()

    def average(self) -> AllReduceResult:
        seed, spoil, request = self._drawn
        generator = torch.Generator().manual_seed(seed)
        for buffer in self.swarm.buffers:
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        if spoil:
            self.swarm.buffers[0][0, 0] = float("nan")
        result = self.swarm.average(request)
        self.averaged = [buffer.clone() for buffer in self.swarm.buffers]
        return result

    def outer_step(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        weights, momentum = self.weights
        old = momentum or [None] * len(weights)
        new = [nesterov_sgd(w, a, m) for w, a, m in zip(weights, self.averaged, old, strict=True)]
        return [w for w, _ in new], [m for _, m in new]

    def same(self, weights: tuple[list[torch.Tensor], object]) -> bool:
        file = save({str(i): w for i, w in enumerate(weights[0])})
        ours = [Rows(str(i), 0, w) for i, w in enumerate(self.weights[0])]

        def read(first: int, count: int) -> bytes:
            return file[first : first + count]

        return drift(ours, read, size=len(file), seed=self.state.outer_step) <= TOLERANCE


def strike(victim: Peer, kind: str, when: str, draw: random.Random) -> threading.Thread | None:
    """A kill or a stop of the victim's processes, while it seeks a group or in the transfer."""
    if kind not in ("kill", "stop"):
        return None
    patience = draw.uniform(0.3, 1.5) if when == "search" else TROUBLED.timeout.total_seconds()

    def act() -> None:
        host = victim.swarm._keeper.host
        assert host is not None
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and not (when == "transfer" and host.found_group):
            time.sleep(0.001)
        if host is victim.swarm._keeper.host:
            signal_host(victim.swarm, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "stop":
            time.sleep(STOPPED)
            signal_host(victim.swarm, signal.SIGCONT)

    thread = threading.Thread(target=act)
    thread.start()
    return thread


def play(peers: list[Peer], number: int, kind: str, draw: random.Random) -> None:
    """One round with one fault: all of it ends in time."""
    victim, when = peers[draw.randrange(1, PEERS)], draw.choice(["search", "transfer"])
    there = [peer.swarm for peer in peers if peer is not victim or kind != "absent"]
    # Nobody fails where nobody is hit: these rounds take place however slow the machine is.
    request = everybody(there) if kind in ("none", "absent") else TROUBLED
    threads = []
    for i, peer in enumerate(peers):
        peer.outcome = None
        if peer is victim and kind == "absent":
            continue
        late = LATE if peer is victim and kind == "late" else 0.0
        spoil = peer is victim and kind == "nan"
        threads.append(
            threading.Thread(
                target=peer.round,
                args=(1000 * number + i,),
                kwargs={"delay": late, "spoil": spoil, "request": request},
            )
        )
    began = time.monotonic()
    for thread in threads:
        thread.start()
    striking = strike(victim, kind, when, draw)
    for thread in [*threads, *([striking] if striking else [])]:
        thread.join(90)
        assert not thread.is_alive(), "a round did not end"
    assert request is not TROUBLED or time.monotonic() - began < 45


def assert_one_average_a_group(peers: list[Peer]) -> None:
    """Before anybody takes over anything: one group, one average."""
    groups: dict[frozenset[str], list[Peer]] = {}
    for peer in peers:
        if isinstance(peer.outcome, AllReduceResult) and not peer.outcome.partial:
            groups.setdefault(frozenset(peer.outcome.peers), []).append(peer)
    for first, *others in groups.values():
        for other in others:
            for mine, theirs in zip(first.averaged, other.averaged, strict=True):
                assert torch.allclose(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("forked_hosts")
@pytest.mark.parametrize(
    "faults", [pytest.param(SHORT, id="each"), pytest.param(LONG, id="20", marks=pytest.mark.long)]
)
def test_rounds_with_faults_leave_all_survivors_equal(
    tmp_path: Path, faults: dict[str, int]
) -> None:
    draw = random.Random(20261121)
    kinds = [kind for kind, times in faults.items() for _ in range(times)]
    draw.shuffle(kinds)
    first = [torch.randn(shape) for shape in SHAPES]
    seen: Counter[str] = Counter()
    history: list[str] = []
    with open_swarms(tmp_path, PEERS, SHAPES) as swarms:
        peers = [Peer(swarm, [w.clone() for w in first]) for swarm in swarms]
        validator = peers[0]
        for number, kind in enumerate(kinds):
            before = [[w.clone() for w in p.weights[0]] for p in peers]
            steps = [p.state.outer_step for p in peers]
            play(peers, number, kind, draw)
            for i, peer in enumerate(peers):
                if not isinstance(peer.outcome, AllReduceResult):  # as if there had been no round
                    assert peer.state.outer_step == steps[i]
                    assert all(map(torch.equal, peer.weights[0], before[i]))
                assert all(bool(torch.isfinite(w).all()) for w in peer.weights[0])
            if kind == "none":
                assert_one_average_a_group(peers)
            outcomes = [type(peer.outcome).__name__ for peer in peers]
            published = Published(validator.state.outer_step, validator.weights)
            for peer in peers:
                peer.loads.clear()
                peer.follow(published)
            # A validator takes nothing over: its part is played by what decides for a miner, which
            # takes the published state where its own average lacked parts. It is what it holds.
            lacked = isinstance(validator.outcome, AllReduceResult) and validator.outcome.partial
            assert validator.loads == [Action.REBASE] * lacked, "it holds what it published"
            did = [peer.loads[0].name if peer.loads else "agreed" for peer in peers[1:]]
            seen.update(did)
            history.append(f"{number}: {kind}, {outcomes}, {did}")
            for peer in peers:
                assert peer.state.mode is Mode.TRAINING, history
                assert peer.state.outer_step == validator.state.outer_step, history
                for ours, theirs in zip(peer.weights[0], validator.weights[0], strict=True):
                    assert torch.allclose(ours, theirs, rtol=0, atol=1e-3), history
    print("\n".join(history))
    assert validator.state.outer_step >= len(kinds) // 4, history
    assert seen["agreed"] >= 2 * faults["none"] and seen["LOAD"], history
