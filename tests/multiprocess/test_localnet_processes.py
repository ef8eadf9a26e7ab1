"""Nothing stays behind, whatever the children do."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from distributed_training.localnet.processes import (
    MARK,
    Child,
    Guardian,
    marked,
    stop_together,
    sweep,
)

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).resolve().parents[2]


def until(condition: Callable[[], object], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the awaited state did not come"
        time.sleep(0.02)


@pytest.fixture
def subnet_id() -> Iterator[str]:
    identity = "test-" + secrets.token_hex(8)
    yield identity
    for process in marked(identity):
        process.kill()


def child(tmp_path: Path, subnet_id: str, code: str, name: str = "c") -> Child:
    """A child that writes ``ready`` once it can be signalled."""
    return Child(
        name=name,
        command=[sys.executable, "-c", textwrap.dedent(code)],
        environment={**os.environ, MARK: subnet_id},
        folder=tmp_path / name,
        log=tmp_path / f"{name}.txt",
    )


STUBBORN = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    time.sleep(600)
"""
# A grandchild in a session of its own, as torchrun's workers and p2pd are.
LEAVES_ONE = """
    import subprocess, sys
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print("ready", flush=True)
"""


def test_stop_is_graceful_first_and_in_time(tmp_path: Path, subnet_id: str) -> None:
    good = child(
        tmp_path,
        subnet_id,
        """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("ready", flush=True)
        time.sleep(600)
        """,
        "good",
    )
    bad = child(tmp_path, subnet_id, STUBBORN, "bad")
    for c in (good, bad):
        c.start()
    until(lambda: good.last_lines() == ["ready"] == bad.last_lines())
    started = time.monotonic()
    defects = stop_together([good, bad], timedelta(seconds=1))
    assert time.monotonic() - started < 5
    assert good.exit_status == 0
    assert bad.exit_status == -signal.SIGKILL
    assert len(defects) == 1 and "bad did not stop" in defects[0]


def test_the_sweep_finds_a_grandchild_of_another_session(tmp_path: Path, subnet_id: str) -> None:
    parent = child(tmp_path, subnet_id, LEAVES_ONE)
    parent.start()
    assert parent.wait(timedelta(seconds=20)) == 0
    assert len(marked(subnet_id)) == 1
    strays = sweep(subnet_id, settle=timedelta(0))
    assert len(strays) == 1 and "sleep(600)" in strays[0].command
    assert not marked(subnet_id)


def test_the_sweep_waits_for_what_is_ending(tmp_path: Path, subnet_id: str) -> None:
    c = child(tmp_path, subnet_id, "import time; time.sleep(1)")
    c.start()
    assert sweep(subnet_id, settle=timedelta(seconds=15)) == []


def test_kill_tree(tmp_path: Path, subnet_id: str) -> None:
    c = child(
        tmp_path,
        subnet_id,
        """
        import subprocess, sys, time
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("ready", flush=True)
        time.sleep(600)
        """,
    )
    c.start()
    until(lambda: c.last_lines() == ["ready"])
    c.kill_tree()
    until(lambda: not marked(subnet_id))
    assert c.exit_status == -signal.SIGKILL


def test_the_guardian_ends_everything_when_the_orchestrator_is_killed(
    tmp_path: Path, subnet_id: str
) -> None:
    orchestrator = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(
                f"""
                import os, subprocess, sys, time
                os.environ["{MARK}"] = "{subnet_id}"
                from distributed_training.localnet.processes import Guardian
                guardian = Guardian("{subnet_id}")
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                                 start_new_session=True)
                print("ready", flush=True)
                time.sleep(600)
                """
            ),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    assert orchestrator.stdout is not None
    assert orchestrator.stdout.readline() == b"ready\n"
    assert len(marked(subnet_id)) == 2  # the guardian and the child
    orchestrator.kill()
    orchestrator.wait(timeout=10)
    orchestrator.stdout.close()
    until(lambda: not marked(subnet_id), seconds=25)


def test_a_closed_guardian_harms_nobody(tmp_path: Path, subnet_id: str) -> None:
    c = child(tmp_path, subnet_id, STUBBORN)
    c.start()
    guardian = Guardian(subnet_id)
    guardian.close()
    assert c.running and not psutil.pid_exists(guardian.pid)
    c.kill_tree()
