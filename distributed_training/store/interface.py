"""An object store as the rest of the room sees it; one bucket per instance.

:class:`~.s3.S3ObjectStore` is the one that runs. The tests have a twin in memory that passes the
same contract test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .uplink import Section


@dataclass(frozen=True)
class ObjectInfo:
    """``etag``: MD5 in hex of an object put in one piece, ``md5-of-part-md5s`` + ``-n`` of one put
    in n parts. ``modified``: seconds since 1970, the store's clock. ``age_seconds``: by the store's
    clock too, so that a wrong clock of ours does not matter; None in listings.
    """

    key: str
    size: int
    etag: str
    modified: float
    age_seconds: float | None = None


@dataclass(frozen=True)
class PartInfo:
    number: int  # from 1
    size: int
    etag: str  # MD5 in hex


@dataclass(frozen=True)
class MultipartInfo:
    key: str
    upload_id: str
    initiated: float  # seconds since 1970, the store's clock


class ObjectStore(Protocol):
    """Operations make one attempt each; see :func:`~.retry.patient`.

    A :class:`~.uplink.Section` is sent from its beginning.

    All raise :class:`~.errors.StoreError` of the kind that fits. Thread-safe.
    """

    @property
    def bucket(self) -> str: ...
    def create_bucket(self) -> None:
        """Make the bucket; fine if it is there and ours."""
        ...

    def head(self, key: str) -> ObjectInfo | None: ...
    def get(self, key: str, *, limit: int) -> bytes | None:
        """The whole object, None if there is none. IntegrityError if it exceeds ``limit``."""
        ...

    def get_range(self, key: str, start: int, length: int, *, etag: str = "") -> bytes:
        """Fewer bytes at the object's end. PreconditionError if its etag is no longer ``etag``."""
        ...

    def put(self, key: str, data: bytes | Section) -> str:
        """Returns the etag. IntegrityError if the store holds other bytes than those sent."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Missing ones are fine."""
        ...

    def list_objects(self, prefix: str = "") -> list[ObjectInfo]: ...
    def create_multipart(self, key: str) -> str: ...
    def upload_part(
        self, key: str, upload_id: str, number: int, data: bytes | Section
    ) -> PartInfo: ...

    def list_parts(self, key: str, upload_id: str) -> list[PartInfo]: ...
    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[PartInfo]) -> str: ...
    def abort_multipart(self, key: str, upload_id: str) -> None: ...
    def list_multiparts(self, prefix: str = "") -> list[MultipartInfo]: ...
