"""Test the notes that `make release` takes from the changelog. test_wheel.py has the wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import distributed_training
from scripts.release import Refused, notes

ROOT = Path(__file__).resolve().parents[2]
BODY = (
    "# Changelog\n\n{0}## [0.2.0] - 2026-11-23\n\n### Added\n\n- a flag\n\n"
    "## [0.1.0] - 2026-01-01\n\n- all\n"
)


def test_the_notes_are_the_version_s_part() -> None:
    assert notes(BODY.format("## [Unreleased]\n\n"), "0.2.0") == "### Added\n\n- a flag\n"
    assert notes(BODY.format(""), "0.1.0") == "- all\n"


@pytest.mark.parametrize(
    ("text", "version", "words"),
    [
        (BODY.format("## [Unreleased]\n\n- new\n\n"), "0.2.0", "under .Unreleased."),
        (BODY.format(""), "0.3.0", "says nothing of 0.3.0"),
        ("## [0.2.0] - 2026-11-23\n\n## [0.1.0] - 2026-01-01\n", "0.2.0", "says nothing"),
        (BODY.format("").replace("0.2.0", "0x2x0"), "0.2.0", "says nothing"),
    ],
)
def test_a_changelog_that_does_not_fit_is_refused(text: str, version: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        notes(text, version)


def test_the_changelog_knows_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert f"## [{distributed_training.__version__}] - " in text


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_founder_builds_the_wheel_between_two_releases(tmp_path: Path) -> None:
    """This works at any commit. The version names the commit, and the constraints are included."""
    words = [sys.executable, "scripts/release.py", "--wheel", "--folder", str(tmp_path)]
    done = subprocess.run(
        words, cwd=ROOT, env={"PYTHONPATH": ".", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert str(wheel) in done.stdout and f"-{distributed_training.__version__}+g" in wheel.name
    constraints = (ROOT / "constraints.txt").read_text()
    assert (tmp_path / "constraints.txt").read_text() == constraints
    with zipfile.ZipFile(wheel) as files:
        version = files.read("distributed_training/__init__.py").decode()
    assert f"{distributed_training.__version__}+g" in version
    guide = (ROOT / "docs" / "operator-guide.md").read_text()
    assert "make wheel" in guide and "pip install -c constraints.txt FILE.whl" in guide
