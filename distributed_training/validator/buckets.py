"""What the validator needs of an object store: one bucket to write, many to read.

A bucket of a miner is a stranger's: every read names the most bytes it will take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from distributed_training.protocol.commitment import BucketCredentials


class BucketError(RuntimeError):
    """A bucket that does not answer, refuses, or holds more than was allowed. One line."""


@dataclass(frozen=True)
class ObjectInfo:
    size: int
    modified: float  # seconds since the epoch, the store's clock


class ReadBucket(Protocol):
    """All methods raise :class:`BucketError`."""

    def head(self, key: str) -> ObjectInfo | None:
        """None: there is no such object."""
        ...

    def get(self, key: str, *, limit: int) -> bytes | None:
        """None: there is no such object. More than ``limit`` bytes are an error."""
        ...

    def download(self, key: str, path: Path, *, limit: int) -> None:
        """Into ``path``, complete or not at all. Raises BucketError if there is no such object."""
        ...


class Bucket(ReadBucket, Protocol):
    def put(self, key: str, data: bytes) -> None: ...
    def upload(self, key: str, path: Path) -> None: ...
    def prune(self, *, newest: int, keep: int) -> None:
        """Delete the folders of outer steps older than the ``keep`` newest up to ``newest``."""
        ...


# (uid, read credentials from its commitment) -> its bucket. Raises BucketError.
OpenBucket = Callable[[int, BucketCredentials], ReadBucket]
