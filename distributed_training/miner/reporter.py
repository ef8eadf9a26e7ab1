"""Turn events into log lines, ``events.jsonl`` and metrics, and measure the machine for them.

All log lines about the miner's loop come from here. People read the log, programs read the event
file (``telemetry.read_events``), and monitoring reads the metrics file. The events' fields and the
lines that operators search for (``protocol/lines.py``) are a public interface and must not change.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import psutil

from distributed_training import __version__
from distributed_training.common.backoff import Repeats
from distributed_training.common.files import free_bytes
from distributed_training.common.memory import host_bytes
from distributed_training.common.processes import members, tree_of
from distributed_training.health.gpus import SAMPLE_PATIENCE, sample_gpu
from distributed_training.protocol import lines
from distributed_training.protocol.types import Base, Progress, Update
from distributed_training.telemetry.metrics import MetricsFile, record_step

from . import events as ev
from .events import MinerState, Mode
from .rounds import uploads_for
from .run_folder import listening_ranks

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_SAY_AGAIN = 600.0  # seconds between two log lines about uploads that do not fit on the disk

_FATES = {
    Base.MERGED: "our upload was merged",
    Base.REFUSED: "our upload was refused",
    Base.KEPT: "our upload was not merged",
}

Record = Callable[..., None]  # (kind, **fields): writes an event


class Reporter:
    """Reports rank 0's events. A round lasts from a close to the outer step.

    ``expect_gpu``: whether to warn about a step that used no GPU. ``bucket``: the bucket that
    uploads go to. ``joined``: returns whether an upload was ever begun; a close before that comes
    too early, which is no fault. ``upload_from``: returns how many inner steps an outer step needs
    before its first upload.
    """

    def __init__(
        self,
        *,
        record: Record,
        expect_gpu: bool,
        bucket: str,
        clock: Callable[[], float] = time.monotonic,
        joined: Callable[[], bool] = lambda: True,
        upload_from: Callable[[], int] = lambda: 0,
    ) -> None:
        self._joined = joined
        self._upload_from = upload_from
        self._record = record
        self._expect_gpu = expect_gpu
        self._bucket = bucket
        self._clock = clock
        self._no_room = Repeats(_SAY_AGAIN, clock=clock)
        self._mode = Mode.TRAINING
        self._round_began: float | None = None
        self.round_seconds: float | None = None  # duration of the last round
        self.step_level = logging.INFO  # log level of the lines about a step

    def on_event(self, event: ev.Event, state: MinerState) -> None:
        """Report an event; ``state`` is the state before the event is decided on."""
        if state.mode is not self._mode:
            self._record("state", before=self._mode.value, after=state.mode.value)
            self._mode = state.mode
        match event:
            case ev.InnerStepDone(report=report):
                log.log(self.step_level, "%s", lines.step_line(report))
                log.log(self.step_level, "%s", lines.throughput_line(report))
                for line in lines.step_warnings(report, expect_gpu=self._expect_gpu):
                    log.warning("%s", line)
                tokens_per_second = report.tokens_per_second
                self._record("step", **asdict(report), tokens_per_second=tokens_per_second)
            case ev.UploadSkipped(problem=problem, kind=kind):
                # Compare the kind, since the problem names bytes and paths that differ each time.
                early = kind == "steps" and not self._joined()
                if (again := self._no_room() if kind == "disk" else "") is not None:
                    log.log(logging.INFO if early else logging.WARNING, "%s%s", problem, again)
                cause = f"no room: {problem}" if kind == "disk" else problem
                self._record("skipped", outer_step=state.outer_step, cause=cause)
            case ev.RolledBack(progress=Progress(outer_step=outer, inner_step=inner)):
                log.warning("Training continues at outer step %d, inner step %d", outer, inner)
                self._record("roll_back", outer_step=outer, inner_step=inner)
            case ev.CloseReached(close=close):
                self._round_began = self._clock()
                self._record("close", outer_step=close.outer_step, serial=close.serial)
                steps, least = state.inner_step, self._upload_from()
                if steps < least and uploads_for(state, close):
                    level = logging.WARNING if self._joined() else logging.INFO
                    log.log(level, lines.UPLOAD_BLOCKED, steps, least)
            case ev.UploadBegun(close=close, handle=handle, progress=progress) if close.serial:
                log.info(lines.SAVING_STATE, close.outer_step)
                held = handle.hold_seconds
                log.info("%s", lines.FULL_STATE)
                log.info("%s: training was held for %.2f s", lines.EXTRACTED_STATE, held)
                self._record(
                    "upload",
                    outer_step=close.outer_step,
                    serial=close.serial,
                    inner_step=progress.inner_step,
                    seconds=held,
                )
            case ev.CheckpointBegun(outer_step=outer, seconds=held):
                self._record("checkpoint", outer_step=outer, seconds=held)
            case ev.UploadWritten():
                log.info("%s", lines.UPLOAD_MODEL_START)
                log.info(lines.UPLOADING, self._bucket)
            case ev.UploadEnded(close=close, cause=problem):
                # Whatever prevents a progress upload also causes a warning at the close.
                level = logging.WARNING if close.serial else logging.INFO
                if problem:
                    log.log(level, lines.UPLOAD_FAILED, problem)
                else:
                    pushed = lines.pushed(close.tag, self._bucket)
                    log.info("%s (%.1f MB in %.1f s)", pushed, event.size / 1e6, event.seconds)
                self._record(
                    "publication",
                    revision=close.tag,
                    ok=not problem,
                    seconds=event.seconds,
                    bytes_sent=event.size,
                    reason=problem,
                    finished_at=time.time(),
                )
            case ev.OuterStepEnded() if state.update is not None:
                self._report_round(event, state, state.update)
            # If the cause is empty, a recovery has settled it.
            case ev.NetworkDiffers(cause=cause, forked=True):
                self._record("fork", cause=cause)
            case ev.Stopped(exit_status=status):
                self._record("stop", reason=state.stop_reason, exit_status=status)

    def _report_round(self, event: ev.OuterStepEnded, state: MinerState, update: Update) -> None:
        """Report whether the update was applied, and what became of our upload."""
        began, reached, word = self._round_began, event.outer_step, ""
        if update.whole:
            log.info("Whole weights in place of updates: %s", update.whole)
        if not event.committed:
            log.warning("%s (%s)", lines.all_reduce_failed(3), event.detail)
        else:
            self._round_began = None
            self.round_seconds = None if began is None else self._clock() - began
            fate = _FATES[update.base] + (f"; {update.cause}" if update.cause else "")
            word = _FATES[update.base].removeprefix("our upload was ")
            if update.base is Base.KEPT and not update.cause:
                fate = "no upload of ours"
                word = "missed" if self._joined() else "too early"
            log.log(
                logging.WARNING if update.base is Base.REFUSED else logging.INFO,
                "%s: outer step %d applied; training was held for %.2f s; %s",
                lines.ALL_REDUCE_DONE,
                reached,
                event.seconds,
                fate,
            )
            if event.dropped:
                log.warning("Dropped: %s", event.dropped)
            self._record("outer_step", outer_step=reached)
        self._record(
            "round",
            outer_step=state.outer_step,
            ok=event.committed,
            fault="" if event.committed else "LOCAL",
            detail=event.detail or update.cause,
            base=update.base.value,
            fate=word,
            whole=bool(update.whole),
            seconds=event.seconds,
        )


# --- metrics --------------------------------------------------------------------------------------


def machine_gauges(folder: Path, *, needed: int) -> Mapping[str, Callable[[], float | None]]:
    """Return the gauges of one miner's disk and memory.

    ``needed``: bytes that an upload, a checkpoint and the reserve take in ``folder``.
    """
    total = host_bytes()  # read once at the start, so that no step reads files for it
    return {
        "disk_free_bytes": lambda: free_bytes(folder),
        "disk_needed_bytes": lambda: needed,
        "memory_bytes": lambda: _resident(folder),
        "memory_total_bytes": lambda: total,
    }


def gauges_by_rank(folder: Path, *, gpus: int) -> dict[str, dict[int, float]]:
    """Return metric -> rank -> value. A rank has the same number as its GPU."""
    found: dict[str, dict[int, float]] = {}
    for rank, process in listening_ranks(folder).items():
        with contextlib.suppress(psutil.Error):
            memory = psutil.Process(process.pid).memory_info().rss
            found.setdefault("rank_memory_bytes", {})[rank] = memory
    for rank in range(gpus):
        if (sample := sample_gpu(rank, patience=SAMPLE_PATIENCE)) is None:
            continue
        for name, value in (
            ("rank_gpu_memory_bytes", sample.memory_used_gb * 1e9),
            ("rank_gpu_utilization_percent", sample.utilization),
            ("rank_gpu_temperature_celsius", sample.temperature),
            ("rank_gpu_power_watts", sample.power_watts),
        ):
            if value is not None:
                found.setdefault(name, {})[rank] = value
    return found


def _resident(folder: Path) -> float:
    """Return the resident bytes of all ranks and of the processes that they have started.

    Shared memory counts once for each process.
    """
    ranks = [rank.pid for rank in listening_ranks(folder).values()]
    total = 0
    for process in members(ranks) or tree_of(os.getpid()):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            total += process.memory_info().rss
    return total


class Metrics:
    """Keeps the metrics file, with what other packages count and measure.

    ``counts``: totals by package name; ``gauges``, ``by_rank``: measured when the file is written.
    ``joined``: returns whether an upload was ever begun; earlier rounds do not count as missed.
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
        self._last_rounds: deque[bool] = deque(maxlen=20)  # whether each merged our upload
        # Begin with 0, since a counter that first appears with 1 shows no increase.
        self._skipped = {"disk": 0, "steps": 0}  # skipped uploads, by kind
        for name in ("rounds", "rounds_failed", "rounds_missed", "publications_failed"):
            # Begin with 0 here too.
            file.registry.add(f"{name}_total", 0)
        file.registry.labelled("build_info", "version", {__version__: 1.0})
        for name in ("start", "last_step"):
            file.registry.set(f"{name}_timestamp_seconds", time.time())
        file.registry.set("registered", 1)  # a start without a uid writes 0

    def on_event(self, event: ev.Event, state: MinerState) -> None:
        registry = self._file.registry
        match event:
            case ev.InnerStepDone(report=report):
                record_step(registry, report)
                # A skipped step counts too: the alert on this metric is for a loop that stopped.
                registry.set("last_step_timestamp_seconds", time.time())
                self._file.write(self._gather_figures)
            case ev.Tick():  # ticks come even while no step ends, as during a round or without data
                self._file.write(self._gather_figures)
            case ev.OuterStepEnded(committed=ok, outer_step=reached) if (
                state.update is not None and self._joined()
            ):
                # A miner that applied an update without its own upload took no part in the round.
                took_part = ok and state.update.base is Base.MERGED
                registry.add("rounds_total")
                registry.add("rounds_failed_total", not took_part)
                self._last_rounds.append(took_part)
                failed = list(itertools.takewhile(lambda ok: not ok, reversed(self._last_rounds)))
                registry.set("rounds_failed_in_a_row", len(failed))
                registry.set("round_participation_ratio", fmean(self._last_rounds))
                registry.add("rounds_missed_total", max(0, reached - state.outer_step - 1))
            case ev.UploadEnded(cause=problem, size=size):
                registry.add("publications_total")
                registry.add("publications_failed_total", bool(problem))
                registry.add("uploaded_bytes_total", size)
                if not problem:
                    registry.set("last_publication_timestamp_seconds", time.time())
            case ev.UploadSkipped(kind=kind):
                self._skipped[kind] += 1
            case ev.Stopped():  # write the last figures, which stay in the file
                self._file.write(self._gather_figures, at_once=True)

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
            if "connections" in counted:  # the only one that may decrease
                registry.set(f"{package}_connections", counted.pop("connections"))
            registry.totals(package, counted)


def _unless_it_fails(measure: Callable[[], _T]) -> _T | None:
    """Return a measurement, or None if it fails; then the metric is absent."""
    try:
        return measure()
    # /proc cannot be read without a free file descriptor, and a process may end while it is read.
    except (OSError, psutil.Error):
        return None
