"""How a rank hears that it is to stop."""

from __future__ import annotations

import queue
import signal

from . import events as ev


class RankStop:
    """SIGTERM asks for a stop; SIGINT is the launcher's to handle (a terminal sends it to all).

    ``events``: rank 0's queue, in which the stop arrives as an event like any other.
    """

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[ev.Event] = queue.SimpleQueue()
        self.wanted = False

    def install(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        del number, frame
        self.wanted = True
        self.events.put(ev.StopRequested("asked to stop"))
