"""Predict when the validator calls the next round.

The upload schedule plans by it; so do the server, the block list and the watch of the public
address.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

from distributed_training.protocol.scoring import SECONDS_PER_BLOCK

log = logging.getLogger(__name__)

_MEASURABLE = 5  # blocks to pass before their pace counts
_WINDOW = 100  # blocks from one mark to the next; the pace is that since the one before the last
#: Blocks that two looks may count too many or too few: one has begun, one is not read.
_BLURRED = 1.5
_SILENT = timedelta(minutes=5)  # the chain, before its last known block tells nothing of now
_OVERDUE = 25  # blocks that a call may come late
_ALIKE = 0.1  # two periods that differ by less, relative to the longer one, are the same
_PLAUSIBLE = 4  # times the configured period, or a fraction of it; else calls were missed, or tries


class RoundClock:
    """Predicts the next round's call, as far as a miner can.

    The validator calls once ``blocks_per_allreduce`` blocks have passed since the last round
    (protocol page, section 2); a round that failed starts the period over. The number of blocks is
    a setting of the validator's. The clock starts from the configured number and learns from the
    calls it sees, once two of the last three came after nearly the same number of blocks. Blocks
    are turned into seconds by the pace this miner sees.

    ``last_allreduce_block``: from the global state, or None without one. A block that the chain has
    not reached (a wrong figure, a chain that was set back) counts as unknown.

    ``blocks_per_allreduce``: between two rounds until calls have shown another number.
    ``later``: from the network's first success on. ``shortest_period``: blocks between two rounds
    at the least (default: the period itself).
    ``seconds_per_block`` is the network's, used until another pace was seen. ``chain_age``: time
    since the chain last answered.
    """

    def __init__(
        self,
        *,
        chain_block: Callable[[], int],
        blocks_per_allreduce: int,
        last_allreduce_block: int | None,
        later: int = 0,
        shortest_period: int | None = None,
        seconds_per_block: float = SECONDS_PER_BLOCK,
        chain_age: Callable[[], timedelta] = timedelta,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._chain_block = chain_block
        self._chain_age = chain_age
        self._period = blocks_per_allreduce
        self._last = self._last_averaged = last_allreduce_block
        self._shortest = min(shortest_period or self._period, self._period)
        self._seconds_per_block = seconds_per_block
        self._clock = clock
        self._marks = deque([(chain_block(), clock())], maxlen=2)
        self._configured = self._usual = self._period
        self._later = later
        self._missed = False
        self._gaps: deque[int] = deque(maxlen=3)  # blocks from a round's end to the next call

    def round_called(self) -> None:
        """Note a call of a round now: the blocks since the last one show the period."""
        self._missed = False
        if self._last is None:
            return
        gap = self._chain_block() - self._last  # below 0 is not plausible either
        if not self._configured / _PLAUSIBLE <= gap <= self._configured * _PLAUSIBLE:
            return
        self._gaps.append(gap)
        alike = [each for each in self._gaps if abs(each - gap) <= _ALIKE * max(each, gap)]
        if len(alike) < 2:
            return
        if abs(min(alike) - self._usual) > _ALIKE * self._usual:
            log.info(
                "Rounds are called after %d blocks, not %d: uploads are planned for that",
                min(alike),
                self._usual,
            )
            self._usual = min(alike)
        # One that came late tells nothing of the next: a snapshot that awaits it misses its round.
        self._period = min(self._usual, *alike)
        self._shortest = min(self._shortest, self._period)

    def round_ended(self, *, averaged: bool = True) -> None:
        """Note that a round ended now, ``averaged`` or failed: the period starts over."""
        self._last = self._chain_block()
        if averaged:
            self._succeeded(self._last)

    def round_heard_of(self, block: int | None) -> None:
        """Take the block of the last round, perhaps without this miner, from the global state.

        The validator writes that block once its own round is over, a while after ours.
        """
        now = self._chain_block()
        last = _passed(self._last, now) or 0
        if block is not None and last < block <= now:
            self._last = block
            self._succeeded(block)
            self._missed |= block > last + _OVERDUE

    def _succeeded(self, block: int) -> None:
        self._last_averaged = block
        if self._later > self._configured:
            self._configured = self._usual = self._period = self._later

    def missed(self) -> bool:
        """Return whether this miner missed a round.

        From any thread.

        One was held without it since it was called last, or should have been called minutes ago.
        """
        block = self._chain_block()
        last = _passed(self._last, block)
        return self._missed or (last is not None and block > last + self._period + _OVERDUE)

    def due(self) -> bool | None:
        """Return whether the validator may call a round now; None if unknown.

        From any thread.
        """
        block = self._chain_block()
        # Not since one that failed here: that may have been no round of the validator's.
        last = _passed(self._last_averaged, block)
        # A chain that is silent to us may well answer the validator.
        if last is None or self._chain_age() > _SILENT:
            return None
        # A tenth is for the difference of the two views of the chain.
        return block >= last + self._shortest - self._shortest // 10

    def half(self) -> int:
        """Return half the period in blocks; validators refuse a block list further behind.

        That of the network's file, whatever calls show: a validator that is late judges by it too.
        """
        return self._configured // 2

    def seconds(self, blocks: int | None = None) -> float:
        """Return how many seconds ``blocks`` chain blocks take; default: a round period's."""
        return (self._period if blocks is None else blocks) * self._seconds_per_block

    def next_at(self) -> float | None:
        """Return ``time.monotonic()`` of the next call; None if unknown or already due."""
        expected = self.expected_at()
        return expected if expected is not None and expected > self._clock() else None

    def expected_at(self) -> float | None:
        """Return ``time.monotonic()`` at the period's end, in the past too; None if unknown."""
        block, now = self._chain_block(), self._clock()
        last = _passed(self._last, block)
        if last is None:
            return None
        # The pace of now; the old one if the two readings allow it.
        first_block, first_time = self._marks[0]
        passed, seconds = block - first_block, now - first_time
        pace = self._seconds_per_block
        # Another that the readings allow as well would be noise, times hundreds of blocks.
        if passed >= _MEASURABLE and abs(seconds - passed * pace) > _BLURRED * pace:
            self._seconds_per_block = seconds / passed
        if passed < 0:
            self._marks.clear()  # a chain that began again
        if not self._marks or block - self._marks[-1][0] >= _WINDOW:
            self._marks.append((block, now))
        return now + (last + self._period - block) * self._seconds_per_block


def _passed(last: int | None, block: int) -> int | None:
    """Return ``last``, or None if it lies in the future (a chain set back, a wrong figure)."""
    # By a future block calls would be refused, and a missed round hidden, until the chain is there.
    return None if last is None or last > block else last
