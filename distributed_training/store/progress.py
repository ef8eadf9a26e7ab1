"""Lines about a transfer that takes minutes: how much came, how fast, how long it will take."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

EVERY = 60.0  # seconds between two lines of a transfer, at least


class Progress:
    """Count the bytes of one transfer and log a line a minute. Thread-safe.

    ``what`` begins each line: "Downloading global state of outer step 56". ``total``: bytes of all
    files; ``held``: those of them that an earlier attempt brought. ``clock`` stands still while the
    transfer is paused, so a round does not look like a slow network link.
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        held: int = 0,
        clock: Callable[[], float],
    ) -> None:
        self._what = what
        self._total = total
        self._there = held
        self._clock = clock
        self._lock = threading.Lock()
        self._since = clock(), held  # when the last line was logged, and how much was there then

    def hold(self, count: int) -> None:
        """Count bytes that an earlier attempt brought: they do not tell how fast this one is."""
        with self._lock:
            self._there += count
            at, there = self._since
            self._since = at, there + count

    def add(self, count: int) -> None:
        """Count bytes that came just now, and log a line if one is due."""
        with self._lock:
            self._there += count
            now, (at, before) = self._clock(), self._since
            if now - at < EVERY or self._there >= self._total:
                return
            rate = (self._there - before) / (now - at)
            self._since = now, self._there
        unit, name = (1e9, "GB") if self._total >= 1e8 else (1e6, "MB")
        log.info(
            "%s: %.1f of %.1f %s, %.*f MB/s, %s left",
            self._what,
            self._there / unit,
            self._total / unit,
            name,
            0 if rate >= 1e7 else 1,
            rate / 1e6,
            _duration_text((self._total - self._there) / max(rate, 1.0)),
        )


def _duration_text(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return "less than a minute"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
