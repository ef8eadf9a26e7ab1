"""Find one's own processes, and leave none behind after any behaviour of theirs."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from distributed_training.common.processes import (
    Mark,
    Program,
    kill_tree,
    process_folder,
    reap_orphans,
    send,
    wait_or_kill,
)
from tests.tools.waiting import wait_for

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's"),
]

ROOT = Path(__file__).parents[2]
SLEEP = "import time; print('ready', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
NONE = timedelta(0)
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def mark() -> Iterator[Mark]:
    one = Mark("DT_TEST", secrets.token_hex(8))
    yield one
    one.end(settle=NONE, grace=NONE)


@pytest.fixture
def start(mark: Mark) -> Iterator[Start]:
    """Starts a program that bears the mark; returns when it said it is ready."""
    running: list[subprocess.Popen[bytes]] = []

    def run(code: str, **environ: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **mark.environment, **environ},
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


def test_a_process_that_one_look_misses_is_ended(
    mark: Mark, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During execve a process has no environment for a moment, so one look may miss it."""
    process = start(SLEEP)
    look, missed = Mark.processes, [True]
    monkeypatch.setattr(
        Mark, "processes", lambda mark, **few: [] if missed and missed.pop() else look(mark, **few)
    )
    assert [one.partition(" ")[0] for one in mark.end(settle=NONE, grace=NONE)] == [
        str(process.pid)
    ]
    assert process.wait(60) == -signal.SIGKILL


def test_only_processes_with_exactly_this_mark_are_found(mark: Mark, start: Start) -> None:
    ours = start(SLEEP)
    other = start(SLEEP, DT_TEST=mark.value + "0")
    assert [p.pid for p in mark.processes()] == [ours.pid]
    assert mark.processes(spare=[ours.pid]) == []
    assert send(mark.processes()[0], signal.SIGKILL)
    wait_for(lambda: not mark.processes(), "a zombie does not run")
    assert other.poll() is None


def test_child_that_ends_by_itself_is_waited_for(mark: Mark, start: Start) -> None:
    start("import time; print('ready', flush=True); time.sleep(1)")
    # Not for all of it: the test has a limit.
    assert mark.end(settle=timedelta(hours=1), grace=NONE) == []


def test_terminated_first_then_killed(mark: Mark, start: Start) -> None:
    polite, stubborn = start(SLEEP), start(STUBBORN)
    ended = mark.end(settle=NONE, grace=timedelta(seconds=4))
    assert sorted(int(line.split()[0]) for line in ended) == sorted([polite.pid, stubborn.pid])
    assert polite.wait(60) == -signal.SIGTERM and stubborn.wait(60) == -signal.SIGKILL


def test_a_descendant_with_a_session_of_its_own_is_found(mark: Mark, start: Start) -> None:
    child = (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True, stdout=subprocess.DEVNULL)\n"
        "print('ready', flush=True)\n"
    )
    assert start(child).wait(20) == 0
    (line,) = mark.end(settle=NONE, grace=NONE)
    assert "sleep(600)" in line and not mark.processes()


def test_child_that_sigkill_does_not_end_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    """Its last system call waits for a network disk: nothing of it ends before that answers."""
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


def test_kill_tree(mark: Mark, start: Start) -> None:
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).wait()"
    parent = start(child)
    assert len(mark.processes()) == 2
    kill_tree(parent.pid)
    wait_for(lambda: not mark.processes(), "the tree's end")
    kill_tree(parent.pid)  # gone already


def test_orphans_are_reaped_but_no_child_that_another_waits_for() -> None:
    code = (
        "import os, subprocess, time\n"
        "from distributed_training.common.processes import (\n"
        "    become_subreaper, reap_orphans, start_child, wait_or_kill\n"
        ")\n"
        "assert become_subreaper()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    if not os.fork(): time.sleep(0.2)\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "deadline = time.monotonic() + 20\n"
        "while time.monotonic() < deadline:\n"
        "    reap_orphans(spare=())\n"
        "    try: os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)\n"
        "    except ChildProcessError: break\n"
        "else: raise SystemExit('the orphan is there still')\n"
        "ours = os.fork()\n"
        "if not ours: os._exit(7)\n"
        "os.waitid(os.P_PID, ours, os.WEXITED | os.WNOWAIT)\n"
        "reap_orphans(spare=[ours])\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(ours, 0)[1]) == 7\n"
        "child, _ = start_child('no_such_module', stderr=subprocess.DEVNULL)\n"
        "os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)\n"
        "reap_orphans(spare=())\n"
        "wait_or_kill(child, 10)\n"
        "assert child.returncode == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=40)
    assert done.returncode == 0
    reap_orphans(spare=())  # without any child: nothing


def test_a_process_dies_with_its_parent(mark: Mark, start: Start) -> None:
    child = (
        "from distributed_training.common.processes import die_with_parent\n"
        "import signal\n"
        "die_with_parent(signal.SIGKILL)\n" + SLEEP
    )
    parent = start(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]);"
                   "import time; time.sleep(600)")  # fmt: skip
    assert len(mark.processes()) == 2
    parent.kill()
    wait_for(lambda: not mark.processes(), "the child's end")


def test_a_process_of_a_fork_server_ends_with_its_client(
    mark: Mark, start: Start, tmp_path: Path
) -> None:
    """Its parent is the server, which lives on while anybody may ask it again."""
    module = tmp_path / "forked.py"
    module.write_text(
        "import time\n"
        "from distributed_training.common.processes import end_with_starter\n"
        "def work():\n"
        "    end_with_starter()\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(600)\n"
    )
    asker = start(
        "import multiprocessing, time, forked\n"
        "multiprocessing.get_context('forkserver').Process(target=forked.work).start()\n"
        "time.sleep(600)\n",
        PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}",
    )
    asker.kill()
    wait_for(lambda: not mark.processes(), "the end of all")


HOLDS_A_FOLDER = """
import sys
from distributed_training.common.processes import process_folder
print(process_folder("dt-"), flush=True)
sys.stdin.read()
"""


def test_a_folder_is_removed_only_when_its_process_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary folder that containers or nodes share: a pid says nothing of who lives there."""

    def holder() -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDS_A_FOLDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(tmp_path)},
        )
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    living, made = holder()
    no_pid_here = f"dt-{2**22 + 7}-"
    elsewhere = made.rename(tmp_path / f"{no_pid_here}elsewhere")
    killed, left = holder()
    killed.kill()
    killed.communicate()
    other_machine = tmp_path / f"{no_pid_here}machine"
    other_machine.mkdir()
    (other_machine / "owner").write_text("another kernel's boot id\n")
    just_made = tmp_path / f"{no_pid_here}new"
    just_made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    try:
        assert left.is_dir()
        own = Path(process_folder("dt-"))
        assert {elsewhere, other_machine, just_made, own} == set(tmp_path.iterdir())
    finally:
        living.kill()
        living.communicate()


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
    """A program that is kept running, and its output."""

    def __init__(self, code: str, **more: Any) -> None:
        self.lines: list[str] = []
        self.program = Program(
            "The program",
            [sys.executable, "-u", "-c", code],
            environment={**os.environ, **more},
            effect="nothing is done",
            log_line=lambda line: self.lines.append(line.text),
            final=(2, 3),
        )
        self.program.start()

    def said(self, text: str) -> int:
        return sum(text in line for line in self.lines)


@pytest.mark.slow
def test_a_program_is_kept_running_and_says_all_that_it_prints() -> None:
    """It is started again after a signal or a passing status, also if a child holds its output."""
    code = (
        "import os, subprocess, sys, signal\n"
        "print('begun', os.getpid())\n"
        "subprocess.Popen(['sleep', '600'])\n"
        "sys.stdout.write('last words'); sys.stdout.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    kept = Kept(code, LOST="1")
    try:
        wait_for(lambda: kept.said("begun") == 2, "a second start", 60)
        assert kept.lines[1] == "last words" and "was killed by SIGKILL" in kept.lines[2]
        assert "starting it again in" in kept.lines[2] and "nothing is done" in kept.lines[2]
        assert kept.program.refused is None
    finally:
        kept.program.close()
        Mark("LOST", "1").end(settle=timedelta(0), grace=timedelta(0))


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
