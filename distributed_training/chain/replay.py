"""Which calls were accepted before, also by the process before this one: nobody calls twice.

A nonce is the caller's clock in nanoseconds. A call is fresh while its nonce is at most some
seconds old by our clock (:func:`.auth.max_age`), and a replay when the same call was accepted
before. Both clocks are wall clocks, by protocol, and may be set at any time. So what was accepted
is remembered for much longer than it could stay fresh (``KEPT``), by a clock that nobody can set.
When a call is forgotten at last, everything as old or older is refused from then on (the floor). A
wall clock that goes an hour back and forth therefore neither lets a replay in nor keeps a new call
out.

What was accepted is lost with the process. The file tells the next one two things: the highest
nonce accepted, and whether the end was clean. After a clean end that nonce is the floor. After a
kill or a power loss the last nonces may be missing in the file, so that for the first seconds
everything is refused that could have been signed before the start. The mark of an unclean end is on
the disk before the first call is answered; no call ever waits for a disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from distributed_training.common.files import read_json_object, write_json

log = logging.getLogger(__name__)

KEPT = timedelta(hours=2)
# All hotkeys of a subnet (256) at the rate each may call (5/s) fill this in 25 s: longer than a
# call stays fresh.
MOST = 32_768
_LARGEST_FILE = 4096  # bytes

Call = tuple[str, int, str]  # hotkey, nonce, salt


class NonceMemory:
    """Replay memory. Thread-safe, except that one thread at a time saves.

    ``window``: the longest age at which any call is accepted plus ``skew``, how far a caller's
    clock may be ahead of ours. ``file`` survives the process; None: nothing does. ``clock`` is the
    wall clock in ns, ``monotonic`` seconds.
    """

    def __init__(
        self,
        *,
        window: timedelta,
        skew: timedelta,
        file: Path | None = None,
        clock: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file
        self._monotonic = monotonic
        self._lock = threading.Lock()  # taken by the event loop: never held over the disk
        self._accepted: OrderedDict[Call, float] = OrderedDict()  # when, monotonic
        self._floor = -1
        self._highest = -1
        # After an unclean end: nonces up to this are refused until then (monotonic).
        self._first_floor, self._first_until = -1, float("-inf")
        self._saved: tuple[int, bool] | None = None
        if file is not None and file.exists():
            highest, clean = self._load(file)
            now = clock()
            if highest > now + _nanoseconds(window):
                # Written while this machine's clock was ahead: as a floor it would shut all out.
                highest, clean = -1, False
            self._floor = self._highest = highest
            if not clean:
                self._first_floor = now + _nanoseconds(skew)
                self._first_until = monotonic() + window.total_seconds()

    @staticmethod
    def _load(file: Path) -> tuple[int, bool]:
        content = read_json_object(file, at_most=_LARGEST_FILE) or {}
        highest, clean = content.get("highest"), content.get("clean")
        if type(highest) is int and -1 <= highest < 1 << 63 and type(clean) is bool:
            return highest, clean
        log.warning(
            "%s is damaged, so calls signed before this start are refused for its first seconds; "
            "nothing needs to be done, the file is written anew",
            file,
        )
        return -1, False

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
            self._highest = max(self._highest, nonce)
            forgotten = now - KEPT.total_seconds()
            while len(self._accepted) > MOST or next(iter(self._accepted.values())) < forgotten:
                (_, old, _), _ = self._accepted.popitem(last=False)
                self._floor = max(self._floor, old)
            return True

    def __len__(self) -> int:
        return len(self._accepted)

    def save(self, *, clean: bool = False) -> None:
        """Write the file if it would change. ``clean``: no further call will be answered.

        A failure is logged, not raised: the memory of this process still holds.
        """
        state = (self._highest, clean)
        if self._file is None or state == self._saved:
            return
        try:
            write_json(self._file, {"highest": state[0], "clean": clean})
            self._saved = state
        except OSError as error:
            log.warning(
                "Cannot write %s (%s): calls of the last seconds could be replayed after a "
                "restart; free disk space or correct its permissions",
                self._file,
                error.strerror,
            )


def _nanoseconds(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1e9)
