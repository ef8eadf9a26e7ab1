"""The notes that `make release` takes from the changelog. The wheel: test_wheel.py."""

from __future__ import annotations

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
