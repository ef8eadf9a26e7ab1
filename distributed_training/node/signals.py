"""SIGINT, SIGTERM and SIGHUP as one request to stop.

pm2 sends SIGINT, systemd SIGTERM, a closed terminal SIGHUP; all mean the same. The handler only
notes the request. While a node still starts it may wait long for others (a DHT, a bucket) in code
that looks at no flag: there the first signal also raises :class:`Stopped` in the main thread.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# pm2 sends a signal to the whole tree, so one request may arrive twice; a second Ctrl-C is later.
SAME_REQUEST_SECONDS = 1.0


class Stopped(BaseException):
    """The node stops; what was under way is given up.

    Like KeyboardInterrupt no Exception: a signal raises it anywhere in a start, and libraries
    (logging is one) swallow every Exception.
    """


class StopSignals:
    """A context manager for the main thread; leaving it puts the old handlers back.

    ``stop`` is set by the first signal. ``asked_at`` is its ``time.monotonic()``, ``name`` its
    name, ``hurry`` turns True with a second Ctrl-C. Set ``interrupts`` to True while the first
    signal should raise Stopped as well.
    """

    def __init__(self, *, interrupts: bool = False) -> None:
        self.stop = threading.Event()
        self.interrupts = interrupts
        self.asked_at: float | None = None
        self.name = ""
        self.hurry = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in STOP_SIGNALS:
            self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked_at is None:
            self.asked_at, self.name = now, signal.Signals(number).name
            self.stop.set()
            if self.interrupts:
                raise Stopped
        elif number == signal.SIGINT and now - self.asked_at > SAME_REQUEST_SECONDS:
            self.hurry = True
