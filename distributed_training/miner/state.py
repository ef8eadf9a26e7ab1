"""What the miner does next, as one pure function.

Rank 0 keeps one :class:`MinerState`. Everything that happens (a call from the validator, the end of
an average, a change in the global bucket, a signal) is an event in one queue; :func:`transition`
turns state and event into the next state and the orders that follow. No process, clock or network
is touched here: events carry the time they happened at.

=================  ==============================================================================
state              meaning
=================  ==============================================================================
TRAINING           inner steps; the global epoch is compared with ours from time to time
AVERAGING          inner steps pause; the swarm averages, then all ranks vote on the outer step
AWAITING_GLOBAL    a round ended, well or badly: inner steps go on, and the global epoch is left
                   alone until the validator has had its time to publish (``reload`` timeout)
FETCHING           the global state is being fetched; inner steps go on, and what they do is kept
                   should the fetch fail. No round: our pseudo-gradient is another epoch's
LOADING            the global state is being loaded; inner steps pause
STOPPING           the last order was STOP
=================  ==============================================================================
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from pathlib import Path

from distributed_training.protocol.types import AllReduceFault, AllReduceResult, RoundRequest


class Mode(enum.Enum):
    TRAINING = "training"
    AVERAGING = "averaging"
    AWAITING_GLOBAL = "awaiting_global"
    FETCHING = "fetching"
    LOADING = "loading"
    STOPPING = "stopping"


class Do(enum.Enum):
    """Orders. Those above the line reach all ranks, those below concern rank 0 alone."""

    AVERAGE = "write the pseudo-gradient into the swarm's buffers"
    OUTER_STEP = "prepare the outer step, vote, commit or roll back"
    LOAD = "load the fetched global state"
    REBASE = "take the fetched global state as epoch start, keep what was trained since"
    SNAPSHOT = "write a snapshot"
    PREVIEW = "try the snapshot's gradient as a validator would, then publish"
    CHECKPOINT = "write a checkpoint"
    ROLL_BACK = "go back to the last good checkpoint"
    STOP = "checkpoint and leave the loop"
    # ----
    START_AVERAGING = "let the swarm average in its own thread"
    CANCEL_AVERAGING = "the round is over: free the swarm"
    PAUSE_UPLOADS = "the round needs the line"
    RESUME_UPLOADS = "the line is free again"
    COMPARE_EPOCHS = "read the global epoch soon"
    FETCH_GLOBAL = "download the global state in the background"
    COMPARE_WEIGHTS = "compare a sample of the global weights with our epoch start"


COLLECTIVE = frozenset(
    {
        Do.AVERAGE,
        Do.OUTER_STEP,
        Do.LOAD,
        Do.REBASE,
        Do.SNAPSHOT,
        Do.PREVIEW,
        Do.CHECKPOINT,
        Do.ROLL_BACK,
        Do.STOP,
    }
)


@dataclass(frozen=True)
class MinerState:
    """``outer_step`` is the local epoch. Times are ``time.monotonic()``: a wall clock that is set
    must not move a deadline."""

    mode: Mode
    outer_step: int
    round: RoundRequest | None = None
    called_at: float = 0.0  # that round
    global_due: float = 0.0  # when AWAITING_GLOBAL ends
    fetch_target: int | None = None  # the epoch being fetched
    partial: bool = False  # our last outer step may differ from that of others
    rebase: bool = False  # of a fetch: the epoch is ours, only its start is not
    fetch_failures: int = 0  # in a row, of failed_target
    failed_target: int | None = None
    exit_status: int = 0
    stop_reason: str = ""


# --- events ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AllReduceCalled:
    request: RoundRequest
    at: float


@dataclass(frozen=True)
class PseudoGradientWritten:
    """All ranks wrote their shard of the pseudo-gradient; ``norm`` is global."""

    norm: float


@dataclass(frozen=True)
class AveragingEnded:
    """``fault`` is None when ``result`` is there."""

    result: AllReduceResult | None
    fault: AllReduceFault | None = None
    detail: str = ""


@dataclass(frozen=True)
class OuterStepEnded:
    committed: bool
    outer_step: int  # after it
    at: float
    detail: str = ""
    partial: bool = False  # parts of the average failed


@dataclass(frozen=True)
class InnerStepEnded:
    """``snapshot_due`` and ``checkpoint_due`` are what the schedules say of this step;
    ``preview_due``: a snapshot is complete on disk. It comes again until there was a preview."""

    inner_step: int
    preview_due: bool = False
    snapshot_due: bool = False
    checkpoint_due: bool = False
    roll_back: bool = False  # three losses in a row were not finite


@dataclass(frozen=True)
class GlobalEpochSeen:
    outer_step: int
    at: float


@dataclass(frozen=True)
class WeightsCompared:
    """Whether the global weights of ``outer_step`` are those our epoch began with."""

    outer_step: int
    same: bool


@dataclass(frozen=True)
class GlobalFetched:
    outer_step: int
    folder: Path


@dataclass(frozen=True)
class GlobalFetchFailed:
    detail: str
    at: float


@dataclass(frozen=True)
class LoadEnded:
    outer_step: int


@dataclass(frozen=True)
class RolledBack:
    """Weights are those of a checkpoint of ``outer_step``, which may be an epoch before ours."""

    outer_step: int


@dataclass(frozen=True)
class Tick:
    at: float


@dataclass(frozen=True)
class StopRequested:
    reason: str
    exit_status: int = 0


Event = (
    AllReduceCalled
    | PseudoGradientWritten
    | AveragingEnded
    | OuterStepEnded
    | InnerStepEnded
    | GlobalEpochSeen
    | WeightsCompared
    | GlobalFetched
    | GlobalFetchFailed
    | LoadEnded
    | RolledBack
    | Tick
    | StopRequested
)

Orders = tuple[Do, ...]
_FETCH_AGAIN, _FETCH_AGAIN_LONGEST = 60.0, 3600.0  # seconds after a fetch that failed, doubled


@dataclass(frozen=True)
class Timing:
    """``reload_seconds``: from an AllReduce call until the validator must have published."""

    reload_seconds: float


def trains(mode: Mode) -> bool:
    """Whether inner steps run in this state."""
    return mode in (Mode.TRAINING, Mode.AWAITING_GLOBAL, Mode.FETCHING)


def transition(state: MinerState, event: Event, timing: Timing) -> tuple[MinerState, Orders]:
    """The next state and the orders that follow from ``event``. Pure.

    An event that has no meaning in a state (an average that ends after it was given up, say)
    changes nothing.
    """
    if state.mode is Mode.STOPPING:
        return state, ()
    match event:
        case StopRequested(reason=reason, exit_status=status):
            orders: Orders = (Do.STOP,)
            if state.mode is Mode.AVERAGING:
                orders = (Do.CANCEL_AVERAGING, Do.STOP)
            return (
                replace(
                    state,
                    mode=Mode.STOPPING,
                    round=None,
                    exit_status=status,
                    stop_reason=reason,
                ),
                orders,
            )
        case AllReduceCalled(request=request, at=at):
            if not trains(state.mode) or state.mode is Mode.FETCHING:
                return state, ()
            return (
                replace(state, mode=Mode.AVERAGING, round=request, called_at=at),
                (Do.PAUSE_UPLOADS, Do.AVERAGE),
            )
        case PseudoGradientWritten() if state.mode is Mode.AVERAGING:
            return state, (Do.START_AVERAGING,)
        case AveragingEnded(result=result) if state.mode is Mode.AVERAGING:
            if result is not None:
                return state, (Do.OUTER_STEP,)
            return _round_over(state, timing), (Do.RESUME_UPLOADS,)
        case OuterStepEnded(committed=committed, outer_step=outer) if state.mode is Mode.AVERAGING:
            after = replace(_round_over(state, timing), outer_step=outer)
            if committed:
                after = replace(after, partial=event.partial)
            # Commit and checkpoint belong together: after a SIGKILL the checkpoint decides.
            return after, (
                (Do.CHECKPOINT, Do.RESUME_UPLOADS) if committed else (Do.RESUME_UPLOADS,)
            )
        case InnerStepEnded() if trains(state.mode):
            if event.roll_back:
                return state, (Do.ROLL_BACK,)
            orders = ()
            if event.preview_due:
                orders += (Do.PREVIEW,)
            if event.snapshot_due and state.mode is not Mode.FETCHING:
                orders += (Do.SNAPSHOT,)
            if event.checkpoint_due:
                orders += (Do.CHECKPOINT,)
            return state, orders
        case GlobalEpochSeen(outer_step=seen, at=at):
            return _epoch_seen(state, seen, at)
        case WeightsCompared(outer_step=outer, same=False) if (
            state.mode is Mode.TRAINING and outer == state.outer_step
        ):
            return _fetch_for_rebase(state)
        case GlobalFetched() if state.mode is Mode.FETCHING:
            order = Do.REBASE if state.rebase else Do.LOAD
            return replace(state, mode=Mode.LOADING), (order,)
        case GlobalFetchFailed(at=at) if state.mode in (Mode.FETCHING, Mode.LOADING):
            # Training on stale weights beats not training; a later comparison tries again.
            again = state.fetch_target == state.failed_target
            failures = 1 + (state.fetch_failures if again else 0)
            return (
                replace(
                    state,
                    mode=Mode.AWAITING_GLOBAL,
                    fetch_target=None,
                    rebase=False,
                    partial=state.partial or state.rebase,
                    fetch_failures=failures,
                    failed_target=state.fetch_target,
                    global_due=at
                    + min(_FETCH_AGAIN * 2 ** min(failures - 1, 10), _FETCH_AGAIN_LONGEST),
                ),
                (Do.RESUME_UPLOADS,),
            )
        case LoadEnded(outer_step=outer) if state.mode is Mode.LOADING:
            return (
                replace(
                    state,
                    mode=Mode.TRAINING,
                    outer_step=outer,
                    fetch_target=None,
                    rebase=False,
                    partial=False,
                    fetch_failures=0,
                    failed_target=None,
                ),
                (Do.CHECKPOINT, Do.RESUME_UPLOADS),
            )
        case RolledBack(outer_step=outer) if outer != state.outer_step:
            # A rebase would keep what was trained in an epoch that is not ours any more.
            return replace(state, outer_step=outer, rebase=False), (Do.COMPARE_EPOCHS,)
        case Tick(at=at) if state.mode is Mode.AWAITING_GLOBAL and at >= state.global_due:
            return replace(state, mode=Mode.TRAINING), (Do.COMPARE_EPOCHS, Do.COMPARE_WEIGHTS)
        case _:
            return state, ()


def _round_over(state: MinerState, timing: Timing) -> MinerState:
    return replace(
        state,
        mode=Mode.AWAITING_GLOBAL,
        round=None,
        fetch_failures=0,
        failed_target=None,
        global_due=state.called_at + timing.reload_seconds,
    )


def _fetch_for_rebase(state: MinerState) -> tuple[MinerState, Orders]:
    return (
        replace(state, mode=Mode.FETCHING, fetch_target=state.outer_step, rebase=True, round=None),
        (Do.PAUSE_UPLOADS, Do.FETCH_GLOBAL),
    )


def _epoch_seen(state: MinerState, seen: int, at: float) -> tuple[MinerState, Orders]:
    if state.mode is Mode.AWAITING_GLOBAL:
        if seen == state.outer_step and at >= state.global_due:
            if state.partial:
                return _fetch_for_rebase(state)
            return replace(state, mode=Mode.TRAINING), (Do.COMPARE_WEIGHTS,)
        # Before its time is up the validator may still be publishing the epoch we already have.
        # An epoch ahead of ours is never on its way: it is there.
        # One that could not be fetched is not asked for again before its time.
        if at < state.global_due and (seen <= state.outer_step or seen == state.failed_target):
            return state, ()
    elif state.mode is not Mode.TRAINING:
        return state, ()
    if seen == state.outer_step:
        return _fetch_for_rebase(state) if state.partial else (state, ())
    return (
        replace(state, mode=Mode.FETCHING, fetch_target=seen, rebase=False, round=None),
        (Do.PAUSE_UPLOADS, Do.FETCH_GLOBAL),
    )
