"""What comments cite exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]


def test_every_section_of_the_protocol_page_that_is_cited_is_there() -> None:
    sections = set(re.findall(r"^## (\d+)\. ", (ROOT / "docs" / "protocol.md").read_text(), re.M))
    sources = [ROOT / "distributed_training", ROOT / "bench", ROOT / "tests", ROOT / "extras"]
    cited = {
        number: path
        for source in sources
        for path in source.rglob("*.py")
        for found in re.findall(
            r"protocol page,? *\n?[ #]*\(?sections? (\d+(?:(?:, | and )\d+)*)", path.read_text()
        )
        for number in re.findall(r"\d+", found)
    }
    assert len(cited) >= 5
    assert set(cited) <= sections, {n: p for n, p in cited.items() if n not in sections}


@pytest.mark.parametrize("package", ["validator", "scoring"])
def test_a_package_names_modules_that_it_has(package: str) -> None:
    module = importlib.import_module(f"distributed_training.{package}")
    folder = ROOT / "distributed_training" / package
    named = re.findall(r"``(\w+)``", module.__doc__ or "")
    assert len(named) > 3
    assert [name for name in named if not (folder / f"{name}.py").exists()] == []
