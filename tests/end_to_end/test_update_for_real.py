"""Setup and tests of a version, which tests/unit/test_update.py replaces in scripts/update.sh."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from scripts import update

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_this_version_is_set_up_and_passes_where_a_miner_is_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an environment of its own, without a GPU: or no operator could update to it."""
    for name in [n for n in os.environ if n.startswith(("PYTEST_", "PYTHON", "DT_", "OMP_"))]:
        monkeypatch.delenv(name)
    folder = tmp_path / "version"
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True, timeout=60)
    update.run("its setup", [update._SETUP], folder)
    update.test(folder)
