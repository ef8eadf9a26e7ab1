"""Define an exchange: the four methods that a miner calls, and the events that it posts.

A round has two moments. At the *close* of outer step E the loop writes its upload; later comes the
*update* that leads to outer step E + 1. An exchange follows the network in its own threads and
posts an event at each of these moments. No event contains a tensor or an open file. The loop may
read an event late, so each event names the outer step that it applies to.
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
    """The time at which an outer step's uploads are collected. If it moves, its serial grows.

    Two closes are equal if outer step and serial are equal, since the grace may change. A progress
    upload is for no close: it has a ``Close`` with serial 0, which no real close has.
    """

    outer_step: int  # the outer step from whose weights the uploads start
    serial: int
    closes_at: float = field(default=0.0, compare=False)  # Unix seconds, by the store's clock
    grace: float = field(default=0.0, compare=False)  # seconds after which an upload is late

    @property
    def tag(self) -> str:
        """The name of its upload."""
        return f"{self.outer_step}.{self.serial}"

    @property
    def ends_at(self) -> float:
        """The time after which an upload is late, in Unix seconds by the store's clock."""
        return self.closes_at + self.grace


@dataclass(frozen=True)
class CloseReached(Event):
    """The close of an outer step has come: its uploads are collected now."""

    close: Close
    until: float = math.inf  # time after which an upload is late, in seconds of the steady clock


@dataclass(frozen=True)
class UploadEnded(Event):
    """The upload for a close is in the store or, if there is a cause, will not be sent any more."""

    close: Close
    cause: str = ""  # why it is not in the store in time; empty if it is there and complete
    size: int = 0  # bytes
    seconds: float = 0.0  # seconds that sending took in this process; 0 if it was already there


@dataclass(frozen=True)
class UpdateReady(Event):
    """The next outer step's update, or whole weights instead of many updates, is on the disk."""

    update: Update
    at: float  # when it was ready, in seconds of the steady clock


@dataclass(frozen=True)
class NetworkDiffers(Event):
    """The network's history or its file differs from ours. Posted whenever that changes."""

    cause: str  # one line that names both versions and the remedy; empty if they are the same again
    # True if the history forked, so that nothing is applied or sent before a recovery; False if the
    # file differs.
    forked: bool


@dataclass(frozen=True)
class StopRequested(Event):
    """The miner must stop, because of a signal or for a reason that this program found."""

    reason: str
    exit_status: int = ExitStatus.STOPPED


Post = Callable[[Event], None]  # may be called from any thread; returns at once


class Exchange(Protocol):
    """The source of updates, as the loop sees it. No method waits for the network."""

    def start(self, post: Post, *, outer_step: int, schema: Schema) -> None:
        """Begin to follow the network, and to post what happens there.

        ``outer_step``: the outer step whose epoch-start weights the ranks have. ``schema``: the
        model's schema.
        """

    def send(self, close: Close) -> None:
        """Send the upload for ``close`` (:func:`upload_path`); UploadEnded reports the result.

        The loop calls it once the checkpoint that records the upload is complete.
        """

    def applied(self, outer_step: int, *, wants_weights: bool = False) -> None:
        """Note the outer step whose epoch-start weights the ranks have now.

        The loop also calls it after a roll-back, and after an update that it did not apply, to get
        that update again. ``wants_weights``: whether the newest whole weights must come next, even
        if they are older.
        """

    def stop(self) -> None:
        """End transfers in progress; wait a few seconds for a request in flight."""


def upload_path(folder: Path, close: Close) -> Path:
    """Return the path of the upload for ``close``. ``folder``: where this member's uploads are."""
    return folder / f"{close.tag}.safetensors"
