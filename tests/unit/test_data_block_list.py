"""The block list holds exactly the blocks trained on and not merged, always.

The list is the miner's (`miner.block_list`); what it promises is checked here against a model that
remembers every single token's training.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from distributed_training.exchange.base import Close
from distributed_training.miner import events as ev
from distributed_training.miner.block_list import BlockList
from distributed_training.miner.events import MinerState, Mode
from distributed_training.protocol.pages import JUDGED_RANKS, VALIDATOR_PAGES, pages_read_by
from distributed_training.protocol.types import Base, Progress, Update

TRAINING = MinerState(mode=Mode.TRAINING, outer_step=1)
MICRO_BATCH = 2
MICRO_BATCHES_PER_STEP = 3


class OneRank:
    """One rank, whose data is always ready, of few sequences a block."""

    world_size = 1
    depth, lead_seconds = 2, math.inf

    def ready_everywhere(self, block: int, own: int | None) -> int | None:
        del block
        return own

    def ready(self, block: int) -> int | None:
        return 4 + block % 5


class Impatient(BlockList):
    patience = 0.0


class BlockListMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.chain = 100
        self.steps = 0
        self.uploaded = 0  # the last step in the upload of this outer step
        self.owed: dict[int, int] = {}  # block -> last step with its tokens, not yet merged
        self.in_step: list[int] = []
        self.checkpoint: tuple[str, Any] | None = None
        self.current = 0
        self.cursor: dict[str, int] = {}
        self.merged: dict[int, int] = {}  # block -> last step of it that was merged
        self.feed = self.make()

    def make(self) -> BlockList:
        return Impatient(
            chain_block=lambda: self.chain,
            data=OneRank(),  # type: ignore[arg-type]
            ranks=OneRank(),  # type: ignore[arg-type]
            micro_batch_size=MICRO_BATCH,
            recent=lambda: 200,
        )

    @rule(blocks=st.integers(0, 3))
    def chain_moves(self, blocks: int) -> None:
        self.chain += blocks

    @rule(times=st.integers(1, 12))
    def train(self, times: int) -> None:
        for _ in range(times):
            order = self.feed.on_boundary(may_begin=True)
            if order.begin:
                self.current = order.begin
                self.cursor = {"block": order.begin, "sequences": order.sequences}
                self.cursor["offset"] = order.start
            if not self.feed.available:
                continue
            self.feed.micro_batch_done()
            self.cursor["offset"] += MICRO_BATCH
            self.in_step.append(self.current)
            if len(self.in_step) == MICRO_BATCHES_PER_STEP:
                self.end_step(skipped=False)

    @rule()
    def step_that_is_skipped(self) -> None:
        self.end_step(skipped=True)

    def end_step(self, *, skipped: bool) -> None:
        self.steps += 1
        self.feed.step_done(skipped=skipped)
        if not skipped:
            self.owed |= dict.fromkeys(self.in_step, self.steps)
        self.in_step = []

    @rule()
    def upload(self) -> None:
        """Write one for a close, which may have moved: the list stays until a merge."""
        self.uploaded = self.steps
        handle: Any = None
        taken = ev.UploadBegun(Close(1, 1, 0.0, 0.0), handle, Progress(1))
        self.feed.on_event(taken, TRAINING)

    @rule(base=st.sampled_from(Base))
    def take_outer_step(self, base: Base) -> None:
        update = Update(2, Path("u"), base, None, "ab")
        self.feed.on_event(ev.OuterStepEnded(True, 2), replace(TRAINING, update=update))
        if base is not Base.KEPT:
            gone = {block: last for block, last in self.owed.items() if last <= self.uploaded}
            self.owed = {b: last for b, last in self.owed.items() if b not in gone}
            self.merged |= gone
        self.uploaded, self.in_step = 0, []

    @rule()
    def save(self) -> None:
        self.checkpoint = (
            json.dumps(self.feed.state_dict()),
            copy.deepcopy((self.owed, self.in_step, self.cursor, self.steps, self.uploaded)),
        )

    @precondition(lambda self: self.checkpoint is not None)
    @rule()
    def kill(self) -> None:
        """All since the checkpoint is gone, except the checkpoint's part of the step under way."""
        assert self.checkpoint is not None
        state, kept = self.checkpoint
        owed, in_step, cursor, steps, self.uploaded = copy.deepcopy(kept)
        self.feed = self.make()
        self.feed.load_state_dict(json.loads(state), cursor)
        self.owed, self.in_step, self.cursor = owed, in_step, cursor
        self.steps, self.merged = steps, {}
        if cursor and cursor["sequences"] - cursor["offset"] >= MICRO_BATCH:
            order = self.feed.on_boundary(may_begin=True)
            assert order.request == cursor["block"] and not order.begin
            order = self.feed.on_boundary(may_begin=True)
            assert (order.begin, order.sequences, order.start) == tuple(
                cursor[key] for key in ("block", "sequences", "offset")
            )
            self.current = order.begin

    @precondition(lambda self: self.checkpoint is not None and self.checkpoint[1][3] <= self.steps)
    @rule()
    def roll_back(self) -> None:
        """Weights go back, data does not; what was merged since stays merged."""
        assert self.checkpoint is not None
        state, kept = self.checkpoint
        owed, self.in_step, _, _, self.uploaded = copy.deepcopy(kept)
        self.feed.roll_back(json.loads(state))
        self.owed = {b: s for b, s in owed.items() if self.merged.get(b, 0) < s}

    @invariant()
    def the_list_is_what_is_owed(self) -> None:
        listed = self.feed.blocks()
        assert len(listed) == len(set(listed))
        assert set(listed) <= set(self.owed), "a block is listed that was not trained on"
        assert set(self.owed) <= set(listed), "a trained block is not listed"


TestBlockList = pytest.mark.timeout(90)(BlockListMachine.TestCase)
TestBlockList.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


Page = tuple[int, int, int]  # block, rank whose page it is, its number


class Run:
    """A miner of ``world_size`` ranks between two restarts. A page is one micro-batch."""

    depth, lead_seconds = 1, math.inf

    def __init__(self, world_size: int, n_pages: int) -> None:
        self.world_size = world_size
        self.pages = [
            pages_read_by(rank=rank, world_size=world_size, n_pages=n_pages)
            for rank in range(world_size)
        ]
        self.chain = 100
        stand_in: Any = self  # for the data pipeline and the other ranks
        self.feed = BlockList(
            chain_block=lambda: self.chain,
            data=stand_in,
            ranks=stand_in,
            micro_batch_size=MICRO_BATCH,
            recent=lambda: 200,
        )
        self.cursor: dict[str, int] = {}
        self.in_step: list[list[Page]] = []  # by micro-batch

    def ready(self, block: int) -> int | None:
        return MICRO_BATCH * len(self.pages[0])

    def ready_everywhere(self, block: int, own: int | None) -> int | None:
        return own

    def micro_batch(self, trained: set[Page]) -> None:
        while not self.feed.available:
            self.chain += 1
            order = self.feed.on_boundary(may_begin=True)
            if order.begin:
                self.cursor = {"block": order.begin, "sequences": order.sequences}
                self.cursor["offset"] = order.start
        number = self.cursor["offset"] // MICRO_BATCH
        block = self.cursor["block"]
        self.in_step.append([(block, *pages[number]) for pages in self.pages])
        self.cursor["offset"] += MICRO_BATCH
        self.feed.micro_batch_done()
        if len(self.in_step) == MICRO_BATCHES_PER_STEP:
            trained.update(page for pages in self.in_step for page in pages)
            self.in_step = []
            self.feed.step_done()


@settings(max_examples=400, deadline=None)
@given(
    n_pages=st.integers(1, 5),
    runs=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=4),
)
def test_no_judged_page_of_a_listed_block_is_lost_with_any_ranks(
    n_pages: int, runs: list[tuple[int, int]]
) -> None:
    """Stopped after any micro-batch, and started with any number of ranks: all that validators look
    at, of every block in the list, was trained on. ``runs``: ranks, micro-batches."""
    trained: set[Page] = set()
    before: Run | None = None
    for world_size, micro_batches in runs:
        run = Run(world_size, n_pages)
        if before is not None:
            run.chain = before.chain
            run.feed.load_state_dict(
                json.loads(json.dumps(before.feed.state_dict())), before.cursor
            )
            if before.world_size == world_size:
                run.in_step = before.in_step
                run.cursor = before.cursor
        for _ in range(micro_batches):
            run.micro_batch(trained)
        before = run
    assert before is not None
    begun = set(before.feed.blocks()) | {before.cursor.get("block", 0)} - {0}
    for _ in range(6 * MICRO_BATCHES_PER_STEP * len(before.pages[0])):
        before.micro_batch(trained)
    listed = set(before.feed.blocks()) & begun
    judged = range(min(VALIDATOR_PAGES, n_pages))
    lost = {
        (block, rank, number)
        for block in listed
        for rank in range(JUDGED_RANKS)
        for number in judged
    } - trained
    assert not lost
