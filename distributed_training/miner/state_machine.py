"""The miner's next action, as one pure function of state and event.

Everything that happens becomes an *event* in one queue of rank 0: a call from the validator, the
end of an average, a new global state, a signal, the result of each command. :func:`decide` turns
the :class:`MinerState` and an event into the next state and what follows: *commands*, which reach
all ranks at a micro-batch boundary, and *tasks*, which rank 0 starts beside the loop. What follows
from one is an event again. No process, clock or network is touched here: events carry the time they
happened at, of ``time.monotonic()``, since a wall clock that is set must move no deadline.

=================  ==============================================================================
mode               meaning
=================  ==============================================================================
TRAINING           inner steps; the global outer step is compared with ours from time to time
AVERAGING          inner steps pause, unless ``Rules.train_in_rounds``; the swarm averages, then all
                   ranks vote on the outer step. A snapshot's gradient is checked now
AWAITING_GLOBAL    a round ended, successful or not: inner steps go on, and a global outer step
                   behind ours is left alone until the validator has had its time to publish
                   (``reload`` timeout), or says that it did not
FETCHING           the global state is being fetched; inner steps go on, and their result is kept
                   should the fetch fail. No round: our pseudo-gradient is another outer step's
LOADING            the global state is being loaded; inner steps pause
STOPPING           the last command was STOP
=================  ==============================================================================
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from distributed_training.common.backoff import doubling
from distributed_training.protocol.types import (
    AllReduceFault,
    AllReduceResult,
    Progress,
    PublicationReport,
    Revision,
    RoundRequest,
    StepReport,
)

if TYPE_CHECKING:
    from distributed_training.training.snapshot import SnapshotHandle


class Action(enum.IntEnum):
    """The action that every rank carries out next."""

    TRAIN = 0  # one micro-batch
    IDLE = 1  # nothing: rank 0 waits for something
    WAIT_FOR_DATA = 2  # nothing: no block is ready on all ranks
    WRITE_PSEUDO_GRADIENT = 3  # into the swarm's buffers
    OUTER_STEP = 4  # prepare, vote, commit everywhere or nowhere
    LOAD = 5  # the fetched global state
    REBASE = 6  # the same, keeping what was trained in this outer step
    SNAPSHOT = 7  # of everything an upload needs
    CHECK_GRADIENT = 8  # on held-out data, as a validator would
    CHECKPOINT = 9
    ROLL_BACK = 10  # to the last good checkpoint
    STOP = 11  # checkpoint and leave the loop


class Task(enum.Enum):
    """The background tasks that rank 0 alone starts, beside the loop."""

    AVERAGE = "let the swarm average in its own thread"
    CANCEL_AVERAGE = "the round is over: free the swarm"
    COMPARE_EPOCHS = "read the global outer step soon"
    COMPARE_WEIGHTS = "compare a sample of the global weights with those our outer step began with"
    FETCH_GLOBAL = "download the global state"
    REFUSE_GLOBAL = "refuse the fetched global state: it could not be loaded"


class DataPart(NamedTuple):
    """A boundary's part about data; 0 where there is none.

    ``request``: a block to prefetch. ``begin``: the block to train on from here, cut to
    ``sequences`` on every rank, of which the first ``start`` were trained on before a restart.
    """

    request: int = 0
    begin: int = 0
    sequences: int = 0
    start: int = 0


class LocalPart(NamedTuple):
    """Rank 0's local data of a command; it is never broadcast."""

    folder: Path | None = None  # LOAD, REBASE: the fetched global state
    blocks: Sequence[int] = ()  # SNAPSHOT, CHECKPOINT, STOP: trained on since the last upload
    kept: Mapping[str, Any] = {}  # CHECKPOINT, STOP: more for rank 0's checkpoint, JSON-able


@dataclass(frozen=True)
class Command:
    """One boundary: the action with what it needs, the part about data, and rank 0's own part."""

    action: Action
    outer_step: int = 0  # LOAD, REBASE: of the fetched global state
    chain_block: int = 0  # SNAPSHOT: at this boundary
    exit_status: int = 0  # STOP: of the miner
    trains_on: bool = False  # WRITE_PSEUDO_GRADIENT: inner steps go on after it
    in_pause: bool = False  # CHECK_GRADIENT: a round holds up training anyway
    data: DataPart = field(default=DataPart())
    local: LocalPart = field(default=LocalPart(), compare=False)

    def to_integers(self) -> list[int]:
        """Return :data:`COMMAND_INTEGERS` integers: all but rank 0's own part."""
        flags = int(self.trains_on), int(self.in_pause)
        numbers = self.outer_step, self.chain_block, self.exit_status
        return [self.action, *numbers, *flags, *self.data]

    @classmethod
    def from_integers(cls, integers: Sequence[int]) -> Command:
        action, outer_step, chain_block, exit_status, trains_on, in_pause, *data = integers
        return cls(
            Action(action),
            outer_step=outer_step,
            chain_block=chain_block,
            exit_status=exit_status,
            trains_on=bool(trains_on),
            in_pause=bool(in_pause),
            data=DataPart(*data),
        )


COMMAND_INTEGERS = len(Command(Action.TRAIN).to_integers())


class Mode(enum.Enum):
    """The modes of the miner; the values are those of the ``state`` events.

    The docstring of :mod:`.state_machine` explains each.
    """

    TRAINING = "training"
    AVERAGING = "averaging"
    AWAITING_GLOBAL = "awaiting_global"
    FETCHING = "fetching"
    LOADING = "loading"
    STOPPING = "stopping"


class Event:
    """One of the dataclasses below; none is derived from another."""


# --- results of commands -------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatchTrained(Event):
    """One micro-batch, and the inner step is not complete yet."""


@dataclass(frozen=True)
class BlockUsedUp(Event):
    """There was no micro-batch left in the block, on any rank."""


@dataclass(frozen=True)
class InnerStepDone(Event):
    """``diverged``: so many steps in a row had no finite loss that a checkpoint must be loaded."""

    report: StepReport
    diverged: bool = False


@dataclass(frozen=True)
class PseudoGradientWritten(Event):
    """All ranks wrote their shard of the pseudo-gradient; ``norm`` is global."""

    norm: float


@dataclass(frozen=True)
class OuterStepEnded(Event):
    """``outer_step``: after it. ``detail``: why a rank voted against it."""

    committed: bool
    outer_step: int
    detail: str = ""


@dataclass(frozen=True)
class Loaded(Event):
    """Weights, or after a rebase those the outer step began with, are the global state's."""

    outer_step: int


@dataclass(frozen=True)
class LoadFailed(Event):
    """The fetched state does not fit this model; weights are as they were.

    ``awful``: it fits, but its loss is beyond the limit.
    """

    problem: str
    at: float
    awful: bool = False


@dataclass(frozen=True)
class SnapshotTaken(Event):
    """Training goes on; ``handle`` tells when this rank's files are complete."""

    handle: SnapshotHandle
    progress: Progress


@dataclass(frozen=True)
class GradientChecked(Event):
    """``delta``: loss with minus without the snapshot's gradient, nats per token; None: unknown."""

    delta: float | None
    seconds: float


@dataclass(frozen=True)
class RolledBack(Event):
    """``progress`` of the checkpoint loaded, None without one; ``kept``: what rank 0 kept in it."""

    progress: Progress | None
    kept: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stopped(Event):
    """The loop has ended on all ranks."""

    exit_status: int


# --- from rank 0's threads and processes ----------------------------------------------------------


@dataclass(frozen=True)
class AllReduceCalled(Event):
    """A signed call that the server accepted."""

    request: RoundRequest
    at: float


@dataclass(frozen=True)
class Averaged(Event):
    """The average lies in the swarm's buffers."""

    result: AllReduceResult


@dataclass(frozen=True)
class RoundFailed(Event):
    """There is no average. ``began`` is False when the pseudo-gradient could not be written."""

    fault: AllReduceFault
    detail: str = ""
    began: bool = True
    causes: Mapping[str, str] = field(default_factory=dict)  # what was wrong with peers, by id


@dataclass(frozen=True)
class GlobalEpochSeen(Event):
    """The global bucket stands at this outer step."""

    outer_step: int
    at: float


@dataclass(frozen=True)
class ValidatorHeard(Event):
    """The master says by a signed call that it is at this outer step, and in no round."""

    outer_step: int
    at: float


@dataclass(frozen=True)
class WeightsCompared(Event):
    """The result of comparing the global weights of ``outer_step`` with ours."""

    outer_step: int
    same: bool


@dataclass(frozen=True)
class NetworkCompared(Event):
    """The network's file of the global bucket differs from ours by ``problem``; empty: not now.

    Posted when that changes.
    """

    problem: str


@dataclass(frozen=True)
class GlobalFetched(Event):
    """The files of a global state are in ``folder``."""

    folder: Path


@dataclass(frozen=True)
class GlobalFetchFailed(Event):
    """A global state could not be fetched."""

    detail: str
    at: float


@dataclass(frozen=True)
class StopRequested(Event):
    """A signal, or a reason found by this program, asks for a stop."""

    reason: str
    exit_status: int = 0


# --- what follows from others ---------------------------------------------------------------------


@dataclass(frozen=True)
class Tick(Event):
    """A tick about once a second, at which deadlines are compared."""

    at: float


@dataclass(frozen=True)
class ModeChanged(Event):
    """The state machine went to another mode."""

    before: Mode
    after: Mode


@dataclass(frozen=True)
class SnapshotWanted(Event):
    """The inner step that just ended is to be uploaded."""


@dataclass(frozen=True)
class SnapshotComplete(Event):
    """Rank 0's part of the snapshot is on disk: its gradient can be previewed."""


@dataclass(frozen=True)
class SnapshotFailed(Event):
    """``revision`` is None when none was begun; otherwise its files could not be written.

    ``kind``: that of metric ``snapshots_refused_total``.
    """

    problem: str
    revision: Revision | None = None
    kind: Literal["disk", "blocks", "write", "unchecked"] = "write"


@dataclass(frozen=True)
class SnapshotPutOff(Event):
    """A snapshot is due, and the block list is too old for it; posted at most once a minute."""


@dataclass(frozen=True)
class SnapshotSubmitted(Event):
    """The uploader has it, ``seconds`` after the snapshot was taken."""

    revision: Revision
    preview: GradientChecked
    seconds: float = 0.0


@dataclass(frozen=True)
class PublicationEnded(Event):
    """The uploader has answered."""

    report: PublicationReport


class GlobalView(enum.Enum):
    """The global bucket, compared with the outer step and the epoch-start weights of ours."""

    UNREAD = "it was not read since a start from the disk, whose state may be old"
    SAME = "no difference is known"
    UNPUBLISHED = "it was not seen at our last outer step yet"
    UNPUBLISHED_PARTIAL = "neither, and parts of that outer step's average failed here"
    DIFFERENT = "its weights of our outer step are, or may be, others than ours"


#: What becomes of a view once nothing more is expected of the bucket at our last outer step.
_NO_LONGER_AWAITED = {
    GlobalView.UNPUBLISHED: GlobalView.SAME,
    GlobalView.UNPUBLISHED_PARTIAL: GlobalView.DIFFERENT,
}

_FETCH_AGAIN = timedelta(minutes=1)  # after a fetch that failed, doubled by each further one
_FETCH_AGAIN_LONGEST = timedelta(hours=1)


@dataclass(frozen=True)
class MinerState:
    """``outer_step`` is this miner's. Times are ``time.monotonic()``."""

    mode: Mode
    outer_step: int
    # a round
    round: RoundRequest | None = None
    called_at: float = 0.0
    averaged: AllReduceResult | None = None  # what the outer step under way is made of
    trains_on: bool = False  # inner steps go on while the swarm averages
    # the global state
    view: GlobalView = GlobalView.SAME
    global_due: float = 0.0  # when AWAITING_GLOBAL ends
    fetch_target: int | None = None  # the outer step being fetched
    fetched: Path | None = None  # its files
    problem: str = ""  # why the state that was fetched last was not loaded
    fetch_failures: int = 0  # in a row, of failed_target
    failed_target: int | None = None
    # trained since the last checkpoint
    unsaved_steps: int = 0
    unsaved_seconds: float = 0.0
    # the end
    exit_status: int = 0
    stop_reason: str = ""


@dataclass(frozen=True)
class Rules:
    """The durations by which the state machine decides.

    ``reload_seconds``: from an AllReduce call until the validator must have uploaded.
    ``checkpoint_steps``, ``checkpoint_seconds``: inner steps and seconds of training between two
    checkpoints; both must have passed. ``train_in_rounds``: inner steps go on while the swarm
    averages; the outer step keeps what they trained.
    """

    reload_seconds: float
    checkpoint_steps: int
    checkpoint_seconds: float = 0.0
    train_in_rounds: bool = False


Decision = tuple[MinerState, tuple[Action | Task, ...]]


def trains(mode: Mode) -> bool:
    """Return whether inner steps run in this mode.

    Uploads go on then too: validators judge those of an outer step for half a round period after
    it, and a rebase stays in the outer step.
    """
    return mode in (Mode.TRAINING, Mode.AWAITING_GLOBAL, Mode.FETCHING)


def trains_now(state: MinerState) -> bool:
    """Return whether the next boundary may train: also in a round where steps go on then."""
    return trains(state.mode) or state.trains_on


def may_check(state: MinerState) -> bool:
    """Return whether a snapshot's gradient may be checked now.

    A round that has its average is not held up: the check follows the outer step.
    """
    return trains(state.mode) or (state.mode is Mode.AVERAGING and state.averaged is None)


def ignores_calls(state: MinerState) -> bool:
    """Return whether an AllReduce call leads to nothing: no pseudo-gradient is at hand."""
    fetches = state.mode in (Mode.FETCHING, Mode.LOADING)
    return fetches or state.mode is Mode.STOPPING or state.view is GlobalView.UNREAD


def rebases(state: MinerState) -> bool:
    """Return whether the state being fetched or loaded is of our outer step: training is kept."""
    return state.fetch_target == state.outer_step


def goes_back(state: MinerState) -> bool:
    """Return whether the state being loaded is of no later outer step than this miner's."""
    return state.fetch_target is not None and state.fetch_target <= state.outer_step


def decide(state: MinerState, event: Event, rules: Rules) -> Decision:
    """Return the next state, and the commands and tasks that follow from ``event``.

    Pure.

    An event that has no meaning in a mode (an average that ends after it was given up, say) changes
    nothing.
    """
    if state.mode is Mode.STOPPING:
        return state, ()
    match event:
        case StopRequested(reason=reason, exit_status=status):
            after = replace(
                state, mode=Mode.STOPPING, round=None, exit_status=status, stop_reason=reason
            )
            if state.mode is Mode.AVERAGING:
                return after, (Task.CANCEL_AVERAGE, Action.STOP)
            return after, (Action.STOP,)
        case InnerStepDone() if trains_now(state):
            return _after_step(state, event, rules)
        case SnapshotWanted() if trains(state.mode):
            # A checkpoint of the same boundary shares the snapshot's copies in host memory.
            if 0 < rules.checkpoint_seconds <= 2 * state.unsaved_seconds:
                return _clear_unsaved(state), (Action.SNAPSHOT, Action.CHECKPOINT)
            return state, (Action.SNAPSHOT,)
        case SnapshotComplete() if may_check(state):
            return state, (Action.CHECK_GRADIENT,)
        case RolledBack(progress=Progress(outer_step=outer)) if outer != state.outer_step:
            view = _NO_LONGER_AWAITED.get(state.view, state.view)
            after = replace(state, outer_step=outer, view=view)
            return after, (Task.COMPARE_EPOCHS,)
        case AllReduceCalled() if ignores_calls(state):
            return state, ()
        case _ if state.mode is Mode.AVERAGING:
            return _in_round(state, event, rules)
        case AllReduceCalled(request=request, at=at):
            after = replace(state, mode=Mode.AVERAGING, round=request, called_at=at)
            return after, (Action.WRITE_PSEUDO_GRADIENT,)
        case _:
            return _global_state(state, event)


def _after_step(state: MinerState, event: InnerStepDone, rules: Rules) -> Decision:
    averaging = state.mode is Mode.AVERAGING  # the round's average is still to come
    if event.diverged:
        if averaging:
            # No roll-back: its checkpoint may be of the outer step before, and the average is of
            # this one. Skipped steps changed no weights.
            return replace(state, trains_on=False), ()
        return _clear_unsaved(state), (Action.ROLL_BACK,)
    report = event.report
    if report.skipped:
        return state, ()
    # Time counts beside steps: a checkpoint has 16 bytes a parameter, and a GPU may take 25 steps
    # in a minute.
    steps, seconds = state.unsaved_steps + 1, state.unsaved_seconds + report.seconds
    due = steps >= rules.checkpoint_steps and seconds >= rules.checkpoint_seconds
    if averaging or not due:  # in a round its copies would be in host memory beside the round's
        return replace(state, unsaved_steps=steps, unsaved_seconds=seconds), ()
    return _clear_unsaved(state), (Action.CHECKPOINT,)


def _clear_unsaved(state: MinerState) -> MinerState:
    """Return the state after a checkpoint of all that was trained, or a roll-back of it."""
    return replace(state, unsaved_steps=0, unsaved_seconds=0.0)


def _in_round(state: MinerState, event: Event, rules: Rules) -> Decision:
    match event:
        case PseudoGradientWritten():
            return replace(state, trains_on=rules.train_in_rounds), (Task.AVERAGE,)
        case Averaged(result=result):
            return replace(state, averaged=result, trains_on=False), (Action.OUTER_STEP,)
        case RoundFailed():
            return _round_over(state, rules), ()
        case OuterStepEnded(committed=committed, outer_step=outer):
            after = replace(_round_over(state, rules), outer_step=outer)
            if not committed:
                return after, ()
            partial = state.averaged is not None and state.averaged.partial
            view = GlobalView.UNPUBLISHED_PARTIAL if partial else GlobalView.UNPUBLISHED
            # Commit and checkpoint belong together: after a SIGKILL the checkpoint decides.
            after = replace(after, view=view)
            return _clear_unsaved(after), (Action.CHECKPOINT,)
        case _:
            return state, ()


def _round_over(state: MinerState, rules: Rules) -> MinerState:
    return replace(
        state,
        mode=Mode.AWAITING_GLOBAL,
        round=None,
        averaged=None,
        trains_on=False,
        fetch_failures=0,
        failed_target=None,
        global_due=state.called_at + rules.reload_seconds,
    )


def _global_state(state: MinerState, event: Event) -> Decision:
    match event:
        case Tick(at=at) if state.mode is Mode.AWAITING_GLOBAL and at >= state.global_due:
            after = replace(state, mode=Mode.TRAINING)
            return after, (Task.COMPARE_EPOCHS, Task.COMPARE_WEIGHTS)
        case ValidatorHeard(outer_step=said, at=at) if (
            state.mode is Mode.AWAITING_GLOBAL
            and said < state.outer_step
            and said != state.failed_target
        ):
            # It calls nobody while it averages or publishes: our outer step is not on its way.
            return replace(state, global_due=min(at, state.global_due)), ()
        case GlobalEpochSeen(outer_step=seen, at=at):
            if state.view is GlobalView.UNREAD:
                state = replace(state, view=GlobalView.UNPUBLISHED)
            return _epoch_seen(state, seen, at)
        case WeightsCompared(outer_step=outer, same=False) if (
            state.mode is Mode.TRAINING and outer == state.outer_step
        ):
            return _fetch(state, outer)
        case GlobalFetched(folder=folder) if state.mode is Mode.FETCHING:
            after = replace(state, mode=Mode.LOADING, fetched=folder)
            return after, (Action.REBASE if rebases(state) else Action.LOAD,)
        case GlobalFetchFailed(at=at) if state.mode in (Mode.FETCHING, Mode.LOADING):
            return _fetch_failed(state, at), ()
        case LoadFailed(problem=problem, at=at) if state.mode is Mode.LOADING:
            after = replace(_fetch_failed(state, at), problem=problem)
            # By the losses of this miner alone, which are others after its next start or load.
            passing = event.awful and goes_back(state)
            return after, () if passing else (Task.REFUSE_GLOBAL,)
        case Loaded(outer_step=outer) if state.mode is Mode.LOADING:
            return MinerState(mode=Mode.TRAINING, outer_step=outer), (Action.CHECKPOINT,)
        case _:
            return state, ()


def _epoch_seen(state: MinerState, seen: int, at: float) -> Decision:
    view = _NO_LONGER_AWAITED.get(state.view, state.view)
    if state.mode is Mode.AWAITING_GLOBAL:
        # The root metadata is written last: our outer step in it is published whole. The next round
        # may be called before the time to publish is up, and must begin from the same weights.
        published = view is not state.view and seen != state.failed_target
        if seen == state.outer_step and (published or at >= state.global_due):
            if view is GlobalView.DIFFERENT:
                return _fetch(state, seen)
            after = replace(state, mode=Mode.TRAINING, view=view)
            return after, (Task.COMPARE_WEIGHTS,)
        # Before its time is up the validator may still be publishing the one we already have.
        # An outer step ahead of ours is never on its way: it is there.
        # One that could not be fetched is not asked for again before its time.
        if at < state.global_due and (seen <= state.outer_step or seen == state.failed_target):
            return state, ()
    elif state.mode is not Mode.TRAINING:
        return state, ()
    if seen != state.outer_step or view is GlobalView.DIFFERENT:
        return _fetch(state, seen)
    return state, ()


def _fetch(state: MinerState, target: int) -> Decision:
    view = _NO_LONGER_AWAITED.get(state.view, state.view)
    if target == state.outer_step:
        view = GlobalView.DIFFERENT
    after = replace(state, mode=Mode.FETCHING, fetch_target=target, view=view)
    return after, (Task.FETCH_GLOBAL,)


def _fetch_failed(state: MinerState, at: float) -> MinerState:
    """Go on with stale weights, which beats not training; a later comparison tries again."""
    again = state.fetch_target == state.failed_target
    failures = 1 + (state.fetch_failures if again else 0)
    wait = doubling(failures, first=_FETCH_AGAIN, longest=_FETCH_AGAIN_LONGEST)
    return replace(
        state,
        mode=Mode.AWAITING_GLOBAL,
        fetch_target=None,
        fetched=None,
        fetch_failures=failures,
        failed_target=state.fetch_target,
        global_due=at + wait.total_seconds(),
    )
