"""Limit how often something repeats: waits between attempts, and throttled log lines."""

from __future__ import annotations

import math
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import NamedTuple

BURST_SECONDS = 6.0  # a bucket holds as many tokens as its rate allows in this time


class Clocks(NamedTuple):
    """A monotonic clock and this machine's Unix time, both in seconds."""

    steady: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time


def doubling(failures: int, *, first: timedelta, longest: timedelta) -> timedelta:
    """Return ``first`` after one failure, doubled with each further failure up to ``longest``."""
    # Cap the exponent first: after weeks of failures, the result would overflow a timedelta.
    return min(first * 2 ** min(max(failures, 1) - 1, 30), longest)


class Backoff:
    """Doubling waits with jitter, so that peers that failed together do not return together."""

    def __init__(self, *, first: timedelta, longest: timedelta) -> None:
        self._first = first
        self._longest = longest
        self._failures = 0

    def failed(self) -> timedelta:
        """Count a failure; return how long to wait, a random half to all of the doubled wait."""
        self._failures += 1
        wait = doubling(self._failures, first=self._first, longest=self._longest)
        return wait * random.uniform(0.5, 1.0)

    def succeeded(self) -> None:
        self._failures = 0

    @property
    def failures(self) -> int:
        """The number of consecutive failures."""
        return self._failures


class Throttle:
    """Let something pass at most once in ``every`` seconds, separately for each key.

    ``most``: how many may pass in ``every`` seconds, over all keys. Only the last ``most_keys``
    keys that passed are remembered. ``clock`` returns monotonic seconds.
    """

    def __init__(
        self,
        every: float,
        *,
        most: float = math.inf,
        most_keys: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = every
        self._most = most
        self._window = -math.inf, 0  # when the window began, and how many have passed since
        self._most_keys = most_keys
        self._clock = clock
        self._passed_at: OrderedDict[Hashable, float] = OrderedDict()

    def __call__(self, key: Hashable = None) -> bool:
        """Return whether ``key`` may pass now; if so, its next ``every`` seconds begin."""
        now, before = self._clock(), self._passed_at.get(key)
        if before is not None and now - before < self._every:
            return False
        began, passed = self._window
        if now - began >= self._every:
            began, passed = now, 0
        if passed >= self._most:  # the key's own ``every`` seconds do not begin
            return False
        self._window = began, passed + 1
        self._passed_at[key] = now
        self._passed_at.move_to_end(key)
        # Keys may be addresses or texts that anybody chooses, so they must not fill memory.
        if len(self._passed_at) > self._most_keys:
            self._passed_at.popitem(last=False)
        return True


class Repeats:
    """A :class:`Throttle` that counts what it suppresses, for the next line of the same key."""

    def __init__(self, every: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._throttle = Throttle(every, clock=clock)
        self._held: Counter[Hashable] = Counter()

    def __call__(self, key: Hashable = None) -> str | None:
        """Return what to append to a line of ``key``; None if the line must not be written."""
        if not self._throttle(key):
            self._held[key] += 1
            return None
        held = self._held.pop(key, 0)
        times = "time" if held == 1 else "times"
        return f" ({held} more {times} since the last such line)" if held else ""


class Buckets:
    """Token buckets by key; beyond ``capacity`` the least recently used ones are forgotten.

    Not thread-safe.
    """

    def __init__(
        self,
        *,
        rate: float,
        burst: float | None = None,
        capacity: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate = rate
        self._burst = max(1.0, rate * BURST_SECONDS if burst is None else burst)
        self._capacity = capacity
        self._clock = clock
        self._levels: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def _level(self, key: Hashable, now: float) -> float:
        level, then = self._levels.get(key, (self._burst, now))
        return min(self._burst, level + (now - then) * self._rate)

    def empty(self, key: Hashable) -> bool:
        return self._level(key, self._clock()) < 1.0

    def draw(self, key: Hashable) -> bool:
        """Draw one token; return False if there is none."""
        now = self._clock()
        level = self._level(key, now)
        enough = level >= 1.0
        # Keep the key even if it is refused: a forgotten key would get a full bucket again.
        self._levels[key] = (level - 1.0 if enough else level, now)
        self._levels.move_to_end(key)
        if len(self._levels) > self._capacity:
            self._levels.popitem(last=False)
        return enough
