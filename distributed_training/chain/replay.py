"""Which calls were accepted before, also by the process before this one: nobody calls twice.

A nonce is the caller's clock in nanoseconds. A call is fresh while its nonce is at most some
seconds old by our clock (:func:`.auth.max_age`), and a replay when the same call was accepted
before. Both clocks are wall clocks, by protocol, and may be set at any time. So what was accepted
is remembered for much longer than it could stay fresh (``KEPT``), by a clock that nobody can set.
When a call is forgotten at last, everything as old or older is refused from then on (the floor). A
wall clock that goes an hour back and forth therefore neither lets a replay in nor keeps a new call
out.

What was accepted is lost with the process. The next one is told the highest nonce accepted, and
whether the end was clean (:mod:`.kept`). After a clean end that nonce is the floor. After a kill or
a power loss the last nonces may be missing, so that for the first seconds everything is refused
that could have been signed before the start. No call ever waits for a disk.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta

from .kept import Kept

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
        """True when this call was accepted before, or may have been. Changes nothing."""
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
            if self._used(call):
                return False
            now = self._monotonic()
            self._accepted[call] = now
            self.highest = max(self.highest, nonce)
            forgotten = now - KEPT.total_seconds()
            while len(self._accepted) > MOST or next(iter(self._accepted.values())) < forgotten:
                (_, old, _), _ = self._accepted.popitem(last=False)
                self._floor = max(self._floor, old)
            return True

    def __len__(self) -> int:
        return len(self._accepted)


def _nanoseconds(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1e9)
