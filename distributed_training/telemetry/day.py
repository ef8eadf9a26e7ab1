"""Sum up a day of a miner from its events, in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed_training.telemetry.events import EventFollower, finite

DAY = 86400.0  # seconds
_HISTORY_BYTES = 64 * 2**20  # bytes of events: a day with a step each second


@dataclass
class Day:
    """The figures of a span of time.

    ``rounds``: by outer step, whether this miner took it with a round of its own.
    """

    steps: int = 0
    uploads: int = 0
    failed_uploads: int = 0
    starts: int = 0
    rounds: dict[int, bool] = field(default_factory=dict)
    outer_steps: list[int] = field(default_factory=list)  # the first and the last

    def apply(self, event: Mapping[str, Any]) -> None:
        """Apply an event of this day. Raises TypeError, ValueError for a damaged one."""
        kind = event.get("kind")
        if kind == "step":
            self.steps += 1
        elif kind == "start":
            self.starts += 1
        elif kind == "publication":
            self.uploads += 1
            self.failed_uploads += not event.get("ok")
        elif kind == "round":
            # A round that failed may be tried again for the same outer step.
            number = int(event["outer_step"])
            self.rounds[number] = self.rounds.get(number, False) or bool(event.get("ok"))
        if kind in ("step", "start", "load", "outer_step"):
            number = int(event["outer_step"])
            self.outer_steps = [*self.outer_steps[:1], number]

    def line(self, number: int) -> str:
        """Return it as ``Day 3: 5,760 steps, ...``."""
        taken = sum(self.rounds.values())
        passed = self.outer_steps[-1] - self.outer_steps[0] if self.outer_steps else 0
        words = f"Day {number}: {self.steps:,} steps, {self.uploads} uploads"
        words += f" ({self.failed_uploads} failed)" if self.failed_uploads else ""
        words += f", {taken} of {max(len(self.rounds), passed)} rounds"
        restarts = max(0, self.starts - (number == 1))  # the first start is none
        return words + (f", {restarts} restart{'s' * (restarts != 1)}" if restarts else "")


def find_first_event(folder: Path) -> float | None:
    """Return the Unix time of the oldest event of a run folder."""
    with contextlib.suppress(OSError), contextlib.closing(_events(folder)) as follower:
        for event in follower.history(at_most=2**62):
            if (at := finite(event.get("time"))) is not None:
                return at
    return None


def sum_up(folder: Path, begin: float, end: float) -> Day:
    """Return the figures of the span between two Unix times."""
    day = Day()
    with contextlib.suppress(OSError), contextlib.closing(_events(folder)) as follower:
        for event in follower.history(at_most=_HISTORY_BYTES):
            at = finite(event.get("time"))
            # Lines of other versions and damaged ones cost themselves.
            with contextlib.suppress(KeyError, OverflowError, TypeError, ValueError):
                if at is not None and begin <= at < end:
                    day.apply(event)
    return day


def _events(folder: Path) -> EventFollower:
    return EventFollower(folder / "events.jsonl")
