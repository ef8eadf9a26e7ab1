"""Test with real processes that children are found and ended, and that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from distributed_training.common import processes
from distributed_training.common.processes import (
    ProcessId,
    Program,
    end_sessions,
    kill_tree,
    members,
    sessions_of,
    wait_or_kill,
)
from tests.tools.tree import Tree
from tests.tools.waiting import wait_for

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's"),
]

ROOT = Path(__file__).parents[2]
SLEEP = "import time; print('ready', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], {{}})"
NONE = timedelta(0)
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def tree() -> Iterator[Tree]:
    one = Tree()
    yield one
    one.end()


@pytest.fixture
def start(tree: Tree) -> Iterator[Start]:
    """Return a function that starts a program as a session leader and waits until it is ready."""
    running: list[subprocess.Popen[bytes]] = []

    def run(code: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **tree.environment},
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd=ROOT,
        )
        running.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        return process

    yield run
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("leader_is_gone", [False, True])
def test_a_session_is_ended_with_all_process_groups_in_it(
    start: Start, tree: Tree, leader_is_gone: bool
) -> None:
    leader = start(CHILD.format("process_group=0") + ("" if leader_is_gone else f"; {SLEEP}"))
    other = start(SLEEP)
    if leader_is_gone:
        leader.wait(20)
    else:
        wait_for(lambda: len(members([leader.pid])) == 2, "the child")
    # What a leader leaves does not get its hour.
    ended = end_sessions([leader.pid], settle=timedelta(hours=leader_is_gone), grace=NONE)
    assert len(ended) == 2 - leader_is_gone and "time.sleep(600)" in ended[0]
    assert [p.pid for p in tree.processes()] == [other.pid]


def test_a_session_that_ends_by_itself_is_waited_for(start: Start) -> None:
    process = start("import time; print('ready', flush=True); time.sleep(1)")
    # Not for all of it: the test has a limit.
    assert end_sessions([process.pid], settle=timedelta(hours=1), grace=NONE) == []


def test_terminated_first_then_killed(start: Start) -> None:
    polite, stubborn = start(SLEEP), start(STUBBORN)
    ended = end_sessions([polite.pid, stubborn.pid], settle=NONE, grace=timedelta(seconds=4))
    assert sorted(int(line.split()[0]) for line in ended) == sorted([polite.pid, stubborn.pid])
    assert polite.wait(60) == -signal.SIGTERM and stubborn.wait(60) == -signal.SIGKILL


def test_a_remembered_process_is_no_later_one_with_its_pid(start: Start) -> None:
    process = start(SLEEP)
    me = ProcessId.of(process.pid)
    later = ProcessId(me.pid, me.began - 100)
    assert me.find() == psutil.Process(me.pid) and later.find() is None
    assert sessions_of([me, later]) == [me.pid]
    process.kill()
    process.wait()
    assert me.find() is None


def test_child_that_sigkill_does_not_end_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    """Its last system call waits for a network disk, so it cannot end before the disk answers."""
    waits: list[float] = []

    class InTheKernel:
        pid, killed = 41, False

        def wait(self, timeout: float) -> None:  # without a limit it would be a TypeError
            waits.append(timeout)
            raise subprocess.TimeoutExpired("x", timeout)

        def kill(self) -> None:
            self.killed = True

    process = InTheKernel()
    wait_or_kill(process, 3)  # type: ignore[arg-type]
    assert process.killed and waits[0] == 3 and 0 < waits[1] < 60
    assert "Process 41 is left behind" in caplog.text


def test_kill_tree(tree: Tree, start: Start) -> None:
    parent = start(CHILD.format("start_new_session=True") + ".wait()")
    assert len(tree.processes()) == 2
    kill_tree(parent.pid)
    tree.wait_for_end()
    kill_tree(parent.pid)  # gone already


def test_a_process_dies_with_its_parent(tree: Tree, start: Start) -> None:
    child = (
        "from distributed_training.common.processes import die_with_parent\n"
        "import signal\n"
        "die_with_parent(signal.SIGKILL)\n" + SLEEP
    )
    parent = start(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]);"
                   "import time; time.sleep(600)")  # fmt: skip
    parent.kill()
    tree.wait_for_end()


ANSWERS = """
import time
from distributed_training.common.processes import ParentConnection
parent = ParentConnection(plugins=False{more})
parent.send("ready")
{then}
"""


@pytest.mark.parametrize("moment", ["waits", "stopped", "only by the socket"])
def test_a_child_ends_with_its_parent(
    tmp_path: Path, tree: Tree, start: Start, moment: str
) -> None:
    alone = moment == "only by the socket"
    code = ANSWERS.format(
        more=", ends=None" if alone else "",
        then="parent.end_with_parent(); time.sleep(600)" if alone else "time.sleep(600)",
    )
    (tmp_path / "child_of_a_test.py").write_text(code)
    parent = start(
        f"import sys, time; sys.path[:0] = [{str(tmp_path)!r}]\n"
        "from distributed_training.common.processes import ChildProcess\n"
        "child = ChildProcess('The child', 'child_of_a_test', effect='', receive=print)\n"
        "child.start(); sys.stdout.flush(); time.sleep(0.2)\n"
        "while True: sys.stdout.flush(); time.sleep(0.05)"
    )
    (child,) = psutil.Process(parent.pid).children()
    assert os.getpgid(child.pid) == child.pid, "a Ctrl-C is its parent's"
    if moment == "stopped":
        child.suspend()
    parent.kill()
    tree.wait_for_end()


LIMITED = """
import os, resource, subprocess, sys
from distributed_training.common.processes import limit_resources
_, hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
_, files = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, files), files))
limit_resources()
_, status = os.waitpid(subprocess.Popen([sys.executable, "-c", "import os; os.abort()"]).pid, 0)
print(os.WIFSIGNALED(status), os.WCOREDUMP(status))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(files, 1 << 20))
"""


def test_aborted_child_leaves_no_core_and_open_files_are_as_many_as_allowed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["True False", "True"], done.stderr
    assert not list(tmp_path.iterdir())


class Kept:
    """A program that is restarted whenever it ends, and its output."""

    def __init__(self, code: str) -> None:
        self.lines: list[str] = []
        self.program = Program(
            "The program",
            [sys.executable, "-u", "-c", code],
            environment={**os.environ},
            effect="nothing is done",
            log_line=lambda line: self.lines.append(line.text),
            final=(2, 3),
        )
        self.program.start()

    def said(self, text: str) -> int:
        return sum(text in line for line in self.lines)


@pytest.mark.slow
def test_a_program_is_kept_running_and_says_all_that_it_prints() -> None:
    """It restarts after a signal or a status that may pass, even if a child holds its output."""
    code = (
        "import os, subprocess, sys, signal\n"
        "print('begun', os.getpid())\n"
        "subprocess.Popen(['sleep', '600'])\n"
        "sys.stdout.write('last words'); sys.stdout.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    kept, pids = Kept(code), []
    try:
        wait_for(lambda: kept.said("begun") == 2, "a second start", 60)
        assert kept.lines[1] == "last words" and "was killed by SIGKILL" in kept.lines[2]
        assert "starting it again in" in kept.lines[2] and "nothing is done" in kept.lines[2]
        assert kept.program.refused is None
        pids = [int(line.split()[1]) for line in kept.lines if line.startswith("begun")]
    finally:
        kept.program.close()
        end_sessions(pids, settle=NONE, grace=NONE)


@pytest.mark.slow
@pytest.mark.parametrize("status", [2, 3])
def test_a_program_that_no_start_helps_is_left_ended(status: int) -> None:
    kept = Kept(f"print('why'); raise SystemExit({status})")
    wait_for(lambda: kept.program.refused is not None, "its end", 30)
    assert kept.program.refused == status and kept.lines == ["why"]
    kept.program.close()


@pytest.mark.slow
def test_a_program_ends_in_order_or_is_killed_in_time() -> None:
    code = "import signal, time\n{}\nprint('ready')\ntime.sleep(600)"
    good = Kept(code.format("def end(*_): print('saved'); raise SystemExit\n"
                            "signal.signal(signal.SIGTERM, end)"))  # fmt: skip
    deaf = Kept(code.format("signal.signal(signal.SIGTERM, signal.SIG_IGN)"))
    wait_for(lambda: good.said("ready") and deaf.said("ready"), "both", 30)
    good.program.close(timeout=timedelta(seconds=30))
    deaf.program.close(timeout=timedelta(seconds=0.5))
    wait_for(lambda: good.lines == ["ready", "saved"], "its last line", 10)
    for one in (good, deaf):
        assert not psutil.pid_exists(one.program.pid) and one.program.refused is None


@pytest.mark.parametrize("steady, grows", [(600.0, True), (0.0, False)])
def test_pauses_grow_unless_the_program_had_lived_for_long(
    monkeypatch: pytest.MonkeyPatch, steady: float, grows: bool
) -> None:
    monkeypatch.setattr(processes, "_STEADY_SECONDS", steady)
    monkeypatch.setattr(processes, "_FIRST_WAIT", timedelta(milliseconds=1))
    kept = Kept("print('begun'); raise SystemExit(1)")
    try:
        wait_for(lambda: kept.said("begun") >= 3, "a third start", 60)
        assert (kept.program._backoff.failures >= 2) == grows
    finally:
        kept.program.close()
