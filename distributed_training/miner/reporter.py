"""Turn events into log lines, metrics and ``events.jsonl``.

All log lines about the miner's loop come from here. People read the log, programs the event file
(``telemetry.read_events``), monitoring the metrics. An event's fields and the lines that operators
search for (``protocol/lines.py``) are an interface and stay.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import psutil

from distributed_training import __version__
from distributed_training.common.backoff import Repeats
from distributed_training.common.files import free_bytes
from distributed_training.common.memory import host_bytes
from distributed_training.health.gpus import NvmlSampler
from distributed_training.protocol import lines
from distributed_training.protocol.types import (
    AllReduceFault,
    Progress,
    PublicationReport,
    Revision,
    StepReport,
)
from distributed_training.store.upload_schedule import UploadSchedule
from distributed_training.telemetry import MetricsFile, record_step, unix_time
from distributed_training.telemetry.trackers import Tracker

from . import events as ev
from .events import MinerState, Mode
from .round import ignores_calls
from .run_folder import INSTANCE, listening_ranks
from .state_machine import goes_back

log = logging.getLogger(__name__)

_SAY_AGAIN = 600.0  # seconds between two lines of snapshots that fail alike
_ANSWER = 60.0  # seconds that the store has for one, see global_state.py
_SLOPE_SAMPLES = 240  # a minute apart
_SLOPE_LEAST = 30  # below, warming up looks like a leak


class MachineGauges:
    """Gauges of the disk, memory and GPUs of one miner.

    ``needed``: bytes that a snapshot and a checkpoint take in ``folder``.
    """

    def __init__(self, folder: Path, *, needed: int, gpus: int) -> None:
        self._folder = folder
        self._needed = needed
        self._instance = os.environ.get(INSTANCE, "")  # as the ranks wrote it
        self._growth = Growth()
        self._cards = [card for i in range(gpus) if (card := NvmlSampler.open(i)) is not None]

    def single(self) -> Mapping[str, Callable[[], float | None]]:
        total = host_bytes()  # as the start found it: the step is to read no files for it
        return {
            "disk_free_bytes": lambda: free_bytes(self._folder),
            "disk_needed_bytes": lambda: self._needed,
            "memory_bytes": self._resident,
            "memory_growth_bytes_per_hour": self._growth.per_hour,
            "memory_total_bytes": lambda: total,
        }

    def by_rank(self) -> dict[str, dict[int, float]]:
        """Return metric, rank -> value. A rank has the number of its GPU."""
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

    def _resident(self) -> float:
        """Return the resident bytes of all ranks and of the processes around them.

        They are the children of the ranks and the process they were forked from, which is the
        parent of each (without a launcher: of this rank's tree). Shared pages count for each of
        them.
        """
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
    """Return gauges of how long validators will count the last upload, by name.

    They are the time left to its age limit and to that of its block list. ``newest``: block of that
    list; ``most_blocks``: that it may be behind the chain.
    """

    def age() -> float | None:
        return schedule.repo_age(time.monotonic())

    def behind() -> float | None:
        block = newest()
        # A chain endpoint that lags may be behind our own list.
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
        """Add a value; ``now``: seconds. One sample a minute is kept."""
        if not self._samples or now - self._samples[-1][0] >= 60:
            self._samples.append((now, value))

    def per_hour(self) -> float | None:
        """Return the growth per hour; None in the first half an hour."""
        if len(self._samples) < _SLOPE_LEAST:
            return None
        moments, values = zip(*self._samples, strict=True)
        return 3600 * statistics.linear_regression(moments, values).slope


Record = Callable[..., None]  # (kind, **fields): writes an event

_T = TypeVar("_T")


class Metrics:
    """The metrics file, with what other packages count and measure; written now and then.

    ``counts``: totals by the name of the package; ``gauges``, ``by_rank``: measured when the file
    is written; ``trackers``: handed all figures after each step.
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
        # From zero on: a counter that appears with 1 has no increase.
        self._refused = dict.fromkeys(("disk", "blocks", "list", "write", "unchecked"), 0)
        for name in ("rounds", "rounds_failed", "rounds_missed", "publications_failed"):
            file.registry.add(f"{name}_total", 0)  # until then: the first one is an increase
        file.registry.labelled("build_info", "version", {__version__: 1.0})
        for name in ("start", "last_step"):
            file.registry.set(f"{name}_timestamp_seconds", time.time())
        file.registry.set("registered", 1)  # a start that waits for a uid writes 0

    def step(self, report: StepReport) -> None:
        record_step(self._file.registry, report)
        # A skipped step counts too: the alert by it is for a loop that stands.
        self._file.registry.set("last_step_timestamp_seconds", time.time())
        self.write()
        for tracker in () if report.skipped else self._trackers:  # it has no number of its own
            tracker.log(report.total_inner_steps, self._file.registry.values())

    def write(self) -> None:
        """Write the file if it is time: also where no step ends, in a round or without data."""
        self._file.write(self._collect)

    def round_ended(self, outer_step: int, *, ok: bool, seconds: float) -> None:
        registry = self._file.registry
        registry.add("rounds_total")
        registry.add("rounds_failed_total", not ok)
        self._last_rounds.append((outer_step, ok))
        registry.set("round_seconds", seconds)
        self._participated()

    def loaded(self, before: int, reached: int) -> None:
        """Count outer steps that others took; rounds that failed here are counted already."""
        known = {outer_step for outer_step, _ in self._last_rounds}
        missed = [step for step in range(max(before, reached - 20), reached) if step not in known]
        self._file.registry.add("rounds_missed_total", max(0, reached - before))
        self._last_rounds.extend((step, False) for step in missed)
        self._participated()

    def set(self, name: str, value: float) -> None:
        self._file.registry.set(name, value)

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

    def snapshot_refused(self, kind: str) -> None:
        self._refused[kind] += 1

    def stopped(self) -> None:
        """Write the last figures, which stay in the file."""
        self._file.write(self._collect, at_once=True)

    def _collect(self) -> None:
        registry = self._file.registry
        for name, measure in self._gauges.items():
            registry.set(name, _unless_it_fails(measure))
        for name, values in (_unless_it_fails(self._by_rank) or {}).items():
            registry.labelled(name, "rank", {str(rank): value for rank, value in values.items()})
        refused = {f"refused.{kind}": count for kind, count in self._refused.items()}
        registry.totals("snapshots", refused)
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


class MissedRounds:
    """Log one WARNING for each outer step that the network took without this miner.

    The cause is that of the last call: there was none, it came when there was no pseudo-gradient,
    or its round failed here. ``published_within``: from a call until its outer step is published
    and was looked for; an older call is of another round. ``clock_fault``: see :class:`Reporter`.
    ``listens_at``: since when calls can reach this miner (monotonic), ``started``: since when it
    starts (Unix time). ``interval``: between two looks at the global bucket. Subscribes to the
    event stream.
    """

    def __init__(
        self,
        *,
        outer_step: int,
        published_within: timedelta,
        clock_fault: Callable[[], str] = str,
        listens_at: float = -math.inf,
        started: float = 0.0,
        interval: timedelta = timedelta.max,
    ) -> None:
        self._clock_fault = clock_fault
        self._known = outer_step  # the highest that was ours, or was logged
        self._within = published_within.total_seconds()
        self._listens_at, self._started = listens_at, started
        self._gap = 2 * interval.total_seconds() + _ANSWER  # longer is an outage
        self._seen_at = math.inf  # the global bucket, last
        self._outage = -math.inf, 0.0  # when the last one ended, and its seconds
        self._called_at = -math.inf
        self._cause = ""  # why the last call led to no outer step

    def on_event(self, event: ev.Event, state: MinerState) -> None:
        # At every event: a roll-back must not make an outer step of ours a missed one.
        self._known = max(self._known, state.outer_step)
        match event:
            # A call during a round is that round's, again.
            case ev.AllReduceCalled(at=at) if state.mode is not Mode.AVERAGING:
                self._called_at, self._cause = at, "its round here has not ended"
                if not ignores_calls(state):
                    return
                self._cause = (
                    f"it was called while it was {state.mode.value}, and had no pseudo-gradient of "
                    "that outer step; nothing needs to be done"
                )
            case ev.RoundFailed(fault=AllReduceFault.NO_GROUP) if state.mode is Mode.AVERAGING:
                why = self._clock_fault() or (
                    "see whether other machines reach its --dht.port (python -m "
                    "distributed_training doctor)"
                )
                self._cause = f"it was called and found no group: {why}"
            case ev.RoundFailed(fault=fault) if state.mode is Mode.AVERAGING:
                self._cause = (
                    f"it was called and the round failed here ({fault.value}): the lines of that "
                    "round and hivemind.log have more"
                )
            case ev.OuterStepEnded(committed=committed, detail=detail):
                self._cause = f"a rank could not apply the average ({detail})"
                if committed:
                    self._called_at = -math.inf
            # Nothing else is asked of the bucket while a state is fetched, which may take hours.
            case ev.GlobalFetched() | ev.GlobalFetchFailed():
                self._seen_at = math.inf
            case ev.GlobalEpochSeen(outer_step=seen, at=at):
                if at - self._seen_at > self._gap:
                    self._outage = at, at - self._seen_at
                self._seen_at = at
                # In a round the step may be our own, which the validator published before us.
                if seen > self._known and state.mode is not Mode.AVERAGING:
                    self._log(seen, at)

    def _log(self, seen: int, at: float) -> None:
        first, self._known = self._known + 1, seen
        log.warning(
            "The network took outer step %s without this miner: %s. The global state is loaded; "
            "uploads of the outer step before count for half a round period more",
            seen if seen == first else f"{first} to {seen}",
            self._cause if at - self._called_at < self._within else self._not_called(at),
        )

    def _not_called(self, at: float) -> str:
        """Say why no call came, as far as this miner can know."""
        ended, seconds = self._outage
        if at - self._listens_at < self._within:
            since = time.strftime("%H:%M:%S", time.localtime(self._started))
            return f"this miner was starting (since {since}), so no call reached it: nothing to do"
        if at - ended < self._within:
            return (
                f"no call came, and the store did not answer this machine for {seconds:.0f} s "
                "either: see its network"
            )
        return (
            "the validator did not call it: see whether other machines reach its --axon.port "
            "(python -m distributed_training doctor), and whether --axon.external_ip is right"
        )


class Reporter:
    """Rank 0 only; subscribes to the event stream.

    ``warnings``: the step's, of diagnostics. ``global_uid``: whose bucket the global one is.
    ``clock_fault``: what is wrong with this machine's clock, in words, or nothing.
    """

    def __init__(
        self,
        *,
        record: Record,
        metrics: Metrics,
        schedule: UploadSchedule,
        warnings: Callable[[StepReport], list[str]],
        bucket: str,
        global_uid: int | None,
        reload_timeout: timedelta,
        clock_fault: Callable[[], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock_fault = clock_fault
        self._record = record
        self._metrics = metrics
        self._schedule = schedule
        self._warnings = warnings
        self._bucket = bucket
        self._global_uid = global_uid
        self._reload_timeout = reload_timeout
        self._clock = clock
        self._round_began: float | None = None
        self._no_snapshot = Repeats(_SAY_AGAIN, clock=clock)
        self._global_outer_step = 0  # when the global bucket was last looked at

    def on_event(self, event: ev.Event, state: MinerState) -> None:
        """Report an event; ``state`` is the state it found, before any decision on it."""
        in_round = state.mode is Mode.AVERAGING
        match event:
            case ev.InnerStepDone(report=report):
                self._step(report)
            case ev.AllReduceCalled() if ignores_calls(state):
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
            case ev.SnapshotFailed(problem=problem, kind=kind):
                # By the kind: the problem names bytes and paths that differ each time.
                disk = kind in ("disk", "write")
                if (again := self._no_snapshot(kind) if disk else "") is not None:
                    log.warning("%s%s", problem, again)
                self._metrics.snapshot_refused(kind)
            case ev.SnapshotPutOff():
                log.info("%s", lines.STALE_LIST)
                self._metrics.snapshot_refused("list")
            case ev.Tick():
                self._metrics.write()
            case ev.SnapshotSubmitted(revision=revision, preview=preview, seconds=seconds):
                self._submitted(revision, preview)
                self._metrics.set("snapshot_ready_seconds", seconds)
            case ev.PublicationEnded(report=publication):
                self._publication_ended(publication)
            case ev.GlobalEpochSeen(outer_step=seen):
                self._global_outer_step = seen
                self._metrics.set("global_outer_step", seen)
            case ev.GlobalFetchFailed(detail=detail):
                log.warning("%s", lines.not_fetched(detail))
            case ev.LoadFailed(problem=why, awful=awful):
                if awful and goes_back(state):
                    target = state.fetch_target or 0
                    log.warning("%s", lines.awful_back(target, state.outer_step, why))
                elif awful:
                    log.warning("%s", lines.awful(self._global_uid, why))
                else:
                    log.warning(
                        "The global state does not fit this model (%s). Training goes on.", why
                    )
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
                if after is Mode.FETCHING and state.fetch_target not in (None, state.outer_step):
                    log.info("%s", lines.epochs_differ(state.outer_step, state.fetch_target))
            case ev.Stopped(exit_status=status):
                self._record("stop", reason=state.stop_reason, exit_status=status)
                self._metrics.stopped()

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
        """Report a failed round: there is no average; training goes on."""
        # The numbered lines are the public miner's: by them operators tell where a round failed.
        fault, detail = event.fault, event.detail
        if fault is AllReduceFault.NO_GROUP and (why := self._clock_fault()):
            detail = f"{detail}; {why}" if detail else why
        log.warning("All Reduce Failed: %s%s", fault.value, f": {detail}" if detail else "")
        if not event.began or fault is AllReduceFault.NO_GROUP:
            log.warning("%s", lines.all_reduce_failed(1))
        elif fault not in (AllReduceFault.LOCAL, AllReduceFault.CANCELLED):
            log.warning("%s", lines.all_reduce_failed(2))
        self._round_ended(state, fault=fault.name, detail=detail, causes=event.causes)

    def _outer_step_ended(self, event: ev.OuterStepEnded, state: MinerState) -> None:
        average, fault = state.averaged, ""
        assert average is not None
        if event.committed:
            reached, peers = event.outer_step, average.group_size
            log.info("%s", lines.ALL_REDUCE_FINISH)
            done, took = lines.ALL_REDUCE_DONE, self._round_seconds()
            log.info("%s: outer step %d with %d peers in %.1f s", done, reached, peers, took)
            self._record("outer_step", outer_step=reached)
        else:
            fault = AllReduceFault.LOCAL.name
            log.warning("%s (%s)", lines.all_reduce_failed(3), event.detail)
        self._round_ended(state, fault=fault, detail=event.detail, causes=average.causes)
        if event.committed and average.partial:
            log.warning(
                "Parts of the average failed: the global state becomes the epoch-start weights "
                "once the validator has published it; what is trained until then is kept"
            )

    def _round_ended(
        self, state: MinerState, *, fault: str, detail: str, causes: Mapping[str, str]
    ) -> None:
        log.info("%s", lines.RESUMING)
        log.info("%s", lines.waiting_for_validator(self._reload_timeout))
        result, seconds = state.averaged, self._round_seconds()
        self._round_began = None
        self._record(
            "round",
            outer_step=state.outer_step,
            ok=not fault,
            fault=fault,
            detail=detail,
            peers=list(result.peers) if result else [],
            failed_peers=list(result.failed_peers) if result else [],
            causes=dict(causes),
            seconds=seconds,
            matchmaking_seconds=result.matchmaking_seconds if result else None,
            transfer_seconds=result.transfer_seconds if result else None,
        )
        self._metrics.round_ended(state.outer_step, ok=not fault, seconds=seconds)

    def _round_seconds(self) -> float:
        """Return how long ago the round under way began."""
        return 0.0 if self._round_began is None else self._clock() - self._round_began

    # --- uploads -------------------------------------------------------------------------------

    def _submitted(self, revision: Revision, preview: ev.GradientChecked) -> None:
        delta, seconds = preview.delta, preview.seconds
        if delta is not None:
            self._record("preview", revision=revision.tag, delta=delta, seconds=seconds)
            self._metrics.set("preview_loss_change", delta)
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
