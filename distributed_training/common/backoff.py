"""Limit how often something repeats: waits between attempts, and throttled log lines."""

from __future__ import annotations

import math
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import KW_ONLY, dataclass, field
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


@dataclass(kw_only=True)
class Backoff:
    """Doubling waits with jitter, so that peers that failed together do not return together.

    ``failures``: the number of consecutive failures.
    """

    first: timedelta
    longest: timedelta
    failures: int = field(default=0, init=False)

    def failed(self) -> timedelta:
        """Count a failure; return how long to wait, a random half to all of the doubled wait."""
        self.failures += 1
        wait = doubling(self.failures, first=self.first, longest=self.longest)
        return wait * random.uniform(0.5, 1.0)

    def succeeded(self) -> None:
        self.failures = 0


@dataclass
class Throttle:
    """Let something pass at most once in ``every`` seconds, separately for each key.

    ``most``: how many may pass in ``every`` seconds, over all keys. Only the last ``most_keys``
    keys that passed are remembered. ``clock`` returns monotonic seconds.
    """

    every: float
    _: KW_ONLY
    most: float = math.inf
    most_keys: int = 1024
    clock: Callable[[], float] = time.monotonic
    # When the window began, and how many have passed since.
    _window: tuple[float, int] = field(default=(-math.inf, 0), init=False)
    _passed_at: OrderedDict[Hashable, float] = field(default_factory=OrderedDict, init=False)

    def __call__(self, key: Hashable = None) -> bool:
        """Return whether ``key`` may pass now; if so, its next ``every`` seconds begin."""
        now, before = self.clock(), self._passed_at.get(key)
        if before is not None and now - before < self.every:
            return False
        began, passed = self._window
        if now - began >= self.every:
            began, passed = now, 0
        if passed >= self.most:  # the key's own ``every`` seconds do not begin
            return False
        self._window = began, passed + 1
        self._passed_at[key] = now
        self._passed_at.move_to_end(key)
        # Keys may be addresses or texts that anybody chooses, so they must not fill memory.
        if len(self._passed_at) > self.most_keys:
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


@dataclass(kw_only=True)
class Buckets:
    """Token buckets by key; beyond ``capacity`` the least recently used ones are forgotten.

    Not thread-safe.
    """

    rate: float
    burst: float | None = None
    capacity: int = 4096
    clock: Callable[[], float] = time.monotonic
    _levels: OrderedDict[Hashable, tuple[float, float]] = field(
        default_factory=OrderedDict, init=False
    )

    def __post_init__(self) -> None:
        given = self.rate * BURST_SECONDS if self.burst is None else self.burst
        self._most = max(1.0, given)

    def _level(self, key: Hashable, now: float) -> float:
        level, then = self._levels.get(key, (self._most, now))
        return min(self._most, level + (now - then) * self.rate)

    def empty(self, key: Hashable) -> bool:
        return self._level(key, self.clock()) < 1.0

    def draw(self, key: Hashable) -> bool:
        """Draw one token; return False if there is none."""
        now = self.clock()
        level = self._level(key, now)
        enough = level >= 1.0
        # Keep the key even if it is refused: a forgotten key would get a full bucket again.
        self._levels[key] = (level - 1.0 if enough else level, now)
        self._levels.move_to_end(key)
        if len(self._levels) > self.capacity:
            self._levels.popitem(last=False)
        return enough
