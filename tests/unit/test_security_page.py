"""docs/threats.toml names tests that exist, and the site shows them."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "threats.toml").read_text()
ROWS = tomllib.loads(TEXT)["threat"]
DEFINED = set(
    re.findall(
        r"^\s*(?:async )?def (test_\w+)\(",
        "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py")),
        re.MULTILINE,
    )
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["threat"])
def test_each_threat_names_tests_that_are_there(row: dict[str, list[str]]) -> None:
    assert row["tests"] and set(row["tests"]) <= DEFINED, set(row["tests"]) - DEFINED


def test_the_sites_page_has_each_threat() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "site" / "hooks.py"))["threats"](TEXT)
    rows = re.findall(r"^\| (?!Threat).+ \| .+ \| `test_.+` \|$", page, re.M)
    assert len(rows) == len(ROWS) >= 25
