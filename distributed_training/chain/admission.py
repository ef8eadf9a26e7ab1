"""What a caller may cost before it has proven anything.

The loop trains in this process; every junk request takes the interpreter away from it for a moment.
So the cheapest refusal is the earliest: an address that keeps sending junk is blocked, and its
connections are closed where they are accepted, before a protocol object or a task exists for them.

Addresses of validators (learned from verified calls of neurons with a permit) keep working while
strangers are shut out; a network of strangers shares one budget of new connections.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable

BURST_SECONDS = 6.0  # a bucket holds what its rate allows in this time


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


def normalize(address: str) -> str:
    """One key per client: IPv4 also when mapped into IPv6, IPv6 by its /64."""
    if "." in address and ":" not in address:
        return address
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False).network_address) + "/64"
    return str(parsed)


class Admission:
    """Connections and junk by address. Thread-safe: sockets may be closed by other threads.

    ``max_connections`` counts strangers; validators' addresses may use a quarter more. A stranger
    is blocked for ``block_seconds`` after ``strikes`` refused requests (one is forgiven every
    ``block_seconds / strikes``).
    """

    def __init__(
        self,
        *,
        max_connections: int,
        max_connections_per_address: int,
        requests_per_address: float,
        strikes: int = 20,
        block_seconds: float = 60.0,
        newcomers_per_second: float = 50.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max = max_connections
        self._max_per_address = max_connections_per_address
        self._clock = clock
        self._block_seconds = block_seconds
        self._requests = Buckets(rate=requests_per_address, clock=clock)
        self._strikes = Buckets(rate=strikes / block_seconds, burst=strikes, clock=clock)
        self._newcomers = Buckets(rate=newcomers_per_second, capacity=1, clock=clock)
        self._blocked: OrderedDict[str, float] = OrderedDict()  # until
        self._trusted: OrderedDict[str, None] = OrderedDict()
        self._open: Counter[str] = Counter()
        self._total = 0
        self._lock = threading.Lock()
        self.refused: Counter[str] = Counter()

    @property
    def connections(self) -> int:
        return self._total

    def connect(self, address: str) -> bool:
        """Whether a new connection (which carries one request) may stay; it counts from then on
        until :meth:`disconnect`."""
        with self._lock:
            trusted = address in self._trusted
            reason = None
            if self._blocked.get(address, 0.0) > self._clock():
                reason = "connection_blocked"
            elif self._open[address] >= self._max_per_address:
                reason = "connections_of_address"
            elif not self._requests.take(address):
                reason = "rate"
            elif self._total >= (self._max + self._max // 4 if trusted else self._max):
                reason = "connections"
            elif not trusted and not self._newcomers.take("newcomers"):
                reason = "connection_rate"
            if reason is not None:
                self.refused[reason] += 1
                if reason == "connections_of_address":
                    self._strike(address)
                if not self._open[address]:
                    del self._open[address]
                return False
            self._open[address] += 1
            self._total += 1
            return True

    def disconnect(self, address: str) -> None:
        with self._lock:
            self._total -= 1
            self._open[address] -= 1
            if self._open[address] <= 0:
                del self._open[address]

    def strike(self, address: str) -> None:
        """A request of this address was refused unproven."""
        with self._lock:
            self._strike(address)

    def _strike(self, address: str) -> None:
        if address in self._trusted or self._strikes.take(address):
            return
        self._blocked[address] = self._clock() + self._block_seconds
        self._blocked.move_to_end(address)
        if len(self._blocked) > 4096:
            self._blocked.popitem(last=False)

    def trust(self, address: str) -> None:
        """A validator called from here: never blocked, and not counted among newcomers."""
        with self._lock:
            self._trusted[address] = None
            self._trusted.move_to_end(address)
            self._blocked.pop(address, None)
            if len(self._trusted) > 1024:
                self._trusted.popitem(last=False)

    def rules(self, most: int) -> tuple[list[str], list[str], bool]:
        """For :class:`~.firewall.Firewall`: who is blocked and who is trusted (at most ``most`` of
        each, the latest first), and whether a stranger would be let in now."""
        with self._lock:
            now = self._clock()
            blocked = [a for a, until in reversed(self._blocked.items()) if until > now]
            trusted = list(reversed(self._trusted))
            welcome = self._total < self._max and not self._newcomers.empty("newcomers")
            return blocked[:most], trusted[:most], welcome

    def blocked(self, address: str) -> bool:
        with self._lock:
            return self._blocked.get(address, 0.0) > self._clock()
