"""Test that the documents show the table that ``bench.growth`` computes."""

from __future__ import annotations

import json
from pathlib import Path

from bench.growth import Network, rows

ROOT = Path(__file__).parents[1]


def test_the_table_of_growth_is_the_documents() -> None:
    network = Network(4 * 10**9, 4800.0, 1000.0, 1000.0, 2 * 100 * 1024, 400.0)
    figure = json.loads((ROOT / "docs" / "figures" / "growth.json").read_text())
    found = [[row[0].removesuffix(", 4-bit"), *row[1:]] for row in rows(network, "4-bit")]
    assert found == figure["rows"]
