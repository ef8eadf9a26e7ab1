"""Stuck multipart uploads and old outer steps: found, shown, removed."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from distributed_training.protocol import keys

from .claim import ForeignBucketError, check_claim
from .errors import StoreError, UploadMissingError
from .interface import ObjectStore

log = logging.getLogger(__name__)

STUCK_AGE = timedelta(hours=1)


@dataclass(frozen=True)
class StuckUpload:
    """A multipart upload that was never completed. ``size``: bytes of its parts at the store."""

    key: str
    upload_id: str
    age: timedelta
    size: int
    parts: int


def stuck_uploads(
    store: ObjectStore,
    *,
    older_than: timedelta,
    prefix: str = "",
    spare: Collection[str] = (),
    now: float | None = None,
) -> list[StuckUpload]:
    """Oldest first; without those in ``spare`` (upload ids). Raises StoreError."""
    now = time.time() if now is None else now
    found = []
    for upload in store.list_multiparts(prefix):
        age = timedelta(seconds=max(0.0, now - upload.initiated))
        if age < older_than or upload.upload_id in spare:
            continue
        try:
            parts = store.list_parts(upload.key, upload.upload_id)
        except UploadMissingError:
            continue
        size = sum(p.size for p in parts)
        found.append(StuckUpload(upload.key, upload.upload_id, age, size, len(parts)))
    return sorted(found, key=lambda u: u.age, reverse=True)


def abort_uploads(store: ObjectStore, uploads: Collection[StuckUpload]) -> int:
    """How many were aborted or gone already. Raises StoreError at the first refusal."""
    for upload in uploads:
        try:
            store.abort_multipart(upload.key, upload.upload_id)
        except UploadMissingError:
            continue
    return len(uploads)


def prune_epochs(store: ObjectStore, *, newest: int, keep: int) -> int:
    """Delete the objects of outer steps more than ``keep`` - 1 before ``newest``; how many.

    Steps after ``newest`` stay: they are not ours to judge. Metadata goes first, so that an outer
    step half deleted is not one that anyone is pointed to.
    """
    old = []
    for info in store.list_objects("epoch-"):
        parsed = keys.parse_epoch_key(info.key)
        if parsed is not None and parsed[0] <= newest - max(keep, 1):
            old.append((parsed[1] != keys.METADATA, info.key))
    store.delete([key for _, key in sorted(old)])
    return len(old)


def prune_snapshots(
    folder: Path,
    *,
    before: Path | None = None,
    unused_for: timedelta | None = None,
    spare: Collection[Path] = (),
) -> int:
    """Delete local snapshots (``<outer>.<inner>.<block>``) that nothing will publish; how many.

    Those taken at an earlier chain block than the snapshot ``before``, and those in which nothing
    was written for ``unused_for``: left by a miner that was killed, or by a disk that was full.
    """
    count = 0
    newest = None if before is None else _chain_block(before)
    spared = {path.resolve() for path in spare}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        block = _chain_block(path)
        if block is None or not path.is_dir() or path.resolve() in spared:
            continue
        old = newest is not None and block < newest
        if old or (unused_for is not None and _unused(path) > unused_for.total_seconds()):
            shutil.rmtree(path, ignore_errors=True)
            count += 1
    return count


def _chain_block(snapshot: Path) -> int | None:
    """At which a snapshot was taken; None if the folder is not named as one. A miner that was
    killed goes back to lower steps, never to lower blocks."""
    parts = snapshot.name.split(".")
    return int(parts[2]) if len(parts) == 3 and all(p.isdigit() for p in parts) else None


def _unused(folder: Path) -> float:
    """Seconds since anything in it was written; 0 if it is being deleted."""
    try:
        written = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:
        return 0.0
    return time.time() - written


def sweep_uploads(
    store: ObjectStore,
    *,
    instance: str,
    spare: Collection[str],
    older_than: timedelta = STUCK_AGE,
) -> None:
    """The daemon's own cleaning: never raises, says what it did. A bucket that another than
    ``instance`` has claimed is left alone: what looks stuck may be that one's."""
    try:
        check_claim(store, instance)
        stuck = stuck_uploads(store, older_than=older_than, spare=spare)
        abort_uploads(store, stuck)
    except ForeignBucketError:
        return  # told by whoever tries to publish
    except StoreError as error:
        log.warning("Stuck multipart uploads could not be cleaned up: %s", error)
        return
    if stuck:
        size = sum(u.size for u in stuck)
        log.info(
            "Aborted %d stuck multipart uploads (%.2f GB) in %s",
            len(stuck),
            size / 1e9,
            store.bucket,
        )
