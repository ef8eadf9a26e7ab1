"""A plug-in with a store: buckets in the memory of one process (``--r2.endpoint_url memory://``)."""

from __future__ import annotations

import time
from collections import defaultdict

from distributed_training.store import base, errors
from distributed_training.store.base import ObjectInfo, Section

BUCKETS: dict[str, dict[str, tuple[ObjectInfo, bytes]]] = defaultdict(dict)


class DictStore:
    def __init__(self, bucket: str) -> None:
        self.bucket, self._objects = bucket, BUCKETS[bucket]

    def head(self, key: str) -> ObjectInfo | None:
        return self._objects[key][0] if key in self._objects else None

    def get(self, key: str, *, limit: int) -> bytes | None:
        info = self.head(key)
        if info is not None and info.size > limit:
            raise errors.IntegrityError(f"{key} is too large")
        return self._objects[key][1] if info is not None else None

    def get_range(self, key: str, start: int, length: int, *, etag: str = "") -> bytes:
        info = self.head(key)
        if info is None:
            raise errors.ObjectMissingError(f"{key}: no such object")
        if etag not in ("", info.etag):
            raise errors.PreconditionError(f"{key}: the object changed meanwhile")
        return self._objects[key][1][start : start + length]

    def put(self, key: str, data: bytes | Section) -> str:
        if isinstance(data, Section):
            data.seek(0)
            data = b"".join(iter(data.read, b""))
        info = ObjectInfo(key, len(data), f"{time.monotonic_ns()}", time.time(), 0.0)
        self._objects[key] = info, data
        return info.etag

    def delete(self, key: str) -> None:
        self._objects.pop(key, None)

    def list_objects(self, prefix: str = "", *, most: int = 1000) -> list[ObjectInfo]:
        found = [self._objects[key][0] for key in sorted(self._objects) if key.startswith(prefix)]
        if len(found) > most:
            raise errors.StoreError(f"{prefix} lists more than {most} objects")
        return found

    def multipart(self) -> None: ...

    def close(self) -> None: ...


base.STORES.register("memory", lambda settings, bucket, **how: DictStore(bucket))
