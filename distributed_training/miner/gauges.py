"""What is measured of the machine when the metrics are written."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from distributed_training.diagnostics.nvml import NvmlSampler
from distributed_training.store.upload_schedule import UploadSchedule
from distributed_training.telemetry import unix_time

from .process import INSTANCE, listening_ranks

_SLOPE_SAMPLES = 240  # a minute apart
_SLOPE_LEAST = 30  # below, warming up looks like a leak


class MachineGauges:
    """Disk, memory and GPUs of one miner. ``needed``: bytes that a snapshot and a
    checkpoint take in ``folder``."""

    def __init__(self, folder: Path, *, needed: int, gpus: int) -> None:
        self._folder = folder
        self._needed = needed
        self._instance = os.environ.get(INSTANCE, "")  # as the ranks wrote it
        self._growth = Growth()
        self._cards = [card for i in range(gpus) if (card := NvmlSampler.open(i)) is not None]

    def single(self) -> Mapping[str, Callable[[], float | None]]:
        return {
            "disk_free_bytes": self._disk_free,
            "disk_needed_bytes": lambda: self._needed,
            "memory_bytes": self._resident,
            "memory_growth_bytes_per_hour": self._growth.per_hour,
            "memory_total_bytes": lambda: psutil.virtual_memory().total,
        }

    def by_rank(self) -> dict[str, dict[int, float]]:
        """Metric, rank -> value. Rank and GPU have one number: a rank takes the GPU of its own."""
        found: dict[str, dict[int, float]] = {}
        for rank, pid in listening_ranks(self._folder, instance=self._instance).items():
            with contextlib.suppress(psutil.Error):
                memory = psutil.Process(pid).memory_info().rss
                found.setdefault("rank_memory_bytes", {})[rank] = memory
        for card in self._cards:
            sample = card.sample()
            if sample is None:
                continue
            for name, value in (
                ("rank_gpu_memory_bytes", sample.memory_used_gb * 1e9),
                ("rank_gpu_utilization_percent", sample.utilization),
                ("rank_gpu_temperature_celsius", sample.temperature),
                ("rank_gpu_power_watts", sample.power_watts),
            ):
                if value is not None:
                    found.setdefault(name, {})[card.index] = value
        return found

    def close(self) -> None:
        for card in self._cards:
            card.close()

    def _disk_free(self) -> float | None:
        with contextlib.suppress(OSError):
            return shutil.disk_usage(self._folder).free
        return None

    def _resident(self) -> float:
        """Of all ranks, what they started and what they were forked from, which is the parent of
        each (without a launcher: of this rank's tree). What they share counts for each of them."""
        top = psutil.Process()
        if self._instance:
            top = top.parent() or top
        total = 0
        for process in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                total += process.memory_info().rss
        self._growth.add(time.monotonic(), total)
        return total


def limits(
    schedule: UploadSchedule,
    *,
    newest: Callable[[], int | None],
    chain_block: Callable[[], int],
    most_blocks: Callable[[], int],
) -> dict[str, Callable[[], float | None]]:
    """How long validators will take what is published: its age, that of its block list.

    ``newest``: block of that list; ``most_blocks``: that it may be behind the chain.
    """

    def age() -> float | None:
        return schedule.repo_age(time.monotonic())

    def behind() -> float | None:
        block = newest()
        return None if block is None else max(0, chain_block() - block)

    def left(limit: float, spent: float | None) -> float | None:
        return None if spent is None else limit - spent

    return {
        "last_publication_timestamp_seconds": lambda: unix_time(schedule.published_at),
        "publication_age_seconds": age,
        "publication_age_limit_seconds": lambda: schedule.age_limit,
        "publication_seconds_left": lambda: left(schedule.age_limit, age()),
        "block_list_age_blocks": behind,
        "block_list_limit_blocks": most_blocks,
        "block_list_blocks_left": lambda: left(most_blocks(), behind()),
    }


class Growth:
    """The slope of a figure over the last four hours, by least squares."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_SLOPE_SAMPLES)

    def add(self, now: float, value: float) -> None:
        """``now``: seconds; looked at once a minute."""
        if not self._samples or now - self._samples[-1][0] >= 60:
            self._samples.append((now, value))

    def per_hour(self) -> float | None:
        """None in the first half an hour."""
        if len(self._samples) < _SLOPE_LEAST:
            return None
        moments, values = zip(*self._samples, strict=True)
        return 3600 * statistics.linear_regression(moments, values).slope
