"""SIGINT, SIGTERM and SIGHUP as one request to stop.

pm2 sends SIGINT, systemd SIGTERM, a closed terminal SIGHUP; all mean the same, but a SIGHUP that
``nohup`` has ignored stays ignored. The handler only notes the request. While a node still starts
it may wait long for others (a DHT, a bucket) in code that looks at no flag: there the first signal
also raises :class:`Stopped` in the main thread.
"""

from __future__ import annotations

import queue
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

    ``stop`` is set soon after the first signal, by a thread: Event.set takes a lock, which the
    interrupted code may hold, so a handler that called it could wait for itself. ``asked_at`` is
    the signal's ``time.monotonic()``, ``name`` its name, ``hurry`` turns True with a second Ctrl-C.
    Set ``interrupts`` to True while the first signal should raise Stopped as well.
    """

    def __init__(self, *, interrupts: bool = False) -> None:
        self.stop = threading.Event()
        self.interrupts = interrupts
        self.asked_at: float | None = None
        self.name = ""
        self.hurry = False
        self._old: dict[int, Any] = {}
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()  # its put() may be interrupted

    def __enter__(self) -> StopSignals:
        threading.Thread(target=self._set, name="stop-signals", daemon=True).start()
        for number in STOP_SIGNALS:
            # Under nohup SIGHUP is ignored, and a closed terminal is to end nothing.
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._wake.put(False)

    def _set(self) -> None:
        if self._wake.get():
            self.stop.set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked_at is None:
            self.asked_at, self.name = now, signal.Signals(number).name
            self._wake.put(True)
            if self.interrupts:
                raise Stopped
        elif number == signal.SIGINT and now - self.asked_at > SAME_REQUEST_SECONDS:
            self.hurry = True
