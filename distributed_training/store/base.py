"""The object store as the rest of the room sees it; one bucket per instance.

Implemented by :class:`~.s3.S3ObjectStore` and :class:`~.memory.MemoryObjectStore`, which pass the
same contract test.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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
    """Operations make one attempt each; retrying is the caller's (:func:`~.retry.retrying`).

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


class Line:
    """The uplink as a shared resource: paused while an all-reduce needs it, or stopped for good.

    Transfers look at it between parts and at each read of a part under way, so a pause frees the
    line at once; the parts it interrupts are sent again.
    """

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._stopped = threading.Event()

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def pause(self) -> None:
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    def stop(self) -> None:
        self._stopped.set()
        self._open.set()

    def wait_open(self) -> None:
        """Until not paused. Raises StoppedError."""
        from .errors import StoppedError

        self._open.wait()
        if self._stopped.is_set():
            raise StoppedError("stopped as asked; what was sent stays in the journal")

    def sleep(self, seconds: float) -> None:
        """Raises StoppedError as soon as the line is stopped."""
        self._stopped.wait(seconds)
        self.wait_open()


class LineClosedError(OSError):
    """Raised inside a transfer's read when the line is paused or stopped."""


class Section(io.RawIOBase):
    """A range of a file as a request body, hashed on its way out.

    Read with ``pread``, so one file handle serves all parts; nothing but the block under way is in
    memory. ``md5`` is that of the bytes read since the last seek to 0.
    """

    BLOCK = 1024 * 1024

    def __init__(self, handle: int, start: int, size: int, line: Line | None = None) -> None:
        super().__init__()
        import hashlib

        self._new_hash = lambda: hashlib.md5(usedforsecurity=False)
        self._handle = handle
        self._start = start
        self._size = size
        self._line = line
        self._at = 0
        self._md5 = self._new_hash()

    def __len__(self) -> int:
        return self._size

    @property
    def md5(self) -> str:
        return self._md5.hexdigest()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        target = offset + (0, self._at, self._size)[whence]
        if target == 0:
            self._md5 = self._new_hash()
        self._at = target
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Hazard: returns up to ``BLOCK`` bytes, also when fewer are asked for.

        http.client asks for 16 KiB at a time and sends whatever it gets; larger pieces save a third
        of the CPU time of an upload.
        """
        import os

        if self._line is not None and (self._line.paused or self._line.stopped):
            raise LineClosedError("the line is closed")
        wanted = self._size - self._at
        if size is not None and size >= 0:
            wanted = min(wanted, max(size, self.BLOCK)) if size else 0
        data = os.pread(self._handle, wanted, self._start + self._at)
        self._at += len(data)
        self._md5.update(data)
        return data
