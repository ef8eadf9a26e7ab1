"""Choose the blocks that all ranks prefetch and train on, and list those since the last upload.

A block number is a position in the data (protocol page, section 3). Rank 0 asks for the chain's
current block ahead of need; where training is faster than the chain, for the newest of the blocks
before it that were not asked for. It waits until *every* rank holds a block's pages, and begins it
cut to the sequences of the poorest rank. A block enters the block list with the first completed
inner step that holds its tokens, never before; it leaves the list once its upload was merged.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distributed_training.common.backoff import Repeats, Throttle
from distributed_training.protocol.types import Base, Progress

from . import events as ev
from .events import DataPart, MinerState
from .ranks import Ranks

if TYPE_CHECKING:
    from distributed_training.data.pipeline import DataPipeline

log = logging.getLogger(__name__)

_REMEMBERED = 10_000  # blocks
_GAPS = 100  # that are remembered
_SAY_AGAIN = 600.0  # seconds between two lines of skipped blocks


class BlockList:
    """Chooses the blocks to train on and lists those since the last upload; on rank 0 only.

    It subscribes to the miner's stream of events.

    Args:
        chain_block: Returns the chain's newest block.
        data: Says how many blocks to request ahead of the one in training, at most, and how many
            seconds before the queue runs dry the next one is requested: a block that waits in the
            queue ages, and validators judge an upload by its newest *trained* block.
        ranks: Says which blocks every rank holds.
        micro_batch_size: Sequences of a micro-batch of one rank.
        uid: The miner's; with another uid every block has other pages.
        recent: Returns how many blocks behind the chain's a list's newest block may be before
            validators refuse it (half a round period).
        clock: Seconds that only grow.

    Examples:
        ```python
        blocks = BlockList(
            chain_block=lambda: chain.block,
            data=data,
            ranks=ranks,
            micro_batch_size=4,
            recent=lambda: 200,
        )
        part = blocks.on_boundary(may_begin=True)
        print(part.request, part.begin)  # block to prefetch, block to train on; 0: none
        ```
    """

    #: Seconds without any ready block after which a block that was served before is trained on
    #: again (its tokens are still cached on every rank), rather than leaving GPUs idle.
    patience = 60.0

    def __init__(
        self,
        *,
        chain_block: Callable[[], int],
        data: DataPipeline,
        ranks: Ranks,
        micro_batch_size: int,
        uid: int = 0,
        recent: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.chain_block = chain_block
        self._data = data
        self._ranks = ranks
        self._micro_batch_size = micro_batch_size
        self._uid = uid
        self._refused_from = recent
        self._clock = clock
        self._done_at: float | None = None  # the last micro-batch
        # From one micro-batch to the next; the median leaves rounds and waits for data out.
        self._seconds: deque[float] = deque(maxlen=33)
        self._last_requested = self._oldest = 0
        self._gaps: list[tuple[int, int]] = []  # first and last of what lies unused between the two
        self._skipped = Repeats(_SAY_AGAIN)
        self._barren = False  # the last block had no data: the source may be down
        self._requested: list[int] = []
        self._ready: list[tuple[int, int]] = []
        self._current = (0, 0)  # block, its sequences
        self._newest = (0, 0)  # of those that were begun
        self._moved_at = clock()  # the chain
        self._repeat_line = Throttle(self.patience, clock=clock)
        self._remaining = 0  # micro-batches of it
        self._starving_since: float | None = None
        self._ahead: list[int] = []  # to request first: before a restart they were already
        self._under_way = (0, 0, 0)  # block, sequences and position of a restored cursor
        self._since_step: set[int] = set()  # blocks in the inner step under way
        self._steps = 0  # inner steps that ended
        self._trained: dict[int, int] = {}  # block: the last step with its tokens
        self._uploaded = 0  # the last step in the upload of this outer step, in a store network
        self._done: dict[int, int] = {}  # block: the last of its steps that was uploaded

    # --- what comes next -----------------------------------------------------------------------

    @property
    def available(self) -> bool:
        """True while micro-batches are left of the block in training."""
        return self._remaining > 0

    @property
    def in_step(self) -> bool:
        """True while an inner step is under way that has micro-batches."""
        return bool(self._since_step)

    def on_boundary(self, *, may_begin: bool) -> DataPart:
        """Return the block to prefetch and the block to train on from here.

        Args:
            may_begin: Whether a new block may begin now.
        """
        for block in tuple(self._requested):
            sequences = self._ranks.ready_everywhere(block, self._data.ready(block))
            if sequences is None:
                continue
            self._requested.remove(block)
            self._barren = sequences < self._micro_batch_size
            # With less than a micro-batch it would end on all ranks as soon as it began.
            if sequences >= self._micro_batch_size:
                self._ready.append((block, sequences))
            elif (again := self._skipped()) is not None:
                what = f"Block {block} has no data for at least one rank and is skipped"
                log.warning("%s%s", what, again)
        request = self._next_request()
        if not may_begin or self._remaining:
            return DataPart(request)
        block, sequences, start = self._next_block()
        if block:
            self._current = (block, sequences)
            self._newest = max(self._newest, self._current)
            self._remaining = (sequences - start) // self._micro_batch_size
        return DataPart(request, block, sequences, start)

    def _next_request(self) -> int:
        if self._ahead:
            block = self._ahead.pop(0)
            self._requested.append(block)
            return block
        if len(self._requested) + len(self._ready) >= max(1, self._data.depth):
            return 0
        whole = self._current[1] // self._micro_batch_size  # nothing better is known of the others
        micro_batches = (
            self._remaining
            + sum(sequences // self._micro_batch_size for _, sequences in self._ready)
            + whole * len(self._requested)
        )
        # Two blocks in the queue made the newest trained one 31 blocks old at 60 s a step, and
        # validators refuse an upload by that one. Until the pace is known one is too many.
        pace = statistics.median(self._seconds) if self._seconds else math.inf
        later = micro_batches - 1  # asked again a micro-batch later
        if later > 0 and later * pace > self._data.lead_seconds:
            return 0
        block = self.chain_block()
        if block > self._last_requested:
            if not self._last_requested:
                self._oldest = block
            elif block > self._last_requested + 1:
                # The chain was faster than training: what lies between serves when it is slower.
                self._gaps = [*self._gaps[1 - _GAPS :], (self._last_requested + 1, block - 1)]
            self._last_requested = block
            self._moved_at = self._clock()
        else:
            block = self._past_block()
        if block:
            self._requested.append(block)
        return block

    def _past_block(self) -> int:
        """Return an earlier block: the chain has not moved, and its newest block was asked for."""
        if self._barren:
            return 0  # no more often than the chain moves, or a source that is down gets no rest
        ahead = [*self._requested, *(block for block, _ in self._ready), *self._since_step]
        if self._remaining:
            ahead.append(self._current[0])
        newest = max([*self._trained, *ahead], default=0)  # in the list of the next upload
        if (
            self._clock() - self._moved_at > self.patience
            and newest < self._last_requested - self._recent
        ):
            return self._last_requested  # once more: no newer one is to be expected
        # Any block may be listed (protocol page, section 3), if the list has a recent one too.
        if self._gaps:
            first, last = self._gaps.pop()
            if first < last:
                self._gaps.append((first, last - 1))
            return last
        if self._oldest <= 1:
            return 0
        self._oldest -= 1
        return self._oldest

    @property
    def _recent(self) -> int:
        recent = self._refused_from()
        return recent - max(2, recent // 10)  # it has to arrive, and to be read

    @property
    def newest_trained(self) -> int | None:
        """The newest block known to be trained on; None before the first."""
        return max([*self._trained, *self._done], default=None)

    def _next_block(self) -> tuple[int, int, int]:
        block, sequences, start = self._under_way
        if block in self._requested:
            return 0, 0, 0  # the order of the blocks stays what it was before the restart
        self._under_way = (0, 0, 0)
        for entry in [entry for entry in self._ready if entry[0] == block]:
            self._ready.remove(entry)
            # The ranks' blocks lie on disk: what was served before is there, unless one was lost.
            sequences = min(sequences, entry[1])
            if sequences - start >= self._micro_batch_size:
                return block, sequences, start
        if self._ready:
            self._starving_since = None
            return (*self._ready.pop(0), 0)
        now = self._clock()
        if self._starving_since is None:
            self._starving_since = now
        if self._newest[0] and now - self._starving_since >= self.patience:
            if self._repeat_line():
                log.warning(
                    "No new data for %.0f s: block %d is trained on again",
                    now - self._starving_since,
                    self._newest[0],
                )
            return (*self._newest, 0)
        return 0, 0, 0

    # --- what was trained ----------------------------------------------------------------------

    def on_event(self, event: ev.Event, state: MinerState) -> None:
        """Change the list as micro-batches, steps, rounds and uploads end.

        Args:
            event: The event that was just handled.
            state: The miner's state after it.
        """
        match event:
            case ev.MicroBatchTrained():
                self.micro_batch_done()
            case ev.InnerStepDone(report=report):
                self.micro_batch_done()
                self.step_done(skipped=report.skipped)
            case ev.BlockUsedUp():
                self._remaining = 0
            case ev.OuterStepEnded(committed=True):
                if state.update is not None and state.update.base is not Base.KEPT:
                    uploaded = [b for b, last in self._trained.items() if last <= self._uploaded]
                    self._done |= {block: self._trained.pop(block) for block in uploaded}
                    for block in tuple(self._done)[:-_REMEMBERED]:
                        del self._done[block]
                self._uploaded = 0
                # Of the step under way: the outer step has replaced its weights.
                self._since_step.clear()
            case ev.UploadBegun(close=close) if close.serial:
                # Until it is merged its blocks are in the list: the close may move.
                self._uploaded = self._steps
            case ev.RolledBack(progress=Progress(), kept=kept):
                self.roll_back(kept.get("rank_zero", {}).get("blocks", {}))
            case _:
                return

    def micro_batch_done(self) -> None:
        """Count one micro-batch of the block in training."""
        now = self._clock()
        if self._done_at is not None:
            self._seconds.append(now - self._done_at)
        self._done_at = now
        self._remaining = max(0, self._remaining - 1)
        self._since_step.add(self._current[0])

    def step_done(self, *, skipped: bool = False) -> None:
        """List the blocks of an inner step that ended.

        Args:
            skipped: Whether loss or gradient was NaN or Inf, so that its tokens were not learned.
        """
        self._steps += 1
        if not skipped:
            # With the step. The public miner lists a block when it is fetched, learned from or not.
            self._trained |= dict.fromkeys(sorted(self._since_step), self._steps)
        self._since_step.clear()

    def blocks(self) -> list[int]:
        """Return the blocks trained on since the last upload, in the order of training."""
        return list(self._trained)

    # --- across restarts -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON-able state."""
        return {
            "blocks": sorted(self._trained.items()),
            "steps": self._steps,
            "uploaded": self._uploaded,
            "last_block": self._last_requested,
            "oldest": self._oldest,
            "gaps": self._gaps,
            # In the order of their turn: a restart trains on the same blocks in the same order.
            "ahead": [*(b for b, _ in self._ready), *self._requested, *self._ahead],
            "since_step": sorted(self._since_step),
            "uid": self._uid,
            "world_size": self._ranks.world_size,
            "micro_batch_size": self._micro_batch_size,
        }

    def load_state_dict(
        self, state: dict[str, Any], cursor: dict[str, Any], *, exact: bool = True, first: int = 0
    ) -> None:
        """Continue after a restart, from a checkpoint's state.

        The block that was under way begins again where it was, then those that were prefetched.
        With another uid every block has other pages: none counts as trained on, and those under way
        start over.

        With another number of ranks or another micro-batch, a rank's sequences of a block are cut
        differently, and the trainer drops the micro-batches of the inner step under way. So it does
        where ``exact`` is False. Then the blocks that they were of, and the one in training, start
        over: no page of a block that is listed goes untrained.

        Args:
            state: A :meth:`state_dict`; empty at a fresh start.
            cursor: The data's place, with ``block``, ``sequences`` and ``offset``; empty as
                ``state``.
            exact: Whether the trainer kept the micro-batches under way.
            first: The block to begin with at a fresh start, which the ranks have prepared; 0: none.
        """
        if not state:
            self._ahead = [first] if first else []
            self._last_requested = self._oldest = first
            return
        self._trained = {int(b): int(step) for b, step in state.get("blocks", [])}
        self._steps = int(state.get("steps", 0))
        self._uploaded = int(state.get("uploaded", 0))
        self._last_requested = int(state.get("last_block", 0))
        self._oldest = int(state.get("oldest", self._last_requested))
        self._gaps = [(int(first), int(last)) for first, last in state.get("gaps", [])]
        since_step = {int(b) for b in state.get("since_step", [])}
        ahead = [int(b) for b in state.get("ahead", [])]
        block, sequences, offset = (
            int(cursor.get(key, 0)) for key in ("block", "sequences", "offset")
        )
        under_way = bool(block) and sequences - offset >= self._micro_batch_size
        layout = self._ranks.world_size, self._micro_batch_size
        same_layout = (state.get("world_size"), state.get("micro_batch_size")) == layout
        same_uid = state.get("uid", self._uid) == self._uid  # absent in older checkpoints
        if not same_uid:
            self._trained = {}
        if not (exact and same_layout and same_uid):
            # The trainer drops the micro-batches under way, or ranks cut the block differently: a
            # listed block with a page that went untrained is one that validators may look at.
            again = sorted(since_step | ({block} if under_way else set()))
            self._ahead = [*again, *(b for b in ahead if b not in again)]
            why = "the number of ranks or the micro-batch changed"
            if not same_uid:
                why = "this hotkey has another uid, which is assigned other pages"
            elif same_layout:
                why = "flags changed, so the micro-batches of the inner step under way are dropped"
            log.info(
                "Data continues with a new block: %s%s",
                why,
                f". From their beginning again: {', '.join(map(str, again))}" if again else "",
            )
            return
        self._since_step = since_step
        self._ahead = ahead
        if under_way:
            log.info("Data continues in block %d at sequence %d of %d", block, offset, sequences)
            self._under_way = (block, sequences, offset)
            self._ahead = [block, *(b for b in self._ahead if b != block)]

    def roll_back(self, state: dict[str, Any]) -> None:
        """Return to the list of a checkpoint whose weights were loaded; data continue from here.

        Later training is not in the weights any more, and blocks uploaded since are not listed
        again.

        Args:
            state: The :meth:`state_dict` of the checkpoint.
        """
        saved = {int(b): int(step) for b, step in state.get("blocks", [])}
        self._trained = {b: step for b, step in saved.items() if self._done.get(b, 0) < step}
        # Of an earlier outer step, perhaps, whose update comes again.
        self._uploaded = int(state.get("uploaded", 0))
        self._since_step = {int(b) for b in state.get("since_step", [])}


class NoBlocks(BlockList):
    """The block list of a script with its own data, which needs no blocks."""

    def __init__(self, chain_block: Callable[[], int]) -> None:
        self.chain_block = chain_block

    @property
    def available(self) -> bool:
        return True

    @property
    def in_step(self) -> bool:
        return False

    @property
    def newest_trained(self) -> int | None:
        return None

    def on_boundary(self, *, may_begin: bool) -> DataPart:
        del may_begin
        return DataPart()

    def on_event(self, event: ev.Event, state: MinerState) -> None:
        """Take note of nothing."""

    def blocks(self) -> list[int]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}
