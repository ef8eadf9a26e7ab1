"""One round through the store, in the order in which it happens.

Inner steps continue all the time. They pause only where all ranks work: for the copies of an upload
and of a checkpoint, and for the outer step.

========================  =========================================================================
who                       what
========================  =========================================================================
a thread of rank 0        :class:`~distributed_training.exchange.base.Close`: uploads are taken now
rank 0                    :func:`decide_round`: from here to the end, what follows from what
all ranks                 :meth:`StoreRank.carry_out`: write the upload, during training
all ranks                 a checkpoint, which knows what the upload holds
rank 0                    :class:`UploadWatch`: both are on the disk, so the upload may be sent
a thread of rank 0        sends it; later :class:`~distributed_training.protocol.types.Update`
all ranks                 :meth:`StoreRank.carry_out`: prepare, vote, commit everywhere or nowhere
========================  =========================================================================

The order of upload, checkpoint and sending makes a kill at any moment harmless: a miner that starts
again has either not sent an upload, or knows what it held.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from distributed_training.common.backoff import doubling
from distributed_training.exchange.base import (
    ChainForked,
    Close,
    Fact,
    HeadSeen,
    NetworkFinished,
    UploadEnded,
)
from distributed_training.protocol import lines
from distributed_training.protocol.types import (
    ExitStatus,
    Progress,
    RankFailedError,
    Sign,
    Update,
)

from . import events as ev
from .events import (
    Action,
    Command,
    Decision,
    LocalPart,
    MinerState,
    Mode,
    Stage,
    Task,
)
from .ranks import Ranks

if TYPE_CHECKING:
    from distributed_training.exchange.store_rounds import StoreRounds
    from distributed_training.protocol.update_file import Header
    from distributed_training.training.held_weights import HeldWeights
    from distributed_training.training.outer_step import UploadHandle

log = logging.getLogger(__name__)

_AGAIN, _AGAIN_LONGEST = timedelta(minutes=1), timedelta(hours=1)  # after an update that failed


def event_of(fact: Fact) -> ev.Event:
    """Return the event of a fact that the thread that follows the store has posted."""
    match fact:
        case Close():
            return ev.CloseReached(fact)
        case Update():
            return ev.UpdateReady(fact, time.monotonic())
        case HeadSeen(outer_step=outer):
            return ev.GlobalEpochSeen(outer, time.monotonic())
        case UploadEnded() | ChainForked():
            return fact
        case NetworkFinished(cause=cause):
            return ev.StopRequested(f"the network is finished: {cause}", ExitStatus.FINISHED)


def uploads_for(state: MinerState, close: Close) -> bool:
    """Return whether this miner may upload for ``close``: it holds its weights, and did not yet."""
    again = state.upload is not None and close.serial <= state.upload.close.serial
    holds = state.mode is not Mode.STOPPING and close.outer_step == state.outer_step
    return holds and not again and state.update is None


def decide_round(state: MinerState, event: ev.Event) -> Decision:
    """Return the next state and what follows from an event of a round, as ``decide`` does."""
    upload = state.upload
    match event:
        case ev.UploadWanted(close=close):
            if not uploads_for(state, close):
                return state, ()
            after = replace(state.clear_unsaved(), upload=ev.Upload(close))
            # Nothing is trained between the two, and nothing is sent before the checkpoint is
            # complete: after a kill it must know what the upload held.
            return after, (Action.WRITE_UPLOAD, Action.CHECKPOINT)
        case ev.ProgressWanted():
            # In a round its copies would be in host memory next to the round's.
            idle = state.mode is Mode.TRAINING and not state.in_round
            return state, (Action.WRITE_PROGRESS,) if idle else ()
        case ev.UploadWritten(close=close):
            if not close.serial:
                return state, (Task.SEND_PROGRESS,)
            if upload is None or upload.close != close or upload.stage is not Stage.WANTED:
                return state, ()
            return replace(state, upload=replace(upload, stage=Stage.SENT)), (Task.SEND_UPLOAD,)
        case ev.UploadEnded(outer_step=outer, serial=serial):
            if upload is None or (upload.close.outer_step, upload.close.serial) != (outer, serial):
                return state, ()
            return replace(state, upload=replace(upload, stage=Stage.ENDED)), ()
        case ev.UpdateReady(update=update, at=at):
            follows = update.whole or update.outer_step == state.outer_step + 1
            if state.update is not None or not follows:
                return state, ()
            return replace(state, update=update, update_at=at), (Action.OUTER_STEP,)
        case ev.OuterStepEnded(committed=committed, outer_step=outer):
            if (applied := state.update) is None:
                return state, ()
            if committed:
                after = replace(
                    state,
                    mode=Mode.TRAINING,
                    outer_step=outer,
                    update=None,
                    upload=None,
                    place=(outer, applied.inner_steps),
                    update_failures=0,
                )
                return after, (Action.FOLLOW_SCHEDULE, Task.SHOW_APPLIED)
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
        case ev.Tick(at=at) if state.mode is Mode.AWAITING_GLOBAL and at >= state.again_at:
            # The second time whole weights, which hold whatever ours are.
            again = Task.FETCH_WEIGHTS if state.update_failures > 1 else Task.SHOW_APPLIED
            return replace(state, mode=Mode.TRAINING), (again,)
        case _:
            return state, ()


def keep_upload(state: MinerState, event: ev.RolledBack) -> MinerState:
    """Return the state with what is left of a round after a roll-back.

    An upload that was sent stays: there is no second one for its close. An update that was to be
    applied to another outer step is asked for again.
    """
    upload, back = state.upload, event.progress
    elsewhere = back is not None and back.outer_step != state.outer_step
    if elsewhere or (upload is not None and upload.stage is Stage.WANTED):
        upload = None
    return replace(state, upload=upload, update=None if elsewhere else state.update)


class StoreTasks:
    """Starts rank 0's background tasks."""

    def __init__(self, rounds: StoreRounds) -> None:
        self._rounds = rounds

    def start(self, task: Task, state: MinerState) -> None:
        match task:
            case Task.SEND_UPLOAD:
                assert state.upload is not None
                self._rounds.send(state.upload.close)
            case Task.SEND_PROGRESS:
                self._rounds.send_progress(state.outer_step)
            case Task.SHOW_APPLIED:
                self._rounds.applied(state.outer_step)
            case Task.FETCH_WEIGHTS:
                self._rounds.fetch_weights()


class UploadWatch:
    """Answer a close with an upload, and have it sent once nothing can be lost. Rank 0 only.

    Subscribes to the event stream. ``minimum``: inner steps of an outer step before its first
    upload. ``disk_problem``: the line that says why an upload would not fit on the disk, or None.
    ``keep``: checkpoints that a roll-back may go back to. ``joined``: whether an upload was ever
    begun; a close that comes before is too early, which is no fault. ``every``: inner steps between
    two progress uploads; 0: there are none.
    """

    def __init__(
        self,
        rounds: StoreRounds,
        *,
        inner_step: Callable[[], int],
        minimum: int,
        disk_problem: Callable[[], str | None],
        keep: int,
        joined: Callable[[], bool] = lambda: True,
        every: int = 0,
    ) -> None:
        self._joined = joined
        self._rounds = rounds
        self._inner_step = inner_step
        self._minimum = minimum
        self._disk_problem = disk_problem
        self._close: Close | None = None  # until it was answered
        self._taken: ev.UploadTaken | None = None  # until it may be sent
        self._after: ev.CheckpointBegun | None = None  # the checkpoint of its boundary
        self._begun: ev.CheckpointBegun | None = None  # the last one, until it is complete
        self._complete: deque[int] = deque(maxlen=keep)  # outer steps of the last checkpoints
        self._every = every
        self._since = 0  # inner steps since the last progress upload was wanted
        self._told = -1  # the outer step in which it was said that progress comes too early
        self._progress: ev.ProgressTaken | None = None  # until it is sent, or given up
        self._sends = False  # progress is being sent

    def on_event(self, event: ev.Event, state: MinerState) -> list[ev.Event]:
        """Follow an upload from its close to the moment at which it may be sent."""
        match event:
            case ev.CloseReached(close=close) if uploads_for(state, close):
                if (steps := self._inner_step()) < self._minimum:
                    level = logging.WARNING if self._joined() else logging.INFO
                    log.log(level, "%s", lines.upload_blocked(steps, self._minimum))
                self._close = close
                return self._answer_close(state)
            case ev.UploadTaken():
                self._taken, self._after = event, None
            case ev.CheckpointBegun():
                self._begun = event
                if self._taken is not None and self._after is None:
                    self._after = event
            case ev.RolledBack() if self._taken is not None:
                # It holds what is in no checkpoint; nothing was sent, so there may be another.
                self._close, self._taken = self._taken.close, None
            case ev.OuterStepEnded(committed=True):
                self._taken = None  # it comes too late
            case ev.ProgressTaken():
                self._progress = event
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
        if (taken := self._progress) is not None:
            if not taken.handle.done():
                return []
            self._progress = None
            # One that a round has ended is no loss: the upload for the close holds as much.
            if taken.handle.error is not None or taken.close.outer_step != state.outer_step:
                return []
            self._sends = True
            return [ev.UploadWritten(taken.close)]
        waits = self._sends or self._close is not None or state.in_round
        if not self._every or self._since < self._every or waits:
            return []
        if (steps := self._inner_step()) < self._minimum:
            if self._told != state.outer_step:
                self._told = state.outer_step
                log.info("%s", lines.upload_blocked(steps, self._minimum))
            return []
        self._since = 0
        return [] if self._disk_problem() else [ev.ProgressWanted()]

    def _answer_close(self, state: MinerState) -> list[ev.Event]:
        """Ask for an upload at the first inner step that counts, until the grace is over."""
        if (close := self._close) is None:
            return []
        steps = self._inner_step()
        if self._rounds.now() >= close.ends_at or not uploads_for(state, close):
            self._close = None
            missed = (
                f"blocked: {lines.counted(steps, 'inner step')} when the close was over, and "
                f"{self._minimum} are needed, so nothing was sent for it; the next upload holds it"
            )
            return [ev.UploadSkipped(missed, "steps")] if steps < self._minimum else []
        if steps < self._minimum:
            return []
        self._close = None
        if (problem := self._disk_problem()) is not None:
            return [ev.UploadSkipped(problem, "disk")]
        return [ev.UploadWanted(close)]

    def _await_files(self) -> list[ev.Event]:
        """Report once that the upload and its checkpoint are there, or that they never will be."""
        if (taken := self._taken) is None or self._after is None or not taken.handle.done():
            return []
        close, saved = taken.close, self._after.saved()
        if (error := taken.handle.error) is None and saved is None:
            return []
        self._taken = None
        if error is None and saved:
            return [ev.UploadWritten(close)]
        why = error or "the checkpoint that must know of it was not written"
        return [ev.UploadEnded(close.outer_step, close.serial, f"it was not sent ({why})")]

    def _forget_old(self) -> None:
        """Let uploads go that no checkpoint needs any more."""
        if (begun := self._begun) is None or (saved := begun.saved()) is None:
            return
        self._begun = None
        if saved:
            self._complete.append(begun.outer_step)
            if len(self._complete) == self._complete.maxlen:
                self._rounds.forget(min(self._complete))


class StoreRank:
    """One rank's part of rounds through the store.

    ``rounds``, ``header`` (of an upload: its close and blocks to the file's header) and ``sign`` of
    the miner's hotkey are rank 0's, else None.
    """

    def __init__(
        self,
        trainer: HeldWeights,
        ranks: Ranks,
        *,
        rounds: StoreRounds | None = None,
        header: Callable[[Close, Sequence[int]], Header] | None = None,
        sign: Sign | None = None,
    ) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._rounds = rounds
        self._header = header
        self._sign = sign
        self._handle: UploadHandle | None = None  # of the last upload

    def carry_out(self, command: Command, progress: Progress, last_loss: float) -> ev.Event | None:
        """Carry out this boundary's part of a round. Collective."""
        local, trainer = command.local, self._trainer
        if command.action in (Action.WRITE_UPLOAD, Action.WRITE_PROGRESS):
            return self._write_upload(local, progress)
        assert command.action is Action.OUTER_STEP, command.action
        ended = take_outer_step(trainer, self._ranks, lambda: trainer.prepare_update(local.update))
        return replace(ended, dropped=trainer.dropped if ended.committed else "")

    def give_up(self) -> None:
        """End the writing of an upload under way: its copies are needed."""
        if self._handle is not None:
            self._handle.cancel()

    def _write_upload(self, local: LocalPart, progress: Progress) -> ev.Event | None:
        self.give_up()  # of a close that has moved
        if self._rounds is None or self._header is None or local.close is None:
            with contextlib.suppress(OSError, RankFailedError):  # rank 0 reports the event
                self._handle = self._trainer.write_upload()
            return None
        close = local.close
        path, header = self._rounds.upload_path(close), self._header(close, local.blocks)
        try:
            self._handle = self._trainer.write_upload(path, header, sign=self._sign)
        except (OSError, RankFailedError) as error:  # raised on all ranks alike
            problem = f"it was not written ({error})"
            return ev.UploadEnded(close.outer_step, close.serial, problem)
        if not close.serial:
            return ev.ProgressTaken(close, self._handle)
        return ev.UploadTaken(close, self._handle, progress)


def take_outer_step(
    trainer: HeldWeights, ranks: Ranks, prepare: Callable[[], None]
) -> ev.OuterStepEnded:
    """Take the outer step that ``prepare`` computes. Collective."""
    detail, began = "", time.perf_counter()
    try:
        prepare()
    except (RuntimeError, ValueError, OSError) as error:
        detail = str(error) or type(error).__name__
        log.warning("Rank %d votes against the outer step: %s", ranks.rank, detail)
    # A rank that failed votes too: without its vote the others would wait for ever.
    committed = ranks.vote(not detail)
    # On all ranks or on none.
    if committed:
        trainer.commit_outer_step()
    else:
        trainer.roll_back_outer_step()
        detail = detail or "another rank voted against it"
    held = time.perf_counter() - began
    return ev.OuterStepEnded(committed, trainer.outer_step, detail, held)
