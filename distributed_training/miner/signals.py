"""The signals that stop a rank."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from distributed_training.node.start import StopNow

from . import events as ev
from .nodes import under_torchrun

_LAUNCHER = os.getppid()


def who_stops() -> str:
    """Return why SIGTERM came, as far as a rank can see: also who started it has it sent."""
    if os.getppid() != _LAUNCHER:
        return f"the launcher (pid {_LAUNCHER}) is gone"
    return "asked to stop"


class RankStop:
    """SIGTERM asks for a stop; SIGINT is the launcher's to handle (a terminal sends it to all).

    Under torchrun SIGINT and SIGHUP ask for one too. It handles them from its construction on, in
    the main thread. ``events``: rank 0's queue, in which the stop arrives as an event like any
    other.
    """

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[ev.Event] = queue.SimpleQueue()
        self.wanted = False
        self._interrupts = False
        signal.signal(signal.SIGTERM, self._on_signal)
        # torchrun passes on which of them it got.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal if under_torchrun() else signal.SIG_IGN)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let a stop raise :class:`StopNow` inside, whatever the main thread waits for there."""
        self._interrupts = True
        try:
            if self.wanted:
                raise StopNow
            yield
        finally:
            self._interrupts = False

    def _on_signal(self, number: int, frame: object) -> None:
        del number, frame
        self.wanted = True
        # With a SimpleQueue another put, in the code that the signal interrupts, does no harm.
        self.events.put(ev.StopRequested(who_stops()))
        if self._interrupts:
            self._interrupts = False  # once: the next one would cut its clean-up short
            raise StopNow
