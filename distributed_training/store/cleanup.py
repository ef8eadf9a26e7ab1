"""Keep a bucket in order: abort stuck uploads.

A stuck upload is a multipart upload that was never completed, of a miner that was killed and
continued elsewhere. It is billed and not visible. There may be thousands of them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from .base import MultipartInfo, ObjectStore
from .errors import StoreError, UploadMissingError
from .transfer import Retry

log = logging.getLogger(__name__)

Item = TypeVar("Item")

STUCK_AGE = timedelta(hours=1)
_THREADS = 8
_RETRY = Retry(each=timedelta(seconds=30))  # of one request


@dataclass(frozen=True)
class Removed:
    """The result of a removal: how many are ``gone``, how many stay, and ``why``.

    ``gone``: removed, or not there any more. ``why``: the store's answer to the last of those that
    stay.
    """

    gone: int
    failed: int = 0
    why: str = ""


def stuck_uploads(
    store: ObjectStore, *, older_than: timedelta, prefix: str = ""
) -> list[MultipartInfo]:
    """List stuck uploads, oldest first. Raises StoreError when the list cannot be had."""
    multipart = store.multipart()
    if multipart is None:
        return []
    found = _RETRY(multipart.list_multiparts, prefix)
    return sorted((u for u in found if u.age >= older_than), key=lambda u: u.initiated)


def upload_sizes(
    store: ObjectStore, uploads: Sequence[MultipartInfo]
) -> Iterator[tuple[int, int] | None]:
    """Yield (parts, bytes) of each; None where the store refuses. One ListParts each, so slow."""
    multipart = store.multipart()
    assert multipart is not None, "there are uploads"

    def size(upload: MultipartInfo) -> tuple[int, int] | None:
        try:
            parts = _RETRY(multipart.list_parts, upload.key, upload.upload_id)
        except StoreError:
            return None
        return len(parts), sum(part.size for part in parts)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="sizes") as pool:
        yield from pool.map(size, uploads)


def abort_uploads(store: ObjectStore, uploads: Sequence[MultipartInfo]) -> Removed:
    """Abort ``uploads``; one that the store no longer knows is gone."""
    multipart = store.multipart()
    assert multipart is not None, "there are uploads"

    def abort(upload: MultipartInfo) -> None:
        with contextlib.suppress(UploadMissingError):
            _RETRY(multipart.abort_multipart, upload.key, upload.upload_id)

    return _each(abort, uploads)


def _each(remove: Callable[[Item], None], items: Sequence[Item]) -> Removed:
    """Remove each item; one that cannot be removed does not keep the others from it."""

    def answer(item: Item) -> str:
        try:
            remove(item)
        except StoreError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="cleanup") as pool:
        answers = list(pool.map(answer, items))
    failures = [text for text in answers if text]
    return Removed(len(answers) - len(failures), len(failures), failures[-1] if failures else "")


def sweep_uploads(store: ObjectStore, *, prefix: str, older_than: timedelta = STUCK_AGE) -> None:
    """Abort stuck uploads of keys that begin with ``prefix``: never raises, logs the result."""
    try:
        stuck = stuck_uploads(store, older_than=older_than, prefix=prefix)
    except StoreError as error:
        log.warning("Stuck multipart uploads could not be listed, next try later: %s", error)
        return
    if not stuck:
        return
    done = abort_uploads(store, stuck)
    if done.gone:
        log.info("Aborted %d stuck multipart uploads in %s", done.gone, store.bucket)
    if done.failed:
        log.warning(
            "%d stuck multipart uploads stay in %s until the next cleanup (%s)",
            done.failed,
            store.bucket,
            done.why,
        )
