"""Test that the oldest torch that ``pyproject.toml`` allows trains like the installed one.

The state that FSDP2 keeps between two steps is private and changes between versions of torch. So
this file runs the training tests once more, in an environment with the oldest torch.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TESTS = (
    "tests/unit/test_training_trainer.py",
    "tests/unit/test_training_optimizers.py",
    "tests/multiprocess/test_training_ranks.py",
)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_oldest_torch_trains_alike() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (oldest,) = re.findall(r'"torch>=([0-9.]+)"', text)
    folder = f"build/torch-{oldest}"
    python = ROOT / folder / "bin" / "python"
    if not (ROOT / folder / ".made").exists():
        pytest.skip(f"torch {oldest} is not tested, since {folder} is missing: make {folder}/.made")
    version = [str(python), "-c", "import torch; print(torch.__version__)"]
    found = subprocess.run(version, capture_output=True, text=True, check=True).stdout
    assert found.startswith(f"{oldest}.")
    command = [str(python), "-m", "pytest", "-x", "-p", "no:cacheprovider", *TESTS]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
