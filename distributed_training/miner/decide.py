"""What the miner does next, as one pure function.

Rank 0 keeps one :class:`MinerState`. Everything that happens is an event in one queue;
:func:`decide` turns state and event into the next state and the orders and tasks that follow. No
process, clock or network is touched here: events carry the time they happened at.

=================  ==============================================================================
mode               meaning
=================  ==============================================================================
TRAINING           inner steps; the global epoch is compared with ours from time to time
AVERAGING          inner steps pause; the swarm averages, then all ranks vote on the outer step
AWAITING_GLOBAL    a round ended, successful or not: inner steps go on, and a global epoch behind
                   ours is left alone until the validator has had its time to publish
                   (``reload`` timeout)
FETCHING           the global state is being fetched; inner steps go on, and what they do is kept
                   should the fetch fail. No round: our pseudo-gradient is another epoch's
LOADING            the global state is being loaded; inner steps pause
STOPPING           the last order was STOP
=================  ==============================================================================
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from distributed_training.common.backoff import doubling
from distributed_training.protocol.types import AllReduceResult, Progress, RoundRequest

from . import events as ev
from .orders import Order, Task

_FETCH_AGAIN = timedelta(minutes=1)  # after a fetch that failed, doubled by each further one
_FETCH_AGAIN_LONGEST = timedelta(hours=1)


class Mode(enum.Enum):
    """Where the miner stands; the values are those of the ``state`` events."""

    TRAINING = "training"
    AVERAGING = "averaging"
    AWAITING_GLOBAL = "awaiting_global"
    FETCHING = "fetching"
    LOADING = "loading"
    STOPPING = "stopping"


@dataclass(frozen=True)
class MinerState:
    """``outer_step`` is the local epoch. Times are ``time.monotonic()``."""

    mode: Mode
    outer_step: int
    # a round
    round: RoundRequest | None = None
    called_at: float = 0.0
    averaged: AllReduceResult | None = None  # what the outer step under way is made of
    partial: bool = False  # our last outer step may differ from that of others
    unpublished: bool = False  # the bucket was not seen at our last outer step yet
    # the global state
    global_due: float = 0.0  # when AWAITING_GLOBAL ends
    fetch_target: int | None = None  # the epoch being fetched
    fetched: Path | None = None  # its files
    rebase: bool = False  # the epoch is ours, only its start is not
    fetch_failures: int = 0  # in a row, of failed_target
    failed_target: int | None = None
    # the end
    exit_status: int = 0
    stop_reason: str = ""


@dataclass(frozen=True)
class Rules:
    """``reload_seconds``: from an AllReduce call until the validator must have published.
    ``checkpoint_steps``: inner steps between two checkpoints."""

    reload_seconds: float
    checkpoint_steps: int


Decision = tuple[MinerState, tuple[Order | Task, ...]]


def trains(mode: Mode) -> bool:
    """Whether inner steps run in this mode."""
    return mode in (Mode.TRAINING, Mode.AWAITING_GLOBAL, Mode.FETCHING)


def publishes(mode: Mode) -> bool:
    """Whether a snapshot taken in this mode is worth publishing, and the line is free for it."""
    return mode in (Mode.TRAINING, Mode.AWAITING_GLOBAL)


def ignores_calls(mode: Mode) -> bool:
    """Whether an AllReduce call leads to nothing: there is no pseudo-gradient of this epoch."""
    return mode in (Mode.FETCHING, Mode.LOADING, Mode.STOPPING)


def decide(state: MinerState, event: ev.Event, rules: Rules) -> Decision:
    """The next state, and the orders and tasks that follow from ``event``. Pure.

    An event that has no meaning in a mode (an average that ends after it was given up, say)
    changes nothing.
    """
    if state.mode is Mode.STOPPING:
        return state, ()
    match event:
        case ev.StopRequested(reason=reason, exit_status=status):
            after = replace(
                state, mode=Mode.STOPPING, round=None, exit_status=status, stop_reason=reason
            )
            if state.mode is Mode.AVERAGING:
                return after, (Task.CANCEL_AVERAGE, Order.STOP)
            return after, (Order.STOP,)
        case ev.InnerStepDone() if trains(state.mode):
            return state, _after_step(event, rules)
        case ev.SnapshotWanted() if publishes(state.mode):
            return state, (Order.SNAPSHOT,)
        case ev.SnapshotComplete() if trains(state.mode):
            return state, (Order.PREVIEW,)
        case ev.RolledBack(progress=Progress(outer_step=outer)) if outer != state.outer_step:
            # A rebase would keep what was trained in an epoch that is not ours any more.
            after = replace(state, outer_step=outer, rebase=False, unpublished=False)
            return after, (Task.COMPARE_EPOCHS,)
        case ev.AllReduceCalled() if ignores_calls(state.mode):
            return state, ()
        case _ if state.mode is Mode.AVERAGING:
            return _in_round(state, event, rules)
        case ev.AllReduceCalled(request=request, at=at):
            after = replace(state, mode=Mode.AVERAGING, round=request, called_at=at)
            return after, (Order.WRITE_PSEUDO_GRADIENT,)
        case _:
            return _global_state(state, event)


def _after_step(event: ev.InnerStepDone, rules: Rules) -> tuple[Order, ...]:
    if event.diverged:
        return (Order.ROLL_BACK,)
    if event.report.skipped or event.report.inner_step % rules.checkpoint_steps:
        return ()
    return (Order.CHECKPOINT,)


def _in_round(state: MinerState, event: ev.Event, rules: Rules) -> Decision:
    match event:
        case ev.PseudoGradientWritten():
            return state, (Task.AVERAGE,)
        case ev.Averaged(result=result):
            return replace(state, averaged=result), (Order.OUTER_STEP,)
        case ev.RoundFailed():
            return _round_over(state, rules), ()
        case ev.OuterStepEnded(committed=committed, outer_step=outer):
            after = replace(_round_over(state, rules), outer_step=outer)
            if not committed:
                return after, ()
            partial = state.averaged is not None and state.averaged.partial
            # Commit and checkpoint belong together: after a SIGKILL the checkpoint decides.
            return replace(after, partial=partial, unpublished=True), (Order.CHECKPOINT,)
        case _:
            return state, ()


def _round_over(state: MinerState, rules: Rules) -> MinerState:
    return replace(
        state,
        mode=Mode.AWAITING_GLOBAL,
        round=None,
        averaged=None,
        fetch_failures=0,
        failed_target=None,
        global_due=state.called_at + rules.reload_seconds,
    )


def _global_state(state: MinerState, event: ev.Event) -> Decision:
    match event:
        case ev.Tick(at=at) if state.mode is Mode.AWAITING_GLOBAL and at >= state.global_due:
            after = replace(state, mode=Mode.TRAINING)
            return after, (Task.COMPARE_EPOCHS, Task.COMPARE_WEIGHTS)
        case ev.GlobalEpochSeen(outer_step=seen, at=at):
            return _epoch_seen(state, seen, at)
        case ev.WeightsCompared(outer_step=outer, same=False) if (
            state.mode is Mode.TRAINING and outer == state.outer_step
        ):
            return _fetch(state, outer, rebase=True)
        case ev.GlobalFetched(folder=folder) if state.mode is Mode.FETCHING:
            after = replace(state, mode=Mode.LOADING, fetched=folder)
            return after, (Order.REBASE if state.rebase else Order.LOAD,)
        case ev.GlobalFetchFailed(at=at) if state.mode is Mode.FETCHING:
            return _fetch_failed(state, at), ()
        case ev.LoadFailed(at=at) if state.mode is Mode.LOADING:
            return _fetch_failed(state, at), (Task.DISCARD_GLOBAL,)
        case ev.Loaded(outer_step=outer) if state.mode is Mode.LOADING:
            return MinerState(mode=Mode.TRAINING, outer_step=outer), (Order.CHECKPOINT,)
        case _:
            return state, ()


def _epoch_seen(state: MinerState, seen: int, at: float) -> Decision:
    if state.mode is Mode.AWAITING_GLOBAL:
        # The root metadata is written last: our outer step in it is published whole. The next round
        # may be called before the time to publish is up, and must begin from the same weights.
        published = state.unpublished and seen != state.failed_target
        if seen == state.outer_step and (published or at >= state.global_due):
            if state.partial:
                return _fetch(state, seen, rebase=True)
            after = replace(state, mode=Mode.TRAINING, unpublished=False)
            return after, (Task.COMPARE_WEIGHTS,)
        # Before its time is up the validator may still be publishing the epoch we already have.
        # An epoch ahead of ours is never on its way: it is there.
        # One that could not be fetched is not asked for again before its time.
        if at < state.global_due and (seen <= state.outer_step or seen == state.failed_target):
            return state, ()
    elif state.mode is not Mode.TRAINING:
        return state, ()
    if seen != state.outer_step:
        return _fetch(state, seen, rebase=False)
    return _fetch(state, seen, rebase=True) if state.partial else (state, ())


def _fetch(state: MinerState, target: int, *, rebase: bool) -> Decision:
    after = replace(
        state, mode=Mode.FETCHING, fetch_target=target, rebase=rebase, unpublished=False
    )
    return after, (Task.FETCH_GLOBAL,)


def _fetch_failed(state: MinerState, at: float) -> MinerState:
    """Training on stale weights beats not training; a later comparison tries again."""
    again = state.fetch_target == state.failed_target
    failures = 1 + (state.fetch_failures if again else 0)
    wait = doubling(failures, first=_FETCH_AGAIN, longest=_FETCH_AGAIN_LONGEST)
    return replace(
        state,
        mode=Mode.AWAITING_GLOBAL,
        fetch_target=None,
        fetched=None,
        rebase=False,
        partial=state.partial or state.rebase,
        fetch_failures=failures,
        failed_target=state.fetch_target,
        global_due=at + wait.total_seconds(),
    )
