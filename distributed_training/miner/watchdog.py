"""Notices ranks that hang.

A rank that hangs (a stopped process, a driver that does not return, a deadlock) does not end, so
nobody is told; the other ranks wait for it in their next collective. What a rank that is well does
is come to a micro-batch boundary: also when it waits for data, for a round or for an upload. There
it touches a file, once a second (:class:`Heartbeat`), and the launcher looks whether the times of
those files still change (:class:`Watchdog`); it compares none with its own clock, which may be set.

A start has no boundaries. It touches the file after each of its stages; while it asks the network,
which takes as long as it must and has timeouts of its own, a thread does so.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

_EVERY = 1.0  # seconds


class Heartbeat:
    """A rank calls it at each boundary, and after each stage of its start."""

    def __init__(self, run_folder: Path, rank: int) -> None:
        self._path = _beat_file(run_folder, rank)
        self._next = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        # Small models come to hundreds of boundaries a second.
        if now >= self._next:
            self._next = now + _EVERY
            with contextlib.suppress(OSError):  # started without a launcher
                self._path.touch()

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Count the rank as well as long as it is not stopped, however long it waits."""
        over = threading.Event()

        def beat() -> None:
            self()
            while not over.wait(_EVERY):
                self()

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


class Watchdog:
    """``limit``: from one beat of a rank to its next, and from the first look to its first."""

    def __init__(self, run_folder: Path, *, world_size: int, limit: timedelta) -> None:
        self._paths = [_beat_file(run_folder, rank) for rank in range(world_size)]
        self._limit = limit.total_seconds()
        # time of the file (None: not there yet), when it was another's
        self._seen: dict[Path, tuple[int | None, float]] = {}

    def hangs(self) -> bool:
        """Return whether a rank showed no sign of life within the limit. Call it often."""
        return any(self._hangs(path) for path in self._paths)

    def _hangs(self, path: Path) -> bool:
        written = None
        with contextlib.suppress(OSError):
            written = path.stat().st_mtime_ns
        # The file's time is compared with itself alone: a disk may have another clock.
        if path not in self._seen or self._seen[path][0] != written:
            self._seen[path] = written, time.monotonic()
        return time.monotonic() - self._seen[path][1] > self._limit


def _beat_file(run_folder: Path, rank: int) -> Path:
    return run_folder / "pids" / f"rank-{rank}.beat"
