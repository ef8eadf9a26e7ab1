"""Test the files and the environment variables that the ranks share with the launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from distributed_training.miner import run_folder
from distributed_training.miner.launcher import stop_limit
from distributed_training.miner.rank_group import rank_environment_defaults
from distributed_training.miner.run_folder import Heartbeat, Watchdog, forget_ranks
from distributed_training.miner.start import CONTROL_TIMEOUT
from distributed_training.protocol.types import ExitStatus
from distributed_training.training.collectives import COLLECTIVE_TIMEOUT
from tests.tools.miner_parts import config_of


def test_a_status_is_of_the_process_that_wrote_it(tmp_path: Path) -> None:
    run_folder.write_pid_file(tmp_path, 0)
    run_folder.write_exit_status(tmp_path, 3, "deregistered")
    me = run_folder.listening_ranks(tmp_path)[0]
    assert me.pid == os.getpid() and me.find() is not None
    written = run_folder.read_exit_status(tmp_path, pid=me.pid)
    assert written == run_folder.Ending(ExitStatus.DEREGISTERED, "deregistered", False, me.pid)
    assert run_folder.read_exit_status(tmp_path) == written
    assert run_folder.read_exit_status(tmp_path, pid=me.pid + 1) is None
    forget_ranks(tmp_path)
    assert run_folder.listening_ranks(tmp_path) == {}
    assert run_folder.read_exit_status(tmp_path) is None
    assert not list(tmp_path.rglob("*.json*"))


def test_a_stop_gets_the_time_that_the_last_checkpoint_shows(tmp_path: Path) -> None:
    asked = timedelta(seconds=60)
    assert stop_limit(tmp_path, asked) == asked
    last = tmp_path / "checkpoints" / "last.json"
    last.parent.mkdir()
    for seconds, expected in ((10.0, 60), (94.0, 208)):
        last.write_text(f'{{"seconds": {seconds}}}')
        assert stop_limit(tmp_path, asked) == timedelta(seconds=expected)
    for damaged in ("", "[]", '{"seconds": null}'):
        last.write_text(damaged)
        assert stop_limit(tmp_path, asked) == asked


def test_a_library_that_aborts_leaves_stacks() -> None:
    """NCCL aborts in this way when a rank never joins a collective."""
    program = (
        "import ctypes\n"
        "from distributed_training.common.processes import write_stacks_on_signal\n"
        "write_stacks_on_signal()\n"
        "def nccl_gives_up():\n"
        "    ctypes.CDLL(None).abort()\n"
        "nccl_gives_up()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode < 0 and "nccl_gives_up" in done.stderr


def test_a_collective_gives_up_before_the_ranks_count_as_hung() -> None:
    config = config_of()
    assert COLLECTIVE_TIMEOUT < config.miner.hang_timeout < CONTROL_TIMEOUT


def test_the_allocators_segments_grow_unless_the_operator_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "PYTORCH_CUDA_ALLOC_CONF"
    for other in (name, "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(other, raising=False)
    assert rank_environment_defaults(ranks=1)[name] == "expandable_segments:True"
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert rank_environment_defaults(ranks=1)[name] == "max_split_size_mb:512"
    monkeypatch.delenv(name)
    # Torch's newer name for the same variable.
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    assert name not in rank_environment_defaults(ranks=1)


# --- whether ranks hang ---------------------------------------------------------------------------


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(run_folder, "time", clock)
    return clock


def test_ranks_that_come_to_boundaries_do_not_hang(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "pids").mkdir()
    beats = [Heartbeat(tmp_path, rank) for rank in (0, 1)]
    dog = Watchdog(tmp_path, ranks=range(2), limit=timedelta(seconds=5))
    clock.now += 3600  # a start may take any time
    assert not dog.hangs()
    for _ in range(200):  # boundaries every 0.2 s, as during a wait for a round or an upload
        clock.now += 0.2
        for beat in beats:
            beat()
        assert not dog.hangs()
    for _ in range(24):
        clock.now += 0.2
        beats[0]()
        assert not dog.hangs()
    clock.now += 1.5
    beats[0]()
    assert dog.hangs()  # because of rank 1
    forget_ranks(tmp_path)
    dog = Watchdog(tmp_path, ranks=range(2), limit=timedelta(seconds=5))
    assert not dog.hangs()
    clock.now += 6  # during the start, no rank has reached a boundary
    assert dog.hangs()


def test_a_wall_clock_that_is_set_is_no_hang_and_hides_none(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "pids").mkdir()
    Heartbeat(tmp_path, 0)()
    file = tmp_path / "pids" / "rank-0.beat"
    dog = Watchdog(tmp_path, ranks=range(1), limit=timedelta(seconds=5))
    for wall in (0, 2_000_000_000, 1_000_000_000):
        os.utime(file, (wall, wall))
        clock.now += 4
        assert not dog.hangs()
    clock.now += 6
    assert dog.hangs()


def test_a_rank_without_a_launcher_does_not_mind(tmp_path: Path) -> None:
    Heartbeat(tmp_path / "nowhere", 0)()
    assert not (tmp_path / "nowhere").exists()
