"""A test that is skipped for want of a tool fails where ``DT_REQUIRE`` names the tool."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SKIPPED = """
import pytest

@pytest.mark.skipif(True, reason="needs chromium and chromedriver (Debian packages)")
def test_a_page(): ...
"""


@pytest.mark.parametrize(("required", "status"), [("pm2", 0), ("pm2,chromium", 1)])
def test_a_required_tool_that_is_missing_fails(tmp_path: Path, required: str, status: int) -> None:
    (tmp_path / "test_skipped.py").write_text(SKIPPED)
    words = ["-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *words, "-c", os.devnull],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"DT_REQUIRE": required},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert ("DT_REQUIRE names chromium" in done.stdout) == bool(status)
