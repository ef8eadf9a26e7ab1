"""The children of a local subnet, also of one that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from distributed_training.common.processes import command_of
from distributed_training.localnet.services import Child, stop_together
from tests.tools.tree import Tree
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(150)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree() -> Iterator[Tree]:
    one = Tree()
    yield one
    one.end()


def child(tmp_path: Path, tree: Tree, code: str, name: str = "c") -> Child:
    """A child that writes ``ready`` once it can be signalled."""
    return Child(
        name=name,
        command=[sys.executable, "-c", textwrap.dedent(code)],
        environment={**os.environ, **tree.environment},
        folder=tmp_path / name,
    )


STUBBORN = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    time.sleep(600)
"""


def test_a_process_that_outlives_sigkill_delays_no_other_stop(
    tmp_path: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = [child(tmp_path, tree, STUBBORN, name) for name in ("one", "two")]
    for each in children:
        each.start()
        wait_for(lambda each=each: each.last_lines() == ["ready"], each.name)
    hangs = children[0]._process
    assert hangs is not None
    wait = hangs.wait

    def in_a_system_call(timeout: float | None = None) -> int:
        raise subprocess.TimeoutExpired("one", timeout or 0.0)

    monkeypatch.setattr(hangs, "wait", in_a_system_call)
    assert len(stop_together(children, timedelta(seconds=0.1))) == 2
    assert wait(60) == -signal.SIGKILL == children[1].exit_status


def test_children_end_when_the_orchestrator_is_killed(tmp_path: Path, tree: Tree) -> None:
    orchestrator = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(
                f"""
                import os, sys, time
                from pathlib import Path
                from distributed_training.localnet.services import Child
                Child(name="c", command=[sys.executable, "-c", "import time; time.sleep(600)"],
                      environment=dict(os.environ),
                      folder=Path("{tmp_path}")).start()
                print("ready", flush=True)
                time.sleep(600)
                """
            ),
        ],
        cwd=ROOT,
        env={**os.environ, **tree.environment},
        stdout=subprocess.PIPE,
    )
    assert orchestrator.stdout is not None
    assert orchestrator.stdout.readline() == b"ready\n"
    # Before setpriv has become the command, nobody has asked for its end yet.
    wait_for(
        lambda: len([p for p in tree.processes() if command_of(p).startswith(sys.executable)]) == 2,
        "the child",
    )
    orchestrator.kill()
    orchestrator.wait()
    orchestrator.stdout.close()
    tree.wait_for_end()
