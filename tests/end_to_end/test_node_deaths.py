"""A miner of two machines in a local subnet: ``bench/node_deaths.py``, either machine dying at each
point of a round and of a publication."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from bench import node_deaths
from bench.kills import PHASES

pytestmark = [pytest.mark.long]


@pytest.mark.timeout(4800)
def test_either_node_dies_at_each_point_and_all_wait_for_it(tmp_path: Path) -> None:
    cells = list(itertools.product(node_deaths.WAYS, PHASES))
    deaths, problems = node_deaths.run(tmp_path, cells)
    assert problems == []
    assert len(deaths) == len(cells)


@pytest.mark.timeout(2400)
def test_node_0_goes_on_alone_and_takes_node_1_in_again(tmp_path: Path) -> None:
    cells = [
        (node_deaths.KILLED, "transfer"),
        (node_deaths.UNPLUGGED, "commit"),
        (node_deaths.KILLED, "upload"),
    ]
    _, problems = node_deaths.run(tmp_path, cells, nnodes="1:2")
    assert problems == []
