"""The draw of different pages for everybody keeps its promises on drawn networks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some

from distributed_training.protocol.page_permutation import PagePermutation, permuted
from distributed_training.protocol.pages import JUDGED_RANKS, pages_read_by

pytestmark = pytest.mark.timeout(120)
VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "page_permutation.json").read_text())


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda c: f"{c['uid']}.{c['local_rank']}")
def test_golden_vectors(case: dict) -> None:
    asked = {name: value for name, value in case.items() if name != "pages"}
    pages = PagePermutation(**VECTORS["rule"])(**asked, num_rows=VECTORS["num_rows"])
    assert [list(page) for page in pages] == case["pages"]


def test_golden_vectors_of_the_permutation() -> None:
    key, count = VECTORS["rule"]["key"], VECTORS["count"]
    assert [permuted(place, count, key=key) for place in range(8)] == VECTORS["permuted"]


def _rule(**changes: object) -> PagePermutation:
    values: dict = {
        "key": "lab 5Grw",
        "rows_per_page": 100,
        "pages_per_block": 5,
        "max_uids": 256,
        "held_out_pages": 32,
    }
    return PagePermutation(**values | changes)


def _read(
    rule: PagePermutation, table: dict[str, int], uid: int, world_size: int, block: int
) -> list[tuple[str, int, str]]:
    """All pages that the ranks of a miner read of a block."""
    dealt = [
        place
        for rank in range(world_size)
        for place in pages_read_by(rank=rank, world_size=world_size, n_pages=rule.pages_per_block)
    ]
    return [
        rule(uid=uid, local_rank=owner, block=block, n_pages=number + 1, num_rows=table)[number]
        for owner, number in dealt
    ]


@settings(max_examples=40)
@given(count=some.integers(1, 1500), key=some.text(max_size=20))
def test_each_page_has_one_place(count: int, key: str) -> None:
    assert sorted(permuted(place, count, key=key) for place in range(count)) == [*range(count)]


@given(
    pages=some.lists(some.integers(2, 40_000), min_size=1, max_size=5),
    members=some.lists(some.integers(1, 9), min_size=2, max_size=5),
    pages_per_block=some.integers(1, 6),
    held_out_pages=some.integers(1, 64),
    first=some.integers(0, 10**7),
    data=some.data(),
)
def test_no_page_is_shared_in_a_block_and_none_comes_again_too_soon(
    pages: list[int],
    members: list[int],
    pages_per_block: int,
    held_out_pages: int,
    first: int,
    data: some.DataObject,
) -> None:
    """``members``: how many ranks each uid has, from uid 0 on."""
    rule = _rule(
        pages_per_block=pages_per_block, held_out_pages=held_out_pages, max_uids=len(members)
    )
    table = {f"c{i}": 100 * n + i for i, n in enumerate(pages)}
    table["small"] = 101  # which some sources list, and others do not
    free = sum(pages) - held_out_pages
    slots = len(members) * 8 * max(pages_per_block, 3) * (1 + max(members) // 9)
    # The way from one slot to the next, in blocks: the promise of the protocol page.
    way = free // (1 << (slots - 1).bit_length()) if free > 0 else 0
    assume(way >= 1)
    held_out = set(rule.held_out(table))
    assert len(held_out) == held_out_pages
    seen: dict[tuple[str, int, str], tuple[int, int]] = {}
    near = some.integers(first, first + 3 * way)
    for block in sorted(data.draw(some.lists(near, max_size=12, unique=True))):
        for uid, world_size in enumerate(members):
            for page in _read(rule, table, uid, world_size, block):
                assert page not in held_out
                config, row, _ = page
                assert row % 100 == 0 and row + 100 <= table[config] and config != "small"
                if page in seen:
                    assert block - seen[page][1] >= way, (page, seen[page], uid, block)
                seen[page] = uid, block


def test_with_200_pages_for_each_slot_none_comes_again_within_100_blocks() -> None:
    """Two miners of eight ranks: 80 slots, so 12,800 pages do."""
    rule, table = _rule(), {"a": 100 * (32 + 12_800)}
    seen: Counter[tuple[str, int, str]] = Counter()
    for block in range(7, 107):
        for uid in range(2):
            seen.update(_read(rule, table, uid, 8, block))
    assert set(seen.values()) == {1} and len(seen) == 100 * 80


def test_pages_are_drawn_evenly_and_all_of_them_in_the_end() -> None:
    rule, table = _rule(held_out_pages=3, max_uids=4), {"a": 20_000, "b": 10_050}
    seen = Counter(
        page
        for uid in range(4)
        for block in range(297)
        for page in _read(rule, table, uid, 1, block)
    )
    every = {(c, row, "train") for c in "ab" for row in range(0, table[c] // 100 * 100, 100)}
    assert set(seen) == every - set(rule.held_out(table))
    assert set(seen.values()) == {4 * 8}, "each slot sees each page once in 4 * 8 blocks"
    # Of a stretch of blocks both configs have their share.
    some_blocks = [p for b in range(30) for p in _read(rule, table, 1, 1, b)]
    assert 0.5 < sum(config == "a" for config, _, _ in some_blocks) / len(some_blocks) < 0.8


def test_other_networks_draw_other_pages_and_hold_out_others() -> None:
    table = {"a": 10**6}
    ours, theirs = _rule(), _rule(key="other 5Grw")
    assert not set(ours.held_out(table)) & set(theirs.held_out(table))
    assert _read(ours, table, 0, 1, 5) != _read(theirs, table, 0, 1, 5)
    more = _rule(held_out_pages=40)
    assert set(ours.held_out(table)) < set(more.held_out(table))


@pytest.mark.parametrize(
    "changes",
    [{"uid": 256}, {"uid": -1}, {"block": -1}, {"local_rank": -1}, {"n_pages": 6},
     {"num_rows": {}}, {"num_rows": {"a": 3200, "b": 101}}],
)  # fmt: skip
def test_page_beyond_the_data_is_an_error(changes: dict) -> None:
    given_: dict = {"uid": 0, "local_rank": 0, "block": 0, "n_pages": 5, "num_rows": {"a": 10**5}}
    assert len(_rule()(**given_)) == 5
    with pytest.raises(ValueError, match=r"has no|none is left"):
        _rule()(**given_ | changes)


@settings(max_examples=25)
@given(world_size=some.integers(1, 64), pages_per_block=some.integers(1, 9))
def test_pages_of_any_number_of_ranks_exist_and_differ(
    world_size: int, pages_per_block: int
) -> None:
    rule, table = _rule(pages_per_block=pages_per_block, max_uids=3), {"a": 10**7}
    read = [page for uid in range(3) for page in _read(rule, table, uid, world_size, 11)]
    assert len(set(read)) == len(read)
    judged = rule(uid=2, local_rank=JUDGED_RANKS - 1, block=11, n_pages=1, num_rows=table)
    assert set(judged) <= set(read)
