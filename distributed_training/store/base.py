"""Define the interface of an object store (eight methods), and register the kinds of stores.

A store is one bucket, which maps keys to bytes. A file too large for one request is sent in parts
if the store is a :class:`MultipartStore`, and otherwise in one piece. Each operation makes one
attempt; :class:`~.transfer.Retry` makes more. Several threads may call operations at the same time.

A kind of store is a function that opens a bucket; the file that defines it registers it in
:data:`STORES`. :func:`~.opening.open_store` chooses the kind by ``--r2.endpoint_url``
(``store.endpoint`` of the network's file).
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from distributed_training.common.kinds import Kinds
from distributed_training.config.settings import StoreSettings
from distributed_training.protocol.metadata import BucketCredentials

from .errors import PreconditionError, StoppedError, TakenError


@dataclass(frozen=True)
class ObjectInfo:
    """One object, as described by a listing or a HEAD request.

    ``etag``: at most stores the hex MD5 for an object that was put in one piece, and
    ``md5-of-part-md5s`` + ``-n`` for an object of n parts; see :func:`same_etag`. ``modified``:
    seconds since 1970, by the store's clock. ``age_seconds``: also by the store's clock, so it does
    not matter if our clock is wrong. It is negative if the store's clock was set back since then,
    or rounds up, and None in listings. ``cached``: the answer may come from a cache on the way, so
    the store's clock is not known to the second.
    """

    key: str
    size: int
    etag: str
    modified: float
    age_seconds: float | None = None
    cached: bool = False


@dataclass(frozen=True)
class PartInfo:
    """One part of a multipart upload."""

    number: int  # from 1
    size: int
    etag: str  # as the store writes it: a hex MD5, or anything else


@dataclass(frozen=True)
class MultipartInfo:
    """One multipart upload that has not been completed."""

    key: str
    upload_id: str
    initiated: float  # seconds since 1970, by the store's clock

    @property
    def age(self) -> timedelta:
        """The time since the upload was begun, by our clock."""
        return timedelta(seconds=max(0.0, time.time() - self.initiated))


def same_etag(one: str, other: str) -> bool:
    """Compare two etags, ignoring case: some stores write MD5s in capitals."""
    return bool(one) and one.lower() == other.lower()


#: The form of the etag that most stores give an object that was sent in parts.
OF_PARTS = re.compile(r"[0-9a-fA-F]{32}-\d+")


def is_md5(etag: str) -> bool:
    return re.fullmatch(r"[0-9a-fA-F]{32}", etag) is not None


def md5_of(data: bytes | Section) -> str:
    """Return the hex MD5 of a request body."""
    if isinstance(data, Section):
        return data.md5
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


#: The most objects to list, because the listing of an untrusted bucket may never end.
MOST_LISTED = 200_000
_COMPARED = 16 * 1024 * 1024  # bytes to fetch and compare at a time
PART = 64 * 1024 * 1024  # bytes; a larger file or object is sent in parts of this size
CONCURRENT = 6  # how many parts, ranges or small files are sent or fetched at once


class ObjectStore(Protocol):
    """One bucket of an object store.

    All methods are thread-safe, make one attempt, and raise the fitting kind of
    :class:`StoreError`. A :class:`~.base.Section` is always sent from its beginning.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from distributed_training.store.folder import FolderStore
        >>> store = FolderStore(Path(tempfile.mkdtemp()), writes=True)
        >>> etag = store.put("models/a", b"bytes")
        >>> store.get("models/a", limit=100), store.head("models/a").etag == etag
        (b'bytes', True)
        >>> [found.key for found in store.list_objects("models/")]
        ['models/a']
    """

    @property
    def bucket(self) -> str:
        """The bucket's name, for messages."""
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """Return the size, etag and age of an object; None if there is no such object.

        Args:
            key: The object's name in the bucket.
        """
        ...

    def get(self, key: str, *, limit: int) -> bytes | None:
        """Return a whole object; None if there is no such object.

        Args:
            key: The object's name in the bucket.
            limit: The most bytes to read.

        Raises:
            IntegrityError: If the object is larger than ``limit``.
        """
        ...

    def get_range(self, key: str, start: int, length: int, *, etag: str = "") -> bytes:
        """Return a range of an object, or less if the object ends within the range.

        Args:
            key: The object's name in the bucket.
            start: First byte.
            length: Number of bytes.
            etag: The etag that the object must still have; empty for any etag.

        Raises:
            ObjectMissingError: If there is no such object.
            PreconditionError: If the object has a different etag.
        """
        ...

    def put(self, key: str, data: bytes | Section) -> str:
        """Write an object; return its etag, which :meth:`head` returns from then on.

        Args:
            key: The object's name in the bucket.
            data: All of its bytes.
        """
        ...

    def delete(self, key: str) -> None:
        """Delete an object; a missing one is not an error.

        Args:
            key: The object's name in the bucket.
        """
        ...

    def list_objects(self, prefix: str = "", *, most: int = MOST_LISTED) -> list[ObjectInfo]:
        """List the objects of a bucket, in the order of their keys.

        Args:
            prefix: List only keys that begin with this prefix.
            most: The most objects to list.

        Raises:
            StoreError: If there are more than ``most``.
        """
        ...

    def multipart(self) -> MultipartStore | None:
        """Return this store if it accepts a file in parts, else None."""
        ...

    def close(self) -> None:
        """Close the store's connections."""
        ...


class MultipartStore(ObjectStore, Protocol):
    """A bucket that accepts a file in parts; the object appears only after the last call.

    Examples:
        ```python
        upload = store.create_multipart("models/a")
        parts = [
            store.upload_part("models/a", upload, number, data)
            for number, data in enumerate(pieces, 1)
        ]
        etag = store.complete_multipart("models/a", upload, parts)
        ```
    """

    def create_multipart(self, key: str) -> str:
        """Begin an upload in parts; return its id.

        Args:
            key: The object's name in the bucket.
        """
        ...

    def upload_part(self, key: str, upload_id: str, number: int, data: bytes | Section) -> PartInfo:
        """Send one part of an upload.

        Args:
            key: The object's name in the bucket.
            upload_id: The id that :meth:`create_multipart` returned.
            number: The part's number, from 1.
            data: All bytes of the part.

        Raises:
            IntegrityError: If the store holds different bytes afterwards.
        """
        ...

    def list_parts(self, key: str, upload_id: str) -> list[PartInfo]:
        """List the parts of an upload that the store has received.

        Args:
            key: The object's name in the bucket.
            upload_id: The id that :meth:`create_multipart` returned.
        """
        ...

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[PartInfo]) -> str:
        """Join the parts of an upload into the object; return the object's etag.

        Args:
            key: The object's name in the bucket.
            upload_id: The id that :meth:`create_multipart` returned.
            parts: All parts, in the order of their numbers.
        """
        ...

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Abort an upload and delete its parts.

        Args:
            key: The object's name in the bucket.
            upload_id: The id that :meth:`create_multipart` returned.
        """
        ...

    def list_multiparts(self, prefix: str = "") -> list[MultipartInfo]:
        """List the uploads that were begun but neither completed nor aborted.

        Args:
            prefix: List only keys that begin with this prefix.
        """
        ...


def put_once(store: ObjectStore, key: str, data: bytes | Section) -> str:
    """Write an object that nobody may replace; return its etag.

    If the store has a method ``put_new``, which raises PreconditionError if the object exists, only
    one of two writers wins. With other stores the client checks first, so two simultaneous writers
    may both write. It is not an error if the object already exists with the same bytes, for example
    because an answer was lost. Raises TakenError if it exists with other bytes, and StoreError.
    """
    put_new = getattr(store, "put_new", None)
    if put_new is None:
        if store.head(key) is None:
            return store.put(key, data)
    else:
        try:
            return str(put_new(key, data))
        except TakenError:
            raise
        except PreconditionError:
            pass
    return require_same(store, key, store.head(key), data).etag


def require_same(
    store: ObjectStore, key: str, held: ObjectInfo | None, data: bytes | Section
) -> ObjectInfo:
    """Return ``held`` if that object has the bytes of ``data``. Raises TakenError, StoreError."""
    if held is None or not _holds(store, held, data):
        raise TakenError(
            f"{store.bucket}/{key} already holds other bytes, and nobody may replace them: nothing "
            "was written"
        )
    return held


def _holds(store: ObjectStore, held: ObjectInfo, data: bytes | Section) -> bool:
    """Return whether an object has these bytes; read it if its etag is not an MD5."""
    if held.size != len(data):
        return False
    if is_md5(held.etag):
        return same_etag(held.etag, md5_of(data))
    if isinstance(data, Section):
        data.seek(0)
    at = 0
    while at < held.size:
        part = data.read(_COMPARED) if isinstance(data, Section) else data[at : at + _COMPARED]
        if not part or store.get_range(held.key, at, len(part), etag=held.etag) != part:
            return False
        at += len(part)
    return True


class OpenStore(Protocol):
    """A function that opens a bucket, registered in :data:`STORES` as a kind of store.

    It is called with ``settings`` (endpoint, keys, limits), ``bucket`` (the name), ``write``
    (whether to open it for writing) and ``credentials``: the keys of another member's bucket, as
    its owner committed them, or None for our own bucket. It raises ValueError, with a line for the
    operator.

    Examples:
        ```python
        def open_mine(settings, bucket, *, write, credentials):
            return MyStore(settings.endpoint_url, bucket)

        STORES.register("mine", open_mine)
        ```
    """

    def __call__(
        self,
        settings: StoreSettings,
        bucket: str,
        *,
        write: bool,
        credentials: BucketCredentials | None,
    ) -> ObjectStore: ...


STORES: Kinds[OpenStore] = Kinds("object store")


# --- request bodies, and stopping transfers on request --------------------------------------------


class Uplink:
    """A thread-safe, one-way switch: once stopped, transfers end at their next part or read."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        self._stopped.set()

    def check_stopped(self) -> None:
        """Raise StoppedError if the uplink was stopped; long file operations call this."""
        if self._stopped.is_set():
            raise StoppedError("stopped as asked")

    def sleep(self, seconds: float) -> None:
        """Sleep for that time. Raises StoppedError as soon as the uplink is stopped."""
        self._stopped.wait(seconds)
        self.check_stopped()


class Section(io.RawIOBase):
    """A range of a file as a request body.

    It is read with ``pread``, so one file handle serves all parts, and only the current block is in
    memory.
    """

    BLOCK = 1024 * 1024

    def __init__(self, handle: int, start: int, size: int, uplink: Uplink | None = None) -> None:
        super().__init__()
        self._handle = handle
        self._start = start
        self._size = size
        self._uplink = uplink
        self._at = 0
        self._md5 = ""

    def __len__(self) -> int:
        return self._size

    @property
    def md5(self) -> str:
        """The hex MD5; the first call reads the whole range. Raises StoppedError."""
        if not self._md5:
            digest = hashlib.md5(usedforsecurity=False)
            for at in range(0, self._size, self.BLOCK):
                if self._uplink is not None:
                    self._uplink.check_stopped()
                length = min(self.BLOCK, self._size - at)
                digest.update(os.pread(self._handle, length, self._start + at))
            self._md5 = digest.hexdigest()
        return self._md5

    def part(self, start: int, size: int) -> Section:
        """Return a part of this range as another section."""
        return Section(self._handle, self._start + start, size, self._uplink)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Read ``size`` bytes, or up to ``BLOCK`` bytes if fewer are asked for."""
        if self._uplink is not None and self._uplink.stopped:
            # This error makes urllib3 drop the connection, so a stop takes effect within one block.
            raise OSError("the uplink is closed")
        wanted = self._size - self._at
        if size is not None and size >= 0:
            # http.client asks for 16 KiB at a time and sends whatever it gets; larger pieces save a
            # third of the CPU time of an upload.
            wanted = min(wanted, max(size, self.BLOCK)) if size else 0
        data = os.pread(self._handle, wanted, self._start + self._at)
        self._at += len(data)
        return data
