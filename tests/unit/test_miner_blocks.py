"""Test which text comes next and which pages an upload names, also after a kill or a roll-back."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from distributed_training.exchange.base import Close
from distributed_training.miner import events as ev
from distributed_training.miner.blocks import Blocks
from distributed_training.miner.events import DataPart, MinerState, Mode
from distributed_training.protocol.pages import block_at, place_of
from distributed_training.protocol.types import Progress
from tests.tools.miner_parts import step_report

pytestmark = pytest.mark.timeout(60)
MODE = MinerState(mode=Mode.TRAINING, outer_step=3)
STEP = ev.InnerStepDone(step_report(1))
SKIPPED = ev.InnerStepDone(replace(step_report(1), skipped=True))


class World:
    """Stand for the prepared blocks of two ranks, and for a clock.

    ``sequences``: the length of each block; None while the block is not ready.
    """

    world_size, depth = 2, 2

    def __init__(self, **sequences: int | None) -> None:
        self.sequences: dict[int, int | None] = {}
        self.default: int | None = 10
        self.now = 0.0

    def ready(self, block: int) -> int | None:
        return self.sequences.get(block, self.default)

    def ready_everywhere(self, block: int, own: int | None) -> int | None:
        del block
        return own

    def blocks(self, *, outer_step: int = 3, micro_batch: int = 2, **more: Any) -> Blocks:
        stand_in: Any = self  # stands for both the data pipeline and the other ranks
        values: dict[str, Any] = {"pages": 5, "uid": 7, **more}
        return Blocks(
            data=stand_in, ranks=stand_in, micro_batch_size=micro_batch, outer_step=outer_step,
            clock=lambda: self.now, **values,
        )  # fmt: skip


def begin(blocks: Blocks) -> tuple[int, int]:
    """Begin the next block; return its outer step and first page."""
    blocks.on_event(ev.MicroBatchEnded(trained=False), MODE)
    for _ in range(3):
        if block := blocks.on_boundary(may_begin=True).begin:
            return place_of(block)
    raise AssertionError("no block is ready")


def see(blocks: Blocks, *events: ev.Event) -> tuple[int, ...]:
    for event in events:
        blocks.on_event(event, MODE)
    return blocks.pages()


def kept(blocks: Blocks) -> dict[str, Any]:
    return {"rank_zero": {"blocks": json.loads(json.dumps(blocks.state_dict()))}}


def test_pages_count_from_0_in_each_outer_step_and_an_upload_names_first_and_last() -> None:
    blocks = World().blocks()
    assert begin(blocks) == (3, 0)
    assert see(blocks, ev.MicroBatchEnded()) == (), "its step is not complete"
    assert see(blocks, STEP) == (0, 9), "both ranks read five"
    assert [begin(blocks), begin(blocks)] == [(3, 10), (3, 20)]
    assert see(blocks, STEP) == (20, 29), "without a gap: nothing was trained of 10 to 19"
    assert see(blocks, ev.UploadEnded(Close(3, 1))) == (20, 29), "the close may move"
    assert see(blocks, ev.OuterStepEnded(True, 4)) == ()
    assert see(blocks, STEP) == (), "the rest of a block of the outer step before"
    assert [begin(blocks), begin(blocks)] == [(3, 30), (4, 0)]
    assert see(blocks, STEP) == (0, 9)
    assert see(blocks, ev.OuterStepEnded(False, 4)) == (0, 9)


def test_a_step_that_was_not_learned_begins_the_named_pages_anew() -> None:
    blocks = World().blocks()
    begin(blocks)
    assert see(blocks, STEP) == (0, 9)
    begin(blocks)
    assert see(blocks, SKIPPED) == (0, 9)
    begin(blocks)
    assert see(blocks, STEP) == (20, 29)
    begin(blocks)
    assert see(blocks, SKIPPED, STEP) == (20, 39), "of one block one step was good"


def test_after_a_roll_back_no_page_comes_again_and_none_is_named_that_is_lost() -> None:
    blocks = World().blocks()
    begin(blocks)
    see(blocks, STEP)
    checkpoint = kept(blocks)
    for _ in range(3):
        begin(blocks)
        see(blocks, STEP)
    assert see(blocks) == (0, 39)
    assert see(blocks, ev.RolledBack(Progress(3, 1, 9), checkpoint)) == (0, 9), "as the weights"
    assert not blocks.available, "of the block under way a part is lost"
    assert begin(blocks) == (3, 40)
    assert see(blocks, STEP) == (40, 49)
    # Roll back to the previous outer step. Its update comes again, and in both outer steps the
    # page counts continue.
    see(blocks, ev.OuterStepEnded(True, 4))
    places = [begin(blocks) for _ in range(4)]
    assert places[-1] == (4, 20)
    assert see(blocks, ev.RolledBack(Progress(3, 1, 9), checkpoint)) == (0, 9)
    places += [begin(blocks) for _ in range(4)]
    see(blocks, ev.OuterStepEnded(True, 4))
    places += [begin(blocks) for _ in range(4)]
    assert len({*places}) == len(places) and (3, 40) not in places
    assert see(blocks, ev.RolledBack(None)) == ()


@settings(max_examples=60)
@given(
    some.lists(some.sampled_from(["begin", "step", "skip", "outer", "save", "back"])), some.data()
)
def test_named_pages_were_all_trained_since_the_weights_began(
    moves: list[str], data: some.DataObject
) -> None:
    """Compare the named pages with a model that remembers which pages the weights have learned."""
    del data
    blocks, step = World().blocks(), 3
    known: set[tuple[int, int]] = set()
    saved: tuple[int, set[tuple[int, int]], Any] = (3, set(), kept(blocks))
    current = (3, -1)
    handed: set[tuple[int, int]] = set()
    for move in moves:
        match move:
            case "begin":
                current = begin(blocks)
                assert current not in handed, "no block comes twice"
                handed.add(current)
            case "step" | "skip" if blocks.available:
                see(blocks, STEP if move == "step" else SKIPPED)
                if move == "step":
                    known |= {(current[0], current[1] + i) for i in range(10)}
            case "outer":
                step += 1
                see(blocks, ev.OuterStepEnded(True, step))
                known = set()
            case "save":
                saved = (step, {*known}, kept(blocks))
            case "back":
                step, known = saved[0], {*saved[1]}
                see(blocks, ev.RolledBack(Progress(step), saved[2]))
        if named := blocks.pages():
            first, last = named
            assert {(step, page) for page in range(first, last + 1)} <= known


def saved_state() -> tuple[dict[str, Any], dict[str, int]]:
    """Return a state in which the block from page 10 is in training, after three of its five
    micro-batches, and the blocks from page 20 on are prefetched.
    """
    blocks = World().blocks()
    begin(blocks)
    see(blocks, STEP)
    begin(blocks)
    see(blocks, ev.MicroBatchEnded(), STEP, ev.MicroBatchEnded())
    state = kept(blocks)["rank_zero"]["blocks"]
    assert state["next"] == 30 and state["pages"] == [0, 19]
    return state, {"page_block": block_at(3, 10), "sequences": 10, "offset": 6}


def test_a_restart_continues_at_the_sequence_and_the_page_of_the_checkpoint() -> None:
    state, cursor = saved_state()
    blocks = World().blocks()
    blocks.load_state_dict(state, cursor)
    assert blocks.pages() == (0, 19)
    assert blocks.on_boundary(may_begin=True) == DataPart(request=block_at(3, 10))
    part = blocks.on_boundary(may_begin=True)
    assert part == DataPart(block_at(3, 20), block_at(3, 10), 10, 6)
    assert see(blocks, ev.MicroBatchEnded(), STEP) == (0, 19)
    assert [begin(blocks), begin(blocks), begin(blocks)] == [(3, 20), (3, 30), (3, 40)]


@pytest.mark.parametrize(
    ("change", "page", "named", "why"),
    [
        ("ranks", 30, (30, 44), "flags, ranks or the micro-batch changed"),
        ("micro-batch", 30, (30, 39), "flags, ranks or the micro-batch changed"),
        ("a disk", 30, (30, 39), "flags, ranks or the micro-batch changed"),
        ("uid", 0, (0, 9), "the checkpoint is of another uid"),
    ],
)
def test_pages_that_are_cut_differently_count_on_behind_those_before(
    change: str, page: int, named: tuple[int, ...], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world, (state, cursor) = World(), saved_state()
    if change == "ranks":
        world.world_size = 3
    blocks = world.blocks(
        micro_batch=5 if change == "micro-batch" else 2, uid=41 if change == "uid" else 7
    )
    blocks.load_state_dict(state, cursor, exact=change != "a disk")
    (line,) = caplog.messages
    assert why in line and begin(blocks) == (3, page)
    assert see(blocks, STEP) == named, "what is named has no gap"


@pytest.mark.parametrize(("have", "start"), [(0, 0), (7, 0), (8, 6)])
def test_a_block_that_came_back_shorter_is_served_as_far_as_it_goes(have: int, start: int) -> None:
    world, (state, cursor) = World(), saved_state()
    world.sequences[block_at(3, 10)] = have
    blocks = world.blocks()
    blocks.load_state_dict(state, cursor)
    parts = [blocks.on_boundary(may_begin=True) for _ in range(3)]
    begun = next(part for part in parts if part.begin)
    assert (begun.begin == block_at(3, 10)) == bool(start) and begun.start == start


def test_a_source_without_data_is_asked_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    blocks = world.blocks()
    begin(blocks)
    see(blocks, STEP)
    world.default = 0
    asked = [blocks.on_boundary(may_begin=False).request for _ in range(20)]
    assert len([block for block in asked if block]) <= 2
    assert "has no data for at least one rank and is skipped" in caplog.text
    blocks.on_event(ev.MicroBatchEnded(trained=False), MODE)
    assert blocks.on_boundary(may_begin=True).begin == 0
    world.now, world.default = 200.0, 10
    place = begin(blocks)
    assert place[1] > 10 and see(blocks, STEP) == (place[1], place[1] + 9), "behind the outage"


def test_blocks_begin_in_the_order_of_their_pages() -> None:
    world = World()
    world.sequences[block_at(3, 0)] = None
    blocks = world.blocks()
    assert [blocks.on_boundary(may_begin=True).begin for _ in range(4)] == [0] * 4
    world.sequences[block_at(3, 0)] = 10
    assert begin(blocks) == (3, 0)


def test_as_many_blocks_are_requested_ahead_as_the_data_want() -> None:
    world = World()
    world.default, world.depth = None, 3
    blocks = world.blocks()
    asked = [blocks.on_boundary(may_begin=True).request for _ in range(5)]
    assert asked == [block_at(3, 0), block_at(3, 10), block_at(3, 20), 0, 0]
