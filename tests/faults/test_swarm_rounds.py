"""Twenty rounds in a row with faults drawn from a seed: all survivors end with equal weights.

Four peers, each with a host process of its own. Peer 0 stands for the validator: what it holds
after a round is the global state. The others follow the miner's rules: commit what was averaged,
load the global state when their epoch is another, and take it as well when parts of the average
failed or a sample of the weights differs.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from distributed_training.config.swarm import SwarmSettings
from distributed_training.miner.drift import TOLERANCE, Rows, drift
from distributed_training.protocol.types import AllReduceError, AllReduceResult, RoundRequest
from distributed_training.swarm import HivemindSwarm
from distributed_training.training.outer import nesterov_sgd

SHAPES: list[tuple[int, ...]] = [(700, 1000)] * 4
ROUNDS, PEERS = 20, 4
REQUEST = RoundRequest(
    caller="5V",
    received_at=0.0,
    timeout=timedelta(seconds=7),
    min_group_size=2,
    min_matchmaking_time=timedelta(seconds=1.2),
    request_timeout=timedelta(seconds=1),
    allreduce_timeout=timedelta(seconds=5),
    next_chunk_timeout=timedelta(seconds=1),
)
FAULTS = {"none": 4, "kill": 6, "stop": 3, "nan": 3, "late": 2, "absent": 2}


@dataclass
class Peer:
    swarm: HivemindSwarm
    weights: list[torch.Tensor]
    momentum: list[torch.Tensor] | None = None
    epoch: int = 0
    outcome: AllReduceResult | AllReduceError | None = None
    averaged: list[torch.Tensor] = field(default_factory=list)

    def round(self, seed: int, *, delay: float, spoil: bool) -> None:
        """What the miner does with a call: write, average, check, commit or leave everything."""
        time.sleep(delay)
        generator = torch.Generator().manual_seed(seed)
        for buffer in self.swarm.buffers:
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        if spoil:
            self.swarm.buffers[0][0, 0] = float("nan")
        try:
            self.outcome = self.swarm.average(REQUEST)
        except AllReduceError as error:
            self.outcome = error
            return
        self.averaged = [buffer.clone() for buffer in self.swarm.buffers]
        old = self.momentum or [None] * len(self.weights)
        new = [
            nesterov_sgd(w, a, m) for w, a, m in zip(self.weights, self.averaged, old, strict=True)
        ]
        self.weights, self.momentum = [w for w, _ in new], [m for _, m in new]
        self.epoch += 1

    def take(self, other: Peer) -> None:
        self.weights = [w.clone() for w in other.weights]
        self.momentum = None if other.momentum is None else [m.clone() for m in other.momentum]
        self.epoch = other.epoch


def follow(peer: Peer, validator: Peer) -> str:
    """The miner's rules once the validator has published."""
    if peer.epoch != validator.epoch:
        peer.take(validator)
        return "loaded"
    if isinstance(peer.outcome, AllReduceResult) and peer.outcome.partial:
        peer.take(validator)
        return "took the global state: parts failed"
    file = save({str(i): w for i, w in enumerate(validator.weights)})
    ours = [Rows(str(i), 0, w) for i, w in enumerate(peer.weights)]
    if drift(ours, lambda first, count: file[first : first + count], seed=peer.epoch) > TOLERANCE:
        peer.take(validator)
        return "took the global state: weights differed"
    return "agreed"


def fault(peer: Peer, kind: str, after: float) -> threading.Timer | None:
    def strike() -> None:
        process = peer.swarm._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "stop":
            time.sleep(2.5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)

    if kind not in ("kill", "stop"):
        return None
    timer = threading.Timer(after, strike)
    timer.start()
    return timer


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_twenty_rounds_with_faults_leave_all_survivors_equal(tmp_path: Path) -> None:
    draw = random.Random(20261121)
    kinds = [kind for kind, times in FAULTS.items() for _ in range(times)]
    draw.shuffle(kinds)
    assert len(kinds) == ROUNDS
    settings = SwarmSettings(
        dht_port=0,
        dht_listen_ip="127.0.0.1",
        initial_peers=(),
        run_id="rounds",
        start_timeout=timedelta(seconds=30),
    )
    schema = [(str(i), shape) for i, shape in enumerate(SHAPES)]
    first = [torch.randn(shape) for shape in SHAPES]
    peers: list[Peer] = []
    seen: Counter[str] = Counter()
    history: list[str] = []
    try:
        for i in range(PEERS):
            known = tuple(peers[0].swarm.visible_maddrs) if peers else ()
            swarm = HivemindSwarm(
                settings=replace(settings, initial_peers=known),
                schema=schema,
                run_folder=tmp_path / str(i),
            )
            peers.append(Peer(swarm, [w.clone() for w in first]))
        validator = peers[0]
        for number in range(ROUNDS):
            victim, kind = peers[draw.randrange(1, PEERS)], kinds[number]
            struck_after = draw.uniform(0.3, 3.0)
            before = [[w.clone() for w in p.weights] for p in peers]
            epochs = [p.epoch for p in peers]
            threads = []
            for i, peer in enumerate(peers):
                peer.outcome = None
                if peer is victim and kind == "absent":
                    continue
                late = 3.0 if peer is victim and kind == "late" else 0.0
                spoil = peer is victim and kind == "nan"
                threads.append(
                    threading.Thread(
                        target=peer.round,
                        args=(1000 * number + i,),
                        kwargs={"delay": late, "spoil": spoil},
                    )
                )
            began = time.monotonic()
            for thread in threads:
                thread.start()
            timer = fault(victim, kind, struck_after)
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive(), "a round did not end"
            if timer is not None:
                timer.join(10)
            assert time.monotonic() - began < 45
            whole = [
                p for p in peers if isinstance(p.outcome, AllReduceResult) and not p.outcome.partial
            ]
            for i, peer in enumerate(peers):
                if not isinstance(peer.outcome, AllReduceResult):  # as if there had been no round
                    assert peer.epoch == epochs[i]
                    assert all(map(torch.equal, peer.weights, before[i]))
                assert all(bool(torch.isfinite(w).all()) for w in peer.weights)
            if kind == "none":
                # Before anybody takes over anything: one group, one average.
                groups: dict[frozenset[str], list[Peer]] = {}
                for peer in whole:
                    assert isinstance(peer.outcome, AllReduceResult)
                    groups.setdefault(frozenset(peer.outcome.peers), []).append(peer)
                for members in groups.values():
                    for mine, theirs in zip(
                        members[0].averaged * len(members[1:]),
                        [t for peer in members[1:] for t in peer.averaged],
                        strict=True,
                    ):
                        assert torch.allclose(mine, theirs, rtol=0, atol=1e-5), history
            did = [follow(peer, validator) for peer in peers[1:]]
            seen.update([kind, *did])
            history.append(f"{number}: {kind}, {len(whole)} whole, {did}")
            for peer in peers[1:]:
                assert peer.epoch == validator.epoch, history
                for ours, theirs in zip(peer.weights, validator.weights, strict=True):
                    assert torch.allclose(ours, theirs, rtol=0, atol=1e-3), history
    finally:
        for peer in peers:
            peer.swarm.close()
    print("\n".join(history))
    assert validator.epoch >= ROUNDS // 4, history
    assert seen["agreed"] >= 2 * FAULTS["none"] and seen["loaded"], history
