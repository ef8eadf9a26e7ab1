"""What is measured of the machine when the metrics are written."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil


def machine_gauges(folder: Path, *, needed: int) -> Mapping[str, Callable[[], float | None]]:
    """Disk and memory. ``needed``: bytes of a snapshot in ``folder``."""

    def free() -> float | None:
        with contextlib.suppress(OSError):
            return shutil.disk_usage(folder).free
        return None

    return {
        "disk_free_bytes": free,
        "disk_needed_bytes": lambda: needed,
        "memory_bytes": _resident,
        "memory_total_bytes": lambda: psutil.virtual_memory().total,
    }


def _resident() -> float:
    """Of this process and of all it started; what they share counts for each of them."""
    here = psutil.Process()
    total = 0
    for process in (here, *here.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            total += process.memory_info().rss
    return total
