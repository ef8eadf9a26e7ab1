"""When the next round will be called, as far as a miner can know.

The validator calls once ``blocks_per_allreduce`` blocks have passed since the last round (protocol
page, section 2); a round that failed starts the period anew. Blocks are turned into seconds by the
pace this miner sees.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from distributed_training.protocol import schedule

_MEASURABLE = 5  # blocks to pass before their pace counts
_WINDOW = 100  # blocks after which the pace is measured anew


class RoundClock:
    """``last_allreduce_block``: from the global state, or None if it does not say.

    ``shortest_period``: blocks between two rounds at the least (default: the period itself).
    ``seconds_per_block`` is the network's, used until a pace was seen.
    """

    def __init__(
        self,
        *,
        chain_block: Callable[[], int],
        blocks_per_allreduce: int,
        last_allreduce_block: int | None,
        shortest_period: int | None = None,
        seconds_per_block: float = schedule.SECONDS_PER_BLOCK,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._chain_block = chain_block
        self._period = blocks_per_allreduce
        self._last = self._last_averaged = last_allreduce_block
        self._shortest = min(shortest_period or self._period, self._period)
        self._seconds_per_block = seconds_per_block
        self._clock = clock
        self._seen = (chain_block(), clock())

    def round_ended(self, *, averaged: bool = True) -> None:
        """A round ended now, ``averaged`` or failed: the period starts anew."""
        self._last = self._chain_block()
        if averaged:
            self._last_averaged = self._last

    def due(self) -> bool | None:
        """Whether the validator may call a round now; None if unknown. From any thread.

        Only a successful round begins a time without calls: one that failed here may have been no
        round of the validator's. A tenth of the period is left for what the two see differently.
        """
        if self._last_averaged is None:
            return None
        early = self._last_averaged + self._shortest - self._shortest // 10
        return self._chain_block() >= early

    def seconds(self, blocks: int | None = None) -> float:
        """That so many blocks take at the pace seen; default: those between two rounds."""
        return (self._period if blocks is None else blocks) * self._seconds_per_block

    def next_at(self) -> float | None:
        """``time.monotonic()`` of the next call; None if unknown or already due."""
        if self._last is None:
            return None
        block, now = self._chain_block(), self._clock()
        first_block, first_time = self._seen
        if block - first_block >= _MEASURABLE:
            self._seconds_per_block = (now - first_time) / (block - first_block)
        if not 0 <= block - first_block < _WINDOW:
            self._seen = (block, now)
        remaining = schedule.blocks_until_round(
            block=block, last_allreduce_block=self._last, bpa=self._period
        )
        return now + remaining * self._seconds_per_block if remaining else None
