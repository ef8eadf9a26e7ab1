"""Events -> log lines, metrics and ``events.jsonl``.

Everything the miner says about its loop is said here. People read the log, programs the event file
(``telemetry.read_events``), monitoring the metrics; an event's fields and the lines operators
search for (``protocol/lines.py``) are an interface and stay.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, TypeVar

import psutil

from distributed_training import __version__
from distributed_training.common.exits import ExitStatus
from distributed_training.protocol import lines, names
from distributed_training.protocol.types import (
    AllReduceFault,
    Progress,
    PublicationReport,
    Revision,
    StepReport,
)
from distributed_training.store.upload_schedule import UploadSchedule
from distributed_training.telemetry import MetricsFile, record_step
from distributed_training.telemetry.trackers import Tracker

from . import events as ev
from .decide import MinerState, Mode, ignores_calls

log = logging.getLogger(__name__)

Record = Callable[..., None]  # (kind, **fields): writes an event

_T = TypeVar("_T")


class Metrics:
    """The metrics file with what other rooms count and measure; written now and then.

    ``counts``: totals by the name of the room; ``gauges``, ``by_rank``: measured when the file is
    written; ``trackers``: handed all figures after each step.
    """

    def __init__(
        self,
        *,
        file: MetricsFile,
        counts: Mapping[str, Callable[[], Mapping[str, float]]],
        gauges: Mapping[str, Callable[[], float | None]],
        by_rank: Callable[[], Mapping[str, Mapping[int, float]]] = dict,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self._file = file
        self._counts = counts
        self._gauges = gauges
        self._by_rank = by_rank
        self._trackers = trackers
        self._last_rounds: deque[tuple[int, bool]] = deque(maxlen=20)  # outer step, averaged
        for name in ("rounds", "rounds_failed", "rounds_missed", "publications_failed"):
            file.registry.add(f"{name}_total", 0)  # until then: the first one is an increase
        file.registry.labelled("build_info", "version", {__version__: 1.0})
        file.registry.set("protocol_run", names.RUN)
        file.registry.set("registered", 1)  # a start without a uid comes to no metrics

    def step(self, report: StepReport) -> None:
        record_step(self._file.registry, report)
        self._file.write(time.monotonic(), self._collect)
        for tracker in () if report.skipped else self._trackers:  # it has no number of its own
            tracker.log(report.total_inner_steps, self._file.registry.values())

    def round_ended(self, outer_step: int, *, ok: bool, seconds: float) -> None:
        registry = self._file.registry
        registry.add("rounds_total")
        registry.add("rounds_failed_total", not ok)
        self._last_rounds.append((outer_step, ok))
        registry.set("round_seconds", seconds)
        self._participated()

    def loaded(self, before: int, reached: int) -> None:
        """Outer steps that others took; rounds that failed here are counted already."""
        known = {outer_step for outer_step, _ in self._last_rounds}
        missed = [step for step in range(max(before, reached - 20), reached) if step not in known]
        self._file.registry.add("rounds_missed_total", max(0, reached - before))
        self._last_rounds.extend((step, False) for step in missed)
        self._participated()

    def epoch_seen(self, outer_step: int) -> None:
        self._file.registry.set("global_outer_step", outer_step)

    def _participated(self) -> None:
        registry, worked = self._file.registry, [ok for _, ok in self._last_rounds]
        failed = list(itertools.takewhile(lambda ok: not ok, reversed(worked)))
        registry.set("rounds_failed_in_a_row", len(failed))
        if worked:
            registry.set("round_participation_ratio", sum(worked) / len(worked))

    def publication_ended(self, report: PublicationReport) -> None:
        registry = self._file.registry
        registry.add("publications_total")
        registry.add("publications_failed_total", not report.ok)
        registry.add("uploaded_bytes_total", report.bytes_sent)

    def previewed(self, delta: float) -> None:
        self._file.registry.set("preview_loss_change", delta)

    def score_previewed(self, fields: Mapping[str, Any]) -> None:
        for name in ("random_relative", "assigned_relative", "rank", "train_share"):
            self._file.registry.set(f"score_{name}", fields.get(name))
        valid = fields.get("repo_valid")
        self._file.registry.set("score_repo_valid", None if valid is None else float(valid))

    def stopped(self, exit_status: int) -> None:
        """The last figures stay in the file: an alert tells a deregistration from a stop."""
        registered = exit_status != ExitStatus.DEREGISTERED
        self._file.registry.set("registered", registered)
        self._file.write(time.monotonic(), self._collect, at_once=True)

    def _collect(self) -> None:
        registry = self._file.registry
        for name, measure in self._gauges.items():
            registry.set(name, _unless_it_fails(measure))
        for name, values in (_unless_it_fails(self._by_rank) or {}).items():
            registry.labelled(name, "rank", {str(rank): value for rank, value in values.items()})
        for room, counts in self._counts.items():
            counted = dict(counts())
            if "connections" in counted:  # the one that may fall
                registry.set(f"{room}_connections", counted.pop("connections"))
            registry.totals(room, counted)


def _unless_it_fails(measure: Callable[[], _T]) -> _T | None:
    """Without a free descriptor /proc cannot be read, and processes end while they are looked at:
    what could not be measured is absent, and training goes on."""
    try:
        return measure()
    except (OSError, psutil.Error):
        return None


class Reporter:
    """Rank 0 only; subscribes to the event stream. ``warnings``: the step's, of diagnostics."""

    def __init__(
        self,
        *,
        record: Record,
        metrics: Metrics,
        schedule: UploadSchedule,
        warnings: Callable[[StepReport], list[str]],
        bucket: str,
        reload_timeout: timedelta,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._record = record
        self._metrics = metrics
        self._schedule = schedule
        self._warnings = warnings
        self._bucket = bucket
        self._reload_timeout = reload_timeout
        self._clock = clock
        self._round_began: float | None = None
        self._global_outer_step = 0  # when the global bucket was last looked at

    def see(self, event: ev.Event, state: MinerState) -> None:
        """``state`` is what the event found: it has not been decided on yet."""
        in_round = state.mode is Mode.AVERAGING
        match event:
            case ev.InnerStepDone(report=report):
                self._step(report)
            case ev.AllReduceCalled() if ignores_calls(state.mode):
                log.warning("An AllReduce call is ignored: this miner is %s", state.mode.value)
            case ev.PseudoGradientWritten(norm=norm):
                self._round_began = self._clock()
                log.info("%s", lines.PAUSING)
                log.info("%s", lines.AVERAGING_START)
                log.info("%s (pseudo-gradient norm %.4f)", lines.ALL_REDUCE_START, norm)
            case ev.RoundFailed() if in_round:
                self._round_failed(event, state)
            case ev.OuterStepEnded() if in_round:
                self._outer_step_ended(event, state)
            case ev.SnapshotTaken(handle=handle, progress=progress):
                log.info("%s", lines.saving_state(progress.outer_step))
                log.info("%s", lines.FULL_STATE)
                held = handle.hold_seconds
                log.info("%s: training was held for %.2f s", lines.EXTRACTED_STATE, held)
            case ev.SnapshotFailed(problem=problem):
                log.warning("%s", problem)
            case ev.SnapshotSubmitted(revision=revision, preview=preview):
                self._submitted(revision, preview)
            case ev.PublicationEnded(report=publication):
                self._publication_ended(publication)
            case ev.ScorePreviewed(fields=fields):
                log.info("%s", fields.get("line", "Score preview: without a line"))
                self._record("score_preview", **fields)
                self._metrics.score_previewed(fields)
            case ev.GlobalEpochSeen(outer_step=seen):
                self._global_outer_step = seen
                self._metrics.epoch_seen(seen)
            case ev.GlobalFetchFailed(detail=detail):
                log.warning("The global state could not be fetched (%s). Training goes on.", detail)
            case ev.LoadFailed(problem=why):
                log.warning("The global state does not fit this model (%s). Training goes on.", why)
                self._record("load_failed", problem=why)
            case ev.Loaded(outer_step=outer):
                log.info("Loaded the global state of outer step %d", outer)
                self._record("load", outer_step=outer)
                self._metrics.loaded(state.outer_step, outer)
            case ev.RolledBack(progress=Progress(outer_step=outer, inner_step=inner)):
                log.warning("Training goes on at outer step %d, inner step %d", outer, inner)
                self._record("roll_back", outer_step=outer, inner_step=inner)
            case ev.ModeChanged(before=before, after=after):
                self._record("state", before=before.value, after=after.value)
                if after is Mode.FETCHING and not state.rebase and state.fetch_target is not None:
                    log.info("%s", lines.epochs_differ(state.outer_step, state.fetch_target))
            case ev.Stopped(exit_status=status):
                log.info("Stopped (%s)", state.stop_reason)
                self._record("stop", reason=state.stop_reason, exit_status=status)
                self._metrics.stopped(status)

    def _step(self, report: StepReport) -> None:
        log.info("%s", lines.step_line(report))
        age = self._schedule.repo_age_line(self._clock())
        if report.outer_step < self._global_outer_step:
            # However young: what is published of an outer step that is over does not count.
            age += f", of outer step {report.outer_step}, validators read {self._global_outer_step}"
        log.info("%s | %s", lines.throughput_line(report), age)
        for line in self._warnings(report):
            log.warning("%s", line)
        self._record("step", **asdict(report), tokens_per_second=report.tokens_per_second)
        self._metrics.step(report)

    # --- the round -----------------------------------------------------------------------------

    def _round_failed(self, event: ev.RoundFailed, state: MinerState) -> None:
        """There is no average; training goes on with what it had."""
        fault, detail = event.fault, event.detail
        log.warning("All Reduce Failed: %s%s", fault.value, f": {detail}" if detail else "")
        if not event.began or fault is AllReduceFault.NO_GROUP:
            log.warning("%s", lines.all_reduce_failed(1))
        elif fault not in (AllReduceFault.LOCAL, AllReduceFault.CANCELLED):
            log.warning("%s", lines.all_reduce_failed(2))
        self._round_ended(state, fault=fault.name, detail=detail)

    def _outer_step_ended(self, event: ev.OuterStepEnded, state: MinerState) -> None:
        average, fault = state.averaged, ""
        assert average is not None
        if event.committed:
            reached, peers = event.outer_step, average.group_size
            log.info("%s", lines.ALL_REDUCE_FINISH)
            log.info("%s: outer step %d with %d peers", lines.ALL_REDUCE_DONE, reached, peers)
            self._record("outer_step", outer_step=reached)
        else:
            fault = AllReduceFault.LOCAL.name
            log.warning("%s (%s)", lines.all_reduce_failed(3), event.detail)
        self._round_ended(state, fault=fault, detail=event.detail)
        if event.committed and average.partial:
            log.warning(
                "Parts of the average failed: the global state is taken as the epoch's start once "
                "the validator has published it; what is trained until then is kept"
            )

    def _round_ended(self, state: MinerState, *, fault: str, detail: str) -> None:
        log.info("%s", lines.RESUMING)
        log.info("%s", lines.waiting_for_validator(self._reload_timeout))
        result, began = state.averaged, self._round_began
        seconds = 0.0 if began is None else self._clock() - began
        self._round_began = None
        self._record(
            "round",
            outer_step=state.outer_step,
            ok=not fault,
            fault=fault,
            detail=detail,
            peers=list(result.peers) if result else [],
            failed_peers=list(result.failed_peers) if result else [],
            seconds=seconds,
            matchmaking_seconds=result.matchmaking_seconds if result else None,
            transfer_seconds=result.transfer_seconds if result else None,
        )
        self._metrics.round_ended(state.outer_step, ok=not fault, seconds=seconds)

    # --- publications --------------------------------------------------------------------------

    def _submitted(self, revision: Revision, preview: ev.Previewed) -> None:
        delta, seconds = preview.delta, preview.seconds
        if delta is not None:
            log.info("%s (%.2f s)", lines.preview(delta), seconds)
            self._record("preview", revision=revision.tag, delta=delta, seconds=seconds)
            self._metrics.previewed(delta)
        log.info("%s", lines.UPLOAD_MODEL_START)
        log.info("%s", lines.uploading(self._bucket))

    def _publication_ended(self, report: PublicationReport) -> None:
        if report.ok:
            pushed = lines.pushed(report.revision, self._bucket)
            log.info("%s (%.1f MB in %.1f s)", pushed, report.bytes_sent / 1e6, report.seconds)
        else:
            log.warning("%s", lines.upload_failed(report.reason))
        fields = asdict(report) | {"revision": report.revision.tag}
        self._record("publication", **fields)
        self._metrics.publication_ended(report)
