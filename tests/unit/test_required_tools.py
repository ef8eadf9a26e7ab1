"""A test that is skipped for want of a tool fails where ``DT_REQUIRE`` names the tool."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SKIPPED = """
import pytest

@pytest.mark.skipif(True, reason="needs chromium and chromedriver (Debian packages)")
def test_a_page(): ...

@pytest.mark.skipif(True, reason="needs prometheus (Debian package)")
def test_an_alert(): ...
"""


def test_a_required_tool_that_is_missing_fails_and_another_one_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_skipped.py").write_text(SKIPPED)
    words = ["-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *words, "-c", os.devnull],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"DT_REQUIRE": "pm2,chromium", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "DT_REQUIRE names chromium" in done.stdout and "1 skipped, 1 error" in done.stdout
