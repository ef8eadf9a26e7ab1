"""Page selection against the golden vectors, and the overlaps the protocol page states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from distributed_training.protocol.pages import (
    JUDGED_RANKS,
    VALIDATOR_PAGES,
    pages_read_by,
    select_pages,
)

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


@pytest.mark.parametrize("num_rows", [{}, {"a": 101}])
def test_too_little_data_is_an_error(num_rows: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        select_pages(uid=0, local_rank=0, block=0, n_pages=1, num_rows=num_rows)


def test_negative_arguments_are_an_error() -> None:
    with pytest.raises(ValueError, match="negative"):
        _select(block=-1)


@given(world_size=some.integers(1, 512), n_pages=some.integers(1, 9))
def test_every_judged_page_is_read_once_at_every_world_size(world_size: int, n_pages: int) -> None:
    read = [
        pages_read_by(rank=rank, world_size=world_size, n_pages=n_pages)
        for rank in range(world_size)
    ]
    flat = [page for pages in read for page in pages]
    assert len(set(flat)) == len(flat), "a page is read by two ranks"
    assert len({len(pages) for pages in read}) == 1, "ranks have unequal shares"
    judged = {
        (owner, number)
        for owner in range(JUDGED_RANKS)
        for number in range(min(VALIDATOR_PAGES, n_pages))
    }
    assert judged <= set(flat)
    if world_size < JUDGED_RANKS:  # a block that is cut short loses what is not judged
        for pages in read:
            of_them = [page in judged for page in pages]
            assert of_them == sorted(of_them, reverse=True)


@pytest.mark.parametrize("world_size", [4, 8])
def test_four_ranks_and_more_read_as_the_public_miner_does(world_size: int) -> None:
    for rank in range(world_size):
        read = pages_read_by(rank=rank, world_size=world_size, n_pages=5)
        assert read == [(rank, number) for number in range(5)]


@pytest.mark.parametrize(("rank", "world_size", "n_pages"), [(1, 1, 5), (-1, 2, 5), (0, 1, 0)])
def test_a_rank_outside_the_world_is_an_error(rank: int, world_size: int, n_pages: int) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        pages_read_by(rank=rank, world_size=world_size, n_pages=n_pages)
