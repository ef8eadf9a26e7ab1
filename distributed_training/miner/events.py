"""The miner's vocabulary: events, the commands that follow, and the state of rank 0.

An *event* is anything that happened: the result of a command, a call, the end of an average. From
it follow *actions*, which reach all ranks as a *command* at a micro-batch boundary, and *tasks*,
which rank 0 starts next to the loop. :mod:`.state_machine` and :mod:`.round` decide which.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from distributed_training.exchange.base import ChainForked as ChainForked
from distributed_training.exchange.base import Close
from distributed_training.exchange.base import UploadEnded as UploadEnded
from distributed_training.protocol.keys import PARTS, Parts
from distributed_training.protocol.types import (
    AllReduceFault,
    AllReduceResult,
    Event,
    Progress,
    PublicationReport,
    Revision,
    RoundRequest,
    StepReport,
    Update,
)

if TYPE_CHECKING:
    from distributed_training.training.snapshot import SnapshotHandle
    from distributed_training.training.store_outer_step import UploadHandle


class Action(enum.IntEnum):
    """The action that every rank carries out next."""

    TRAIN = 0  # one micro-batch
    IDLE = 1  # nothing: rank 0 waits for something
    WAIT_FOR_DATA = 2  # nothing: no block is ready on all ranks
    WRITE_PSEUDO_GRADIENT = 3  # into the swarm's buffers
    OUTER_STEP = 4  # with the average or the update: prepare, vote, commit everywhere or nowhere
    LOAD = 5  # the fetched global state
    REBASE = 6  # the same, keeping what was trained in this outer step
    SNAPSHOT = 7  # of everything an upload needs
    CHECK_GRADIENT = 8  # on held-out data, as a validator would
    CHECKPOINT = 9
    ROLL_BACK = 10  # to the last good checkpoint
    STOP = 11  # checkpoint and leave the loop
    FOLLOW_SCHEDULE = 12  # go to the network's place in the learning rate's schedule
    FOLLOW_RULES = 13  # of another version of the network's file
    WRITE_UPLOAD = 14  # for a close: of the weights as they are


class Task(enum.Enum):
    """The background tasks that only rank 0 starts, next to the loop."""

    AVERAGE = "let the swarm average in its own thread"
    CANCEL_AVERAGE = "the round is over: free the swarm"
    COMPARE_EPOCHS = "read the global outer step soon"
    COMPARE_WEIGHTS = "compare a sample of the global weights with those our outer step began with"
    FETCH_GLOBAL = "download the global state"
    REFUSE_GLOBAL = "refuse the fetched global state: it could not be loaded"
    SEND_UPLOAD = "send the upload of the close"


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
    close: Close | None = None  # WRITE_UPLOAD
    update: Update | None = None  # OUTER_STEP of a round through the store
    blocks: Sequence[int] = ()  # SNAPSHOT, CHECKPOINT, STOP: trained on since the last upload
    rules: str = ""  # FOLLOW_RULES: text of the network's file
    kept: Mapping[str, Any] = {}  # CHECKPOINT, STOP: more for rank 0's checkpoint, JSON-able


@dataclass(frozen=True)
class Command:
    """One boundary: the action with what it needs, the part about data, and rank 0's own part."""

    action: Action
    outer_step: int = 0  # LOAD, REBASE: of the fetched global state; FOLLOW_SCHEDULE: the place's
    # FOLLOW_RULES: number of the version
    inner_steps: int = 0  # FOLLOW_SCHEDULE: of the network before that outer step
    chain_block: int = 0  # SNAPSHOT: at this boundary
    exit_status: int = 0  # STOP: of the miner
    trains_on: bool = False  # WRITE_PSEUDO_GRADIENT: inner steps continue after it
    in_pause: bool = False  # CHECK_GRADIENT: a round holds up training anyway
    parts: Parts = "all"  # SNAPSHOT: what is uploaded
    data: DataPart = field(default=DataPart())
    local: LocalPart = field(default=LocalPart(), compare=False)

    def to_integers(self) -> list[int]:
        """Return :data:`COMMAND_INTEGERS` integers: all but rank 0's own part."""
        flags = int(self.trains_on), int(self.in_pause), PARTS.index(self.parts)
        numbers = self.outer_step, self.inner_steps, self.chain_block, self.exit_status
        return [self.action, *numbers, *flags, *self.data]

    @classmethod
    def from_integers(cls, integers: Sequence[int]) -> Command:
        action, outer_step, steps, chain_block, exit_status, *flags = integers
        trains_on, in_pause, parts, *data = flags
        return cls(
            Action(action),
            outer_step=outer_step,
            inner_steps=steps,
            chain_block=chain_block,
            exit_status=exit_status,
            trains_on=bool(trains_on),
            in_pause=bool(in_pause),
            parts=PARTS[parts],
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


# --- results of commands -------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatchTrained(Event):
    """A micro-batch was trained on, and the inner step is not complete yet."""


@dataclass(frozen=True)
class BlockUsedUp(Event):
    """There was no micro-batch left in the block, on any rank."""


@dataclass(frozen=True)
class InnerStepDone(Event):
    """``diverged``: too many steps in a row had no finite loss, so a checkpoint must be loaded."""

    report: StepReport
    diverged: bool = False


@dataclass(frozen=True)
class PseudoGradientWritten(Event):
    """All ranks wrote their shard of the pseudo-gradient; ``norm`` is global."""

    norm: float


@dataclass(frozen=True)
class OuterStepEnded(Event):
    """``outer_step``: after it. ``detail``: why a rank voted against it.

    ``seconds``: how long training was held. ``dropped``: which training is lost, in words.
    """

    committed: bool
    outer_step: int
    detail: str = ""
    seconds: float = 0.0
    dropped: str = ""


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
    """Training continues; ``handle`` tells when this rank's files are complete."""

    handle: SnapshotHandle
    progress: Progress
    parts: Parts = "all"


@dataclass(frozen=True)
class GradientChecked(Event):
    """``delta``: loss with minus without the snapshot's gradient, nats per token; None: unknown."""

    delta: float | None
    seconds: float


@dataclass(frozen=True)
class RolledBack(Event):
    """``progress`` of the loaded checkpoint, None without one; ``kept``: rank 0's values in it."""

    progress: Progress | None
    kept: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stopped(Event):
    """The loop has ended on all ranks."""

    exit_status: int


@dataclass(frozen=True)
class CheckpointBegun(Event):
    """A checkpoint of this boundary is being written.

    ``saved`` tells whether it is complete on all ranks; None: not known yet. ``seconds``: how long
    training was held.
    """

    outer_step: int
    saved: Callable[[], bool | None]
    seconds: float = 0.0


@dataclass(frozen=True)
class UploadTaken(Event):
    """The upload of ``close`` is being written; ``handle`` tells when all its rows are there."""

    close: Close
    handle: UploadHandle
    progress: Progress


# --- from rank 0's threads and processes ----------------------------------------------------------


@dataclass(frozen=True)
class AllReduceCalled(Event):
    """A signed call that the server accepted."""

    request: RoundRequest
    at: float


@dataclass(frozen=True)
class Averaged(Event):
    """The average is in the swarm's buffers."""

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
class PlaceSeen(Event):
    """The network took ``inner_steps`` before the outer step at which the global bucket stands.

    0: nobody says. ``last_allreduce_block``: of the round that led to that outer step.
    """

    outer_step: int
    inner_steps: int
    last_allreduce_block: int | None = None


@dataclass(frozen=True)
class ValidatorHeard(Event):
    """The master says by a signed call that it is at this outer step, and in no round."""

    outer_step: int
    at: float


@dataclass(frozen=True)
class ModelAsked(Event):
    """The master asks this miner by a signed call to upload its model too."""


@dataclass(frozen=True)
class WeightsCompared(Event):
    """The result of comparing the global weights of ``outer_step`` with ours."""

    outer_step: int
    same: bool


@dataclass(frozen=True)
class NetworkCompared(Event):
    """The network's file of the global bucket differs from ours by ``problem``; empty: not now.

    Posted when that changes. ``outdated``: ours is the older one.
    """

    problem: str
    outdated: bool = False


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


@dataclass(frozen=True)
class CloseReached(Event):
    """An outer step's uploads are taken now."""

    close: Close


@dataclass(frozen=True)
class UpdateReady(Event):
    """The next outer step's update is on the disk, or whole weights in place of many."""

    update: Update
    at: float


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

    ``kind``: the label of metric ``snapshots_refused_total``.
    """

    problem: str
    revision: Revision | None = None
    kind: Literal["disk", "blocks", "write", "unchecked"] = "write"


@dataclass(frozen=True)
class SnapshotPutOff(Event):
    """A snapshot is due, and the block list is too old for it; posted at most once a minute."""


@dataclass(frozen=True)
class SnapshotSubmitted(Event):
    """The uploader has the snapshot, ``seconds`` after it was taken."""

    revision: Revision
    preview: GradientChecked
    seconds: float = 0.0


@dataclass(frozen=True)
class PublicationEnded(Event):
    """The uploader has answered."""

    report: PublicationReport


@dataclass(frozen=True)
class UploadWanted(Event):
    """The weights of this boundary are to be uploaded for ``close``."""

    close: Close


@dataclass(frozen=True)
class UploadWritten(Event):
    """The upload of ``close`` and the checkpoint of its boundary are on the disk."""

    close: Close


class Stage(enum.IntEnum):
    """The stages of an upload for a close."""

    WANTED = 0  # it may be begun again, since nothing was sent
    SENT = 1  # or being sent: others may know its content
    ENDED = 2  # sent, or given up


@dataclass(frozen=True)
class Upload:
    """This miner's upload for one close. There is one file for each, whatever becomes of it."""

    close: Close
    stage: Stage = Stage.WANTED


class GlobalView(enum.Enum):
    """The global bucket, compared with our outer step and our epoch-start weights."""

    UNREAD = "it was not read since a start from the disk, whose state may be old"
    SAME = "no difference is known"
    UNPUBLISHED = "it was not seen at our last outer step yet"
    UNPUBLISHED_PARTIAL = "neither, and parts of that outer step's average failed here"
    DIFFERENT = "its weights of our outer step are, or may be, others than ours"


@dataclass(frozen=True)
class MinerState:
    """``outer_step`` is this miner's. Times are ``time.monotonic()``."""

    mode: Mode
    outer_step: int
    # a round
    round: RoundRequest | None = None
    called_at: float = 0.0
    averaged: AllReduceResult | None = None  # what the outer step under way is made of
    trains_on: bool = False  # inner steps continue while the swarm averages
    # a round through the store
    upload: Upload | None = None  # of this outer step; None: there is none
    update: Update | None = None  # that all ranks apply next
    # the global state
    view: GlobalView = GlobalView.SAME
    global_due: float = 0.0  # when AWAITING_GLOBAL ends
    fetch_target: int | None = None  # the outer step being fetched
    fetched: Path | None = None  # the files of the one that was fetched last
    problem: str = ""  # why the state that was fetched last was not loaded
    fetch_failures: int = 0  # in a row, of failed_target
    failed_target: int | None = None
    place: tuple[int, int] | None = None  # PlaceSeen's numbers, the last ones
    model_asked: bool = False  # until an upload with the model has ended well
    # trained since the last checkpoint
    unsaved_steps: int = 0
    unsaved_seconds: float = 0.0
    # the end
    exit_status: int = 0
    stop_reason: str = ""

    @property
    def in_round(self) -> bool:
        """Return whether a round holds host memory: no checkpoint is due then."""
        writes = self.upload is not None and self.upload.stage is not Stage.ENDED
        return self.mode is Mode.AVERAGING or writes or self.update is not None

    def clear_unsaved(self) -> MinerState:
        """Return the state after a checkpoint or a roll-back: no inner step is unsaved."""
        return replace(self, unsaved_steps=0, unsaved_seconds=0.0)


@dataclass(frozen=True)
class Rules:
    """The durations by which the state machine decides.

    ``reload_seconds``: from an AllReduce call until the validator must have uploaded.
    ``checkpoint_steps``, ``checkpoint_seconds``: inner steps and seconds of training between two
    checkpoints; both must have passed. ``train_in_rounds``: inner steps continue while the swarm
    averages; the outer step keeps what they trained. ``content``: of an upload. ``tick_seconds``:
    between two looks at deadlines. ``exchange``: by it the rounds are decided.
    """

    reload_seconds: float
    checkpoint_steps: int
    checkpoint_seconds: float = 0.0
    train_in_rounds: bool = False
    content: Literal["scored", "all"] = "all"
    tick_seconds: float = 1.0
    exchange: Literal["hivemind", "store"] = "hivemind"

    def parts(self, state: MinerState) -> Parts:
        """Return what of the next snapshot is uploaded."""
        return "model" if self.content == "scored" and state.model_asked else self.content


Decision = tuple[MinerState, tuple[Action | Task, ...]]
