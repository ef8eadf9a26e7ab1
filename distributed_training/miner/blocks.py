"""Which blocks all ranks prefetch and train on, and which were trained since the last publication.

A block number is a position in the data (protocol page, section 5). Rank 0 asks for the chain's
current block ahead of need, waits until *every* rank holds its pages, and begins it cut to what the
poorest rank has. A block enters the block list with the first completed inner step that holds its
tokens, never before; a publication takes the list with it, and gets it back if it failed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from distributed_training.miner.orders import ControlChannel
from distributed_training.protocol.types import Revision

log = logging.getLogger(__name__)


class ReadyLike(Protocol):
    def ready(self, block: int) -> int | None: ...


class BlockFeed:
    """Rank 0 only. ``prefetch``: blocks requested ahead of the one in training.

    ``patience``: seconds without any ready block after which a block that was served before is
    trained on again (its tokens are still cached on every rank), rather than leaving GPUs idle.
    """

    def __init__(
        self,
        *,
        chain_block: Callable[[], int],
        data: ReadyLike,
        channel: ControlChannel,
        micro_batch_size: int,
        prefetch: int,
        patience: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._chain_block = chain_block
        self._data = data
        self._channel = channel
        self._micro_batch_size = micro_batch_size
        self._prefetch = max(1, prefetch)
        self._patience = patience
        self._clock = clock
        self._last_requested = 0
        self._requested: list[int] = []
        self._ready: list[tuple[int, int]] = []
        self._current = (0, 0)  # block, its sequences
        self._remaining = 0  # micro-batches of it
        self._starving_since: float | None = None
        self._since_step: set[int] = set()  # blocks in the inner step under way
        self._trained: list[int] = []
        self._published: dict[Revision, list[int]] = {}

    # --- what comes next -----------------------------------------------------------------------

    @property
    def available(self) -> bool:
        return self._remaining > 0

    def on_boundary(self, *, may_begin: bool) -> tuple[int, int, int]:
        """(block to request, block to begin, its sequences); 0 where there is none."""
        self._harvest()
        request = self._next_request()
        if not may_begin or self._remaining:
            return request, 0, 0
        block, sequences = self._next_block()
        if block:
            self._current = (block, sequences)
            self._remaining = sequences // self._micro_batch_size
        return request, block, sequences

    def _harvest(self) -> None:
        for block in tuple(self._requested):
            sequences = self._channel.ready_everywhere(block, self._data.ready(block))
            if sequences is None:
                continue
            self._requested.remove(block)
            if sequences >= self._micro_batch_size:
                self._ready.append((block, sequences))
            else:
                log.warning("Block %d has no data for at least one rank and is skipped", block)

    def _next_request(self) -> int:
        if len(self._requested) + len(self._ready) >= self._prefetch:
            return 0
        block = self._chain_block()
        if block <= self._last_requested:
            return 0  # the chain has not moved: its pages are here or on their way
        self._last_requested = block
        self._requested.append(block)
        return block

    def _next_block(self) -> tuple[int, int]:
        if self._ready:
            self._starving_since = None
            return self._ready.pop(0)
        now = self._clock()
        if self._starving_since is None:
            self._starving_since = now
        if self._current[0] and now - self._starving_since >= self._patience:
            log.warning(
                "No new data for %.0f s: block %d is trained on again",
                now - self._starving_since,
                self._current[0],
            )
            return self._current
        return 0, 0

    # --- what was trained ----------------------------------------------------------------------

    def micro_batch_done(self) -> None:
        self._remaining = max(0, self._remaining - 1)
        self._since_step.add(self._current[0])

    def block_used_up(self) -> None:
        self._remaining = 0

    def step_done(self, *, skipped: bool = False) -> None:
        """An inner step ended. Tokens of a skipped step (NaN/Inf) were not learned."""
        if not skipped:
            self._trained.extend(sorted(self._since_step - set(self._trained)))
        self._since_step.clear()

    def blocks(self) -> list[int]:
        """Blocks trained on since the last publication, in order."""
        return list(self._trained)

    def snapshot_taken(self, revision: Revision) -> None:
        """The list goes with this revision; a block still in training enters the next one again."""
        self._published[revision] = self._trained
        self._trained = []

    def publication_ended(self, revision: Revision, *, ok: bool) -> None:
        """A publication that failed, or was superseded, gives its blocks back."""
        blocks = self._published.pop(revision, [])
        if ok:
            return
        later = [b for r, b in self._published.items() if r > revision]
        if later:  # a newer snapshot is on its way: it cannot be changed any more
            blocks = [b for b in blocks if all(b not in listed for listed in later)]
        self._trained = sorted({*blocks, *self._trained})

    # --- across restarts -----------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """JSON-able. Blocks of publications under way count as not published."""
        waiting = {b for blocks in self._published.values() for b in blocks}
        return {"blocks": sorted({*self._trained, *waiting}), "last_block": self._last_requested}

    def restore(self, state: dict[str, Any]) -> None:
        self._trained = [int(b) for b in state.get("blocks", [])]
        self._last_requested = int(state.get("last_block", 0))
