"""What may happen: the one stream of events that the miner's rank 0 acts on.

Whatever happens becomes an event in one queue: a call from the validator, the end of an average, a
new global state, a signal, and what each order came to. For every event the leader asks
:func:`~.decide.decide` what follows, and shows it to the block list, the reporter and publishing,
which subscribe to the same stream.

Times in events are of ``time.monotonic()``: a wall clock that is set must move no deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_training.protocol.types import (
    AllReduceFault,
    AllReduceResult,
    Progress,
    PublicationReport,
    Revision,
    RoundRequest,
    StepReport,
)

from .orders import Order

if TYPE_CHECKING:
    from distributed_training.training.snapshot import SnapshotHandle

    from .decide import Mode


class Event:
    """One of the dataclasses below; none is derived from another."""


# --- what an order came to ------------------------------------------------------------------------


@dataclass(frozen=True)
class Done(Event):
    """``order`` was carried out, and nothing more is to be said of it."""

    order: Order


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
    """Weights, or after a rebase the epoch's start, are those of the global state."""

    outer_step: int


@dataclass(frozen=True)
class LoadFailed(Event):
    """The fetched state does not fit this model; weights are as they were."""

    problem: str
    at: float


@dataclass(frozen=True)
class SnapshotTaken(Event):
    """Training goes on; ``handle`` tells when this rank's files are complete."""

    handle: SnapshotHandle
    progress: Progress


@dataclass(frozen=True)
class Previewed(Event):
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


@dataclass(frozen=True)
class GlobalEpochSeen(Event):
    outer_step: int
    at: float


@dataclass(frozen=True)
class WeightsCompared(Event):
    """Whether the global weights of ``outer_step`` are those our epoch began with."""

    outer_step: int
    same: bool


@dataclass(frozen=True)
class GlobalFetched(Event):
    folder: Path


@dataclass(frozen=True)
class GlobalFetchFailed(Event):
    detail: str
    at: float


@dataclass(frozen=True)
class ScorePreviewed(Event):
    """What a validator would score our newest publication with; fields as ``scripts/score.py
    --json`` writes them for a miner."""

    fields: Mapping[str, Any]


@dataclass(frozen=True)
class StopRequested(Event):
    reason: str
    exit_status: int = 0


# --- what follows from others ---------------------------------------------------------------------


@dataclass(frozen=True)
class Tick(Event):
    """About once a second: deadlines are looked at."""

    at: float


@dataclass(frozen=True)
class ModeChanged(Event):
    before: Mode
    after: Mode


@dataclass(frozen=True)
class SnapshotWanted(Event):
    """The inner step that just ended is to be published."""


@dataclass(frozen=True)
class SnapshotComplete(Event):
    """Rank 0's part of the snapshot is on disk: its gradient can be previewed."""


@dataclass(frozen=True)
class SnapshotFailed(Event):
    """``revision`` is None when none was begun; otherwise its files could not be written."""

    problem: str
    revision: Revision | None = None


@dataclass(frozen=True)
class SnapshotSubmitted(Event):
    """The uploader has it. ``preview``: None when the gradient could not be tried."""

    revision: Revision
    preview: Previewed


@dataclass(frozen=True)
class PublicationEnded(Event):
    report: PublicationReport
