"""Notices ranks that hang.

A rank that hangs (a stopped process, a driver that does not return, a deadlock) does not end, so
nobody is told; the other ranks wait for it in their next collective. What a rank that is well does
is come to a micro-batch boundary: also when it waits for data, for a round or for an upload. There
it touches a file, once a second (:class:`Heartbeat`), and the launcher looks whether the times of
those files still change (:class:`Watchdog`); it compares none with its own clock, which may be set.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from pathlib import Path

_EVERY = 1.0  # seconds


class Heartbeat:
    """A rank calls it at each boundary."""

    def __init__(self, run_folder: Path, rank: int) -> None:
        self._path = _beat_file(run_folder, rank)
        self._next = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY
            with contextlib.suppress(OSError):  # started without a launcher
                self._path.touch()


class Watchdog:
    """``limit``: from one boundary to the next. A rank is watched from its first one on: a start
    waits for the network as long as it must."""

    def __init__(self, run_folder: Path, *, world_size: int, limit: timedelta) -> None:
        self._paths = [_beat_file(run_folder, rank) for rank in range(world_size)]
        self._limit = limit.total_seconds()
        self._seen: dict[Path, tuple[int, float]] = {}  # time of the file, when it was another's

    def hangs(self) -> bool:
        """Whether the ranks came to no boundary within the limit. Call it often."""
        return any(self._hangs(path) for path in self._paths)

    def _hangs(self, path: Path) -> bool:
        try:
            written = path.stat().st_mtime_ns
        except OSError:
            return False  # it did not come that far yet
        if self._seen.get(path, (None, 0.0))[0] != written:
            self._seen[path] = written, time.monotonic()
        return time.monotonic() - self._seen[path][1] > self._limit


def _beat_file(run_folder: Path, rank: int) -> Path:
    return run_folder / "pids" / f"rank-{rank}.beat"
