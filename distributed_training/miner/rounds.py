"""Decide what follows from each event, and carry out one round from close to outer step.

Everything that happens becomes an *event* in a single queue on rank 0: a close, an update, a
signal, or the result of a command. :func:`decide` turns the :class:`MinerState` and an event into
the next state and its consequences: *commands*, which all ranks carry out at a micro-batch
boundary, and *tasks* for the exchange. Their results are events again. The function touches no
process, clock or network: events carry the ``time.monotonic()`` at which they happened, because a
change of the wall clock must not move a deadline.

Inner steps continue all the time. They pause only while all ranks copy the weights for an upload or
a checkpoint, and during the outer step. The steps of a round, in order:

==========================  =======================================================================
who                         what
==========================  =======================================================================
the exchange's thread       :class:`~distributed_training.exchange.base.CloseReached`
:func:`decide`              WRITE_UPLOAD and CHECKPOINT, at an inner step that may be uploaded
all ranks: RoundRank        write the upload, during training
all ranks                   a checkpoint, which knows what the upload holds
the controller              :class:`~.events.UploadWritten`: both are on the disk
the exchange's threads      send it; later :class:`~distributed_training.exchange.base.UpdateReady`
all ranks: RoundRank        prepare, vote, commit everywhere or nowhere
==========================  =======================================================================

The order of upload, checkpoint and sending makes a kill at any moment harmless: after a restart the
miner has either not sent an upload, or knows what it contained.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from distributed_training.common.backoff import doubling
from distributed_training.exchange.base import Close, upload_path
from distributed_training.protocol import lines
from distributed_training.protocol.types import Progress, RankFailedError, Sign
from distributed_training.protocol.update_file import Header

from . import events as ev
from .events import (
    Action,
    Applied,
    Decision,
    LocalPart,
    MinerState,
    Mode,
    Rules,
    Send,
    Stage,
    Upload,
)
from .ranks import RankChannel

if TYPE_CHECKING:
    from distributed_training.training.held_weights import HeldWeights
    from distributed_training.training.outer_step import UploadHandle

log = logging.getLogger(__name__)

# first and longest pause after a failed update
_AGAIN, _AGAIN_LONGEST = timedelta(minutes=1), timedelta(hours=1)


def decide(state: MinerState, event: ev.Event, rules: Rules) -> Decision:
    """Return the next state, and the commands, tasks and events that follow from ``event``.

    A pure function. An event that has no meaning in the current mode changes nothing.
    """
    upload = state.upload
    match event:
        case _ if state.mode is Mode.STOPPING:
            pass
        case ev.StopRequested(reason=reason, exit_status=status):
            after = replace(state, mode=Mode.STOPPING, exit_status=status, stop_reason=reason)
            return after, (Action.STOP,)
        case ev.InnerStepDone(diverged=True):
            # While an update waits, do nothing: the checkpoint may be of an earlier outer step.
            if state.update is None:
                return state.clear_unsaved(), (Action.ROLL_BACK,)
        case ev.InnerStepDone():
            return _count_step(state, event, rules)
        case ev.RolledBack(progress=progress):
            return _roll_back(state, progress)
        case ev.CloseReached(close=close) if uploads_for(state, close):
            return _answer_close(replace(state, reached=event), rules)
        case ev.UploadBegun(close=Close(serial=0), handle=handle) if state.progress is not None:
            return replace(state, progress=replace(state.progress, handle=handle)), ()
        case ev.UploadBegun(close=close, handle=handle) if upload is not None:
            if upload.close == close:
                return replace(state, upload=replace(upload, handle=handle)), ()
        case ev.CheckpointBegun(saved=saved) if upload is not None and upload.handle is not None:
            if upload.saved is None:  # this is the checkpoint of the upload's boundary
                return replace(state, upload=replace(upload, saved=saved)), ()
        case ev.UploadSkipped(kind="disk") if upload is not None:
            return replace(state, upload=replace(upload, stage=Stage.ENDED)), ()
        case ev.UploadWritten(close=Close(serial=0)) if state.progress is not None:
            sends = replace(state.progress, stage=Stage.SENDING)
            return replace(state, progress=sends), (Send(sends.close),)
        case ev.UploadWritten(close=close) if upload is not None and upload.close == close:
            if upload.stage is Stage.WRITING:
                sends = replace(upload, stage=Stage.SENDING)
                return replace(state, upload=sends), (Send(close),)
        case ev.UploadEnded(close=Close(serial=0)):
            return replace(state, progress=None), ()
        case ev.UploadEnded(close=close) if upload is not None:
            if upload.close == close:
                return replace(state, upload=replace(upload, stage=Stage.ENDED)), ()
        case ev.UpdateReady(update=update, at=at) if state.update is None:
            if update.whole or update.outer_step == state.outer_step + 1:
                return replace(state, update=update, update_at=at), (Action.OUTER_STEP,)
        case ev.OuterStepEnded() if state.update is not None:
            return _end_outer_step(state, event)
        case ev.Tick(at=at) if state.mode is Mode.UPDATE_FAILED and at >= state.again_at:
            # After a second failure fetch whole weights, which do not depend on ours.
            again = Applied(state.outer_step, wants_weights=state.update_failures > 1)
            return replace(state, mode=Mode.TRAINING), (again,)
        case ev.Tick(at=at):
            if upload is not None and at >= upload.reached.until and not upload.over:
                state = replace(state, upload=replace(upload, over=True))
            return _answer_close(state, rules, at)
    return state, ()


def uploads_for(state: MinerState, close: Close) -> bool:
    """Return whether this miner may upload for ``close``: it has its weights, and no upload yet."""
    again = state.upload is not None and close.serial <= state.upload.close.serial
    holds = state.mode is not Mode.STOPPING and close.outer_step == state.outer_step
    return holds and not again and state.update is None


def _count_step(state: MinerState, done: ev.InnerStepDone, rules: Rules) -> Decision:
    """Return what is due after an inner step: upload, checkpoint, progress upload or nothing."""
    report = done.report
    state = replace(
        state,
        inner_step=report.inner_step,
        steps_since_progress=state.steps_since_progress + 1,
        unsaved_steps=state.unsaved_steps + (not report.skipped),
        unsaved_seconds=state.unsaved_seconds + (0.0 if report.skipped else report.seconds),
    )
    after, follows = _answer_close(state, rules)
    # Write no checkpoint during a round either, since its copies would take host memory in addition
    # to the round's.
    copies = state.upload is not None and state.upload.stage is not Stage.ENDED
    if follows or report.skipped or copies or state.update is not None:
        return after, follows
    # Time counts as well as steps: a checkpoint has 16 bytes per parameter, and a GPU may take 25
    # steps in a minute.
    seconds = state.unsaved_seconds
    if state.unsaved_steps >= rules.checkpoint_steps and seconds >= rules.checkpoint_seconds:
        return after.clear_unsaved(), (Action.CHECKPOINT,)
    # The round's upload contains as much, and an all-reduce needs the link until the grace ends.
    in_round = state.upload is not None and not state.upload.over
    waits = state.progress or after.reached or in_round or state.mode is not Mode.TRAINING
    early = state.inner_step < rules.upload_from
    due = rules.progress_steps and state.steps_since_progress >= rules.progress_steps
    if waits or early or not due:
        return after, ()
    progress = Upload(ev.CloseReached(Close(state.outer_step, 0)))
    return replace(after, progress=progress, steps_since_progress=0), (Action.WRITE_UPLOAD,)


def _answer_close(state: MinerState, rules: Rules, at: float | None = None) -> Decision:
    """Order the upload for the close that has come, once there are enough inner steps.

    ``at``: seconds of the steady clock; with None, the end of the grace is not checked.
    """
    if (reached := state.reached) is None:
        return state, ()
    over, steps = at is not None and at >= reached.until, state.inner_step
    if over or not uploads_for(state, reached.close):
        missed = (
            f"blocked: {lines.counted(steps, 'inner step')} when the close was over, and "
            f"{rules.upload_from} are needed, so nothing was sent for it; the next upload holds it"
        )
        blocked = (ev.UploadSkipped(missed, "steps"),) if steps < rules.upload_from else ()
        return replace(state, reached=None), blocked
    if steps < rules.upload_from:
        return state, ()
    after = _drop_progress(replace(state.clear_unsaved(), reached=None, upload=Upload(reached)))
    # Train nothing between the two, and send nothing before the checkpoint is complete: after a
    # kill the miner must know what the upload contained.
    return after, (Action.WRITE_UPLOAD, Action.CHECKPOINT)


def _drop_progress(state: MinerState) -> MinerState:
    """Return the state without an unsent progress upload: the one for a close contains as much."""
    written = state.progress is not None and state.progress.stage is Stage.WRITING
    return replace(state, progress=None) if written else state


def _roll_back(state: MinerState, back: Progress | None) -> Decision:
    """Return the state after a roll-back to ``back``, and what follows.

    An upload that was sent stays: there is no second one for its close. An upload that was not sent
    contains training that is in no checkpoint, so another may be written. An update that was meant
    for another outer step is requested again.
    """
    if state.upload is not None and state.upload.stage is Stage.WRITING:
        state = replace(state, upload=None, reached=state.upload.reached)
    if back is None:
        return state, ()
    after = replace(state, outer_step=back.outer_step, inner_step=back.inner_step)
    if back.outer_step != state.outer_step:
        asks = (Applied(back.outer_step),)
        return replace(after, reached=None, upload=None, update=None), asks
    # The checkpoint may be behind the known place in the schedule.
    known = state.place is not None and state.place[0] == state.outer_step
    return after, (Action.FOLLOW_SCHEDULE,) if known else ()


def _end_outer_step(state: MinerState, event: ev.OuterStepEnded) -> Decision:
    applied = state.update
    assert applied is not None
    if event.committed:
        after = replace(
            _drop_progress(state),
            mode=Mode.TRAINING,
            outer_step=event.outer_step,
            inner_step=event.inner_step,
            update=None,
            upload=None,
            place=(event.outer_step, applied.inner_steps),
            update_failures=0,
        )
        return after, (Action.FOLLOW_SCHEDULE, Applied(event.outer_step))
    # A rank ran out of memory, or its weights differ from the network's: request the update again.
    failures = state.update_failures + 1
    wait = doubling(failures, first=_AGAIN, longest=_AGAIN_LONGEST)
    after = replace(
        state,
        mode=Mode.UPDATE_FAILED,
        update=None,
        update_failures=failures,
        again_at=state.update_at + wait.total_seconds(),
    )
    return after, ()


class RoundRank:
    """Carries out one rank's part of rounds and uploads.

    ``uploads``: the folder for uploads. ``header``: the header of each upload, without its close
    and pages. ``sign``: signs with the miner's hotkey. All three are None on all ranks but 0.
    """

    def __init__(
        self,
        trainer: HeldWeights,
        ranks: RankChannel,
        *,
        uploads: Path | None = None,
        header: Header | None = None,
        sign: Sign | None = None,
    ) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._uploads = uploads
        self._header = header
        self._sign = sign
        self._handle: UploadHandle | None = None  # handle of the last upload

    def adopt(self, codec: str) -> None:
        """Write uploads with ``codec`` from now on."""
        if self._header is not None:
            self._header = replace(self._header, codec=codec)

    def give_up(self) -> None:
        """Stop writing an upload that is in progress, because its buffers are needed."""
        if self._handle is not None:
            self._handle.cancel()

    def write_upload(self, local: LocalPart, progress: Progress) -> ev.Event | None:
        """Begin to write the upload for a close, or a progress upload. Collective."""
        self.give_up()  # an unfinished upload is for a close that has moved
        if self._uploads is None or self._header is None or (close := local.close) is None:
            with contextlib.suppress(OSError, RankFailedError):  # rank 0 reports the event
                self._handle = self._trainer.write_upload()
            return None
        header = replace(
            self._header,
            outer_step=close.outer_step,
            serial=close.serial,
            pages=local.pages,
        )
        path = upload_path(self._uploads, close)
        try:
            self._handle = self._trainer.write_upload(path, header, sign=self._sign)
        except (OSError, RankFailedError) as error:  # raised on all ranks alike
            problem = f"it was not written ({error})"
            return ev.UploadEnded(close, problem)
        return ev.UploadBegun(close, self._handle, progress)

    def apply_update(self, local: LocalPart) -> ev.OuterStepEnded:
        """Take the outer step with the update, on all ranks or on none. Collective."""
        trainer, detail, began = self._trainer, "", time.perf_counter()
        try:
            trainer.prepare_update(local.update)
        except (RuntimeError, ValueError, OSError) as error:
            detail = str(error) or type(error).__name__
            log.warning("Rank %d votes against the outer step: %s", self._ranks.rank, detail)
        # A rank that failed must vote too, or the others would wait forever.
        committed = self._ranks.vote(not detail)
        if committed:
            trainer.commit_outer_step()
        else:
            trainer.roll_back_outer_step()
            detail = detail or "another rank voted against it"
        held, dropped = time.perf_counter() - began, trainer.dropped if committed else ""
        outer, inner = trainer.outer_step, trainer.inner_step
        return ev.OuterStepEnded(committed, outer, detail, held, dropped, inner)
