"""Which chain node to believe, by the age of its newest block.

A node that synchronizes, or that lost its peers, answers as if nothing were wrong: with blocks of
hours ago, and without hotkeys that were registered since. Blocks carry the time they were made at,
so such a node is told by the wall clock, as long as there is another node to ask. When all nodes
are behind, the machine's clock may be what is wrong, and the newest one is all there is.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

from .base import Chain, ChainError

log = logging.getLogger(__name__)

LATE = timedelta(minutes=10)  # since the newest block; one is made every 12 s
ASK_AGAIN = timedelta(minutes=10)  # the other nodes, while one is believed that is behind
_ALIKE = 60.0  # seconds between the newest blocks of two nodes that are as good as each other


class NewestBlocks:
    """When the newest block of each node was made. ``clock``: the wall clock, in seconds since the
    epoch; ``monotonic``: that of :data:`ASK_AGAIN`."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._made: dict[str, float] = {}  # by endpoint, of those that were asked
        self._believed_at: float | None = None  # a node that is behind

    def asking(self, endpoint: str) -> None:
        """Until it answers it has nothing that could be newer."""
        self._made[endpoint] = -math.inf

    def check(self, endpoint: str, made: float, others: Iterable[str]) -> None:
        """Raises ChainError if the newest block of ``endpoint``, made at ``made``, is behind the
        clock and one of ``others`` has a newer one or was not asked yet."""
        self._made[endpoint] = made
        behind = self._clock() - made
        if behind <= LATE.total_seconds():
            self._made, self._believed_at = {}, None  # of the others: soon too old
            return
        now = self._monotonic()
        if self._believed_at is not None and now - self._believed_at > ASK_AGAIN.total_seconds():
            self._made, self._believed_at = {endpoint: made}, None
        newest = max((self._made.get(other, math.inf) for other in others), default=-math.inf)
        if newest > made + _ALIKE:
            raise ChainError(
                f"its newest block is {behind / 60:.0f} minutes behind this machine's clock"
            )
        if self._believed_at is None:
            self._believed_at = now
            log.warning(
                "No chain node that answers is newer than %s, which is %.0f minutes behind this "
                "machine's clock, so what it shows may be old: going on with it; see whether "
                "timedatectl says 'synchronized: yes', or name another node with "
                "--subtensor.chain_endpoint",
                endpoint,
                behind / 60,
            )


def minutes_behind(chain: Chain) -> float | None:
    """How far the chain, as it is read, is behind this machine's clock; None if it is not late."""
    now = chain.clock()
    behind = 0.0 if now is None else time.time() - now
    return behind / 60 if behind > LATE.total_seconds() else None
