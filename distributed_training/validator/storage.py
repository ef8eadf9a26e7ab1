"""Whole files over the store room's objects: the global bucket to write, the miners' to read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from distributed_training.store.cleanup import prune_epochs
from distributed_training.store.download import download
from distributed_training.store.errors import StoreError
from distributed_training.store.interface import ObjectStore
from distributed_training.store.journal import Journal
from distributed_training.store.retry import deadline_in, retrying
from distributed_training.store.upload import Sender
from distributed_training.validator.buckets import BucketError, ObjectInfo

Result = TypeVar("Result")


class StoreBucket:
    """A :class:`~.buckets.Bucket` over one :class:`ObjectStore`.

    ``small``: how long a metadata-sized request may take with its retries; ``large``: a whole file.
    ``journal``: what the next process needs to go on with an upload; None for a bucket that is only
    read. ``part_size``: of uploads, 0 to let the file's size decide.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        small: timedelta = timedelta(seconds=30),
        large: timedelta = timedelta(minutes=30),
        journal: Journal | None = None,
        part_size: int = 0,
    ) -> None:
        self._store = store
        self._small = small
        self._large = large
        self._journal = journal
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
        with _as_bucket_errors():
            download(self._store, key, path, limit=limit, deadline=deadline_in(self._large))

    def upload(self, key: str, path: Path) -> None:
        with _as_bucket_errors():
            if (journal := self._journal) is None:
                raise BucketError(f"bucket {self._store.bucket} was opened to be read only")
            with Sender(
                store=self._store,
                journal=journal,
                deadline=deadline_in(self._large),
                part_size=self._part_size,
            ) as sender:
                folder = key.rpartition("/")[0]
                sender.abandon_all_but(
                    r.key for r in journal.uploads() if r.key.rpartition("/")[0] == folder
                )
                sender.upload_all([(key, path)])

    def prune(self, *, newest: int, keep: int) -> None:
        with _as_bucket_errors():
            done = prune_epochs(self._store, newest=newest, keep=keep)
        if done.failed:
            raise BucketError(done.why)

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
