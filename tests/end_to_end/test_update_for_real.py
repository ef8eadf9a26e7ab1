"""Test the real setup of a version, for which tests/unit/test_update.py has a stand-in."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_clone_is_set_up_and_its_miner_and_doctor_answer(tmp_path: Path) -> None:
    """scripts/setup.sh installs it from a folder that is no checkout, as an update has it."""
    environ = {k: os.environ[k] for k in ("PATH", "HOME")} | {"PYTHONSAFEPATH": "1"}
    version = tmp_path / "a version"
    subprocess.run(["git", "clone", "--quiet", ROOT, version], check=True, timeout=60)
    for _ in range(2):  # the second run finds everything installed
        subprocess.run([version / "scripts" / "setup.sh"], check=True, env=environ)
    for words in (
        ("-m", "distributed_training", "run-folder", "miner", "--network", "local"),
        (version / "neurons" / "miner.py", "--help"),
        (version / "scripts" / "diagnose.py", "--help"),
    ):
        program = [version / ".venv" / "bin" / "python", *words]
        done = subprocess.run(program, env=environ, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout, done.stderr
