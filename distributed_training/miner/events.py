"""The miner's vocabulary: events, the commands that follow, and the state of rank 0.

An *event* is anything that happened: the result of a command, a close, an update that is ready.
From it follow *actions*, which reach all ranks as a *command* at a micro-batch boundary, and
*tasks*, which rank 0 starts next to the loop. :mod:`.state_machine` and :mod:`.store_round` decide
which.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from distributed_training.exchange.base import ChainForked as ChainForked
from distributed_training.exchange.base import Close
from distributed_training.exchange.base import UploadEnded as UploadEnded
from distributed_training.protocol.types import (
    Event,
    Progress,
    StepReport,
    Update,
)

if TYPE_CHECKING:
    from distributed_training.training.outer_step import UploadHandle


class Action(enum.IntEnum):
    """The action that every rank carries out next."""

    TRAIN = 0  # one micro-batch
    IDLE = 1  # nothing: rank 0 waits for something
    WAIT_FOR_DATA = 2  # nothing: no block is ready on all ranks
    WRITE_UPLOAD = 3  # for a close: of the weights as they are
    OUTER_STEP = 4  # with the update: prepare, vote, commit everywhere or nowhere
    CHECKPOINT = 5
    ROLL_BACK = 6  # to the last good checkpoint
    STOP = 7  # checkpoint and leave the loop
    FOLLOW_SCHEDULE = 8  # go to the network's place in the learning rate's schedule
    FOLLOW_RULES = 9  # of another version of the network's file
    WRITE_PROGRESS = 10  # an upload for no close


class Task(enum.Enum):
    """The background tasks that only rank 0 starts, next to the loop."""

    SEND_UPLOAD = "send the upload of the close"
    SEND_PROGRESS = "send the progress upload"
    SHOW_APPLIED = "tell the exchange which outer step all ranks are at"
    FETCH_WEIGHTS = "fetch whole weights, in place of an update that could not be applied"


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

    close: Close | None = None  # WRITE_UPLOAD, WRITE_PROGRESS
    update: Update | None = None  # OUTER_STEP
    blocks: Sequence[int] = ()  # of uploads, CHECKPOINT, STOP: trained on since the last upload
    rules: str = ""  # FOLLOW_RULES: text of the network's file
    kept: Mapping[str, Any] = {}  # CHECKPOINT, STOP: more for rank 0's checkpoint, JSON-able


@dataclass(frozen=True)
class Command:
    """One boundary: the action with what it needs, the part about data, and rank 0's own part."""

    action: Action
    outer_step: int = 0  # FOLLOW_SCHEDULE: of the place; FOLLOW_RULES: number of the version
    inner_steps: int = 0  # FOLLOW_SCHEDULE: of the network before that outer step
    exit_status: int = 0  # STOP: of the miner
    data: DataPart = field(default=DataPart())
    local: LocalPart = field(default=LocalPart(), compare=False)

    def to_integers(self) -> list[int]:
        """Return :data:`COMMAND_INTEGERS` integers: all but rank 0's own part."""
        return [self.action, self.outer_step, self.inner_steps, self.exit_status, *self.data]

    @classmethod
    def from_integers(cls, integers: Sequence[int]) -> Command:
        action, outer_step, steps, exit_status, *data = integers
        return cls(
            Action(action),
            outer_step=outer_step,
            inner_steps=steps,
            exit_status=exit_status,
            data=DataPart(*data),
        )


COMMAND_INTEGERS = len(Command(Action.TRAIN).to_integers())


class Mode(enum.Enum):
    """The modes of the miner; the values are those of the ``state`` events.

    The docstring of :mod:`.state_machine` explains each.
    """

    TRAINING = "training"
    AWAITING_GLOBAL = "awaiting_global"
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


@dataclass(frozen=True)
class ProgressTaken(Event):
    """A progress upload is being written, of a close with the serial 0."""

    close: Close
    handle: UploadHandle


# --- from rank 0's threads and processes ----------------------------------------------------------


@dataclass(frozen=True)
class GlobalEpochSeen(Event):
    """The global bucket stands at this outer step."""

    outer_step: int
    at: float


@dataclass(frozen=True)
class NetworkCompared(Event):
    """The network's file of the global bucket differs from ours by ``problem``; empty: not now.

    Posted when that changes. ``outdated``: ours is the older one.
    """

    problem: str
    outdated: bool = False


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
class UploadWanted(Event):
    """The weights of this boundary are to be uploaded for ``close``."""

    close: Close


@dataclass(frozen=True)
class ProgressWanted(Event):
    """The weights of this boundary are to be uploaded, for no close."""


@dataclass(frozen=True)
class UploadWritten(Event):
    """The upload of ``close`` and the checkpoint of its boundary are on the disk.

    No checkpoint has to know of a progress upload.
    """

    close: Close


@dataclass(frozen=True)
class UploadSkipped(Event):
    """No upload is written for a close, as ``problem`` says.

    ``kind``: "disk", which has no room for it, or "steps", of which there are too few.
    """

    problem: str
    kind: str


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


@dataclass(frozen=True)
class MinerState:
    """``outer_step`` is this miner's. Times are ``time.monotonic()``."""

    mode: Mode
    outer_step: int
    # a round
    upload: Upload | None = None  # of this outer step; None: there is none
    update: Update | None = None  # that all ranks apply next
    update_at: float = 0.0  # when it was ready
    update_failures: int = 0  # updates in a row that could not be applied
    again_at: float = 0.0  # when AWAITING_GLOBAL ends, and an update is asked for again
    place: tuple[int, int] | None = None  # an outer step; the network's inner steps before it
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
        return writes or self.update is not None

    def clear_unsaved(self) -> MinerState:
        """Return the state after a checkpoint or a roll-back: no inner step is unsaved."""
        return replace(self, unsaved_steps=0, unsaved_seconds=0.0)


@dataclass(frozen=True)
class Rules:
    """The durations by which the state machine decides.

    ``checkpoint_steps``, ``checkpoint_seconds``: inner steps and seconds of training between two
    checkpoints; both must have passed. ``tick_seconds``: between two looks at deadlines.
    """

    checkpoint_steps: int
    checkpoint_seconds: float = 0.0
    tick_seconds: float = 1.0


Decision = tuple[MinerState, tuple[Action | Task, ...]]
