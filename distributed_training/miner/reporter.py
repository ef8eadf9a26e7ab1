"""Turn events into log lines and ``events.jsonl``, by the network's exchange.

All log lines about the miner's loop come from here. People read the log, programs the event file
(``telemetry.read_events``), monitoring the metrics (:mod:`.metrics`). An event's fields and the
lines that operators search for (``protocol/lines.py``) are an interface and stay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from distributed_training.common.backoff import Repeats
from distributed_training.protocol import lines
from distributed_training.protocol.types import (
    AllReduceFault,
    Base,
    Progress,
    StepReport,
    Update,
)
from distributed_training.store.upload_schedule import UploadSchedule

from . import events as ev
from .events import MinerState, Mode
from .round import ignores_calls
from .state_machine import goes_back

log = logging.getLogger(__name__)

_SAY_AGAIN = 600.0  # seconds between two lines of snapshots that fail alike

_FATES = {
    Base.MERGED: "our upload was merged",
    Base.REFUSED: "our upload was refused",
    Base.KEPT: "our upload was not merged",
}

Record = Callable[..., None]  # (kind, **fields): writes an event


class LoopReporter:
    """Report what the loop of either exchange does.

    ``warnings``: the step's, of diagnostics. ``bucket``: that uploads go to. ``global_uid``: whose
    global state it loads. ``joined``: whether an upload was ever begun; a close that comes before
    is too early, and no fault.
    """

    def __init__(
        self,
        *,
        record: Record,
        warnings: Callable[[StepReport], list[str]],
        bucket: str,
        global_uid: int | None,
        clock: Callable[[], float] = time.monotonic,
        joined: Callable[[], bool] = lambda: True,
    ) -> None:
        self._joined = joined
        self._record = record
        self._warnings = warnings
        self._bucket = bucket
        self._global_uid = global_uid
        self._clock = clock
        self._no_snapshot = Repeats(_SAY_AGAIN, clock=clock)
        self._round_began: float | None = None
        self.round_seconds: float | None = None  # of the last round
        self.step_level = logging.INFO  # of the lines of a step

    def on_event(self, event: ev.Event, state: MinerState) -> None:
        """Report an event; ``state`` is the state it found, before any decision on it."""
        match event:
            case ev.InnerStepDone(report=report):
                log.log(self.step_level, "%s", lines.step_line(report))
                line = lines.throughput_line(report)
                log.log(self.step_level, "%s%s", line, self._note(report))
                for line in self._warnings(report):
                    log.warning("%s", line)
                tokens_per_second = report.tokens_per_second
                self._record("step", **asdict(report), tokens_per_second=tokens_per_second)
            case ev.SnapshotFailed(problem=problem, kind=kind):
                # By the kind: the problem names bytes and paths that differ each time.
                disk = kind in ("disk", "write")
                early = kind == "blocks" and not self._joined()
                if (again := self._no_snapshot(kind) if disk else "") is not None:
                    log.log(logging.INFO if early else logging.WARNING, "%s%s", problem, again)
            case ev.GlobalFetchFailed(detail=detail):
                log.warning("%s", lines.not_fetched(detail))
            case ev.LoadFailed(problem=why, awful=awful):
                if awful and goes_back(state):
                    target = state.fetch_target or 0
                    log.warning("%s", lines.worse_weights_back(target, state.outer_step, why))
                elif awful:
                    log.warning("%s", lines.worse_weights(self._global_uid, why))
                else:
                    log.warning(
                        "The global state does not fit this model (%s). Training continues.", why
                    )
                self._record("load_failed", problem=why)
            case ev.Loaded(outer_step=outer):
                log.info("Loaded the global state of outer step %d", outer)
                self._record("load", outer_step=outer)
            case ev.RolledBack(progress=Progress(outer_step=outer, inner_step=inner)):
                log.warning("Training continues at outer step %d, inner step %d", outer, inner)
                self._record("roll_back", outer_step=outer, inner_step=inner)
            case ev.ModeChanged(before=before, after=after):
                self._record("state", before=before.value, after=after.value)
                if after is Mode.FETCHING and state.fetch_target not in (None, state.outer_step):
                    log.info("%s", lines.epochs_differ(state.outer_step, state.fetch_target))
            case ev.Stopped(exit_status=status):
                self._record("stop", reason=state.stop_reason, exit_status=status)

    def _note(self, report: StepReport) -> str:
        """Return what stands behind the throughput of a step."""
        del report
        return ""

    def _report_upload(self, tag: str, problem: str | None, size: int, seconds: float) -> None:
        """Report the end of an upload of ``size`` bytes, or the problem with it."""
        if problem is not None:
            log.warning(lines.UPLOAD_FAILED, problem)
        else:
            pushed = lines.pushed(tag, self._bucket)
            log.info("%s (%.1f MB in %.1f s)", pushed, size / 1e6, seconds)


class Reporter(LoopReporter):
    """Rank 0 of a network that averages over hivemind; subscribes to the event stream.

    ``judged_step``: the outer step whose uploads validators judge now, as far as it is known;
    ``uploaded_step``: the outer step of the newest upload when this process started;
    ``clock_fault``: describes the fault of this machine's clock, if any. For the rest see
    :class:`LoopReporter`.
    """

    def __init__(
        self,
        *,
        schedule: UploadSchedule,
        reload_timeout: timedelta,
        judged_step: Callable[[], int | None],
        uploaded_step: int | None = None,
        clock_fault: Callable[[], str] = str,
        **of_loop: Any,
    ) -> None:
        super().__init__(**of_loop)
        self._clock_fault = clock_fault
        self._judged_step = judged_step
        self._uploaded_step = uploaded_step
        self._schedule = schedule
        self._reload_timeout = reload_timeout

    def on_event(self, event: ev.Event, state: MinerState) -> None:
        """Report an event; ``state`` is the state it found, before any decision on it."""
        match event:
            case ev.AllReduceCalled() if ignores_calls(state):
                log.warning("An AllReduce call is ignored: this miner is %s", state.mode.value)
            case ev.PseudoGradientWritten(norm=norm):
                self._round_began = self._clock()
                log.info("%s", lines.PAUSING)
                log.info("%s", lines.AVERAGING_START)
                trained = "" if norm else ": nothing is trained yet, so it only takes the average"
                log.info("%s (pseudo-gradient norm %.4f)%s", lines.ALL_REDUCE_START, norm, trained)
            case ev.RoundFailed() | ev.OuterStepEnded() if state.mode is Mode.AVERAGING:
                self._report_round(event, state)
            case ev.SnapshotTaken(handle=handle, progress=progress):
                log.info(lines.SAVING_STATE, progress.outer_step)
                log.info("%s", lines.FULL_STATE)
                held = handle.hold_seconds
                log.info("%s: training was held for %.2f s", lines.EXTRACTED_STATE, held)
            case ev.SnapshotPutOff():
                log.info("%s", lines.STALE_LIST)
            case ev.SnapshotSubmitted(revision=revision, preview=preview):
                delta, seconds = preview.delta, preview.seconds
                if delta is not None:
                    self._record("preview", revision=revision.tag, delta=delta, seconds=seconds)
                log.info("%s", lines.UPLOAD_MODEL_START)
                log.info(lines.UPLOADING, self._bucket)
            case ev.PublicationEnded(report=upload):
                tag, problem = upload.revision.tag, None if upload.ok else upload.reason
                self._report_upload(tag, problem, upload.bytes_sent, upload.seconds)
                self._record("publication", **asdict(upload) | {"revision": tag})
                if upload.ok:
                    self._uploaded_step = upload.revision.outer_step
            case _:
                super().on_event(event, state)

    def _note(self, report: StepReport) -> str:
        del report  # training may have reached an outer step without an upload
        age = self._schedule.repo_age_line(self._clock())
        uploaded, judged = self._uploaded_step, self._judged_step()
        if uploaded is not None and judged is not None and uploaded < judged:
            # However young: what is uploaded of an outer step that is over counts no more.
            age += f", of outer step {uploaded}, validators read {judged}"
        return f" | {age}"

    def _report_round(self, event: ev.RoundFailed | ev.OuterStepEnded, state: MinerState) -> None:
        """Report the end of a round; training continues."""
        # The numbered lines are the public miner's: by them operators tell where a round failed.
        result, detail, fault = state.averaged, event.detail, ""
        began = self._round_began
        seconds = 0.0 if began is None else self._clock() - began
        self._round_began, self.round_seconds = None, seconds
        if isinstance(event, ev.RoundFailed):
            fault = event.fault.name
            if event.fault is AllReduceFault.NO_GROUP and (why := self._clock_fault()):
                detail = f"{detail}; {why}" if detail else why
            log.warning(
                "All Reduce Failed: %s%s", event.fault.value, f": {detail}" if detail else ""
            )
            if not event.began or event.fault is AllReduceFault.NO_GROUP:
                log.warning("%s", lines.all_reduce_failed(1))
            elif event.fault not in (AllReduceFault.LOCAL, AllReduceFault.CANCELLED):
                log.warning("%s", lines.all_reduce_failed(2))
        elif event.committed and result is not None:
            reached, peers = event.outer_step, result.group_size
            log.info("%s", lines.ALL_REDUCE_FINISH)
            done = lines.ALL_REDUCE_DONE
            log.info("%s: outer step %d with %d peers in %.1f s", done, reached, peers, seconds)
            self._record("outer_step", outer_step=reached)
        else:
            fault = AllReduceFault.LOCAL.name
            log.warning("%s (%s)", lines.all_reduce_failed(3), detail)
        log.info("%s", lines.RESUMING)
        log.info(lines.WAITING_FOR_VALIDATOR, self._reload_timeout.total_seconds())
        causes = event.causes if isinstance(event, ev.RoundFailed) else result and result.causes
        self._record(
            "round",
            outer_step=state.outer_step,
            ok=not fault,
            fault=fault,
            detail=detail,
            peers=list(result.peers) if result else [],
            failed_peers=list(result.failed_peers) if result else [],
            causes=dict(causes or {}),
            seconds=seconds,
            matchmaking_seconds=result.matchmaking_seconds if result else None,
            transfer_seconds=result.transfer_seconds if result else None,
        )
        if not fault and result is not None and result.partial:
            log.warning(
                "Parts of the average failed: the global state becomes the epoch-start weights "
                "once the validator has published it; what is trained until then is kept"
            )


class StoreReporter(LoopReporter):
    """Rank 0 of a store network; subscribes to the event stream.

    A round is from a close to the outer step.
    """

    def on_event(self, event: ev.Event, state: MinerState) -> None:
        """Report an event; ``state`` is the state it found, before any decision on it."""
        match event:
            case ev.CloseReached(close=close):
                self._round_began = self._clock()
                self._record("close", outer_step=close.outer_step, serial=close.serial)
            case ev.UploadTaken(close=close, handle=handle, progress=progress):
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
            case ev.UploadEnded(outer_step=outer, serial=serial, cause=problem):
                tag = f"{outer}.{serial}"
                self._report_upload(tag, problem or None, event.size, event.seconds)
                self._record(
                    "publication",
                    revision=tag,
                    ok=not problem,
                    seconds=event.seconds,
                    bytes_sent=event.size,
                    reason=problem,
                    finished_at=time.time(),
                )
            case ev.OuterStepEnded() if state.update is not None:
                self._report_round(event, state, state.update)
            case ev.ChainForked(cause=cause):  # empty: a recovery has settled it
                self._record("fork", cause=cause)
            case _:
                super().on_event(event, state)

    def _report_round(self, event: ev.OuterStepEnded, state: MinerState, update: Update) -> None:
        """Report that the update was applied, or was not, and what became of our upload."""
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
            fault="" if event.committed else AllReduceFault.LOCAL.name,
            detail=event.detail or update.cause,
            base=update.base.value,
            fate=word,
            whole=bool(update.whole),
            seconds=event.seconds,
        )
