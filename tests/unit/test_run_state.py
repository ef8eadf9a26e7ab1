"""Test the files in which a launcher writes its state, even on a full disk."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from distributed_training.common.files import read_json_object
from distributed_training.telemetry import read_events, run_state
from distributed_training.telemetry.facts import Launch
from distributed_training.telemetry.logs import register_secret
from distributed_training.telemetry.run_state import (
    LauncherFile,
    LauncherState,
    observe,
    read_launcher,
    report_running,
    report_stage,
)
from distributed_training.telemetry.verdict import Verdict, judge


def launch_of(folder: Path) -> Launch:
    facts = observe(folder, time.time())
    assert facts.launch is not None
    return facts.launch


def ended_process() -> int:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    return gone.pid


def test_a_start_is_followed_from_its_refusal_to_its_end(tmp_path: Path) -> None:
    file = LauncherFile(tmp_path)
    file.start()
    assert launch_of(tmp_path).state == "starting"
    file.refused("no hotkey at /mnt: btcli wallet new_hotkey", attempt=3, wait=40.0)
    found = launch_of(tmp_path)
    assert (found.state, found.attempt) == ("refused", 3) and "no hotkey" in found.text
    assert found.next_try_at is not None and 30 < found.next_try_at - time.time() <= 40
    file.start()
    report_stage(tmp_path, 1, "importing")
    report_stage(tmp_path, 3, "loading", done=12_400_000_000, total=32_000_000_000, eta=1560.0)
    found = launch_of(tmp_path)
    assert found.stage == "loading, 12.4 of 32.0 GB (3 of 5)" and found.eta_seconds == 1560.0
    judged = judge(observe(tmp_path, time.time()), time.time())
    # From the second refusal on, the verdict stays the same during further attempts.
    assert judged.verdict is Verdict.CANNOT_START and "attempt 4" in judged.cause
    assert judged.remedy.startswith("btcli wallet new_hotkey; ")
    report_running(tmp_path)
    assert launch_of(tmp_path).state == "running"
    file.enter(LauncherState.RUNNING)
    file.crashed("rank 1 (pid 7) was killed by SIGKILL")
    file.start()
    file.stopped("signal SIGINT", "asked to stop")
    found = launch_of(tmp_path)
    assert (found.state, found.stopped_by, found.asked) == ("stopped", "signal SIGINT", True)
    kept = read_launcher(tmp_path)
    assert kept and kept.restarts == 1 and "SIGKILL" in kept.last_crash.text
    kinds = [event["kind"] for event in read_events(tmp_path / "events.jsonl")]
    assert kinds == ["refused", "starting", "starting"]


def test_a_launcher_that_was_killed_is_named_from_outside_and_by_the_next(tmp_path: Path) -> None:
    state = Launch(state="running", at=time.time() - 3600, pid=ended_process(), restarts=2)
    path = tmp_path / "launcher.json"
    run_state._write(path, asdict(state))
    os.utime(path, (time.time() - 60,) * 2)
    found = launch_of(tmp_path)
    assert found.state == "stopped" and not found.asked
    assert f"its launcher (pid {state.pid}) is gone" in found.stopped_by
    launch = observe(tmp_path, time.time()).launch
    assert launch and time.time() - launch.at < 600, "its last sign of life"
    after = LauncherFile(tmp_path).state
    assert after.restarts == 3 and "was killed" in after.last_crash.text
    LauncherFile(tmp_path).stopped("signal SIGTERM")
    assert LauncherFile(tmp_path).state.restarts == 0, "somebody asked for this start"
    file = LauncherFile(tmp_path)
    file.crashed("rank 0 ended with status 1")
    file.stopped("failures", "rank 0 ended with status 1")
    after = LauncherFile(tmp_path).state
    assert after.restarts == 2 and "status 1" in after.last_crash.text, "pm2 asked for this one"


def test_the_ranks_of_torchrun_have_no_launcher(tmp_path: Path) -> None:
    report_stage(tmp_path, 4, "building the model")
    assert launch_of(tmp_path).state == "starting"
    report_running(tmp_path)
    assert launch_of(tmp_path).state == "running"
    rank = tmp_path / "pids" / "rank-0.json"
    rank.parent.mkdir()
    rank.write_text(json.dumps({"pid": ended_process()}))
    for path in (tmp_path / "events.jsonl", rank):
        os.utime(path, (time.time() - 60,) * 2)
    found = launch_of(tmp_path)
    assert (found.state, found.asked) == ("stopped", True) and "torchrun" in found.stopped_by


def test_the_written_state_has_no_secret(tmp_path: Path) -> None:
    register_secret("s3cr3t-of-the-store")
    LauncherFile(tmp_path).refused("bad key s3cr3t-of-the-store", attempt=1, wait=1.0)
    for path in tmp_path.iterdir():
        assert b"s3cr3t" not in path.read_bytes()


def no_room(path: Path, *_: object, **named: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_a_full_disk_takes_the_next_state_in_place_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = LauncherFile(tmp_path)
    # Each character takes six bytes, so this text is longer than the next one.
    file.refused("\u00e9" * 700, attempt=1, wait=1.0)
    file.start()
    monkeypatch.setattr(run_state, "write_bytes", no_room)
    report_running(tmp_path)
    assert launch_of(tmp_path).state == "running", "the start has ended"
    file.refused("0.0 GB free", attempt=1, wait=1.0)
    assert launch_of(tmp_path).text == "0.0 GB free" and not caplog.text
    (tmp_path / "launcher.json").unlink()
    for _ in range(3):
        file.refused("0.0 GB free", attempt=1, wait=1.0)
    (line,) = [r.getMessage() for r in caplog.records]
    assert "launcher.json was not written (No space left on device)" in line


def test_a_second_launcher_of_the_folder_leaves_the_state_of_the_first(tmp_path: Path) -> None:
    with (tmp_path / "launcher.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        first = LauncherFile(tmp_path)
        first.owned = True
        first.enter(LauncherState.RUNNING)
        second = LauncherFile(tmp_path)
        second.refused("a miner is running there", attempt=1, wait=1.0)
        assert second.state.restarts == 0
        assert launch_of(tmp_path).state == "running"
    second.refused("the disk is full", attempt=2, wait=1.0)
    assert launch_of(tmp_path).state == "refused"


def test_a_folder_that_is_not_there_or_closed_is_no_error(tmp_path: Path) -> None:
    assert observe(tmp_path / "none", time.time()).launch is None
    LauncherFile(tmp_path / "none").start()
    assert not (tmp_path / "none").exists(), "its disk may come later"
    (tmp_path / "launcher.json").mkdir()
    assert observe(tmp_path, time.time()).launch is None
    assert read_json_object(tmp_path / "launcher.json") is None
