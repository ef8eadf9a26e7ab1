"""Peers that die, stall or are not there. Real hivemind peers over loopback.

Every test ends with a round of the peers that are left: after every fault the swarm continues. The
caller's weights change only after a success, as in the outer step.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from distributed_training.common.ports import free_ports
from distributed_training.exchange.sn38 import supervisor
from distributed_training.exchange.sn38.supervisor import SwarmUnavailable
from distributed_training.exchange.sn38.swarm import HivemindSwarm
from distributed_training.protocol.types import AllReduceError, AllReduceFault, AllReduceResult
from tests.tools.swarm_world import (
    LARGE,
    REQUEST,
    SETTINGS,
    SMALL,
    Rounds,
    assert_good_round,
    everybody,
    joined,
    open_swarm,
    open_swarms,
    signal_host,
)
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked_hosts")]

PEER = Path(__file__).parents[1] / "tools" / "swarm_peer.py"
#: A round ends at its deadline; leaving its group and telling it takes a little more.
GRACE = 15.0


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[HivemindSwarm]]:
    with open_swarms(tmp_path_factory.mktemp("swarm"), 3, LARGE) as swarms:
        yield swarms


def in_transfer(swarms: list[HivemindSwarm]) -> Callable[[], bool]:
    """Return whether a value at one end of some peer's tensors is an average already."""
    ends = [(s.buffers[i], i + 0.0) for s in swarms for i in (0, -1)]
    before = [float(buffer.view(-1)[-1 if i else 0]) for buffer, i in ends]

    def changed() -> bool:
        now = [float(buffer.view(-1)[-1 if i else 0]) for buffer, i in ends]
        return now != before

    return changed


def assert_noticed(rounds: Rounds, survivors: list[HivemindSwarm], victim: HivemindSwarm) -> None:
    """No survivor takes a damaged average for a whole one, and none is late."""
    outcomes = rounds.join()
    assert REQUEST.timeout is not None
    for swarm in survivors:
        outcome = outcomes[swarm]
        assert rounds.seconds[swarm] < REQUEST.timeout.total_seconds() + GRACE
        if isinstance(outcome, AllReduceResult):
            assert victim.peer_id in outcome.failed_peers or outcome.kept_local > 0, outcome
        else:
            assert outcome.fault in (
                AllReduceFault.PEER_FAILED,
                AllReduceFault.TIMEOUT,
                AllReduceFault.NO_GROUP,
            )


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
def test_a_peer_dies_or_stalls_in_mid_transfer(
    trio: list[HivemindSwarm], number: signal.Signals
) -> None:
    *survivors, victim = trio
    rounds = Rounds(*trio, request=replace(REQUEST, min_group_size=3))
    wait_for(in_transfer(trio), "the first average arrives", every=0.001)
    signal_host(victim, number)
    assert_noticed(rounds, survivors, victim)
    # The victim's own client keeps the deadline too: a host that hangs is started again.
    assert isinstance(rounds.outcomes[victim], AllReduceError)
    assert_good_round(*trio)


def test_a_peer_that_joined_late_takes_its_first_round(trio: list[HivemindSwarm]) -> None:
    """It took one inner step and the others a hundred: nobody is left out or shortened."""
    for swarm, value in zip(trio, (0.01, 1.0, 1.0), strict=True):
        swarm._judge.norms.clear()
        for buffer in swarm.buffers:
            buffer.fill_(value)
    rounds = Rounds(*trio, request=everybody(trio), fill=False)
    for swarm, outcome in rounds.join().items():
        assert isinstance(outcome, AllReduceResult) and not outcome.partial, outcome
        for buffer in swarm.buffers:
            assert torch.allclose(buffer, torch.full_like(buffer, 0.67))


def test_the_bootstrap_is_away_and_comes_later(tmp_path: Path) -> None:
    """It is away at the start of a peer, and when the peer's host is started again."""
    with ExitStack() as stack:

        def start(name: str, **where: Any) -> HivemindSwarm:
            return stack.enter_context(closing(open_swarm(tmp_path / name, SMALL, **where)))

        settings = replace(SETTINGS, dht_port=free_ports(1)[0])
        bootstrap = start("0", settings=settings)
        address = bootstrap.visible_maddrs
        other = start("1", known=address)
        bootstrap.close()
        peer_id = other.peer_id
        other.restart()  # as after a host that died
        late = start("late", known=address)
        assert other.alive() and not joined(other._keeper)
        assert late.alive() and not joined(late._keeper)
        back = start("0", settings=settings)
        assert back.visible_maddrs == address
        wait_for(lambda: joined(late._keeper) and joined(other._keeper), "the swarm is joined")
        assert other.peer_id == peer_id
        assert_good_round(back, other, late)


def test_one_initial_peer_that_is_reachable_is_enough(
    trio: list[HivemindSwarm], tmp_path: Path
) -> None:
    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{trio[0].peer_id}"
    with closing(open_swarm(tmp_path, LARGE, (dead, *trio[0].visible_maddrs))) as late:
        assert joined(late._keeper)
        assert_good_round(trio[0], late)


def test_the_address_of_the_flags_is_announced_and_then_another(tmp_path: Path) -> None:
    """The outside port of a rented container, and a provider that gives it another address."""
    (port,) = free_ports(1)
    settings = replace(SETTINGS, dht_ip="203.0.113.7", dht_port=port, dht_external_port=48009)
    with closing(open_swarm(tmp_path, [(2,)], settings=settings)) as swarm:
        peer_id = swarm.peer_id
        assert swarm.visible_maddrs == [f"/ip4/203.0.113.7/tcp/48009/p2p/{peer_id}"]
        socket.create_connection(("127.0.0.1", port), 10).close()
        swarm.announce("198.51.100.9")
        assert swarm.visible_maddrs == [f"/ip4/198.51.100.9/tcp/48009/p2p/{peer_id}"]
        assert swarm.alive() and swarm.peer_id == peer_id
        socket.create_connection(("127.0.0.1", port), 10).close()


@pytest.mark.slow
def test_a_taken_port_is_an_error_that_names_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_START_ATTEMPTS", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = replace(
            SETTINGS, dht_port=taken.getsockname()[1], start_timeout=timedelta(seconds=6)
        )
        with pytest.raises(SwarmUnavailable, match=r"--dht\.port"):
            open_swarm(tmp_path, [(2,)], settings=settings)


def test_nothing_outlives_the_killed_owner_of_a_host(tmp_path: Path) -> None:
    # Short: the path of a Unix socket has at most 107 bytes.
    sockets = Path(tempfile.mkdtemp(prefix="dt-"))
    peer = subprocess.Popen(
        [sys.executable, str(PEER), str(tmp_path), "127.0.0.1", "4000", "[]"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(PEER.parents[2]), "TMPDIR": str(sockets)},
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
    wait_for(lambda: not list(sockets.glob("swarm-sockets-*")), "its sockets are gone")
    sockets.rmdir()
