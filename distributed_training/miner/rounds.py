"""Decide what follows from each event, and carry out one round from close to outer step.

Everything that happens becomes an *event* in one queue of rank 0: a close, an update, a signal, the
result of each command. :func:`decide` turns the :class:`MinerState` and an event into the next
state and what follows: *commands*, which reach all ranks at a micro-batch boundary, and *tasks* of
the exchange. What follows from one is an event again. No process, clock or network is touched in
it: events carry the time at which they happened, of ``time.monotonic()``, because a wall clock that
is set must move no deadline.

Inner steps continue all the time. They pause only where all ranks work: for the copies of an upload
and of a checkpoint, and for the outer step. A round, in the order in which it happens:

==========================  =======================================================================
who                         what
==========================  =======================================================================
the exchange's thread       :class:`~distributed_training.exchange.base.CloseReached`
rank 0: UploadWatch         :class:`~.events.UploadWanted`, at an inner step that may be uploaded
all ranks: RoundRank        write the upload, during training
all ranks                   a checkpoint, which knows what the upload holds
rank 0: UploadWatch         :class:`~.events.UploadWritten`: both are on the disk
the exchange's threads      send it; later :class:`~distributed_training.exchange.base.UpdateReady`
all ranks: RoundRank        prepare, vote, commit everywhere or nowhere
==========================  =======================================================================

The order of upload, checkpoint and sending makes a kill at any moment harmless: a miner that starts
again has either not sent an upload, or knows what it held.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
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
from .events import Action, Command, Decision, LocalPart, MinerState, Mode, Rules, Stage, Task
from .ranks import Ranks

if TYPE_CHECKING:
    from distributed_training.training.held_weights import HeldWeights
    from distributed_training.training.outer_step import UploadHandle

log = logging.getLogger(__name__)

_AGAIN, _AGAIN_LONGEST = timedelta(minutes=1), timedelta(hours=1)  # after an update that failed


def decide(state: MinerState, event: ev.Event, rules: Rules) -> Decision:
    """Return the next state, and the commands and tasks that follow from ``event``.

    Pure. An event that has no meaning in a mode changes nothing.
    """
    upload = state.upload
    match event:
        case _ if state.mode is Mode.STOPPING:
            pass
        case ev.StopRequested(reason=reason, exit_status=status):
            after = replace(state, mode=Mode.STOPPING, exit_status=status, stop_reason=reason)
            return after, (Action.STOP,)
        case ev.InnerStepDone(diverged=True):
            # The checkpoint may be of an earlier outer step than an update that is at hand.
            if state.update is None:
                return state.clear_unsaved(), (Action.ROLL_BACK,)
        case ev.InnerStepDone(report=report) if not report.skipped:
            # Time counts as well as steps: a checkpoint has 16 bytes a parameter, and a GPU may
            # take 25 steps in a minute.
            steps, seconds = state.unsaved_steps + 1, state.unsaved_seconds + report.seconds
            due = steps >= rules.checkpoint_steps and seconds >= rules.checkpoint_seconds
            # Not in a round: its copies would be in host memory next to the round's.
            if due and not state.holds_copies:
                return state.clear_unsaved(), (Action.CHECKPOINT,)
            return replace(state, unsaved_steps=steps, unsaved_seconds=seconds), ()
        case ev.RolledBack(progress=progress):
            return _roll_back(state, progress)
        case ev.UploadWanted(close=Close(serial=0)):
            # In a round its copies would be in host memory next to the round's.
            if state.mode is Mode.TRAINING and not state.holds_copies:
                return state, (Action.WRITE_PROGRESS,)
        case ev.UploadWanted(close=close) if uploads_for(state, close):
            after = replace(state.clear_unsaved(), upload=ev.Upload(close))
            # Nothing is trained between the two, and nothing is sent before the checkpoint is
            # complete: after a kill it must know what the upload held.
            return after, (Action.WRITE_UPLOAD, Action.CHECKPOINT)
        case ev.UploadWritten(close=Close(serial=0)):
            return state, (Task.SEND_PROGRESS,)
        case ev.UploadWritten(close=close):
            if upload == ev.Upload(close, Stage.WRITING):
                return replace(state, upload=ev.Upload(close, Stage.SENDING)), (Task.SEND_UPLOAD,)
        case ev.UploadEnded(outer_step=outer, serial=serial) if upload is not None:
            if (upload.close.outer_step, upload.close.serial) == (outer, serial):
                return replace(state, upload=replace(upload, stage=Stage.ENDED)), ()
        case ev.UpdateReady(update=update, at=at) if state.update is None:
            if update.whole or update.outer_step == state.outer_step + 1:
                return replace(state, update=update, update_at=at), (Action.OUTER_STEP,)
        case ev.OuterStepEnded() if state.update is not None:
            return _end_outer_step(state, event)
        case ev.Tick(at=at) if state.mode is Mode.AWAITING_GLOBAL and at >= state.again_at:
            # The second time whole weights, which hold whatever ours are.
            again = Task.FETCH_WEIGHTS if state.update_failures > 1 else Task.REPORT_APPLIED
            return replace(state, mode=Mode.TRAINING), (again,)
    return state, ()


def uploads_for(state: MinerState, close: Close) -> bool:
    """Return whether this miner may upload for ``close``: it holds its weights, and did not yet."""
    again = state.upload is not None and close.serial <= state.upload.close.serial
    holds = state.mode is not Mode.STOPPING and close.outer_step == state.outer_step
    return holds and not again and state.update is None


def _roll_back(state: MinerState, back: Progress | None) -> Decision:
    """Return what is left of a round after a roll-back to ``back``, and what follows.

    An upload that was sent stays: there is no second one for its close. An update that was to be
    applied to another outer step is asked for again.
    """
    upload = state.upload
    if upload is not None and upload.stage is Stage.WRITING:
        upload = None
    if back is not None and back.outer_step != state.outer_step:
        after = replace(state, outer_step=back.outer_step, upload=None, update=None)
        return after, (Task.REPORT_APPLIED,)
    # The checkpoint may be older than the place.
    known = state.place is not None and state.place[0] == state.outer_step
    return replace(state, upload=upload), (Action.FOLLOW_SCHEDULE,) if known else ()


def _end_outer_step(state: MinerState, event: ev.OuterStepEnded) -> Decision:
    applied = state.update
    assert applied is not None
    if event.committed:
        after = replace(
            state,
            mode=Mode.TRAINING,
            outer_step=event.outer_step,
            update=None,
            upload=None,
            place=(event.outer_step, applied.inner_steps),
            update_failures=0,
        )
        return after, (Action.FOLLOW_SCHEDULE, Task.REPORT_APPLIED)
    # A rank had no memory, or its weights are not the network's: it is asked for again.
    failures = state.update_failures + 1
    wait = doubling(failures, first=_AGAIN, longest=_AGAIN_LONGEST)
    after = replace(
        state,
        mode=Mode.AWAITING_GLOBAL,
        update=None,
        update_failures=failures,
        again_at=state.update_at + wait.total_seconds(),
    )
    return after, ()


class UploadWatch:
    """Answer a close with an upload, and have it sent once nothing can be lost. Rank 0 only.

    Subscribes to the event stream, and returns the events that follow from what it measures.

    Args:
        weights: Knows the inner steps done in this outer step.
        minimum: Inner steps of an outer step before its first upload.
        disk_problem: Returns why an upload would not fit on the disk, or None.
        forget: Deletes what only checkpoints of outer steps before its argument would need.
        keep: Checkpoints that a roll-back may go back to.
        joined: Returns whether an upload was ever begun; a close before that is no fault.
        every: Inner steps between two progress uploads; 0: there are none.
        clock: The steady clock.
    """

    def __init__(
        self,
        *,
        weights: HeldWeights,
        minimum: int,
        disk_problem: Callable[[], str | None],
        forget: Callable[[int], None],
        keep: int,
        joined: Callable[[], bool] = lambda: True,
        every: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._weights = weights
        self.minimum = minimum
        self._disk_problem = disk_problem
        self._forget = forget
        self._joined = joined
        self._clock = clock
        self._reached: ev.CloseReached | None = None  # until it was answered
        self._answered: ev.CloseReached | None = None  # the last one
        self._begun: ev.UploadBegun | None = None  # until it may be sent
        self._checkpoint: ev.CheckpointBegun | None = None  # the checkpoint of its boundary
        self._saving: ev.CheckpointBegun | None = None  # the last one, until it is complete
        self._complete: deque[int] = deque(maxlen=keep)  # outer steps of the last checkpoints
        self._every = every
        self._since = 0  # inner steps since the last progress upload was wanted
        self._logged = -1  # the outer step in which a line said that progress comes too early
        self._progress: ev.UploadBegun | None = None  # until it is sent, or given up
        self._sends = False  # progress is being sent

    def on_event(self, event: ev.Event, state: MinerState) -> list[ev.Event]:
        """Follow an upload from its close to the moment at which it may be sent."""
        match event:
            case ev.CloseReached(close=close) if uploads_for(state, close):
                if (steps := self._weights.inner_step) < self.minimum:
                    level = logging.WARNING if self._joined() else logging.INFO
                    log.log(level, "%s", lines.upload_blocked(steps, self.minimum))
                self._reached = event
                return self._answer_close(state)
            case ev.UploadBegun(close=Close(serial=0)):
                self._progress = event
            case ev.UploadBegun():
                self._begun, self._checkpoint = event, None
            case ev.CheckpointBegun():
                self._saving = event
                if self._begun is not None and self._checkpoint is None:
                    self._checkpoint = event
            case ev.RolledBack() if self._begun is not None:
                # It holds what is in no checkpoint; nothing was sent, so there may be another.
                self._reached, self._begun = self._answered, None
            case ev.OuterStepEnded(committed=True):
                self._begun = None  # it comes too late
            case ev.UploadEnded(serial=0):
                self._sends = False
            case ev.Tick() | ev.InnerStepDone():
                self._since += isinstance(event, ev.InnerStepDone)
                self._forget_old()
                follows = [*self._await_files(), *self._answer_close(state)]
                return follows or self._follow_progress(state)
        return []

    def _follow_progress(self, state: MinerState) -> list[ev.Event]:
        """Have progress sent once it is written, and more of it written where it is due."""
        if (begun := self._progress) is not None:
            if not begun.handle.done():
                return []
            self._progress = None
            # One that a round has ended is no loss: the upload for the close holds as much.
            if begun.handle.error is not None or begun.close.outer_step != state.outer_step:
                return []
            self._sends = True
            return [ev.UploadWritten(begun.close)]
        waits = self._sends or self._reached is not None or state.holds_copies
        if not self._every or self._since < self._every or waits:
            return []
        if (steps := self._weights.inner_step) < self.minimum:
            if self._logged != state.outer_step:
                self._logged = state.outer_step
                log.info("%s", lines.upload_blocked(steps, self.minimum))
            return []
        self._since = 0
        wanted = ev.UploadWanted(Close(state.outer_step, 0, 0.0, 0.0))
        return [] if self._disk_problem() else [wanted]

    def _answer_close(self, state: MinerState) -> list[ev.Event]:
        """Ask for an upload at the first inner step that counts, until the grace is over."""
        if (reached := self._reached) is None:
            return []
        steps = self._weights.inner_step
        if self._clock() >= reached.until or not uploads_for(state, reached.close):
            self._reached = None
            missed = (
                f"blocked: {lines.counted(steps, 'inner step')} when the close was over, and "
                f"{self.minimum} are needed, so nothing was sent for it; the next upload holds it"
            )
            return [ev.UploadSkipped(missed, "steps")] if steps < self.minimum else []
        if steps < self.minimum:
            return []
        self._answered, self._reached = reached, None
        if (problem := self._disk_problem()) is not None:
            return [ev.UploadSkipped(problem, "disk")]
        return [ev.UploadWanted(reached.close)]

    def _await_files(self) -> list[ev.Event]:
        """Report once that the upload and its checkpoint are there, or that they never will be."""
        if (begun := self._begun) is None or self._checkpoint is None or not begun.handle.done():
            return []
        close, saved = begun.close, self._checkpoint.saved()
        if (error := begun.handle.error) is None and saved is None:
            return []
        self._begun = None
        if error is None and saved:
            return [ev.UploadWritten(close)]
        why = error or "the checkpoint that must know of it was not written"
        return [ev.UploadEnded(close.outer_step, close.serial, f"it was not sent ({why})")]

    def _forget_old(self) -> None:
        """Delete uploads that no checkpoint needs any more."""
        if (begun := self._saving) is None or (saved := begun.saved()) is None:
            return
        self._saving = None
        if saved:
            self._complete.append(begun.outer_step)
            if len(self._complete) == self._complete.maxlen:
                self._forget(min(self._complete))


class RoundRank:
    """One rank's part of rounds and uploads.

    ``uploads`` (the folder of uploads), ``header`` (of each, but for its close and blocks) and
    ``sign`` of the miner's hotkey are rank 0's, else None.
    """

    def __init__(
        self,
        trainer: HeldWeights,
        ranks: Ranks,
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
        self._handle: UploadHandle | None = None  # of the last upload

    def carry_out(self, command: Command, progress: Progress) -> ev.Event | None:
        """Carry out this boundary's part of a round. Collective."""
        if command.action is Action.OUTER_STEP:
            return self._apply_update(command.local)
        return self._write_upload(command.local, progress)

    def adopt(self, codec: str) -> None:
        """Write uploads by ``codec`` from here on."""
        if self._header is not None:
            self._header = replace(self._header, codec=codec)

    def give_up(self) -> None:
        """End the writing of an upload under way: its copies are needed."""
        if self._handle is not None:
            self._handle.cancel()

    def _write_upload(self, local: LocalPart, progress: Progress) -> ev.Event | None:
        self.give_up()  # of a close that has moved
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
            return ev.UploadEnded(close.outer_step, close.serial, problem)
        return ev.UploadBegun(close, self._handle, progress)

    def _apply_update(self, local: LocalPart) -> ev.OuterStepEnded:
        """Take the outer step of the update, on all ranks or on none."""
        trainer, detail, began = self._trainer, "", time.perf_counter()
        try:
            trainer.prepare_update(local.update)
        except (RuntimeError, ValueError, OSError) as error:
            detail = str(error) or type(error).__name__
            log.warning("Rank %d votes against the outer step: %s", self._ranks.rank, detail)
        # A rank that failed votes too: without its vote the others would wait for ever.
        committed = self._ranks.vote(not detail)
        if committed:
            trainer.commit_outer_step()
        else:
            trainer.roll_back_outer_step()
            detail = detail or "another rank voted against it"
        held, dropped = time.perf_counter() - began, trainer.dropped if committed else ""
        return ev.OuterStepEnded(committed, trainer.outer_step, detail, held, dropped)
