"""Choose the text that all ranks prefetch and train on, and count its pages.

A member counts its pages from 0 in each outer step (:mod:`~..protocol.pages`). A *block* is the
next few of these pages: the same number for each rank. Rank 0 requests blocks ahead of need and
waits until *every* rank has the next one ready. Then it begins that block, cut to as many sequences
as the rank with the fewest has. An upload names the first and the last page of the blocks that its
inner steps were trained on, without a gap. So it begins after the gap if there was a roll-back, if
the loss or the gradient was NaN, or if pages were not available: the count continues, and no page
of the outer step is used twice.

Blocks that were prepared for one outer step and are left over when the next begins are trained on
first, and no upload names them.
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

_SAY_AGAIN = 600.0  # seconds between two log lines about skipped blocks
_STEPS = 8  # outer steps whose page counts are kept, since a roll-back may return to one of them


class Blocks:
    """Chooses the blocks to train on. Used only on rank 0.

    It subscribes to the miner's events.

    Args:
        data: Says which blocks are ready on this rank, and how many to request ahead.
        ranks: Says which blocks are ready on every rank.
        micro_batch_size: Sequences in one rank's micro-batch.
        pages: Pages of a block that one rank reads.
        uid: The miner's uid; another uid is assigned other pages.
        outer_step: The outer step to begin with.
        clock: Returns seconds of a clock that never goes backwards.

    Examples:
        ```python
        blocks = Blocks(data=data, ranks=ranks, micro_batch_size=4, pages=5, uid=3, outer_step=7)
        part = blocks.on_boundary(may_begin=True)
        print(part.request, part.begin)  # block to prefetch, block to train on; 0 if there is none
        ```
    """

    # Seconds to wait after a block without data, since the source may be down.
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
        self._named: tuple[int, ...] = ()  # first and last page that an upload names; may be empty
        self._since_step: list[int] = []  # blocks used so far in the current inner step
        # Blocks to request first, since they were requested before a restart.
        self._ahead: list[int] = []
        # requested block, in order -> its number of sequences; 0 if not known yet
        self._queue: dict[int, int] = {}
        self._current = 0  # the block in training
        self._remaining = 0  # micro-batches left in it
        self._restored = (0, 0, 0)  # block, sequences and position of a restored cursor
        self._asks_from = 0.0  # earliest time of the next request after a block without data
        self._skipped = Repeats(_SAY_AGAIN)

    # --- what comes next -----------------------------------------------------------------------

    @property
    def available(self) -> bool:
        """True while the current block has micro-batches left."""
        return self._remaining > 0

    @property
    def in_step(self) -> bool:
        """True while an inner step is in progress and has trained on a micro-batch."""
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
        # Blocks are kept on disk, so the sequences served before still exist unless one was lost.
        sequences, start = (min(sequences, served), start) if block == known else (sequences, 0)
        self._current = block
        self._remaining = max(0, sequences - start) // self._micro_batch_size
        return DataPart(request, block, sequences, start) if self._remaining else DataPart(request)

    # --- what was trained ----------------------------------------------------------------------

    def on_event(self, event: ev.Event, state: MinerState) -> None:
        """Update the counts as micro-batches, inner steps and rounds end.

        Args:
            event: The event.
            state: The miner's state before the event is decided on.
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
                # It is no longer known which part of the block the weights were trained on, so no
                # upload can name the rest.
                self._named, self._remaining = tuple(saved.get("pages", ())), 0
            case _:
                return

    def _begin(self, outer_step: int, page: int = 0) -> None:
        """Count an outer step's pages from ``page``, or from where this process was if further on.

        The micro-batches of the unfinished inner step are no longer in the weights.
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
        """Count the pages of an inner step, unless its loss or gradient was NaN or Inf."""
        for block in self._since_step if learned else ():
            outer_step, first = place_of(block)
            if outer_step == self._outer_step:
                begin, end = self._named or (first, first - 1)
                begin = first if first > end + 1 else begin
                self._named = begin, max(end, first + self._size - 1)
        self._since_step.clear()

    def pages(self) -> tuple[int, ...]:
        """Return the first and the last page that an upload would name now; empty if none."""
        return self._named

    # --- across restarts -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-serializable values."""
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

        The block in training continues where it stopped, and the prefetched blocks follow. With
        another number of ranks or another micro-batch size the pages are cut differently, and if
        ``exact`` is False the trainer drops the micro-batches of the unfinished inner step. In
        these cases the count continues after the prefetched pages. With another uid the count
        starts at 0.

        Args:
            state: A :meth:`state_dict`; empty on a fresh start.
            cursor: The position in the data, with ``page_block``, ``sequences`` and ``offset``;
                empty if ``state`` is.
            exact: Whether the trainer kept the micro-batches of the unfinished inner step.
        """
        if not state:
            return
        if state.get("uid") != self._uid:
            log.info(
                "The page count starts at 0 in outer step %d: the checkpoint is of another uid, "
                "which is assigned other pages",
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
                "Data continues at page %d, after the prepared pages: flags, ranks or the "
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
    """Stands in for :class:`Blocks` if a script brings its own data and so needs no blocks."""

    def __init__(self) -> None:
        """Create it without data."""

    @property
    def available(self) -> bool:
        return True

    @property
    def in_step(self) -> bool:
        return False

    def on_boundary(self, *, may_begin: bool) -> DataPart:
        return DataPart()

    def on_event(self, event: ev.Event, state: MinerState) -> None:
        """Ignore the event."""

    def pages(self) -> tuple[int, ...]:
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {}


def describe(block: int) -> str:
    """Describe a block's place in words."""
    outer_step, page = place_of(block)
    return f"the text from page {page} of outer step {outer_step}"
