"""How long to wait before something that failed is tried again."""

from __future__ import annotations

import random
from datetime import timedelta


def doubling(failures: int, *, first: timedelta, longest: timedelta) -> timedelta:
    """``first`` after the first failure, doubled by each further one, at most ``longest``."""
    return min(first * 2 ** min(max(failures, 1) - 1, 30), longest)


class Backoff:
    """Doubling waits with jitter, so that peers that failed together do not return together."""

    def __init__(self, *, first: timedelta, longest: timedelta) -> None:
        self._first = first
        self._longest = longest
        self._failures = 0

    def failed(self) -> timedelta:
        """Count a failure. Returns how long to wait: between half of the doubled wait and all."""
        self._failures += 1
        wait = doubling(self._failures, first=self._first, longest=self._longest)
        return wait * random.uniform(0.5, 1.0)

    def succeeded(self) -> None:
        self._failures = 0

    @property
    def failures(self) -> int:
        """In a row."""
        return self._failures
