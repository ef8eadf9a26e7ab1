"""Peers that die, stall, disagree or are not there. Real hivemind peers over loopback.

Every test ends with a round of those who are left: whatever happened, the swarm goes on. What a
caller keeps (the weights) is applied only after a success, as the outer step does it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from distributed_training.config.swarm import SwarmSettings
from distributed_training.protocol.types import (
    AllReduceError,
    AllReduceFault,
    AllReduceResult,
    RoundRequest,
)
from distributed_training.swarm import HivemindSwarm, SwarmUnavailable
from distributed_training.swarm.bootstrap import address_of

pytestmark = pytest.mark.timeout(150)

PEER = Path(__file__).parents[1] / "multiprocess" / "swarm_peer.py"

#: Large enough that a transfer can be caught in the middle.
SHAPES: list[tuple[int, ...]] = [(1000, 1000)] * 12
SMALL: list[tuple[int, ...]] = [(40, 30), (5,)]
DEADLINE = 12.0
#: Ending the averager's process after the round is part of ``average``.
GRACE = 12.0
REQUEST = RoundRequest(
    caller="5V",
    received_at=0.0,
    timeout=timedelta(seconds=DEADLINE),
    min_group_size=2,
    min_matchmaking_time=timedelta(seconds=2),
    request_timeout=timedelta(seconds=1),
    allreduce_timeout=timedelta(seconds=8),
    next_chunk_timeout=timedelta(seconds=2),
)
SETTINGS = SwarmSettings(
    dht_port=0,
    dht_listen_ip="127.0.0.1",
    initial_peers=(),
    run_id="test",
    start_timeout=timedelta(seconds=30),
)

Make = Callable[..., HivemindSwarm]
Outcome = AllReduceResult | AllReduceError


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[HivemindSwarm] = []

    def start(shapes: list[tuple[int, ...]] = SMALL) -> HivemindSwarm:
        peers = tuple(made[0].visible_maddrs) if made else ()
        swarm = HivemindSwarm(
            settings=replace(SETTINGS, initial_peers=peers),
            schema=[(str(i), shape) for i, shape in enumerate(shapes)],
            run_folder=tmp_path / str(len(made)),
        )
        made.append(swarm)
        return swarm

    yield start
    for swarm in made:
        swarm.close()


class Rounds:
    """Rounds of several peers at once, each in a thread as the miner does it."""

    def __init__(self, *swarms: HivemindSwarm, request: RoundRequest = REQUEST) -> None:
        self.outcomes: dict[HivemindSwarm, Outcome] = {}
        self.seconds: dict[HivemindSwarm, float] = {}
        self._request = request
        for i, swarm in enumerate(swarms):
            for buffer in swarm.buffers:
                buffer.fill_(float(i + 1))
        self._threads = [threading.Thread(target=self._run, args=(s,), daemon=True) for s in swarms]
        for thread in self._threads:
            thread.start()

    def _run(self, swarm: HivemindSwarm) -> None:
        started = time.monotonic()
        try:
            self.outcomes[swarm] = swarm.average(self._request)
        except AllReduceError as error:
            self.outcomes[swarm] = error
        self.seconds[swarm] = time.monotonic() - started

    def join(self) -> dict[HivemindSwarm, Outcome]:
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads), "a round did not end"
        return self.outcomes


def host_pid(swarm: HivemindSwarm) -> int:
    assert swarm._process is not None
    return swarm._process.pid


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.005)


def assert_good_round(*swarms: HivemindSwarm) -> None:
    rounds = Rounds(*swarms)
    expected = sum(range(1, len(swarms) + 1)) / len(swarms)
    for swarm, outcome in rounds.join().items():
        assert isinstance(outcome, AllReduceResult), outcome
        assert set(outcome.peers) == {s.peer_id for s in swarms}
        for buffer in swarm.buffers:
            assert torch.allclose(buffer, torch.full_like(buffer, expected))


def assert_noticed(rounds: Rounds, survivors: list[HivemindSwarm], victim: HivemindSwarm) -> None:
    """No survivor takes a damaged average for a whole one, and none is late."""
    outcomes = rounds.join()
    for swarm in survivors:
        outcome = outcomes[swarm]
        assert rounds.seconds[swarm] < DEADLINE + GRACE
        if isinstance(outcome, AllReduceResult):
            assert victim.peer_id in outcome.failed_peers, outcome
        else:
            assert outcome.fault in (
                AllReduceFault.PEER_FAILED,
                AllReduceFault.TIMEOUT,
                AllReduceFault.NO_GROUP,
            )


@pytest.mark.slow
def test_a_peer_killed_in_mid_transfer(make: Make) -> None:
    swarms = [make(SHAPES) for _ in range(3)]
    *survivors, victim = swarms
    rounds = Rounds(*swarms)
    first = survivors[0].buffers[0]
    wait_for(lambda: float(first[0, 0]) != 1.0, "the first average arrives")
    os.killpg(host_pid(victim), signal.SIGKILL)
    assert_noticed(rounds, survivors, victim)
    lost = rounds.outcomes[victim]
    assert isinstance(lost, AllReduceError)
    assert lost.fault is AllReduceFault.SWARM_DOWN
    assert_good_round(*survivors)


@pytest.mark.slow
def test_a_peer_that_stalls_in_mid_transfer(make: Make) -> None:
    swarms = [make(SHAPES) for _ in range(3)]
    *survivors, victim = swarms
    rounds = Rounds(*swarms)
    first = survivors[0].buffers[0]
    wait_for(lambda: float(first[0, 0]) != 1.0, "the first average arrives")
    os.killpg(host_pid(victim), signal.SIGSTOP)
    assert_noticed(rounds, survivors, victim)
    # The victim's own client keeps the deadline too: its host hangs, so it is started again.
    assert isinstance(rounds.outcomes[victim], AllReduceError)
    assert_good_round(*survivors)


@pytest.mark.slow
def test_a_peer_killed_in_matchmaking(make: Make) -> None:
    *survivors, victim = [make() for _ in range(3)]
    rounds = Rounds(*survivors, victim)
    wait_for(
        lambda: len(psutil.Process(host_pid(victim)).children()) >= 2, "the averager is started"
    )
    os.killpg(host_pid(victim), signal.SIGKILL)
    for swarm, outcome in rounds.join().items():
        if swarm is not victim and isinstance(outcome, AllReduceResult):
            whole = set(outcome.peers) == {s.peer_id for s in survivors}
            assert whole or victim.peer_id in outcome.failed_peers
    assert_good_round(*survivors)


@pytest.mark.slow
def test_another_schema_finds_no_group(make: Make) -> None:
    first, second, other = make(), make(), make([(3, 3)])
    rounds = Rounds(first, second, other)
    outcomes = rounds.join()
    assert isinstance(outcomes[other], AllReduceError)
    for swarm in (first, second):
        outcome = outcomes[swarm]
        assert isinstance(outcome, AllReduceResult), outcome
        assert set(outcome.peers) == {first.peer_id, second.peer_id}


def test_the_bootstrap_peer_dies_and_the_others_go_on(make: Make) -> None:
    bootstrap, *others = [make() for _ in range(3)]
    assert_good_round(bootstrap, *others)
    os.killpg(host_pid(bootstrap), signal.SIGKILL)
    assert_good_round(*others)


def test_the_bootstrap_peer_is_dead_at_the_start_and_comes_later(
    make: Make, tmp_path: Path
) -> None:
    bootstrap = make()
    address = tuple(bootstrap.visible_maddrs)
    bootstrap.close()
    late = HivemindSwarm(
        settings=replace(SETTINGS, initial_peers=address),
        schema=[(str(i), shape) for i, shape in enumerate(SMALL)],
        run_folder=tmp_path / "late",
    )
    try:
        assert late.alive()
        assert not late.joined
        peer_id = late.peer_id
        bootstrap._closed = False
        bootstrap.restart()
        assert tuple(bootstrap.visible_maddrs) == address
        wait_for(lambda: late.joined, "the swarm is joined", seconds=40)
        assert late.peer_id == peer_id
        wait_for(lambda: not late._lock.locked(), "the host is there again")
        assert_good_round(bootstrap, late)
    finally:
        late.close()


def test_started_again_while_the_bootstrap_is_away_it_joins_later(make: Make) -> None:
    bootstrap, other = make(), make()
    address = tuple(bootstrap.visible_maddrs)
    bootstrap.close()
    other.restart()  # as after a host that died
    assert other.alive() and not other.joined
    bootstrap._closed = False
    bootstrap.restart()
    assert tuple(bootstrap.visible_maddrs) == address
    wait_for(lambda: other.joined, "the swarm is joined", seconds=40)
    wait_for(lambda: not other._lock.locked(), "the host is there again")
    assert_good_round(bootstrap, other)


def test_a_host_that_alone_dies_in_a_round_ends_it_at_once(make: Make) -> None:
    """Its children live on and hold the pipe open."""
    alone, other = make(), make()
    patient = replace(REQUEST, timeout=timedelta(seconds=90), min_group_size=3)
    rounds = Rounds(alone, request=patient)
    wait_for(alone._lock.locked, "the round runs")
    wait_for(lambda: len(psutil.Process(host_pid(alone)).children()) > 1, "the averager is there")
    began = time.monotonic()
    os.kill(host_pid(alone), signal.SIGKILL)
    outcome = rounds.join()[alone]
    assert isinstance(outcome, AllReduceError)
    assert outcome.fault is AllReduceFault.SWARM_DOWN
    assert time.monotonic() - began < 30
    wait_for(lambda: alone.alive() and not alone._lock.locked(), "the host is there", seconds=40)
    assert_good_round(alone, other)


def test_one_initial_peer_that_is_reachable_is_enough(make: Make, tmp_path: Path) -> None:
    live = make()
    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{live.peer_id}"
    late = HivemindSwarm(
        settings=replace(SETTINGS, initial_peers=(dead, *live.visible_maddrs)),
        schema=[(str(i), shape) for i, shape in enumerate(SMALL)],
        run_folder=tmp_path / "late",
    )
    try:
        assert late.joined
        assert_good_round(live, late)
    finally:
        late.close()


def test_the_address_of_the_flags_is_announced(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    swarm = HivemindSwarm(
        settings=replace(SETTINGS, dht_ip="203.0.113.7", dht_port=port),
        schema=[("w", (2,))],
        run_folder=tmp_path,
    )
    try:
        assert f"/ip4/203.0.113.7/tcp/{port}/p2p/{swarm.peer_id}" in swarm.visible_maddrs
    finally:
        swarm.close()


@pytest.mark.parametrize(
    ("maddr", "address"),
    [
        ("/ip4/1.2.3.4/tcp/8009/p2p/Qm", ("1.2.3.4", 8009)),
        ("/dns4/boot.example.org/tcp/9/p2p/Qm", ("boot.example.org", 9)),
        ("/ip6/::1/tcp/9", ("::1", 9)),
        ("/ip4/1.2.3.4/udp/8009/quic/p2p/Qm", None),
        ("/ip4/1.2.3.4/tcp/many", None),
        ("1.2.3.4:8009", None),
        ("", None),
    ],
)
def test_addresses_that_can_be_probed(maddr: str, address: tuple[str, int] | None) -> None:
    assert address_of(maddr) == address


@pytest.mark.slow
def test_bandwidth_is_what_the_round_before_moved_and_absent_before(make: Make) -> None:
    first, second = make(SHAPES), make(SHAPES)
    told: list[float | None] = []
    send = first._send

    def listening(order: dict[str, Any]) -> None:
        if order["kind"] == "average":
            told.append(order["bandwidth"])
        send(order)

    first._send = listening  # type: ignore[method-assign]
    results = [Rounds(first, second).join()[first] for _ in range(2)]
    before = results[0]
    assert isinstance(before, AllReduceResult) and isinstance(results[1], AllReduceResult)
    assert before.transfer_seconds is not None
    size = 4 * sum(rows * columns for rows, columns in SHAPES)
    measured = 8e-6 * size / before.transfer_seconds if before.transfer_seconds > 0.5 else None
    assert told[0] is None
    assert told[1] == (None if measured is None else pytest.approx(measured))


def test_nothing_outlives_the_killed_owner_of_a_host(tmp_path: Path) -> None:
    peer = subprocess.Popen(
        [sys.executable, str(PEER), str(tmp_path), "127.0.0.1", "4000", "[]"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(PEER.parents[2])},
    )
    assert peer.stdin is not None and peer.stdout is not None
    with peer.stdin, peer.stdout:
        assert b"peer_id" in peer.stdout.readline()
        tree = psutil.Process(peer.pid).children(recursive=True)
        assert any("p2pd" in process.name() for process in tree)
        peer.kill()
        peer.wait()
        _, left = psutil.wait_procs(tree, timeout=10)
        for process in left:
            process.kill()
        assert left == []


def test_a_second_call_is_refused_and_the_first_goes_on(make: Make) -> None:
    first, second = make(), make()
    rounds = Rounds(first, second)
    wait_for(first._lock.locked, "the first round runs")
    with pytest.raises(AllReduceError) as caught:
        first.average(REQUEST)
    assert caught.value.fault is AllReduceFault.LOCAL
    assert all(isinstance(o, AllReduceResult) for o in rounds.join().values())


@pytest.mark.slow
def test_a_port_that_is_taken_is_told_with_the_flag(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = replace(
            SETTINGS, dht_port=taken.getsockname()[1], start_timeout=timedelta(seconds=6)
        )
        with pytest.raises(SwarmUnavailable, match=r"--dht\.port"):
            HivemindSwarm(settings=settings, schema=[("w", (2,))], run_folder=tmp_path)


def test_nothing_outlives_a_killed_host(make: Make) -> None:
    swarm = make()
    tree = psutil.Process(host_pid(swarm)).children(recursive=True)
    assert any("p2pd" in process.name() for process in tree)
    peer_id = swarm.peer_id
    os.kill(host_pid(swarm), signal.SIGKILL)
    swarm.restart()
    _, left = psutil.wait_procs(tree, timeout=10)
    assert left == []
    assert swarm.peer_id == peer_id
    identity = next((swarm._folder).glob("identity.key"))
    assert identity.stat().st_mode & 0o777 == 0o600
