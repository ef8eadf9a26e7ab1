"""Test the draw of pages against recorded vectors, and its promises on random networks."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from distributed_training.protocol.pages import MOST_PAGES, PageDraw, block_at, permuted, place_of

pytestmark = pytest.mark.timeout(60)
VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "pages.json").read_text())
RULE, TABLE = PageDraw(**VECTORS["rule"]), VECTORS["num_rows"]


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda c: f"{c['uid']}.{c['outer_step']}")
def test_golden_vectors(case: dict) -> None:
    asked = {name: value for name, value in case.items() if name != "pages"}
    assert [list(page) for page in RULE(**asked, num_rows=TABLE)] == case["pages"]


def test_golden_vectors_of_the_permutation_and_of_what_is_held_out() -> None:
    """The vectors come from earlier editions, so that a network's held-out pages stay held out."""
    key, count = RULE.key, VECTORS["count"]
    assert [permuted(place, count, key=key) for place in range(8)] == VECTORS["permuted"]
    assert [list(page) for page in RULE.held_out(TABLE)] == VECTORS["held_out"]


@settings(max_examples=40)
@given(count=some.integers(1, 1500), key=some.text(max_size=20))
def test_each_page_has_one_place(count: int, key: str) -> None:
    assert sorted(permuted(place, count, key=key) for place in range(count)) == [*range(count)]


@settings(max_examples=40)
@given(
    pages=some.lists(some.integers(2, 200), min_size=1, max_size=4),
    held_out=some.integers(0, 7),
    uid=some.integers(0, 4095),
    outer_step=some.integers(0, 10**6),
)
def test_a_member_sees_each_page_once_before_one_again_and_never_one_held_out(
    pages: list[int], held_out: int, uid: int, outer_step: int
) -> None:
    rule = replace(RULE, held_out_pages=held_out)
    table = {f"c{i}": 100 * n + i for i, n in enumerate(pages)} | {"small": 101, "c": 700}
    free = sum(pages) + 7 - held_out
    one = {"uid": uid, "outer_step": outer_step, "num_rows": table}
    seen = rule(**one, first=0, count=free)
    every = {(c, row, "train") for c in table for row in range(0, table[c] // 100 * 100, 100)}
    assert {*seen} == every - {*rule.held_out(table)} - {("small", 0, "train")}
    assert len(seen) == free
    assert rule(**one, first=free, count=3) == [*seen, *seen, *seen][:3], "then from the first"
    middle = free // 2
    assert rule(**one, first=middle, count=free - middle) == seen[middle:], "in any pieces"
    assert rule(**one, first=free * 10**15 + 1, count=1) == [(seen * 2)[1]], "any number is one"


def test_pages_are_uniform_and_each_member_and_outer_step_has_its_own() -> None:
    table = {"a": 10_000, "b": 10_050}
    rule = replace(RULE, held_out_pages=0)
    drawn = Counter[tuple[str, int, str]]()
    for uid in range(40):
        for outer_step in range(40):
            drawn.update(rule(uid=uid, outer_step=outer_step, first=0, count=5, num_rows=table))
    assert len(drawn) == 200
    # 8,000 draws give 40 per page. Chi-square with 199 degrees exceeds 270 once in 1,000 cases.
    assert sum((count - 40) ** 2 / 40 for count in drawn.values()) < 270
    orders = {
        tuple(each(uid=uid, outer_step=step, first=0, count=20, num_rows=table))
        for each in (rule, replace(rule, run_id="other"))
        for uid in (3, 4)
        for step in (7, 8)
    }
    assert len(orders) == 8


@pytest.mark.parametrize("num_rows", [{}, {"a": 100 * RULE.held_out_pages, "b": 101}])
def test_too_little_data_is_an_error(num_rows: dict[str, int]) -> None:
    for draw in (RULE.held_out, lambda n: RULE(uid=0, outer_step=0, first=0, count=1, num_rows=n)):
        with pytest.raises(ValueError, match="none is left to train on"):
            draw(num_rows)


@given(some.integers(0, 2**30), some.integers(0, MOST_PAGES - 1))
def test_the_number_of_a_block_has_its_place(outer_step: int, page: int) -> None:
    block = block_at(outer_step, page)
    assert 0 < block < 2**63 and place_of(block) == (outer_step, page)
