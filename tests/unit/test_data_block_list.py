"""The block list holds exactly what was trained on since the last publication, whatever happens.

The list is the miner's (`miner.block_list`); what it promises is checked here against a model that
remembers every single token's training.
"""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from distributed_training.miner.block_list import BlockList
from distributed_training.protocol.types import Revision

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


class BlockListMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.chain = 100
        self.steps = 0
        self.snapshots = 0
        self.owed: dict[int, int] = {}  # block -> last step with its tokens, not yet published
        self.in_step: list[int] = []
        self.pending: dict[Revision, tuple[int, list[int]]] = {}
        self.checkpoint: tuple[str, Any] | None = None
        self.current = 0
        self.cursor: dict[str, int] = {}
        self.published: dict[int, int] = {}  # block -> last step of it that was published
        self.feed = self.make()

    def make(self) -> BlockList:
        return BlockList(
            chain_block=lambda: self.chain,
            data=OneRank(),  # type: ignore[arg-type]
            ranks=OneRank(),  # type: ignore[arg-type]
            micro_batch_size=MICRO_BATCH,
            recent=lambda: 200,
            patience=0.0,
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

    @precondition(lambda self: len(self.pending) < 3)
    @rule()
    def snapshot(self) -> None:
        self.snapshots += 1
        revision = Revision(5, 1, self.snapshots)
        self.pending[revision] = (self.steps, self.feed.blocks())
        self.feed.snapshot_taken(revision)
        assert self.feed.blocks() == []

    @precondition(lambda self: self.pending)
    @rule(ok=st.booleans())
    def publication_ends(self, ok: bool) -> None:
        revision = min(self.pending)
        taken_at, listed = self.pending.pop(revision)
        self.feed.publication_ended(revision, ok=ok)
        if ok:
            for block in listed:
                self.published[block] = max(taken_at, self.published.get(block, 0))
                if self.owed.get(block, taken_at + 1) <= taken_at:
                    del self.owed[block]

    @rule()
    def save(self) -> None:
        self.checkpoint = (
            json.dumps(self.feed.state()),
            copy.deepcopy((self.owed, self.in_step, self.cursor, self.steps)),
        )

    @precondition(lambda self: self.checkpoint is not None)
    @rule()
    def kill(self) -> None:
        """Everything since the checkpoint is gone, but for what it holds of the step under way."""
        assert self.checkpoint is not None
        state, kept = self.checkpoint
        owed, in_step, cursor, steps = copy.deepcopy(kept)
        self.feed = self.make()
        self.feed.restore(json.loads(state), cursor)
        self.owed, self.in_step, self.cursor, self.pending = owed, in_step, cursor, {}
        self.steps, self.published = steps, {}
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
        """Weights go back, data does not; what was published since is published."""
        assert self.checkpoint is not None
        state, kept = self.checkpoint
        owed, self.in_step, _, _ = copy.deepcopy(kept)
        self.feed.roll_back(json.loads(state))
        self.owed = {b: s for b, s in owed.items() if self.published.get(b, 0) < s}
        self.pending = {
            revision: (taken_at, [b for b in listed if b in owed])
            for revision, (taken_at, listed) in self.pending.items()
        }

    @invariant()
    def the_list_is_what_is_owed(self) -> None:
        listed = self.feed.blocks()
        waiting = {b for _, blocks in self.pending.values() for b in blocks}
        assert len(listed) == len(set(listed))
        assert set(listed) <= set(self.owed), "a block is listed that was not trained on"
        assert set(self.owed) <= set(listed) | waiting, "a trained block is not listed"


TestBlockList = pytest.mark.timeout(90)(BlockListMachine.TestCase)
TestBlockList.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
