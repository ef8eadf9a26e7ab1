"""An object store in memory, which replaces the S3 client in tests of code that uses a store.

Both pass the same contract test.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence

from distributed_training.store.base import (
    MOST_LISTED,
    MultipartInfo,
    ObjectInfo,
    PartInfo,
    Section,
)
from distributed_training.store.errors import (
    IntegrityError,
    ObjectMissingError,
    PreconditionError,
    StoreError,
    UploadMissingError,
)


class MemoryObjectStore:
    """One bucket. Like S3, it refuses to complete an upload with parts that it does not hold.

    ``before``: called with (operation, key) before each operation; may raise a StoreError.
    """

    def __init__(
        self,
        bucket: str = "bucket",
        *,
        before: Callable[[str, str], None] = lambda operation, key: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._bucket = bucket
        self._before = before
        self._clock = clock
        self._objects: dict[str, tuple[bytes, str, float]] = {}
        self._uploads: dict[str, tuple[str, float, dict[int, bytes]]] = {}
        self._lock = threading.RLock()
        self._count = 0

    def close(self) -> None:
        pass

    @property
    def bucket(self) -> str:
        return self._bucket

    def _info(self, key: str) -> ObjectInfo:
        data, etag, modified = self._objects[key]
        return ObjectInfo(key, len(data), etag, modified, self._clock() - modified)

    def head(self, key: str) -> ObjectInfo | None:
        self._before("head", key)
        with self._lock:
            return self._info(key) if key in self._objects else None

    def get(self, key: str, *, limit: int) -> bytes | None:
        self._before("get", key)
        with self._lock:
            if key not in self._objects:
                return None
            data = self._objects[key][0]
        if len(data) > limit:
            raise IntegrityError(f"{key} has {len(data)} bytes, more than the {limit} allowed")
        return data

    def get_range(self, key: str, start: int, length: int, *, etag: str = "") -> bytes:
        self._before("get_range", key)
        with self._lock:
            if key not in self._objects:
                raise ObjectMissingError(f"{key}: no such object")
            data, current, _ = self._objects[key]
        if etag and etag != current:
            raise PreconditionError(f"{key}: the object changed meanwhile")
        return data[start : start + length]

    def put(self, key: str, data: bytes | Section) -> str:
        self._before("put", key)
        content = _bytes(data)
        etag = _md5(content)
        with self._lock:
            self._objects[key] = (content, etag, self._clock())
        return etag

    def delete(self, key: str) -> None:
        self._before("delete", key)
        with self._lock:
            self._objects.pop(key, None)

    def list_objects(self, prefix: str = "", *, most: int = MOST_LISTED) -> list[ObjectInfo]:
        self._before("list", prefix)
        with self._lock:
            found = [self._info(k) for k in sorted(self._objects) if k.startswith(prefix)]
        if len(found) > most:
            raise StoreError(f"{self.bucket}/{prefix} lists more than {most} objects")
        return found

    def multipart(self) -> MemoryObjectStore:
        return self

    def create_multipart(self, key: str) -> str:
        self._before("create_multipart", key)
        with self._lock:
            self._count += 1
            upload_id = f"upload-{self._count}"
            self._uploads[upload_id] = (key, self._clock(), {})
        return upload_id

    def _upload(self, key: str, upload_id: str) -> dict[int, bytes]:
        with self._lock:
            found = self._uploads.get(upload_id)
        if found is None or found[0] != key:
            raise UploadMissingError(f"{key}: no such multipart upload")
        return found[2]

    def upload_part(self, key: str, upload_id: str, number: int, data: bytes | Section) -> PartInfo:
        self._before("upload_part", key)
        content = _bytes(data)
        parts = self._upload(key, upload_id)
        with self._lock:
            parts[number] = content
        return PartInfo(number, len(content), _md5(content))

    def list_parts(self, key: str, upload_id: str) -> list[PartInfo]:
        self._before("list_parts", key)
        parts = self._upload(key, upload_id)
        with self._lock:
            return [PartInfo(n, len(d), _md5(d)) for n, d in sorted(parts.items())]

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[PartInfo]) -> str:
        self._before("complete_multipart", key)
        held = self._upload(key, upload_id)
        with self._lock:
            if any(_md5(held[part.number]) != part.etag for part in parts):
                raise StoreError(f"{key}: the store answered 400 InvalidPart")
            digests = b"".join(bytes.fromhex(p.etag) for p in parts)
            etag = f"{_md5(digests)}-{len(parts)}"
            content = b"".join(held[p.number] for p in parts)
            self._objects[key] = (content, etag, self._clock())
            del self._uploads[upload_id]
        return etag

    def abort_multipart(self, key: str, upload_id: str) -> None:
        self._before("abort_multipart", key)
        self._upload(key, upload_id)
        with self._lock:
            self._uploads.pop(upload_id, None)

    def list_multiparts(self, prefix: str = "") -> list[MultipartInfo]:
        self._before("list_multiparts", prefix)
        with self._lock:
            return [
                MultipartInfo(key, upload_id, at)
                for upload_id, (key, at, _) in self._uploads.items()
                if key.startswith(prefix)
            ]


def _bytes(data: bytes | Section) -> bytes:
    if isinstance(data, bytes):
        return data
    data.seek(0)
    return b"".join(iter(lambda: data.read(Section.BLOCK), b""))


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()
