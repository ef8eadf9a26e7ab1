"""One object into a file: parallel ranges, complete or not at all, resumed by the next process."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

from distributed_training.common.files import is_full, read_json_object, sync_folder, write_json

from .errors import DeadlineError, IntegrityError, ObjectMissingError, PreconditionError
from .gate import disk_allows
from .retry import patient
from .s3 import ObjectInfo, S3ObjectStore
from .uplink import Uplink

RANGE = 16 * 1024 * 1024
NO_PROGRESS = timedelta(minutes=5)  # that one range is tried again and again


def download(
    store: S3ObjectStore,
    key: str,
    path: Path,
    *,
    limit: int,
    deadline: float,
    concurrency: int = 6,
    uplink: Uplink | None = None,
) -> ObjectInfo:
    """One object into ``path``, in parallel ranges, complete or not at all.

    An interrupted download of the same object goes on where it was, also in another process.
    ``limit``: most bytes; ``deadline`` (time.monotonic()) covers all, and no range is begun after
    it; ``concurrency`` ranges are in memory at once. Raises ObjectMissingError, IntegrityError
    (larger than ``limit``, the disk is too full, replaced twice meanwhile), DeadlineError (also
    when a range fails for ``NO_PROGRESS``), StoppedError, OSError.
    """
    place = f"{store.bucket}/{key}"
    store = patient(store, until=deadline, each=NO_PROGRESS, uplink=uplink)
    for _ in range(2):
        info = store.head(key)
        if info is None:
            raise ObjectMissingError(f"{place}: no such object")
        if info.size > limit:
            raise IntegrityError(f"{place} has {info.size} bytes, more than the {limit} allowed")
        try:
            _download(store, info, path, deadline=deadline, concurrency=concurrency)
            return info
        except PreconditionError:
            continue  # replaced between two ranges: once more, from its beginning
    raise IntegrityError(f"{place} was replaced again and again while it was read")


def _download(
    store: S3ObjectStore,
    info: ObjectInfo,
    path: Path,
    *,
    deadline: float,
    concurrency: int,
) -> None:
    part = path.with_name(f".{path.name}.part")
    notes = path.with_name(f".{path.name}.part.json")
    done = _ranges_done(notes, part, info)
    no_room = f"no room to download {info.key}: {info.size} bytes into {path.parent}; free the disk"
    if disk_allows(path.parent, info.size - len(done) * RANGE, reserve=0):
        raise IntegrityError(no_room)
    handle = os.open(part, os.O_RDWR | os.O_CREAT, 0o644)
    lock = threading.Lock()
    try:
        os.ftruncate(handle, info.size)

        def fetch(start: int) -> None:
            if time.monotonic() > deadline:
                came = min(len(done) * RANGE, info.size)
                raise DeadlineError(
                    f"{info.key}: {came} of {info.size} bytes came in the time allowed; the next "
                    "attempt goes on from there"
                )
            length = min(RANGE, info.size - start)
            data = store.get_range(info.key, start, length, etag=info.etag)
            if len(data) != length:
                raise IntegrityError(
                    f"{info.key}: the store sent {len(data)} bytes instead of {length}"
                )
            view = memoryview(data)
            at = start
            while view:
                written = os.pwrite(handle, view, at)
                view, at = view[written:], at + written
            with lock:
                done.add(start)
                # Bytes of a range are on disk before it is called done.
                os.fdatasync(handle)
                write_json(notes, {"etag": info.etag, "size": info.size, "done": sorted(done)})

        missing = [start for start in range(0, info.size, RANGE) if start not in done]
        with ThreadPoolExecutor(concurrency, thread_name_prefix="download") as pool:
            futures = [pool.submit(fetch, start) for start in missing]
            try:
                for future in futures:
                    future.result()
            finally:
                for future in futures:
                    future.cancel()
        os.fsync(handle)
    except OSError as error:
        if not is_full(error):
            raise
        part.unlink(missing_ok=True)  # rather than keep the disk full until the next attempt
        notes.unlink(missing_ok=True)
        raise IntegrityError(no_room) from error
    finally:
        os.close(handle)
    part.replace(path)
    notes.unlink(missing_ok=True)
    sync_folder(path.parent)


def _ranges_done(notes: Path, part: Path, info: ObjectInfo) -> set[int]:
    raw = read_json_object(notes) or {}
    done = raw.get("done")
    same = (raw.get("etag"), raw.get("size")) == (info.etag, info.size) and part.exists()
    if same and isinstance(done, list) and all(type(start) is int for start in done):
        return set(done)
    part.unlink(missing_ok=True)
    return set()
