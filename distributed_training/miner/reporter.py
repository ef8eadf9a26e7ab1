"""Turn events into log lines and ``events.jsonl``.

All log lines about the miner's loop come from here. People read the log, programs the event file
(``telemetry.read_events``), monitoring the metrics (:mod:`.metrics`). An event's fields and the
lines that operators search for (``protocol/lines.py``) are an interface and stay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict

from distributed_training.common.backoff import Repeats
from distributed_training.protocol import lines
from distributed_training.protocol.types import Base, Progress, Update

from . import events as ev
from .events import MinerState, Mode
from .rounds import uploads_for

log = logging.getLogger(__name__)

_SAY_AGAIN = 600.0  # seconds between two lines of uploads that have no room

_FATES = {
    Base.MERGED: "our upload was merged",
    Base.REFUSED: "our upload was refused",
    Base.KEPT: "our upload was not merged",
}

Record = Callable[..., None]  # (kind, **fields): writes an event


class Reporter:
    """Rank 0's; subscribes to the event stream. A round is from a close to the outer step.

    ``expect_gpu``: a step that used no GPU is worth a warning. ``bucket``: that uploads go to.
    ``joined``: whether an upload was ever begun; a close before that is too early, and no fault.
    ``upload_from``: inner steps of an outer step before its first upload.
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
        self.round_seconds: float | None = None  # seconds of the last round
        self.step_level = logging.INFO  # level of the lines of a step

    def on_event(self, event: ev.Event, state: MinerState) -> None:
        """Report an event; ``state`` is the state it found, before any decision on it."""
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
                # By the kind: the problem names bytes and paths that differ each time.
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
                    log.log(level, "%s", lines.upload_blocked(steps, least))
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
            case ev.UploadEnded(outer_step=outer, serial=serial, cause=problem):
                tag = f"{outer}.{serial}"
                # For progress only inform: whatever prevents it is a warning at the next close.
                level = logging.WARNING if serial else logging.INFO
                if problem:
                    log.log(level, lines.UPLOAD_FAILED, problem)
                else:
                    pushed = lines.pushed(tag, self._bucket)
                    log.info("%s (%.1f MB in %.1f s)", pushed, event.size / 1e6, event.seconds)
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
            case ev.NetworkDiffers(cause=cause, forked=True):  # empty: a recovery has settled it
                self._record("fork", cause=cause)
            case ev.Stopped(exit_status=status):
                self._record("stop", reason=state.stop_reason, exit_status=status)

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
            fault="" if event.committed else "LOCAL",
            detail=event.detail or update.cause,
            base=update.base.value,
            fate=word,
            whole=bool(update.whole),
            seconds=event.seconds,
        )
