"""Define the events that rounds through the store post to the loop from a thread of rank 0.

A round has two moments. At the *close* of outer step E the loop writes its upload; later comes the
*update* that leads to outer step E + 1. :class:`~.store_rounds.StoreRounds` posts an
:class:`~distributed_training.protocol.types.Update` or one of the classes below whenever one is
known. None of them holds a tensor or an open file, and the loop may read one late: each names the
outer step for which it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from distributed_training.protocol.types import Event, Update


@dataclass(frozen=True)
class Close:
    """The time at which an outer step's uploads are taken. If it moves, its serial grows.

    A progress upload is for none: its close has the serial 0, which is no close's.
    """

    outer_step: int  # E: for uploads of the members that hold its epoch-start weights
    serial: int
    closes_at: float  # Unix seconds, by the store's clock
    grace: float  # seconds: an upload that is in the store later is late

    @property
    def ends_at(self) -> float:
        """Unix seconds, by the store's clock, after which an upload is late."""
        return self.closes_at + self.grace


@dataclass(frozen=True)
class UploadEnded(Event):
    """The upload for a close is in the store, or, with a cause, is not sent any more."""

    outer_step: int
    serial: int
    cause: str = ""  # why it is not in the store in time; empty: it is, whole
    size: int = 0  # bytes
    seconds: float = 0.0  # that sending took in this process; 0: it was there already


@dataclass(frozen=True)
class HeadSeen:
    """The network has a new newest outer step."""

    outer_step: int


@dataclass(frozen=True)
class ChainForked(Event):
    """There are two valid manifests for one step: nothing is applied or sent before a recovery."""

    cause: str  # one line that names both, and the remedy; empty: a recovery has settled it


@dataclass(frozen=True)
class NetworkFinished:
    """The master has finished the network."""

    cause: str


Fact = Close | Update | UploadEnded | HeadSeen | ChainForked | NetworkFinished
Post = Callable[[Fact], None]
