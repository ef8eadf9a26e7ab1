"""Measure by how much this machine's clock is wrong, and against whose.

Three limits hang on it. Peers whose clocks are more than 3 s apart do not meet in the swarm, since
hivemind refuses the other's entries in its DHT. Calls are refused that were signed 4 s ahead or 10
s ago. Stores refuse requests that are 15 minutes off. So a wrong clock looks like a closed port, a
wrong key or an empty network, and must be named before those.

The store's ``Date`` comes first, since the store mostly runs on another machine. Without it the
chain's clock counts: a registry's to a second, a public chain's to the time of a block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import httpx

from distributed_training.chain.base import Chain
from distributed_training.common.http import PAST_CACHES, answered_at
from distributed_training.common.transports import Transport
from distributed_training.config import Config
from distributed_training.store.s3 import endpoint_of

log = logging.getLogger(__name__)

#: Seconds between two peers' clocks from which they do not meet in the swarm.
LIMIT = 3.0
#: Two peers that are wrong by this in opposite directions are at the limit.
WARN = LIMIT / 2
REMEDY = "timedatectl set-ntp true; then timedatectl shows 'synchronized: yes'"
INTERVAL = timedelta(minutes=1)
_TIMEOUT = timedelta(seconds=5)
_OLDEST = timedelta(minutes=2)  # age of the chain's last answer

# OSError: certificates that cannot be read.
_SILENT = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, KeyError, OverflowError)


class ClockUnknown(RuntimeError):
    """The store gives no time; the text has the reason."""


@dataclass(frozen=True)
class Offset:
    """The seconds by which this machine's clock is ahead of ``against``, give or take ``error``.

    A clock that is given in whole seconds is assumed to be in the middle of a second.
    """

    seconds: float
    error: float
    against: str

    @property
    def sure(self) -> float:
        """The seconds by which it is wrong at least."""
        return max(0.0, abs(self.seconds) - self.error)

    def __str__(self) -> str:
        side = "ahead of" if self.seconds > 0 else "behind"
        return f"{abs(self.seconds):.1f} s {side} {self.against}"


def store_offset(config: Config) -> Offset:
    """Compare this machine's clock with the store's. Raises ClockUnknown."""
    try:
        with httpx.Client(
            transport=Transport(), timeout=_TIMEOUT.total_seconds(), headers=PAST_CACHES
        ) as client:
            began = time.time()
            reply = client.head(endpoint_of(config.store))
            ended = time.time()
        theirs, cached = answered_at(reply.headers)
    except _SILENT as error:
        raise ClockUnknown(f"the store does not tell its time ({error})") from None
    if cached:
        raise ClockUnknown("a cache before the store answers in its place")
    theirs += 0.5  # whole seconds
    # The store wrote it between the two: half of the way there and back is taken off.
    return Offset((began + ended) / 2 - theirs, (ended - began) / 2, "the store's")


def chain_offset(chain: Chain) -> Offset | None:
    """Compare this machine's clock with the chain's; None if that is not known now."""
    theirs = chain.clock()
    if theirs is None or chain.age() > _OLDEST:
        return None
    error = chain.CLOCK_LAG / 2
    return Offset(time.time() - theirs - error, error, chain.CLOCK)


def measure_offset(config: Config, chain: Chain) -> Offset | None:
    """Return the offset from the store's clock, or else the chain's; None if neither has one."""
    try:
        return store_offset(config)
    except ClockUnknown:
        return chain_offset(chain)


class ClockWatch:
    """Measures once a minute in a thread of its own, and logs when the clock goes wrong or right.

    Close it.
    """

    def __init__(
        self, measure: Callable[[], Offset | None], interval: timedelta = INTERVAL
    ) -> None:
        self._measure = measure
        self._interval = interval.total_seconds()
        self._newest: tuple[Offset, float] | None = None  # and the clock ahead of the time awake
        self._wrong = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clock", daemon=True)
        self._thread.start()

    def offset(self) -> Offset | None:
        """Return the newest offset, corrected for later changes of the clock; None before that."""
        if (newest := self._newest) is None:
            return None
        found, ahead = newest
        return replace(found, seconds=found.seconds + _ahead_of_uptime() - ahead)

    def seconds(self) -> float | None:
        """Return the same for the metrics."""
        found = self.offset()
        return None if found is None else found.seconds

    def fault(self) -> str:
        """Return the cause that a round without a group may have here; empty: the clock is right.

        It ends a line that says what failed.
        """
        found = self.offset()
        if found is None or found.sure < WARN:
            return ""
        return (
            f"this machine's clock is {found}, and peers more than {LIMIT:.0f} s apart find no "
            "group: see whether timedatectl says 'synchronized: yes'"
        )

    def close(self) -> None:
        """End the thread; a measurement that runs ends by itself. Idempotent."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            ahead = _ahead_of_uptime()
            found = self._measure()
            # The clock was set meanwhile: the next measurement is whole.
            if found is not None and abs(_ahead_of_uptime() - ahead) < WARN:
                self._newest = found, ahead
                if found.sure >= WARN and not self._wrong:
                    self._wrong = True
                    log.warning(
                        "This machine's clock is %s: from %.0f s on no round finds a group, and "
                        "signed calls are refused; set it (timedatectl set-ntp true)",
                        found,
                        LIMIT,
                    )
                # Well below: an offset near the limit comes out a second more or less each minute.
                elif found.sure < WARN / 2 and self._wrong:
                    self._wrong = False
                    log.info("This machine's clock is right again: %s", found)
            self._stop.wait(self._interval)


def _ahead_of_uptime() -> float:
    """Return the seconds that the clock is ahead of the time since boot, also spent asleep."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
