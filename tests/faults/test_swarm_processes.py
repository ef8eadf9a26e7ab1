"""A process of the swarm is killed or hangs: noticed, logged, repaired before the next round.

And many rounds in a row leave nothing behind: no files, descriptors, threads, processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from distributed_training.exchange.sn38 import supervisor
from distributed_training.exchange.sn38.swarm import HivemindSwarm
from distributed_training.protocol.types import AllReduceError, AllReduceFault, AllReduceResult
from tests.tools.swarm_world import (
    REQUEST,
    SMALL,
    Rounds,
    assert_good_round,
    everybody,
    open_swarm,
    open_swarms,
    processes,
)
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(300)

#: Of the two p2pd each night: test_localnet_end_to_end.py kills it each day.
VICTIMS = ["host", pytest.param("p2pd", marks=pytest.mark.long)]
NOTICED = 20.0  # seconds; at rest a tenth of one
SECRETS = {"R2_WRITE_SECRET_ACCESS_KEY": "hidden", "HF_TOKEN": "hidden"}


@pytest.fixture(scope="module")
def pair(
    forked_hosts: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[HivemindSwarm]]:
    with open_swarms(tmp_path_factory.mktemp("swarm"), 2, SMALL) as swarms:
        yield swarms


def mended(swarm: HivemindSwarm, before: dict[str, psutil.Process]) -> bool:
    try:
        return swarm.alive() and processes(swarm).get("p2pd") not in (None, before["p2pd"])
    except psutil.NoSuchProcess:  # one that ends just now
        return False


def test_a_swarm_is_two_processes_and_neither_holds_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program itself, before the others' hosts are forked. Kills of each process are tested
    below: another process would need its own test."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    with contextlib.closing(open_swarm(tmp_path, SMALL)) as swarm:
        tree = processes(swarm)
        assert set(tree) == {"host", "p2pd"}
        for process in tree.values():
            assert "hidden" not in process.environ().values()
            assert "PATH" in process.environ()
        tree["host"].kill()
        wait_for(lambda: mended(swarm, tree), "the program is started again", seconds=90)


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_process_is_mended_before_the_next_round(
    pair: list[HivemindSwarm], victim: str, caplog: pytest.LogCaptureFixture
) -> None:
    swarm, _ = pair
    tree, known_by = processes(swarm), (swarm.peer_id, swarm.visible_maddrs)
    caplog.clear()
    began = time.monotonic()
    tree[victim].kill()
    wait_for(lambda: not swarm.alive(), "the death is noticed", seconds=NOTICED, every=0.005)
    wait_for(lambda: "The swarm process ended" in caplog.text, "it is logged", seconds=NOTICED)
    assert time.monotonic() - began < NOTICED
    wait_for(lambda: mended(swarm, tree), "the host is there again", seconds=60)
    told = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(told) == 1 and "SIGKILL" in told[0].getMessage(), told
    assert (swarm.peer_id, swarm.visible_maddrs) == known_by
    _, left = psutil.wait_procs(list(tree.values()), timeout=60)
    assert left == []
    assert_good_round(*pair)


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_process_killed_in_matchmaking_does_not_cost_the_round(
    pair: list[HivemindSwarm], victim: str
) -> None:
    swarm, _ = pair
    tree = processes(swarm)
    rounds = Rounds(*pair, request=everybody(pair))
    wait_for(swarm._keeper._in_use.locked, "the round runs")
    tree[victim].kill()
    for outcome in rounds.join().values():
        assert isinstance(outcome, AllReduceResult), outcome
        assert not outcome.partial
    assert mended(swarm, tree)


def test_a_host_that_cannot_be_started_again_ends_the_round_and_not_the_miner(
    pair: list[HivemindSwarm], monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm, _ = pair
    monkeypatch.setattr(supervisor, "_START_ATTEMPTS", 1)
    tree = processes(swarm)
    with monkeypatch.context() as full_disk:

        def full(prefix: str) -> str:
            raise OSError(28, "No space left on device")

        full_disk.setattr(supervisor, "process_folder", full)
        rounds = Rounds(swarm, request=everybody(pair))
        wait_for(swarm._keeper._in_use.locked, "the round runs")
        tree["host"].kill()
        outcome = rounds.join()[swarm]
        assert isinstance(outcome, AllReduceError), outcome
        assert outcome.fault is AllReduceFault.SWARM_DOWN
        assert "No space left on device" in str(outcome)
    wait_for(lambda: mended(swarm, tree), "the host is there again", seconds=60)
    assert_good_round(*pair)


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_process_that_hangs_is_ended_and_started_again(
    pair: list[HivemindSwarm], victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm, _ = pair
    monkeypatch.setattr(supervisor, "HANG", 6.0)
    swarm.restart()
    tree = processes(swarm)
    tree[victim].suspend()
    wait_for(lambda: mended(swarm, tree), "it was started again", seconds=60)
    _, left = psutil.wait_procs([tree[victim]], timeout=60)  # also reaped, by whoever inherited it
    assert left == []
    assert_good_round(*pair)


def used(swarm: HivemindSwarm) -> dict[str, Any]:
    tree = processes(swarm)
    return {
        "our descriptors": psutil.Process().num_fds(),
        "our threads": psutil.Process().num_threads(),
        "host's descriptors": tree["host"].num_fds(),
        "host's threads": tree["host"].num_threads(),
        "p2pd's descriptors": tree["p2pd"].num_fds(),
        "sockets": len(os.listdir(swarm._keeper.host._sockets)),
        # Ours: other workers have swarms too.
        "folders of sockets": len(
            list(Path(tempfile.gettempdir()).glob(f"swarm-sockets-{os.getpid()}-*"))
        ),
        "hivemind's own sockets": sum(
            str(connection.laddr).startswith("/tmp/hivemind-")
            for process in tree.values()
            for connection in process.net_connections("unix")
        ),
        "processes": len(psutil.Process().children(recursive=True)),
    }


@pytest.mark.slow
def test_rounds_leave_nothing_behind(pair: list[HivemindSwarm]) -> None:
    """A round, a round without a group, one that is cancelled: again and again."""
    swarm, _ = pair

    def once() -> None:
        assert_good_round(*pair)
        rounds = Rounds(swarm)
        wait_for(swarm._keeper._in_use.locked, "the round runs")
        swarm.cancel()
        outcome = rounds.join()[swarm]
        assert isinstance(outcome, AllReduceError) and outcome.fault is AllReduceFault.CANCELLED

    for _ in range(2):
        once()
    before, memory = used(swarm), processes(swarm)["host"].memory_info().rss
    for _ in range(8):
        once()
    wait_for(
        lambda: all(now <= before[what] for what, now in used(swarm).items()),
        f"as much is used as before: {before}, now {used(swarm)}",
    )
    assert processes(swarm)["host"].memory_info().rss < memory + 8_000_000
    log = (swarm._keeper._folder / "hivemind.log").read_text()
    assert "Traceback" not in log


def test_the_host_of_a_closed_swarm_is_gone_with_its_sockets(pair: list[HivemindSwarm]) -> None:
    swarm, _ = pair
    tree = processes(swarm)
    sockets = Path(swarm._keeper.host._sockets)
    assert {path.suffix or path.name for path in sockets.iterdir()} == {".sock", "owner"}
    assert sockets.stat().st_mode & 0o777 == 0o700
    assert (swarm._keeper._folder / "identity.key").stat().st_mode & 0o777 == 0o600
    began = time.monotonic()
    swarm.close()
    assert time.monotonic() - began < 30
    swarm.close()
    _, left = psutil.wait_procs(list(tree.values()), timeout=60)
    assert left == [] and not sockets.exists() and not swarm.alive()
    with pytest.raises(AllReduceError):
        swarm.average(REQUEST)
