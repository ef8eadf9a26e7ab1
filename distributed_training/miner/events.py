"""Define the miner's events, the commands that follow from them, and the state of rank 0.

An *event* is anything that happened: the result of a command, a close, an update that is ready. It
leads to *actions*, which all ranks receive as a *command* at a micro-batch boundary, to *tasks*,
which rank 0 gives to its exchange, and to further events. :func:`.rounds.decide` decides which. The
exchange's events are defined in :mod:`distributed_training.exchange.base`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from distributed_training.exchange.base import Close
from distributed_training.exchange.base import CloseReached as CloseReached
from distributed_training.exchange.base import NetworkDiffers as NetworkDiffers
from distributed_training.exchange.base import StopRequested as StopRequested
from distributed_training.exchange.base import UpdateReady as UpdateReady
from distributed_training.exchange.base import UploadEnded as UploadEnded
from distributed_training.protocol.types import Event, Progress, StepReport, Update

if TYPE_CHECKING:
    from distributed_training.training.outer_step import UploadHandle


class Action(enum.IntEnum):
    """The action that every rank carries out next."""

    TRAIN = 0  # train on one micro-batch
    IDLE = 1  # do nothing while rank 0 waits for something
    WAIT_FOR_DATA = 2  # do nothing while no block is ready on all ranks
    WRITE_UPLOAD = 3  # write an upload of the current weights
    OUTER_STEP = 4  # apply the update: prepare, vote, commit everywhere or nowhere
    CHECKPOINT = 5
    ROLL_BACK = 6  # go back to the last good checkpoint
    STOP = 7  # write a checkpoint and leave the loop
    FOLLOW_SCHEDULE = 8  # move to the network's place in the learning rate's schedule


class Send(NamedTuple):
    """A task for the exchange: send the upload for ``close``, or progress if its serial is 0."""

    close: Close


class Applied(NamedTuple):
    """A task for the exchange: fetch the update that follows the outer step of all ranks."""

    outer_step: int
    wants_weights: bool = False  # whole weights, instead of an update that could not be applied


class DataPart(NamedTuple):
    """The data part of a boundary's command; a field is 0 if there is nothing to do."""

    request: int = 0  # a block to prefetch
    begin: int = 0  # the block to train on from here
    sequences: int = 0  # sequences to which every rank cuts the block
    start: int = 0  # how many of those sequences were trained on before a restart


class LocalPart(NamedTuple):
    """The part of a command that stays on rank 0; it is never broadcast."""

    close: Close | None = None  # for WRITE_UPLOAD
    update: Update | None = None  # for OUTER_STEP
    pages: tuple[int, ...] = ()  # for WRITE_UPLOAD: first and last page
    kept: Mapping[str, Any] = {}  # for CHECKPOINT and STOP: JSON-able extras of rank 0's checkpoint


@dataclass(frozen=True)
class Command:
    """One boundary's command: the action with its arguments, the data part, and rank 0's part."""

    action: Action
    outer_step: int = 0  # for FOLLOW_SCHEDULE: the outer step to move to
    inner_steps: int = 0  # for FOLLOW_SCHEDULE: inner steps of the network before that outer step
    exit_status: int = 0  # for STOP: exit status of the miner
    data: DataPart = field(default=DataPart())
    local: LocalPart = field(default=LocalPart(), compare=False)

    def to_integers(self) -> list[int]:
        """Return the command as :data:`COMMAND_INTEGERS` integers, without rank 0's part."""
        return [self.action, self.outer_step, self.inner_steps, self.exit_status, *self.data]

    @classmethod
    def from_integers(cls, integers: Sequence[int]) -> Command:
        action, outer_step, steps, exit_status, *data = integers
        return cls(Action(action), outer_step, steps, exit_status, DataPart(*data))


COMMAND_INTEGERS = len(Command(Action.TRAIN).to_integers())


# --- results of commands -------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatchEnded(Event):
    """A micro-batch was trained on, and the inner step is not complete yet."""

    trained: bool = True  # False if the block had no micro-batch left


@dataclass(frozen=True)
class InnerStepDone(Event):
    """The optimizer has stepped on all ranks."""

    report: StepReport
    # Too many consecutive steps had no finite loss, so a checkpoint must be loaded.
    diverged: bool = False


@dataclass(frozen=True)
class OuterStepEnded(Event):
    """An update was applied on all ranks, or on none."""

    committed: bool
    outer_step: int  # the outer step afterwards
    detail: str = ""  # why a rank voted against it
    seconds: float = 0.0  # seconds for which training paused
    dropped: str = ""  # description of the training that was lost
    inner_step: int = 0  # inner steps already taken on top of the update


@dataclass(frozen=True)
class RolledBack(Event):
    """All ranks have loaded the last good checkpoint."""

    progress: Progress | None  # progress of the loaded checkpoint; None if there was none
    kept: Mapping[str, Any] = field(default_factory=dict)  # rank 0's values from the checkpoint


@dataclass(frozen=True)
class CheckpointBegun(Event):
    """This boundary's checkpoint is being written."""

    outer_step: int
    # Returns whether this machine's ranks have saved; None if that is not known yet.
    saved: Callable[[], bool | None]
    seconds: float = 0.0  # seconds for which training paused


@dataclass(frozen=True)
class UploadBegun(Event):
    """The upload for ``close`` is being written; with serial 0 it is a progress upload."""

    close: Close
    handle: UploadHandle  # says when all rows of the upload are written
    progress: Progress


@dataclass(frozen=True)
class Stopped(Event):
    """The loop has ended on all ranks."""

    exit_status: int


# --- what rank 0 finds ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Tick(Event):
    """A second or so has passed, so deadlines are checked."""

    at: float  # seconds of the steady clock


@dataclass(frozen=True)
class UploadWritten(Event):
    """The upload for ``close`` and the checkpoint of its boundary are on the disk.

    A progress upload needs no checkpoint.
    """

    close: Close


@dataclass(frozen=True)
class UploadSkipped(Event):
    """No upload is written for the close."""

    problem: str  # the reason, in one line
    kind: str  # "disk" if the disk is too full, or "steps" if there are too few inner steps


# --- the state ------------------------------------------------------------------------------------


class Mode(enum.Enum):
    """The modes of the miner; ``state`` events contain these values."""

    TRAINING = "training"  # ranks take inner steps
    # Ranks take inner steps, and the update is requested again later.
    UPDATE_FAILED = "update_failed"
    STOPPING = "stopping"  # the last command was STOP


class Stage(enum.IntEnum):
    """The stages of an upload for a close."""

    WRITING = 0  # being written, or written: it may be started over, since nothing was sent
    SENDING = 1  # being sent, so others may know its content
    ENDED = 2  # sent, or given up


@dataclass(frozen=True)
class Upload:
    """This miner's upload for one close. Only one file is ever sent for a close."""

    reached: CloseReached
    stage: Stage = Stage.WRITING
    handle: UploadHandle | None = None  # handle of its file; None until the ranks begin to write it
    # Returns whether the checkpoint of its boundary is saved; None if it has not begun.
    saved: Callable[[], bool | None] | None = None
    over: bool = False  # whether the grace of the upload's close has ended

    @property
    def close(self) -> Close:
        """The close that the upload is for; for a progress upload one with serial 0."""
        return self.reached.close

    def end_of_writing(self) -> UploadWritten | UploadEnded | None:
        """Return how writing the file and the checkpoint ended; None if it has not ended yet."""
        handle, close = self.handle, self.close
        if self.stage is not Stage.WRITING or handle is None or not handle.done():
            return None
        why: BaseException | str | None = handle.error
        if why is None and close.serial:
            saved = self.saved() if self.saved else None
            if saved is None:
                return None
            why = None if saved else "the checkpoint that must record it was not written"
        if why is None:
            return UploadWritten(close)
        return UploadEnded(close, f"it was not sent ({why})")


@dataclass(frozen=True)
class MinerState:
    """Rank 0's state. Times are seconds of the steady clock."""

    mode: Mode
    outer_step: int  # outer step of this miner
    inner_step: int = 0  # inner steps in this outer step
    # a round
    reached: CloseReached | None = None  # the close that waits for enough inner steps
    upload: Upload | None = None  # the upload of this outer step; None if there is none
    update: Update | None = None  # the update that all ranks apply next
    update_at: float = 0.0  # when the update was ready
    update_failures: int = 0  # consecutive updates that could not be applied
    again_at: float = 0.0  # when UPDATE_FAILED ends, and the update is requested again
    place: tuple[int, int] | None = None  # an outer step, and the network's inner steps before it
    # progress uploads
    progress: Upload | None = None  # the progress upload that is being written or sent
    steps_since_progress: int = 0  # inner steps since the last progress upload was begun
    # inner steps since the last checkpoint
    unsaved_steps: int = 0
    unsaved_seconds: float = 0.0
    # the end
    exit_status: int = 0
    stop_reason: str = ""

    @property
    def to_write(self) -> Upload | None:
        """Return the upload that was ordered and that the ranks have not begun yet."""
        for upload in (self.upload, self.progress):
            if upload is not None and upload.stage is Stage.WRITING and upload.handle is None:
                return upload
        return None

    def clear_unsaved(self) -> MinerState:
        """Return the state after a checkpoint or a roll-back: no inner step is unsaved."""
        return replace(self, unsaved_steps=0, unsaved_seconds=0.0)


@dataclass(frozen=True)
class Rules:
    """The numbers that the miner's decisions depend on."""

    checkpoint_steps: int  # inner steps between two checkpoints
    # Seconds of training between two checkpoints; both the steps and the seconds must have passed.
    checkpoint_seconds: float = 0.0
    upload_from: int = 0  # inner steps of an outer step before its first upload
    progress_steps: int = 0  # inner steps between two progress uploads; 0 if there are none


Decision = tuple[MinerState, tuple[Action | Send | Applied | Event, ...]]
