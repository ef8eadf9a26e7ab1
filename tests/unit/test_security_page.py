"""SECURITY.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()
ROWS = [
    line
    for line in PAGE.partition("## Threats")[2].partition("## Attacked")[0].splitlines()
    if re.match(r"\| [^-T]", line)
]
DEFINED = set(
    re.findall(
        r"^\s*(?:async )?def (test_\w+)\(",
        "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py")),
        re.MULTILINE,
    )
)


@pytest.mark.parametrize("row", ROWS)
def test_each_threat_names_tests_that_are_there(row: str) -> None:
    named = re.findall(r"`(test_\w+)`", row.split("|")[3])
    assert named and set(named) <= DEFINED, set(named) - DEFINED


def test_the_table_was_found() -> None:
    assert len(ROWS) >= 25
