"""One round of the miner, in the order in which it happens.

========================  =========================================================================
who                       what
========================  =========================================================================
rank 0's server           :meth:`Averaging.receive_call`: a validator calls
rank 0                    :func:`decide_round`: from here to the end, what follows from what
all ranks                 :meth:`SwarmRank.carry_out`, into the swarm's buffers
a thread of rank 0        :meth:`Averaging.begin_average`: the swarm averages in the buffers
all ranks                 :func:`take_outer_step`: prepare, vote, commit everywhere or nowhere
rank 0's server           :func:`end_rounds_of`: it may be called again
========================  =========================================================================
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from distributed_training.protocol import lines
from distributed_training.protocol.types import (
    AllReduceError,
    AllReduceFault,
    Progress,
    RankFailedError,
    RoundRequest,
)
from distributed_training.store.bucket_reader import refuse

from . import events as ev
from .events import Action, Command, Decision, GlobalView, MinerState, Mode, Rules, Task
from .ranks import Ranks

if TYPE_CHECKING:
    from distributed_training.chain.server import SignedServer
    from distributed_training.exchange.sn38.swarm import HivemindSwarm
    from distributed_training.training.held_weights import HeldWeights
    from distributed_training.training.snapshot import SnapshotHandle
    from distributed_training.training.trainer import Trainer

    from .global_state import GlobalEpoch

log = logging.getLogger(__name__)


def ignores_calls(state: MinerState) -> bool:
    """Return whether an AllReduce call leads to nothing: no pseudo-gradient is at hand."""
    fetches = state.mode in (Mode.FETCHING, Mode.LOADING)
    return fetches or state.mode is Mode.STOPPING or state.view is GlobalView.UNREAD


def decide_round(state: MinerState, event: ev.Event, rules: Rules) -> Decision | None:
    """Return the next state and what follows, as ``decide`` does; in a round or at a call.

    None outside of both.
    """
    if state.mode is not Mode.AVERAGING and not isinstance(event, ev.AllReduceCalled):
        return None
    match event:
        case ev.AllReduceCalled(request=request, at=at) if state.mode is not Mode.AVERAGING:
            if ignores_calls(state):
                return state, ()
            after = replace(state, mode=Mode.AVERAGING, round=request, called_at=at)
            return after, (Action.WRITE_PSEUDO_GRADIENT,)
        case ev.PseudoGradientWritten():
            return replace(state, trains_on=rules.train_in_rounds), (Task.AVERAGE,)
        case ev.Averaged(result=result):
            return replace(state, averaged=result, trains_on=False), (Action.OUTER_STEP,)
        case ev.OuterStepEnded() | ev.RoundFailed():
            after = replace(
                state,
                mode=Mode.AWAITING_GLOBAL,
                round=None,
                averaged=None,
                trains_on=False,
                fetch_failures=0,
                failed_target=None,
                global_due=state.called_at + rules.reload_seconds,
            )
            if isinstance(event, ev.RoundFailed) or not event.committed:
                return after, ()
            partial = state.averaged is not None and state.averaged.partial
            view = GlobalView.UNPUBLISHED_PARTIAL if partial else GlobalView.UNPUBLISHED
            after = replace(after.clear_unsaved(), outer_step=event.outer_step, view=view)
            # Commit and checkpoint belong together: after a SIGKILL the checkpoint decides.
            return after, (Action.CHECKPOINT,)
        case _:
            return state, ()


class SwarmRank:
    """One rank's part of rounds over hivemind, and of the uploads between them.

    ``snapshots``: folder of snapshots. ``buffers`` (float32 tensors that the swarm averages in
    place) are rank 0's, else None.
    """

    def __init__(
        self,
        trainer: Trainer,
        ranks: Ranks,
        *,
        snapshots: Path,
        buffers: Sequence[torch.Tensor] | None,
    ) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._snapshots = snapshots
        self._buffers = buffers
        self._snapshot: SnapshotHandle | None = None  # the last one

    def carry_out(self, command: Command, progress: Progress, last_loss: float) -> ev.Event | None:
        """Carry out this boundary's part of a round or an upload. Collective."""
        trainer, buffers, began = self._trainer, self._buffers, time.perf_counter()
        match command.action:
            case Action.WRITE_PSEUDO_GRADIENT:
                on = command.trains_on
                try:
                    norm = trainer.write_pseudo_gradient(buffers, trains_on=on)
                except AllReduceError as error:  # raised on all ranks alike
                    return ev.RoundFailed(error.fault, error.detail, began=False)
                return ev.PseudoGradientWritten(norm)
            case Action.OUTER_STEP:
                prepare = partial(trainer.prepare_outer_step, buffers)
                return take_outer_step(trainer, self._ranks, prepare)
            case Action.SNAPSHOT:
                return self._begin_snapshot(command, progress, last_loss)
            case Action.CHECK_GRADIENT:
                assert self._snapshot is not None
                delta = trainer.check_gradient(self._snapshot)
                return ev.GradientChecked(delta, time.perf_counter() - began)
            case _:
                raise AssertionError(command.action)

    def give_up(self) -> None:
        """End the writing of a snapshot under way: its copies are needed."""
        if self._snapshot is not None:
            self._snapshot.cancel()

    def _begin_snapshot(self, command: Command, progress: Progress, last_loss: float) -> ev.Event:
        # Of this boundary: the public miner names the inner step at which an upload ends.
        if self._snapshot is not None and self._snapshot.error is not None:
            self._snapshot = None  # nobody previews it, and its error may hold memory
        # The block tells it from one of the same step that an uploader may still read: a miner that
        # went back to a checkpoint comes by again.
        name = f"{progress.outer_step}.{progress.inner_step}.{command.chain_block}"
        try:
            self._snapshot = self._trainer.snapshot(
                self._snapshots / name,
                progress=progress,
                block=command.chain_block,
                last_loss=last_loss,
                parts=command.parts,
            )
        except (OSError, RankFailedError) as error:  # raised on all ranks alike
            problem = f"This snapshot is not uploaded, and the next one is tried: {error}"
            if self._ranks.rank != 0:  # rank 0 reports the event
                log.warning("%s", problem)
            return ev.SnapshotFailed(problem)
        return ev.SnapshotTaken(self._snapshot, progress, command.parts)


class Averaging:
    """Run rank 0's tasks of a round next to its loop; they answer with events.

    ``post``: queues an event, from any thread.
    """

    def __init__(self, swarm: HivemindSwarm, post: Callable[[ev.Event], None]) -> None:
        self._swarm = swarm
        self._post = post
        self._cancelled = threading.Event()  # the last round
        # Several: a round that was cancelled may not have ended when the next begins. The end of a
        # rank (processes.leave) waits for none of them.
        self._threads = ThreadPoolExecutor(thread_name_prefix="averaging")

    def receive_call(self, request: RoundRequest) -> None:
        """Take a validator's call, in the server's thread: it is posted and nothing more."""
        log.info("%s", lines.RECEIVED_MAIN_ALL_REDUCE)
        self._post(ev.AllReduceCalled(request, time.monotonic()))

    def begin_average(self, request: RoundRequest) -> None:
        """Begin to average; exactly one ``Averaged`` or ``RoundFailed`` answers."""
        cancelled = self._cancelled = threading.Event()

        def average() -> None:
            try:
                result = self._swarm.average(request, cancelled=cancelled)
            except AllReduceError as error:
                self._post(ev.RoundFailed(error.fault, error.detail, causes=error.causes))
            except BaseException as error:  # without an event the miner would wait for ever
                log.exception("The swarm failed with an unexpected error; please report it")
                self._post(ev.RoundFailed(AllReduceFault.SWARM_DOWN, repr(error)))
            else:
                self._post(ev.Averaged(result))

        self._threads.submit(average)

    def cancel_average(self) -> None:
        self._cancelled.set()  # its thread may not have come to the swarm yet
        self._swarm.cancel()


class RoundTasks:
    """Starts the background tasks of a network that averages over hivemind."""

    def __init__(self, averaging: Averaging, global_epoch: GlobalEpoch) -> None:
        self._averaging, self._global_epoch = averaging, global_epoch

    def start(self, task: Task, state: MinerState) -> None:
        match task:
            case Task.AVERAGE:
                assert state.round is not None
                self._averaging.begin_average(state.round)
            case Task.CANCEL_AVERAGE:
                self._averaging.cancel_average()
            case Task.COMPARE_EPOCHS:
                self._global_epoch.compare_soon()
            case Task.COMPARE_WEIGHTS:
                self._global_epoch.compare_weights(state.outer_step)
            case Task.FETCH_GLOBAL:
                assert state.fetch_target is not None
                self._global_epoch.fetch(state.fetch_target)
            case Task.REFUSE_GLOBAL:
                assert state.fetched is not None
                refuse(state.fetched, state.problem)


def take_outer_step(
    trainer: HeldWeights, ranks: Ranks, prepare: Callable[[], None]
) -> ev.OuterStepEnded:
    """Take the outer step that ``prepare`` computes. Collective."""
    detail, began = "", time.perf_counter()
    try:
        prepare()
    except (AllReduceError, RuntimeError, ValueError, OSError) as error:
        detail = str(error) or type(error).__name__
        log.warning("Rank %d votes against the outer step: %s", ranks.rank, detail)
    # A rank that failed votes too: without its vote the others would wait for ever.
    committed = ranks.vote(not detail)
    # On all ranks or on none: a round that fails leaves the public miner half changed.
    if committed:
        trainer.commit_outer_step()
    else:
        trainer.roll_back_outer_step()
        detail = detail or AllReduceFault.LOCAL.value
    held = time.perf_counter() - began
    return ev.OuterStepEnded(committed, trainer.outer_step, detail, held)


def end_rounds_of(server: SignedServer) -> Callable[[ev.Event, MinerState], None]:
    """Return a subscriber that marks a call as finished, once it led to nothing more.

    Without it the server keeps answering that a round is running.
    """

    def on_event(event: ev.Event, state: MinerState) -> None:
        match event:
            case ev.ModeChanged(before=Mode.AVERAGING):
                server.round_ended()
            case ev.AllReduceCalled() if ignores_calls(state):
                server.round_ended()

    return on_event
