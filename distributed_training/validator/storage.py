"""Whole files over the store room's objects: the global bucket to write, the miners' to read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

from distributed_training.store.cleanup import prune_epochs
from distributed_training.store.errors import StoreError
from distributed_training.store.interface import ObjectStore, PartInfo
from distributed_training.store.retry import deadline_in, retrying
from distributed_training.store.uplink import Section
from distributed_training.validator.buckets import BucketError, ObjectInfo

PART = 32 * 1024 * 1024
THREADS = 6

Result = TypeVar("Result")


class StoreBucket:
    """A :class:`~.buckets.Bucket` over one :class:`ObjectStore`.

    ``small``: how long a metadata-sized request may take with its retries; ``large``: a whole file.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        small: timedelta = timedelta(seconds=30),
        large: timedelta = timedelta(minutes=30),
        part_size: int = PART,
    ) -> None:
        self._store = store
        self._small = small
        self._large = large
        self._part_size = part_size

    def head(self, key: str) -> ObjectInfo | None:
        info = self._try(f"head {key}", lambda: self._store.head(key))
        if info is None:
            return None
        # By the store's clock where it tells its own time: ours may be wrong.
        age = info.age_seconds
        return ObjectInfo(info.size, info.modified if age is None else time.time() - age)

    def get(self, key: str, *, limit: int) -> bytes | None:
        return self._try(f"read {key}", lambda: self._store.get(key, limit=limit))

    def put(self, key: str, data: bytes) -> None:
        self._try(f"write {key}", lambda: self._store.put(key, data))

    def download(self, key: str, path: Path, *, limit: int) -> None:
        info = self._try(f"head {key}", lambda: self._store.head(key))
        where = f"{self._store.bucket}/{key}"
        if info is None:
            raise BucketError(f"{where} does not exist")
        if info.size > limit:
            raise BucketError(f"{where} has {info.size} bytes, more than the {limit} allowed")
        deadline = deadline_in(self._large)
        temporary = path.with_name(f".{path.name}.part")

        def fetch(start: int) -> bytes:
            return self._store.get_range(key, start, self._part_size, etag=info.etag)

        try:
            with _as_bucket_errors(), temporary.open("wb") as file:
                while (start := file.tell()) < info.size:
                    piece = retrying(f"read {where}", partial(fetch, start), deadline=deadline)
                    if not piece:
                        raise BucketError(f"{where}: {start} of {info.size} bytes came")
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def upload(self, key: str, path: Path) -> None:
        deadline = deadline_in(self._large)
        with _as_bucket_errors(), path.open("rb") as file:
            handle, size = file.fileno(), path.stat().st_size
            if size > self._part_size:
                self._upload_parts(key, handle, size, deadline)
                return
            retrying(
                f"write {key}",
                lambda: self._store.put(key, Section(handle, 0, size)),
                deadline=deadline,
            )

    def prune(self, *, newest: int, keep: int) -> None:
        with _as_bucket_errors():
            prune_epochs(self._store, newest=newest, keep=keep)

    def _upload_parts(self, key: str, handle: int, size: int, deadline: float) -> None:
        what = f"write {key}"
        upload = retrying(what, lambda: self._store.create_multipart(key), deadline=deadline)

        def send(number: int) -> PartInfo:
            start = (number - 1) * self._part_size
            length = min(self._part_size, size - start)
            return retrying(
                f"{what}, part {number}",
                lambda: self._store.upload_part(
                    key, upload, number, Section(handle, start, length)
                ),
                deadline=deadline,
            )

        try:
            with ThreadPoolExecutor(THREADS, thread_name_prefix="global-upload") as pool:
                parts = list(pool.map(send, range(1, -(-size // self._part_size) + 1)))
            retrying(
                what, lambda: self._store.complete_multipart(key, upload, parts), deadline=deadline
            )
        except StoreError:
            with suppress(StoreError):  # the store drops it by itself in time
                self._store.abort_multipart(key, upload)
            raise

    def _try(self, what: str, attempt: Callable[[], Result]) -> Result:
        with _as_bucket_errors():
            return retrying(what, attempt, deadline=deadline_in(self._small))


@contextmanager
def _as_bucket_errors() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        raise BucketError(str(error)) from None
    except OSError as error:
        raise BucketError(f"{error.filename or 'local file'}: {error.strerror}") from None
