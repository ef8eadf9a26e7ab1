"""What was last read of a subnet: the half of a chain that readers see.

A chain is a network away and may be gone for hours, while training goes on. So whoever reads gets
what was known last, at once and from memory; a thread of the chain brings it up to date.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

from .base import ChainError, ChainUnavailable, Neuron


class LastKnown:
    """The reading methods of :class:`~.base.Chain`. One thread at a time calls ``_saw_...``.

    ``monotonic`` is the clock of ages.
    """

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._ready = threading.Event()
        self._counts: Counter[str] = Counter()
        self._block = 0
        self._read_at: float | None = None
        self._ahead_of_monotonic: float | None = None  # the chain's clock
        self._neurons: tuple[Neuron, ...] = ()
        self._uids: dict[str, int] = {}
        self._commitments: dict[str, str] = {}

    def _saw_neurons(self, neurons: tuple[Neuron, ...], commitments: dict[str, str]) -> None:
        self._commitments = commitments
        if neurons != self._neurons:
            self._uids = {n.hotkey: n.uid for n in neurons}
            self._neurons = neurons
        self._counts["reads"] += 1

    def _saw_block(self, block: int) -> None:
        """The last thing of a look; from the first one on there is something to read."""
        # A reorganization or a node that lags must not turn the clock back.
        self._counts["went_back"] += block < self._block
        self._block = max(self._block, block)
        self._read_at = self._monotonic()
        self._ready.set()

    def _saw_time(self, seconds: float) -> None:
        """Of the newest block, since the epoch."""
        self._ahead_of_monotonic = seconds - self._monotonic()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._counts["writes"] += 1
        try:
            yield
        except ChainError:
            self._counts["writes_failed"] += 1
            raise

    def wait_ready(self, timeout: timedelta) -> bool:
        return self._ready.wait(timeout.total_seconds())

    def _check(self) -> None:
        if not self._ready.is_set():
            raise ChainUnavailable("the chain has not answered yet")

    def block(self) -> int:
        self._check()
        return self._block

    def neurons(self) -> Sequence[Neuron]:
        self._check()
        return self._neurons

    def uid(self, hotkey: str) -> int | None:
        self._check()
        return self._uids.get(hotkey)

    def commitment(self, hotkey: str) -> str | None:
        self._check()
        return self._commitments.get(hotkey)

    def reads(self) -> int:
        return self._counts["reads"]

    def counters(self) -> Mapping[str, int]:
        return dict(self._counts)

    def _clock_when_read(self) -> float:
        """The chain's time at the last look, in seconds since the epoch; 0 before the first one."""
        if self._ahead_of_monotonic is None or self._read_at is None:
            return 0.0
        return self._ahead_of_monotonic + self._read_at

    def clock(self) -> float | None:
        ahead = self._ahead_of_monotonic
        return None if ahead is None else ahead + self._monotonic()

    def age(self) -> timedelta:
        read_at = self._read_at
        if read_at is None:
            return timedelta.max
        return timedelta(seconds=max(0.0, self._monotonic() - read_at))
