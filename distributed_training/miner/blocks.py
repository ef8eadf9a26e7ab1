"""Choose the text that all ranks prefetch and train on, and count its pages.

A member counts its pages from 0 in each outer step (:mod:`~..protocol.pages`). A *block* is the
next few of them: the same number for each rank. Rank 0 asks for blocks ahead of need, waits until
*every* rank holds the next one, and begins it cut to the sequences of the poorest rank. An upload
names the first and the last page of the blocks that its inner steps were trained on, without a gap.
So after a roll-back, or if loss or gradient was NaN, or pages could not be had, it begins behind
that place: the count continues, and no page of the outer step comes twice.

What was prepared for one outer step and is left when the next begins is trained on first, and no
upload names it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distributed_training.common.backoff import Repeats
from distributed_training.protocol.pages import block_at, place_of
from distributed_training.protocol.types import Progress

from . import events as ev
from .events import DataPart, MinerState
from .ranks import RankChannel

if TYPE_CHECKING:
    from distributed_training.data.pipeline import DataPipeline

log = logging.getLogger(__name__)

_SAY_AGAIN = 600.0  # seconds between two lines of skipped blocks
_STEPS = 8  # outer steps whose counts are remembered, since a roll-back may return to one


class Blocks:
    """Chooses the blocks to train on; on rank 0 only.

    It subscribes to the miner's stream of events.

    Args:
        data: Says how many blocks to request ahead of the one in training.
        ranks: Says which blocks every rank holds.
        micro_batch_size: Sequences of a micro-batch of one rank.
        pages: Pages that one rank reads of a block.
        uid: The miner's; another uid has other pages.
        outer_step: That is trained.
        clock: Seconds that only grow.

    Examples:
        ```python
        blocks = Blocks(data=data, ranks=ranks, micro_batch_size=4, pages=5, uid=3, outer_step=7)
        part = blocks.on_boundary(may_begin=True)
        print(part.request, part.begin)  # block to prefetch, block to train on; 0: none
        ```
    """

    # Seconds from a block without data to the next request, since the source may be down.
    pause = 12.0

    def __init__(
        self,
        *,
        data: DataPipeline,
        ranks: RankChannel,
        micro_batch_size: int,
        pages: int,
        uid: int = 0,
        outer_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._data = data
        self._ranks = ranks
        self._micro_batch_size = micro_batch_size
        self._size = pages * ranks.world_size
        self._uid = uid
        self._clock = clock
        self._outer_step = outer_step
        self._next = {outer_step: 0}  # outer step -> the page to request next
        self._named: tuple[int, ...] = ()  # first and last page of it that an upload names
        self._since_step: list[int] = []  # blocks in the inner step under way
        # Blocks to request first, since they were requested before a restart.
        self._ahead: list[int] = []
        # Requested blocks in turn -> their sequences; 0 if not known yet.
        self._queue: dict[int, int] = {}
        self._current = 0  # the block in training
        self._remaining = 0  # micro-batches of it
        self._restored = (0, 0, 0)  # block, sequences and position of a restored cursor
        self._asks_from = 0.0  # when to request the next block after one without data
        self._skipped = Repeats(_SAY_AGAIN)

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
        for block in [block for block, known in self._queue.items() if not known]:
            sequences = self._ranks.ready_everywhere(block, self._data.ready(block))
            if sequences is None:
                continue
            self._queue[block] = sequences
            # A block with less than a micro-batch would end on all ranks as soon as it began.
            if sequences < self._micro_batch_size:
                del self._queue[block]
                self._asks_from = self._clock() + self.pause
                if (again := self._skipped()) is not None:
                    what = f"{describe(block)} has no data for at least one rank and is skipped"
                    log.warning("%s%s", what, again)
        request = 0
        if self._ahead:
            request = self._ahead.pop(0)
        elif len(self._queue) < max(1, self._data.depth) and self._clock() >= self._asks_from:
            page = self._next[self._outer_step]
            self._next[self._outer_step] = page + self._size
            request = block_at(self._outer_step, page)
        if request:
            self._queue[request] = 0
        block, sequences = next(iter(self._queue.items()), (0, 0))
        if not (may_begin and sequences) or self._remaining:
            return DataPart(request)
        del self._queue[block]
        known, served, start = self._restored
        # The ranks' blocks are on disk, so what was served before is there unless a block was lost.
        sequences, start = (min(sequences, served), start) if block == known else (sequences, 0)
        self._current = block
        self._remaining = max(0, sequences - start) // self._micro_batch_size
        return DataPart(request, block, sequences, start) if self._remaining else DataPart(request)

    # --- what was trained ----------------------------------------------------------------------

    def on_event(self, event: ev.Event, state: MinerState) -> None:
        """Count as micro-batches, steps and rounds end.

        Args:
            event: The event.
            state: The miner's state before the decision that follows from it.
        """
        del state
        match event:
            case ev.MicroBatchEnded(trained=False):
                self._remaining = 0
            case ev.MicroBatchEnded():
                self._count_micro_batch()
            case ev.InnerStepDone(report=report):
                self._count_micro_batch()
                self._count_step(learned=not report.skipped)
            case ev.OuterStepEnded(committed=True, outer_step=outer_step):
                self._begin(outer_step)
            case ev.RolledBack(progress=Progress(outer_step=outer_step), kept=kept):
                saved = kept.get("rank_zero", {}).get("blocks", {})
                self._begin(outer_step, int(saved.get("next", 0)))
                # Which part of the block was trained on is lost, so no upload can name the rest.
                self._named, self._remaining = tuple(saved.get("pages", ())), 0
            case _:
                return

    def _begin(self, outer_step: int, page: int = 0) -> None:
        """Count the pages of an outer step, from ``page`` or where this process has got to in it.

        Micro-batches of the inner step under way are not in the weights any more.
        """
        self._outer_step, self._named = outer_step, ()
        self._next[outer_step] = max(page, self._next.get(outer_step, 0))
        for step in sorted(self._next)[:-_STEPS]:
            del self._next[step]
        self._since_step.clear()

    def _count_micro_batch(self) -> None:
        self._remaining = max(0, self._remaining - 1)
        if self._current not in self._since_step:
            self._since_step.append(self._current)

    def _count_step(self, *, learned: bool) -> None:
        """Count the pages of an inner step, unless loss or gradient was NaN or Inf."""
        for block in self._since_step if learned else ():
            outer_step, first = place_of(block)
            if outer_step == self._outer_step:
                begin, end = self._named or (first, first - 1)
                begin = first if first > end + 1 else begin
                self._named = begin, max(end, first + self._size - 1)
        self._since_step.clear()

    def pages(self) -> tuple[int, ...]:
        """Return the first and the last page of this outer step that was trained on, or neither."""
        return self._named

    # --- across restarts -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON-able state."""
        return {
            "next": self._next[self._outer_step],
            "pages": [*self._named],
            # Keep their order, so that a restart trains on the same blocks in the same order.
            "ahead": [*self._queue, *self._ahead],
            "since_step": [*self._since_step],
            "uid": self._uid,
            "size": self._size,
            "micro_batch_size": self._micro_batch_size,
        }

    def load_state_dict(
        self, state: dict[str, Any], cursor: dict[str, Any], *, exact: bool = True
    ) -> None:
        """Continue after a restart, from a checkpoint's state.

        The block that was under way begins again where it was, then those that were prefetched.
        With another number of ranks or another micro-batch the pages are cut differently, and where
        ``exact`` is False the trainer drops the micro-batches under way. Then the pages count on
        behind those that were prefetched. With another uid they count from 0, and so they do after
        a checkpoint of an earlier edition, whose pages were drawn by another rule.

        Args:
            state: A :meth:`state_dict`; empty at a fresh start.
            cursor: The data's place, with ``page_block``, ``sequences`` and ``offset``; empty as
                ``state``.
            exact: Whether the trainer kept the micro-batches under way.
        """
        if not state:
            return
        if "next" not in state or state.get("uid") != self._uid:
            log.info(
                "Pages count from 0 in outer step %d: the checkpoint is of another uid, which is "
                "assigned other pages, or of an earlier edition",
                self._outer_step,
            )
            return
        self._next[self._outer_step] = int(state["next"])
        self._named = tuple(state["pages"])
        if not exact or (state["size"], state["micro_batch_size"]) != (
            self._size,
            self._micro_batch_size,
        ):
            log.info(
                "Data continues at page %d, behind what was prepared: flags, ranks or the "
                "micro-batch changed",
                self._next[self._outer_step],
            )
            return
        block, sequences, offset = (
            int(cursor.get(key, 0)) for key in ("page_block", "sequences", "offset")
        )
        self._since_step = [*state["since_step"]]
        self._ahead = [each for each in state["ahead"] if each != block]
        if block and sequences - offset >= self._micro_batch_size:
            log.info(
                "Data continues in %s at sequence %d of %d", describe(block), offset, sequences
            )
            self._ahead.insert(0, block)
            self._restored = block, sequences, offset


class NoBlocks(Blocks):
    """The blocks of a script with its own data, which needs none."""

    def __init__(self) -> None:
        """Have no data."""

    @property
    def available(self) -> bool:
        return True

    @property
    def in_step(self) -> bool:
        return False

    def on_boundary(self, *, may_begin: bool) -> DataPart:
        return DataPart()

    def on_event(self, event: ev.Event, state: MinerState) -> None:
        """Take note of nothing."""

    def pages(self) -> tuple[int, ...]:
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {}


def describe(block: int) -> str:
    """Return the place of a block in words."""
    outer_step, page = place_of(block)
    return f"the text from page {page} of outer step {outer_step}"
