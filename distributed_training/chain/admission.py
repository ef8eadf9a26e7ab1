"""What a caller may cost before it has proven anything.

The loop trains in this process; every junk request takes the interpreter away from it for a moment.
So the cheapest refusal is the earliest: an address that keeps sending junk is blocked, and its
connections are closed where they are accepted, before a protocol object or a task exists for them.

All strangers together share one budget of new connections, which a flood from many addresses uses
up. Validators (:mod:`.trust`) do not draw on it and are never blocked.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable

from .trust import TrustedAddresses

BURST_SECONDS = 6.0  # a bucket holds what its rate allows in this time
NEWCOMERS_PER_SECOND, NEWCOMERS_BURST = 25.0, 100
STRIKES = 20  # refused requests; one is forgiven every BLOCK_SECONDS / STRIKES
BLOCK_SECONDS = 60.0
_MOST_BLOCKED = 4096


class Buckets:
    """Token buckets by key, the least recently used forgotten beyond ``capacity``.

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

    def take(self, key: Hashable) -> bool:
        """One token, or False when there is none."""
        now = self._clock()
        level = self._level(key, now)
        enough = level >= 1.0
        self._levels[key] = (level - 1.0 if enough else level, now)
        self._levels.move_to_end(key)
        if len(self._levels) > self._capacity:
            self._levels.popitem(last=False)
        return enough

    def __len__(self) -> int:
        return len(self._levels)


class Admission:
    """Connections and junk by address (a key of :func:`.trust.normalize`).

    For one thread; the counters may be read from others. ``max_connections`` counts strangers;
    validators' addresses may use a quarter more.
    """

    def __init__(
        self,
        *,
        trusted: TrustedAddresses,
        max_connections: int,
        max_connections_per_address: int,
        requests_per_address: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trusted = trusted
        self._max = max_connections
        self._max_per_address = max_connections_per_address
        self._clock = clock
        self._requests = Buckets(rate=requests_per_address, clock=clock)
        self._strikes = Buckets(rate=STRIKES / BLOCK_SECONDS, burst=STRIKES, clock=clock)
        self._newcomers = Buckets(
            rate=NEWCOMERS_PER_SECOND, burst=NEWCOMERS_BURST, capacity=1, clock=clock
        )
        self._blocked: OrderedDict[str, float] = OrderedDict()  # until
        self._open: Counter[str] = Counter()
        self.connections = 0
        self.refused: Counter[str] = Counter()

    def connect(self, address: str) -> bool:
        """Whether a new connection (which carries one request) may stay.

        It counts from then on until :meth:`disconnect`.
        """
        reason = self._why_not(address)
        if reason is not None:
            self.refused[reason] += 1
            return False
        self._open[address] += 1
        self.connections += 1
        return True

    def _why_not(self, address: str) -> str | None:
        trusted = address in self._trusted
        if self._blocked.get(address, 0.0) > self._clock() and not trusted:
            return "connection_blocked"
        if self._open.get(address, 0) >= self._max_per_address:
            self.strike(address)
            return "connections_of_address"
        if not self._requests.take(address):
            return "rate"
        if self.connections >= (self._max + self._max // 4 if trusted else self._max):
            return "connections"
        if not trusted and not self._newcomers.take("newcomers"):
            return "connection_rate"
        return None

    def disconnect(self, address: str) -> None:
        self.connections -= 1
        self._open[address] -= 1
        if self._open[address] <= 0:
            del self._open[address]

    def strike(self, address: str) -> None:
        """A request of this address was refused unproven."""
        if address in self._trusted or self._strikes.take(address):
            return
        self._blocked[address] = self._clock() + BLOCK_SECONDS
        self._blocked.move_to_end(address)
        if len(self._blocked) > _MOST_BLOCKED:
            self._blocked.popitem(last=False)
