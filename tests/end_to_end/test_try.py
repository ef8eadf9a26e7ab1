"""Test ``dt-network try`` with scripts that fail, and with a kill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.founded import ROOT
from tests.tools.tree import Tree
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
TREE = Tree()
PATIENCE = 400.0  # seconds, on a busy machine
EXAMPLE = ROOT / "examples" / "join.py"


def start(folder: Path, script: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "distributed_training.network_command", "try", str(script)]
    path = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    # The operator's own settings must not reach the members.
    foreign = {"DT_NETWORK": "nowhere.toml", "R2_ENDPOINT_URL": "https://nowhere.example"}
    return subprocess.Popen(
        [*command, *words],
        cwd=folder,
        env={**os.environ, **path, **foreign, **TREE.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ends(process: subprocess.Popen[str], patience: float = PATIENCE) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=patience)
        assert not TREE.processes(), "nothing stays"
        return process.returncode, out, err
    finally:
        TREE.end()


def test_a_kill_leaves_no_member(tmp_path: Path) -> None:
    """test_hosts.py has rounds with members of each kind."""
    process = start(tmp_path, EXAMPLE, "--members", "2", "--rounds", "2")
    try:
        logs = [tmp_path / "runs" / "try" / f"member-{n}" / "log.txt" for n in (1, 2)]
        training = lambda: all(log.exists() and "\nloss " in log.read_text() for log in logs)
        wait_for(training, "inner steps of both", PATIENCE, every=0.5)
        process.kill()
        process.communicate()
        TREE.wait_for_end()
    finally:
        TREE.end()


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("print('hello')", "error: bad.py ended without a call of join(), so it was no member"),
        (
            "raise SystemExit('no GPU')",
            "ended with status 1 at inner step 0, before outer step 1: no GPU",
        ),
        (
            "import sys, torch, distributed_training as d\n"
            "model = torch.nn.Linear(3, 4)\n"
            "d.join(sys.argv[1], model, torch.optim.SGD(model.parameters(), 0.1))",
            "ValueError: the model has no parameter model.embed_tokens.weight",
        ),
        (
            "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(999)",
            "no outer step came within 5 s (member-1 has not called join()",
        ),
    ],
    ids=["never joins", "fails", "another model", "hangs"],
)
def test_a_script_that_cannot_take_part_costs_one_line(
    tmp_path: Path, script: str, line: str
) -> None:
    (tmp_path / "bad.py").write_text(script)
    more = ("--timeout", "5") if "sleep" in script else ()
    status, _, err = ends(start(tmp_path, Path("bad.py"), "--members", "2", *more))
    assert status == 1, err
    assert err.count("\n") == 1 and line in err


def test_a_script_that_is_not_there_starts_nothing(tmp_path: Path) -> None:
    status, out, err = ends(start(tmp_path, Path("bad.py")))
    assert (status, out, [*tmp_path.iterdir()]) == (2, "", [])
    assert "bad.py, so nothing was started" in err
