"""Name what rounds through the store give the loop: facts, posted from a thread of rank 0.

A round has two moments. At the *close* of outer step E the loop writes its upload; later comes the
*update* that leads to outer step E + 1. :class:`~.store_rounds.StoreRounds` posts one of the
classes below whenever one is known. None of them holds a tensor or an open file, and whoever gets
one may be late: each names the outer step for which it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from distributed_training.protocol.types import Base


@dataclass(frozen=True)
class Close:
    """The time at which an outer step's uploads are taken. If it moves, its serial grows."""

    outer_step: int  # E: uploads of those who hold its epoch-start weights
    serial: int
    closes_at: float  # Unix seconds, by the store's clock
    grace: float  # seconds: what is in the store later is late

    @property
    def ends_at(self) -> float:
        """Unix seconds, by the store's clock, after which an upload is late."""
        return self.closes_at + self.grace


@dataclass(frozen=True)
class Update:
    """The next outer step, on the disk, whole, of the digest that its signed manifest names.

    Apply it, or fail and say so; then call :meth:`~.store_rounds.StoreRounds.applied` with the
    outer step that is held. The next one is posted after that.
    """

    outer_step: int  # n: of the weights that it leads to
    path: Path
    base: Base  # from where it is applied
    own_upload: Path | None  # ours of n - 1, where ``base`` is MERGED or REFUSED
    weights: str  # digest of theta(n), hex
    inner_steps: int  # of the network before outer step n
    cause: str = ""  # why our upload was not merged; empty: it was, or none was sent


@dataclass(frozen=True)
class Weights:
    """Whole weights, where they are fewer bytes than the updates missed, or those are gone."""

    outer_step: int
    folder: Path  # config.json, model.safetensors
    weights: str  # digest of theta(n), hex
    inner_steps: int  # of the network before that outer step
    reason: str  # why they and not the updates, for a log line
    # As in an Update, of the outer step that was held: it may have merged our upload.
    base: Base = Base.KEPT
    own_upload: Path | None = None
    cause: str = ""


@dataclass(frozen=True)
class UploadSent:
    """The upload for a close is in the store, whole and in time as far as we know."""

    outer_step: int
    serial: int
    size: int  # bytes
    seconds: float  # that sending took in this process; 0: it was there already


@dataclass(frozen=True)
class UploadFailed:
    """The upload for a close is not in the store in time, and is not sent any more."""

    outer_step: int
    serial: int
    cause: str


@dataclass(frozen=True)
class HeadSeen:
    """The network's newest outer step, whenever it has become another."""

    outer_step: int


@dataclass(frozen=True)
class ChainForked:
    """There are two valid manifests for one step: nothing is applied or sent any more."""

    cause: str  # one line that names both, and the remedy


@dataclass(frozen=True)
class NetworkFinished:
    """The master has finished the network."""

    cause: str


Fact = (
    Close | Update | Weights | UploadSent | UploadFailed | HeadSeen | ChainForked | NetworkFinished
)
Post = Callable[[Fact], None]
