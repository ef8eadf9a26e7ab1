"""Define an exchange: the four methods that a miner calls, and the events that it posts.

A round has two moments. At the *close* of outer step E the loop writes its upload; later comes the
*update* that leads to outer step E + 1. An exchange follows the network in threads of its own and
posts an event at each of them. No event holds a tensor or an open file. The loop may read an event
late, so each event names the outer step for which it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from distributed_training.protocol.types import Event, ExitStatus, Schema, Update


@dataclass(frozen=True)
class Close:
    """The time at which an outer step's uploads are taken. If it moves, its serial grows.

    Two closes are the same if outer step and serial are the same, since the grace may change. A
    progress upload is for no close: it has a ``Close`` of serial 0, which no real close has.
    """

    outer_step: int  # the outer step from whose weights the uploads count
    serial: int
    closes_at: float = field(default=0.0, compare=False)  # Unix seconds, by the store's clock
    grace: float = field(default=0.0, compare=False)  # seconds; an upload after them is late

    @property
    def tag(self) -> str:
        """The name of its upload."""
        return f"{self.outer_step}.{self.serial}"

    @property
    def ends_at(self) -> float:
        """Unix seconds, by the store's clock, after which an upload is late."""
        return self.closes_at + self.grace


@dataclass(frozen=True)
class CloseReached(Event):
    """An outer step's uploads are taken now."""

    close: Close
    until: float = math.inf  # seconds of the steady clock after which an upload is late


@dataclass(frozen=True)
class UploadEnded(Event):
    """The upload for a close is in the store, or, with a cause, is not sent any more."""

    close: Close
    cause: str = ""  # why it is not in the store in time; empty if it is there, complete
    size: int = 0  # bytes
    seconds: float = 0.0  # seconds that sending took in this process; 0 if it was there already


@dataclass(frozen=True)
class UpdateReady(Event):
    """The next outer step's update is on the disk, or whole weights in place of many."""

    update: Update
    at: float  # seconds of the steady clock


@dataclass(frozen=True)
class NetworkDiffers(Event):
    """The network's history or its file is another one than ours. Posted when that changes."""

    cause: str  # one line that names both versions and the remedy; empty if they are the same again
    # True: the history forked, so nothing is applied or sent before a recovery; false: the file
    # differs.
    forked: bool


@dataclass(frozen=True)
class StopRequested(Event):
    """The miner is to stop: by a signal, or for a reason found by this program."""

    reason: str
    exit_status: int = ExitStatus.STOPPED


Post = Callable[[Event], None]  # from any thread; returns at once


class Exchange(Protocol):
    """The source of updates, as the loop sees it. No method waits for a network."""

    def start(self, post: Post, *, outer_step: int, schema: Schema) -> None:
        """Begin to follow the network, and to post what happens there.

        ``outer_step``: the outer step whose epoch-start weights are held; ``schema``: the model's.
        """

    def send(self, close: Close) -> None:
        """Send the upload for ``close`` (:func:`upload_path`); UploadEnded answers.

        The loop calls it when a checkpoint whose state has the upload is complete.
        """

    def applied(self, outer_step: int, *, wants_weights: bool = False) -> None:
        """Take note of the outer step whose epoch-start weights are held now.

        The loop calls it also after an update that it did not apply, to get that update again, and
        after a roll-back. ``wants_weights``: the newest whole weights are to come next, even if
        they are older.
        """

    def stop(self) -> None:
        """End transfers under way; wait a few seconds for a request in flight."""


def upload_path(folder: Path, close: Close) -> Path:
    """Return the path of the upload for ``close``. ``folder``: that of this member's uploads."""
    return folder / f"{close.tag}.safetensors"
