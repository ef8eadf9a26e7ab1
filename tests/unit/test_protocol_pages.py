"""Page selection against the golden vectors, and the overlaps the protocol page states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributed_training.protocol.pages import select_pages

pytestmark = pytest.mark.timeout(60)
VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "page_selection.json").read_text())


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda c: f"{c['uid']}.{c['local_rank']}")
def test_golden_vectors(case: dict) -> None:
    pages = select_pages(
        uid=case["uid"],
        local_rank=case["local_rank"],
        block=case["block"],
        n_pages=case["n_pages"],
        num_rows=VECTORS["num_rows"],
        split=VECTORS["split"],
    )
    assert [list(page) for page in pages] == case["pages"]
    assert all(type(row) is int for _, row, _ in pages)


def _select(uid: int = 5, rank: int = 0, block: int = 1000, n: int = 5) -> list:
    return select_pages(
        uid=uid, local_rank=rank, block=block, n_pages=n, num_rows=VECTORS["num_rows"]
    )


def test_neighbours_and_later_blocks_overlap_as_they_do_on_the_network() -> None:
    assert _select(uid=5, rank=1) == _select(uid=6, rank=0)
    assert _select(block=1003)[:3] == _select(block=1000)[2:]
    assert _select(block=1006)[:1] == _select(block=1000)[4:]
    assert _select(n=2) == _select(n=5)[:2]


def test_order_of_the_mapping_does_not_matter() -> None:
    turned = dict(reversed(VECTORS["num_rows"].items()))
    pages = select_pages(uid=5, local_rank=0, block=1000, n_pages=5, num_rows=turned)
    assert pages == _select()


@pytest.mark.parametrize("num_rows", [{}, {"a": 101}])
def test_too_little_data_is_an_error(num_rows: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        select_pages(uid=0, local_rank=0, block=0, n_pages=1, num_rows=num_rows)


def test_negative_arguments_are_an_error() -> None:
    with pytest.raises(ValueError, match="negative"):
        _select(block=-1)
