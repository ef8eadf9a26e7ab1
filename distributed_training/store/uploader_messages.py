"""What rank 0 and the uploader say to each other; besides these, ``Submission`` one way and
``PublicationReport`` the other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from distributed_training.config.store import StoreSettings


@dataclass(frozen=True)
class Start:
    """First message to the uploader. ``folder``: for its journal, kept across restarts.
    ``miner_began``: time.time(), absent when the uploader alone was started again; snapshots from
    before it that the journal does not name are leftovers."""

    settings: StoreSettings
    bucket: str
    folder: Path
    snapshots: Path | None
    miner_began: float | None = None


@dataclass(frozen=True)
class Paused:
    """Whether transfers are to leave the uplink free."""

    paused: bool


@dataclass(frozen=True)
class PeerId:
    peer_id: str


@dataclass(frozen=True)
class Close: ...


@dataclass(frozen=True)
class Busy:
    """Whether a publication is under way."""

    busy: bool
