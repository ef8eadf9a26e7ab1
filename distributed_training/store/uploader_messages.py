"""What rank 0 and the uploader say to each other; besides these, ``Submission`` one way and
``PublicationReport`` the other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from distributed_training.config.store import StoreSettings


@dataclass(frozen=True)
class Start:
    """First message to the worker. ``miner_began``: time.time(), absent when the uploader alone was
    started again; snapshots from before it that the journal does not name are leftovers."""

    settings: StoreSettings
    bucket: str
    journal: Path
    snapshots: Path | None
    ca_bundle: str | None = None
    miner_began: float | None = None


@dataclass(frozen=True)
class Pause: ...


@dataclass(frozen=True)
class Resume: ...


@dataclass(frozen=True)
class PeerId:
    peer_id: str


@dataclass(frozen=True)
class Close:
    release: bool = True


@dataclass(frozen=True)
class Said:
    """A line for the operator; ``level``: info, warning or error."""

    level: str
    text: str


@dataclass(frozen=True)
class Busy:
    """Whether a publication is under way."""

    busy: bool
