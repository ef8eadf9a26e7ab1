"""Turn events into metrics, and measure the machine for them."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import psutil

from distributed_training import __version__
from distributed_training.common.files import free_bytes
from distributed_training.common.memory import host_bytes
from distributed_training.common.processes import members, tree_of
from distributed_training.health.gpus import NvmlSampler
from distributed_training.protocol.types import Base
from distributed_training.telemetry import MetricsFile, record_step

from . import events as ev
from .events import MinerState
from .run_folder import listening_ranks

_T = TypeVar("_T")


class MachineGauges:
    """Gauges of the disk, memory and GPUs of one miner.

    ``needed``: bytes that an upload, a checkpoint and the reserve take in ``folder``.
    """

    def __init__(self, folder: Path, *, needed: int, gpus: int) -> None:
        self._folder = folder
        self._needed = needed
        self._cards = [card for i in range(gpus) if (card := NvmlSampler.open(i)) is not None]

    def single(self) -> Mapping[str, Callable[[], float | None]]:
        total = host_bytes()  # as the start found it: the step is to read no files for it
        return {
            "disk_free_bytes": lambda: free_bytes(self._folder),
            "disk_needed_bytes": lambda: self._needed,
            "memory_bytes": self._resident,
            "memory_total_bytes": lambda: total,
        }

    def by_rank(self) -> dict[str, dict[int, float]]:
        """Return metric, rank -> value. A rank has the number of its GPU."""
        found: dict[str, dict[int, float]] = {}
        for rank, process in listening_ranks(self._folder).items():
            with contextlib.suppress(psutil.Error):
                memory = psutil.Process(process.pid).memory_info().rss
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

    def _resident(self) -> float:
        """Return the resident bytes of all ranks and of what they have started.

        Shared pages count for each process.
        """
        ranks = [rank.pid for rank in listening_ranks(self._folder).values()]
        total = 0
        for process in members(ranks) or tree_of(os.getpid()):
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                total += process.memory_info().rss
        return total


class Metrics:
    """The metrics file, with what other packages count and measure; subscribes to the events.

    ``counts``: totals by the name of the package; ``gauges``, ``by_rank``: measured when the file
    is written. ``joined``: whether an upload was
    ever begun; rounds before that are none that this miner missed.
    """

    def __init__(
        self,
        *,
        file: MetricsFile,
        counts: Mapping[str, Callable[[], Mapping[str, float]]],
        gauges: Mapping[str, Callable[[], float | None]],
        by_rank: Callable[[], Mapping[str, Mapping[int, float]]] = dict,
        joined: Callable[[], bool] = lambda: True,
    ) -> None:
        self._file = file
        self._joined = joined
        self._counts = counts
        self._gauges = gauges
        self._by_rank = by_rank
        self._last_rounds: deque[tuple[int, bool]] = deque(maxlen=20)  # outer step, merged
        # From zero on: a counter that appears with 1 has no increase.
        self._skipped = {"disk": 0, "steps": 0}  # uploads
        for name in ("rounds", "rounds_failed", "rounds_missed", "publications_failed"):
            file.registry.add(f"{name}_total", 0)  # until then: the first one is an increase
        file.registry.labelled("build_info", "version", {__version__: 1.0})
        for name in ("start", "last_step"):
            file.registry.set(f"{name}_timestamp_seconds", time.time())
        file.registry.set("registered", 1)  # a start without a uid writes 0

    def on_event(self, event: ev.Event, state: MinerState) -> None:
        registry = self._file.registry
        match event:
            case ev.InnerStepDone(report=report):
                record_step(registry, report)
                # A skipped step counts too: the alert by it is for a loop that stands.
                registry.set("last_step_timestamp_seconds", time.time())
                self._file.write(self._gather_figures)
            case ev.Tick():  # also where no step ends, in a round or without data
                self._file.write(self._gather_figures)
            case ev.OuterStepEnded(committed=ok, outer_step=reached) if (
                state.update is not None and self._joined()
            ):
                # Whoever applied an update without a share in it took no part.
                self._count_round(state.outer_step, ok and state.update.base is Base.MERGED)
                registry.add("rounds_missed_total", max(0, reached - state.outer_step - 1))
            case ev.UploadEnded(cause=problem, size=size):
                registry.add("publications_total")
                registry.add("publications_failed_total", bool(problem))
                registry.add("uploaded_bytes_total", size)
                if not problem:
                    registry.set("last_publication_timestamp_seconds", time.time())
            case ev.UploadSkipped(kind=kind):
                self._skipped[kind] += 1
            case ev.Stopped():  # the last figures, which stay in the file
                self._file.write(self._gather_figures, at_once=True)

    def _count_round(self, outer_step: int, took_part: bool) -> None:
        registry = self._file.registry
        registry.add("rounds_total")
        registry.add("rounds_failed_total", not took_part)
        self._last_rounds.append((outer_step, took_part))
        self._set_participation()

    def _set_participation(self) -> None:
        registry, worked = self._file.registry, [ok for _, ok in self._last_rounds]
        failed = list(itertools.takewhile(lambda ok: not ok, reversed(worked)))
        registry.set("rounds_failed_in_a_row", len(failed))
        if worked:
            registry.set("round_participation_ratio", sum(worked) / len(worked))

    def _gather_figures(self) -> None:
        registry = self._file.registry
        for name, measure in self._gauges.items():
            registry.set(name, _unless_it_fails(measure))
        for name, values in (_unless_it_fails(self._by_rank) or {}).items():
            registry.labelled(name, "rank", {str(rank): value for rank, value in values.items()})
        refused = {f"refused.{kind}": count for kind, count in self._skipped.items()}
        registry.totals("uploads", refused)
        for package, counts in self._counts.items():
            counted = dict(counts())
            if "connections" in counted:  # the one that may fall
                registry.set(f"{package}_connections", counted.pop("connections"))
            registry.totals(package, counted)


def _unless_it_fails(measure: Callable[[], _T]) -> _T | None:
    """Return a measurement, or None if it cannot be made: the metric is absent then."""
    try:
        return measure()
    # Without a free descriptor /proc cannot be read, and processes end while they are read.
    except (OSError, psutil.Error):
        return None
