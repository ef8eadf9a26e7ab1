"""Finding one's own processes, and the files ranks and launcher share."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_training.miner import process
from distributed_training.miner.process import MARK, ProcessId, marked

pytestmark = [
    pytest.mark.timeout(40),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's"),
]

ROOT = Path(__file__).parents[2]
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come in {seconds} s"
        time.sleep(0.02)


def test_only_processes_with_exactly_this_mark_are_found() -> None:
    mark = secrets.token_hex(8)
    ours = subprocess.Popen(SLEEP, env={**os.environ, MARK: mark}, start_new_session=True)
    other = subprocess.Popen(SLEEP, env={**os.environ, MARK: mark + "0"})
    try:
        wait_for(lambda: bool(marked(mark)), "the mark")
        assert [p.pid for p in marked(mark)] == [ours.pid]
        assert marked(mark)[0].send(signal.SIGKILL)
        wait_for(lambda: not marked(mark), "the end")  # a zombie is not running
        ours.wait()
        assert other.poll() is None
    finally:
        for one in (ours, other):
            one.kill()
            one.wait()


def test_a_reused_pid_is_not_signalled() -> None:
    child = subprocess.Popen(SLEEP)
    try:
        later = ProcessId(child.pid, process.start_time(child.pid) + 1)
        assert not later.alive and not later.send(signal.SIGKILL)
        assert child.poll() is None
        assert ProcessId(child.pid, process.start_time(child.pid)).alive
    finally:
        child.kill()
        child.wait()
    assert process.start_time(child.pid) == 0


def test_a_process_dies_with_its_parent() -> None:
    child = (
        "import time\n"
        "from distributed_training.miner.process import die_with_parent\n"
        "import signal\n"
        "die_with_parent(signal.SIGKILL)\n"
        "print('ready', flush=True); time.sleep(600)\n"
    )
    parent = (
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=30
    )
    pid = int(done.stdout)
    wait_for(lambda: not process.is_running(pid), "the child's end")


def test_what_an_earlier_instance_wrote_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, "one")
    process.write_pid_file(tmp_path, 0)
    process.write_exit_status(tmp_path, 3, "deregistered")
    me = process.read_pid_file(tmp_path, 0, instance="one")
    assert me is not None and me.pid == os.getpid() and me.alive
    assert process.read_exit_status(tmp_path, instance="one") == (3, "deregistered")
    assert process.read_pid_file(tmp_path, 0, instance="two") is None
    assert process.read_pid_file(tmp_path, 1, instance="one") is None
    assert process.read_exit_status(tmp_path, instance="two") is None
    process.forget_ranks(tmp_path)
    assert process.read_exit_status(tmp_path, instance="one") is None
    assert not list(tmp_path.rglob("*.json*"))


def test_a_broken_file_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "exit_status.json").write_text('{"status": 0, "inst')
    assert process.read_exit_status(tmp_path, instance="x") is None
    (tmp_path / "exit_status.json").write_text("[1]")
    assert process.read_json(tmp_path / "exit_status.json") == {}


def test_rank_environment() -> None:
    env = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", MARK: "m"}
    assert process.rank_environment(env) == process.RankEnvironment(3, 1, 4, "m")
    with pytest.raises(KeyError):
        process.rank_environment({})
