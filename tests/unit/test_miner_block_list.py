"""Test which block comes next: ahead of need, in order, and where it was after a restart."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distributed_training.exchange.base import Close
from distributed_training.miner import events as ev
from distributed_training.miner.block_list import BlockList
from distributed_training.miner.events import DataPart, MinerState, Mode
from distributed_training.protocol.types import Base, Progress, Update
from tests.tools.miner_parts import step_report

pytestmark = pytest.mark.timeout(30)
MODE = MinerState(mode=Mode.TRAINING, outer_step=1)
HANDLE: Any = None
TAKEN = ev.UploadBegun(Close(1, 1, 0.0, 0.0), HANDLE, Progress(1, 1))


def take_outer_step(feed: BlockList, base: Base = Base.MERGED) -> None:
    update = Update(2, Path("u"), base, None, "ab")
    feed.on_event(ev.OuterStepEnded(True, 2), replace(MODE, update=update))


def merge(feed: BlockList) -> None:
    feed.on_event(TAKEN, MODE)
    take_outer_step(feed)


class World:
    """A chain, the ranks' prepared blocks (None: under way) and a clock."""

    world_size = 2
    lead_seconds = math.inf  # as many blocks ahead as there may be

    def __init__(self) -> None:
        self.chain = 100
        self.sequences: dict[int, int | None] = {}
        self.default: int | None = 10
        self.now = 0.0

    def ready(self, block: int) -> int | None:
        return self.sequences.get(block, self.default)

    def ready_everywhere(self, block: int, own: int | None) -> int | None:
        del block
        return own

    def feed(
        self,
        *,
        prefetch: int = 2,
        micro_batch: int = 2,
        recent: int = 200,
        uid: int = 3,
        **held: Any,
    ) -> BlockList:
        self.depth = prefetch
        stand_in: Any = self  # for the data pipeline and the other ranks
        return BlockList(
            chain_block=lambda: self.chain,
            data=stand_in,
            ranks=stand_in,
            micro_batch_size=micro_batch,
            uid=uid,
            recent=lambda: recent,
            clock=lambda: self.now,
            **held,
        )


def saved(world: World) -> tuple[dict[str, Any], dict[str, int]]:
    """Block 100 is in training, three of its five micro-batches done; 101 and 102 are ahead."""
    feed = world.feed()
    assert feed.on_boundary(may_begin=True) == DataPart(request=100)
    world.chain = 101
    assert feed.on_boundary(may_begin=True) == DataPart(101, 100, 10)
    world.chain, world.sequences[101] = 102, None
    assert feed.on_boundary(may_begin=True) == DataPart(request=102)
    for _ in range(3):
        feed.micro_batch_done()
    return feed.state_dict(), {"block": 100, "sequences": 10, "offset": 6}


def test_a_fresh_start_begins_with_the_list_prepared_meanwhile() -> None:
    world = World()
    feed = world.feed()
    feed.load_state_dict({}, {}, first=90)  # the chain has moved on since
    assert feed.on_boundary(may_begin=True) == DataPart(request=90)
    part = feed.on_boundary(may_begin=True)
    assert (part.request, part.begin) == (100, 90)
    assert feed.state_dict()["gaps"] == [(91, 99)]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("ranks", "ranks or the micro-batch changed. From"),
        ("micro-batch", "ranks or the micro-batch changed. From"),
        ("a disk", "so the micro-batches of the inner step under way are dropped. From their"),
        ("uid", "this hotkey has another uid, which is assigned other pages. From"),
        ("nothing", ""),
    ],
)
def test_block_cut_differently_begins_again(
    change: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A hotkey that was registered again: validators look at the pages of its new uid."""
    caplog.set_level(logging.INFO)
    world = World()
    state, cursor = saved(world)
    state["blocks"] = [[98, 1], [99, 2]]
    world.chain = 200
    if change == "ranks":
        world.world_size = 3
    feed = world.feed(
        micro_batch=5 if change == "micro-batch" else 2, uid=41 if change == "uid" else 3
    )
    feed.load_state_dict(state, cursor, exact=change != "a disk")
    before = [] if change == "uid" else [98, 99]
    assert feed.blocks() == before
    if change == "nothing":
        return
    (line,) = caplog.messages
    assert line.startswith("Data continues with a new block: ") and why in line
    assert feed.on_boundary(may_begin=True) == DataPart(request=100)
    feed.step_done()
    assert feed.blocks() == before, "the micro-batches of the step under way were dropped"
    part = feed.on_boundary(may_begin=True)
    assert (part.request, part.begin, part.start) == (101, 100, 0), "no page of it is lost"


@pytest.mark.parametrize(("have", "served"), [(0, 0), (7, 0), (8, 1)])
def test_a_block_that_came_back_shorter_is_served_as_far_as_it_goes(have: int, served: int) -> None:
    world = World()
    state, cursor = saved(world)
    world.sequences |= {100: have, 101: 10}
    feed = world.feed()
    feed.load_state_dict(state, cursor)
    feed.on_boundary(may_begin=True)
    part = feed.on_boundary(may_begin=True)
    if served:
        assert (part.begin, part.sequences, part.start) == (100, have, 6)
    else:
        assert part.begin in (0, 102)


def test_without_new_data_the_last_block_is_trained_on_again_after_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    world.sequences |= {99: None, 98: None}
    feed = world.feed()
    feed.on_boundary(may_begin=True)
    assert feed.on_boundary(may_begin=True).begin == 100
    feed.on_event(ev.BlockUsedUp(), MODE)
    assert feed.on_boundary(may_begin=True).begin == 0
    assert "No new data" not in caplog.text
    world.now = 61.0
    assert feed.on_boundary(may_begin=True) == DataPart(0, 100, 10)
    assert "No new data for 61 s: block 100 is trained on again" in caplog.text
    for _ in range(2):  # the second list is as old as the first, so it does no harm either
        feed.micro_batch_done()
        feed.step_done()
        merge(feed)
        world.chain = 1000


def hour(
    world: World,
    feed: BlockList,
    *,
    block_seconds: float,
    chain_until: float = 3600.0,
    data_until: float = 3600.0,
    publish_every: float = 300.0,
) -> tuple[float, list[int], list[int]]:
    """An hour of training at ``block_seconds`` for a block, with 12 s between the chain's and 3 s
    to prepare one: the share of it without data, the blocks in their order, and how far the newest
    block of each publication was behind the real chain. Chain or data may be gone after a while."""
    ages, due = [], publish_every
    prepared: dict[int, float] = {}
    world.ready = lambda block: world.default if prepared[block] <= world.now else None  # type: ignore[method-assign]
    idle, begun, busy_until = 0.0, [], 0.0
    while world.now < 3600:
        world.chain = 100_000 + int(min(world.now, chain_until) // 12)
        world.default = 10 if world.now < data_until else 0
        if world.now >= busy_until and feed.available:
            feed.micro_batch_done()
            feed.step_done()
            feed.on_event(ev.BlockUsedUp(), MODE)
        if world.now >= due and feed.blocks():
            ages.append(100_000 + int(world.now // 12) - max(feed.blocks()))
            merge(feed)
            due = world.now + publish_every
        part = feed.on_boundary(may_begin=True)
        if part.request:
            prepared[part.request] = world.now + 3
        if part.begin:
            begun.append(part.begin)
            busy_until = world.now + block_seconds
        elif world.now >= busy_until:
            idle += 0.1
        world.now += 0.1
    return idle / 3600, begun, ages


@pytest.mark.parametrize("block_seconds", [1.0, 4.0, 30.0])
def test_training_faster_than_the_chain_is_never_out_of_data(block_seconds: float) -> None:
    world = World()
    feed = world.feed(prefetch=8)
    idle, begun, ages = hour(world, feed, block_seconds=block_seconds)
    assert idle < 0.01
    assert len(set(begun)) == len(begun) > 0.9 * 3600 / block_seconds, "no block comes twice"
    assert len(ages) == 11 and max(ages) <= 25


@pytest.mark.parametrize("block_seconds", [1.0, 4.0, 8.0])
@pytest.mark.parametrize("gone", ["chain_until", "data_until"])
def test_without_chain_or_data_the_lists_are_as_recent_as_can_be(
    block_seconds: float, gone: str
) -> None:
    world = World()
    feed = world.feed(prefetch=8)
    idle, _, ages = hour(world, feed, block_seconds=block_seconds, **{gone: 1800.0})
    since = ages[5:]
    assert len(since) >= 4, "publications continue"
    for i, age in enumerate(since):
        assert age <= 25 * (i + 1) + 10, "the newest there was, and no older"
    assert idle < 0.1


def test_past_blocks_are_the_newest_unused_ones_and_not_again_after_a_restart() -> None:
    world = World()
    world.default = None
    feed = world.feed(prefetch=9)
    assert [feed.on_boundary(may_begin=True).request for _ in range(3)] == [100, 99, 98]
    world.chain = 104  # nobody looked at 101 to 103
    assert [feed.on_boundary(may_begin=True).request for _ in range(2)] == [104, 103]
    again = world.feed(prefetch=20)
    again.load_state_dict(feed.state_dict(), {})
    got = [again.on_boundary(may_begin=True).request for _ in range(9)]
    assert got == [100, 99, 98, 104, 103, 102, 101, 97, 96]


def test_a_chain_that_has_just_begun_has_no_block_before_its_first() -> None:
    world = World()
    world.chain, world.default = 2, None
    feed = world.feed(prefetch=9)
    assert [feed.on_boundary(may_begin=True).request for _ in range(4)] == [2, 1, 0, 0]


def test_a_source_without_data_is_asked_no_more_often_than_the_chain_moves() -> None:
    world = World()
    world.default = 0
    feed = world.feed(prefetch=8)
    asked = [feed.on_boundary(may_begin=True).request for _ in range(20)]
    assert [block for block in asked if block] == [100]
    world.chain, world.default = 101, 10
    assert feed.on_boundary(may_begin=True).request == 101
    assert feed.on_boundary(may_begin=True).request == 99


def test_a_block_that_a_rank_cannot_have_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.sequences[100] = 1
    feed = world.feed()
    feed.on_boundary(may_begin=True)
    assert feed.on_boundary(may_begin=True).begin == 0
    assert "Block 100 has no data for at least one rank and is skipped" in caplog.text


@pytest.mark.parametrize(("step", "block_steps"), [(60.0, 4), (10.0, 20), (1.0, 40), (60.0, 1)])
def test_the_newest_trained_block_is_young_and_training_never_waits(
    step: float, block_steps: int
) -> None:
    """A chain of a block per 12 s, a block of text that lasts ``block_steps`` inner steps of
    ``step`` seconds and takes 8 s to prepare. Two blocks in a queue, first in first out, would be
    as old as two blocks take to train."""
    prepare, lead = 8.0, 44.0
    world = World()
    world.default = 2 * 8 * block_steps  # 8 micro-batches of 2 in a step
    asked: dict[int, float] = {}
    world.ready = lambda block: (  # type: ignore[method-assign]
        world.default if world.now - asked.setdefault(block, world.now) >= prepare else None
    )
    world.lead_seconds = lead
    feed = world.feed()
    waited, ages = 0.0, []
    while world.now < 4000:
        world.chain = 100 + int(world.now / 12)
        part = feed.on_boundary(may_begin=True)
        if part.request:
            asked.setdefault(part.request, world.now)
        if part.begin and world.now > 1000:
            ages.append(100 + int(world.now / 12) - part.begin)
        if feed.available:
            world.now += step / 8
            feed.micro_batch_done()
            feed.step_done()
        else:
            world.now += 0.5
            waited += 0.5 if world.now > 1000 else 0.0
    allowed = (lead + 2 * step / 8) / 12 + 1
    assert ages and max(ages) <= allowed, (max(ages), allowed)
    assert waited <= 0.01 * 3000


def test_the_list_follows_the_event_stream() -> None:
    world = World()
    feed = world.feed(prefetch=1)
    report = step_report(1)

    def see(*events: ev.Event) -> list[int]:
        for event in events:
            feed.on_event(event, MODE)
        return feed.blocks()

    feed.on_boundary(may_begin=True)
    assert feed.on_boundary(may_begin=True).begin == 100
    assert see(ev.MicroBatchTrained()) == [], "its step is not complete"
    assert see(ev.InnerStepDone(report)) == [100]
    saved = {"rank_zero": {"blocks": feed.state_dict()}}
    assert see(TAKEN) == [100], "until it is merged"
    take_outer_step(feed, Base.KEPT)
    assert see() == [100]
    see(TAKEN)
    take_outer_step(feed)
    assert see(ev.BlockUsedUp()) == [] and not feed.available
    world.chain = 101
    feed.on_boundary(may_begin=True)
    assert feed.on_boundary(may_begin=True).begin == 101
    skipped = ev.InnerStepDone(replace(report, skipped=True))
    assert see(ev.MicroBatchTrained(), skipped) == [], "its tokens were not learned"
    see(ev.MicroBatchTrained())
    take_outer_step(feed)
    see(ev.BlockUsedUp())
    world.chain = 102
    feed.on_boundary(may_begin=True)
    assert feed.on_boundary(may_begin=True).begin == 102
    assert see(ev.InnerStepDone(report)) == [102], "what was trained before was dropped"
    merge(feed)
    assert see(ev.RolledBack(None)) == []
    assert see(ev.RolledBack(Progress(3, 1), saved)) == [], "100 was merged since"
