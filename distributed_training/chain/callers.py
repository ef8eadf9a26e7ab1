"""Remember the callers of the signed server: accepted calls, trusted addresses, limits.

*Replay.* A nonce is the caller's clock in nanoseconds. A call is fresh while its nonce is at most
some seconds old by our clock (:func:`.auth.max_age`), and a replay when the same call was accepted
before. Both clocks are wall clocks, by protocol, and may be set at any time. So accepted calls are
remembered for much longer than they could stay fresh (``KEPT``), by a monotonic clock. When a call
is forgotten at last, everything as old or older is refused from then on (the floor). The next
process reads the highest nonce accepted, and whether the end was clean, from one small file of the
run folder. After a clean end that nonce is the floor. After a kill the last nonces may be missing,
so for the first seconds everything is refused that could have been signed before the start.

*Trust.* An address becomes trusted when a call of a neuron with a validator permit was verified
from it. It stays trusted over a restart, since a flood does not end with one. Endpoints that
validators have written to the chain are trusted too. Trust only spares an address the limits that
all untrusted clients share; its requests are checked like all others.

*Admission.* The loop trains in this process, and every bad request takes the interpreter away from
it for a moment. So the cheapest refusal is the earliest: connections of an address that keeps
sending bad requests are closed on accept, before a protocol object or a task exists for them. All
untrusted clients together share one budget of new connections; validators do not draw on it and are
never blocked.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import Field

from distributed_training.common.files import read_state, remove_leftovers, write_state

MOST_VALIDATORS = 1024
_LARGEST_FILE = 256 * 1024  # bytes


@dataclass(frozen=True)
class Kept:
    """``highest``: nonce of any accepted call (ns), -1 without one.

    ``clean``: whether no call can be missing in it. ``validators``: keys of :func:`normalize`, the
    latest last.
    """

    # Without defaults: of a file that lost one of these two, every call might be a replay.
    highest: Annotated[int, Field(ge=-1, lt=1 << 63)]
    clean: bool
    validators: Annotated[tuple[str, ...], Field(max_length=MOST_VALIDATORS)] = ()


class KeptFile:
    """The file of callers for the next start, for one thread at a time.

    ``path`` None: none is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._saved: Kept | None = None

    def load(self) -> Kept:
        """Return what was kept; without a file nothing was ever accepted."""
        if self._path is None:
            return Kept(-1, clean=True)
        remove_leftovers(self._path)
        there = self._path.exists()
        lost = (
            "calls signed before this start are refused for its first seconds, and validators are "
            "untrusted clients until they call"
        )
        kept = read_state(self._path, Kept, lost=lost, at_most=_LARGEST_FILE)
        if kept is None:
            kept = Kept(-1, clean=not there)
            if there:
                # It was set aside. A kill before the first save must leave no missing file, which
                # would count as clean.
                self.save(kept)
        return kept

    def save(self, kept: Kept) -> None:
        """Write the file if it would change. A failure is logged, not raised."""
        lost = (
            "after a restart, calls of the last seconds could be replayed and validators kept out "
            "by a flood; free disk space or correct its permissions"
        )
        if self._path is None or kept == self._saved:
            return
        if write_state(self._path, kept, lost=lost):
            self._saved = kept


def normalize(address: str) -> str:
    """Return one key per client: IPv4 also when mapped into IPv6, IPv6 by its /64."""
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


class TrustedAddresses:
    """Keys as :func:`normalize` makes them. Thread-safe.

    ``callers``: those kept from before. At most ``MOST_VALIDATORS`` are kept, the latest; the
    chain's endpoints are bounded by its uids.
    """

    def __init__(self, callers: Iterable[str] = ()) -> None:
        self._lock = threading.Lock()
        self._endpoints: frozenset[str] = frozenset()
        self._callers: OrderedDict[str, None] = OrderedDict.fromkeys(callers)

    def __contains__(self, address: str) -> bool:
        # Without the lock: each is one look-up, and the set of endpoints is replaced whole.
        return address in self._callers or address in self._endpoints

    def add(self, address: str) -> None:
        """Trust an address from which a validator called."""
        with self._lock:
            if len(self._callers) >= MOST_VALIDATORS and address not in self._callers:
                self._callers.popitem(last=False)
            self._callers[address] = None

    def callers(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._callers)

    def set_endpoints(self, addresses: Iterable[str]) -> None:
        """Replace the endpoints of validators by those that the chain shows now."""
        self._endpoints = frozenset(map(normalize, addresses))


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
        """Take one token; return False when there is none."""
        now = self._clock()
        level = self._level(key, now)
        enough = level >= 1.0
        # Also when refused: a key that went out of memory would have a full bucket again.
        self._levels[key] = (level - 1.0 if enough else level, now)
        self._levels.move_to_end(key)
        if len(self._levels) > self._capacity:
            self._levels.popitem(last=False)
        return enough

    def __len__(self) -> int:
        return len(self._levels)


class Admission:
    """Connections and bad requests by address (a key of :func:`normalize`).

    For one thread; the counters may be read from others. ``max_connections`` counts untrusted
    clients; validators' addresses may use a quarter more. ``newcomers``: new connections per second
    of all untrusted clients together, and their burst.
    """

    def __init__(
        self,
        *,
        trusted: TrustedAddresses,
        max_connections: int,
        max_connections_per_address: int,
        requests_per_address: float,
        newcomers: tuple[float, int] = (NEWCOMERS_PER_SECOND, NEWCOMERS_BURST),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trusted = trusted
        self._max = max_connections
        self._max_per_address = max_connections_per_address
        self._clock = clock
        self._requests = Buckets(rate=requests_per_address, clock=clock)
        self._strikes = Buckets(rate=STRIKES / BLOCK_SECONDS, burst=STRIKES, clock=clock)
        self._newcomers = Buckets(rate=newcomers[0], burst=newcomers[1], capacity=1, clock=clock)
        self._blocked: OrderedDict[str, float] = OrderedDict()  # until
        self._open: Counter[str] = Counter()
        self.connections = 0
        self.refused: Counter[str] = Counter()

    def connect(self, address: str) -> bool:
        """Return whether a new connection may be used; it counts until :meth:`disconnect`."""
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
        # By address before all together: one client must not use up what all share.
        if self._open.get(address, 0) >= self._max_per_address:
            self.strike(address)
            return "connections_of_address"
        if not self._requests.take(address):
            return "rate"
        if self.connections >= (self._max + self._max // 4 if trusted else self._max):
            return "connections"
        # Last: a connection that is refused anyway takes nothing of the shared budget.
        if not trusted and not self._newcomers.take("newcomers"):
            return "connection_rate"
        return None

    def may_stay(self, address: str) -> bool:
        """Return whether a connection may wait for another request; half are kept for new ones."""
        mine = self._open.get(address, 0)
        return 2 * self.connections <= self._max and 2 * mine <= self._max_per_address

    def disconnect(self, address: str) -> None:
        self.connections -= 1
        self._open[address] -= 1
        # Or an entry would stay for every address that ever called.
        if self._open[address] <= 0:
            del self._open[address]

    def strike(self, address: str) -> None:
        """Count a request of this address that was refused unproven."""
        if address in self._trusted or self._strikes.take(address):
            return
        self._blocked[address] = self._clock() + BLOCK_SECONDS
        self._blocked.move_to_end(address)
        if len(self._blocked) > _MOST_BLOCKED:
            self._blocked.popitem(last=False)


KEPT = timedelta(hours=2)
# All hotkeys of a subnet (256) at the rate each may call (5/s) fill this in 25 s: longer than a
# call stays fresh.
MOST = 32_768

Call = tuple[str, int, str]  # hotkey, nonce, salt


class NonceMemory:
    """Replay memory. Thread-safe.

    ``window``: the longest age at which any call is accepted plus ``skew``, how far a caller's
    clock may be ahead of ours. ``kept``: from the process before. ``clock`` is the wall clock in
    ns, ``monotonic`` seconds.
    """

    def __init__(
        self,
        *,
        window: timedelta,
        skew: timedelta,
        kept: Kept,
        clock: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._accepted: OrderedDict[Call, float] = OrderedDict()  # when, monotonic
        now = clock()
        # Written while this machine's clock was ahead: as a floor it would shut all out.
        ahead = kept.highest > now + _nanoseconds(window)
        self._floor = self.highest = -1 if ahead else kept.highest
        # Nonces up to the first floor are refused until then (monotonic).
        self._first_floor, self._first_until = -1, float("-inf")
        if ahead or not kept.clean:
            self._first_floor = now + _nanoseconds(skew)
            self._first_until = monotonic() + window.total_seconds()

    def used(self, hotkey: str, nonce: int, salt: str = "") -> bool:
        """Return True when this call was accepted before, or may have been. Changes nothing."""
        with self._lock:
            return self._used((hotkey, nonce, salt))

    def _used(self, call: Call) -> bool:
        return (
            call in self._accepted
            or call[1] <= self._floor
            or (call[1] <= self._first_floor and self._monotonic() < self._first_until)
        )

    def use(self, hotkey: str, nonce: int, salt: str = "") -> bool:
        """Record a verified call; False (and nothing recorded) when it was used before."""
        call = (hotkey, nonce, salt)
        with self._lock:
            # One lock for check and record: of two threads with one call, one is refused.
            if self._used(call):
                return False
            now = self._monotonic()
            self._accepted[call] = now
            self.highest = max(self.highest, nonce)
            forgotten = now - KEPT.total_seconds()
            # What is forgotten raises the floor: as old a call is refused from then on.
            while len(self._accepted) > MOST or next(iter(self._accepted.values())) < forgotten:
                (_, old, _), _ = self._accepted.popitem(last=False)
                self._floor = max(self._floor, old)
            return True

    def __len__(self) -> int:
        return len(self._accepted)


def _nanoseconds(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1e9)
