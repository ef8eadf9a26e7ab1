"""Keep a bucket in order: its lease, and the removal of stuck uploads and old outer steps.

One small object names the miner that may upload into a bucket. Two that upload into one (a copied
``.env``, a forgotten process) overwrite each other's files and are both scored for the mixture. The
lease is renewed while its miner runs and lapses when it does not, so moving to another machine
needs a few minutes' wait or a flag. A miner is identified by its run folder *and* the place of that
folder: a copy on another machine, or under another path, is another miner's.

A stuck upload is a multipart upload that was never completed, of a miner that was killed and
continued elsewhere. It is billed and not visible. There may be thousands of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import platform
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from distributed_training.common.files import write_bytes
from distributed_training.protocol import keys

from .base import MultipartInfo, ObjectStore
from .errors import IntegrityError, StoreError, UploadMissingError
from .transfer import Retry

log = logging.getLogger(__name__)

OWNER_KEY = ".miner/owner.json"
RENEW_EVERY = timedelta(minutes=4)
# Three renewals in a row may fail before another machine may take the bucket.
LAPSES_AFTER = timedelta(minutes=15)
_MOST_BYTES = 4096
_MACHINE_ID = Path("/etc/machine-id")


class ForeignBucketError(StoreError):
    """Another miner uploads into this bucket."""


def instance_of(folder: Path) -> str:
    """Identify the miner of this run folder: the same at each start, another in a copy elsewhere.

    Half of it is random, in ``folder/instance``, written once: machines that were made from one
    image are alike in all that can be asked of them. Raises OSError.
    """
    path = folder / "instance"
    try:
        token = path.read_bytes()[:64].decode("ascii", "replace")
    except FileNotFoundError:
        token = ""
    if not re.fullmatch(r"[0-9a-f]{32}", token):
        token = secrets.token_hex(16)
        write_bytes(path, token.encode())
    place = "\0".join((token, machine(), str(folder.resolve())))
    return hashlib.sha256(place.encode(errors="replace")).hexdigest()[:16]


def machine() -> str:
    """Return a text that tells this machine, or this container, from another."""
    try:
        identity = _MACHINE_ID.read_text(errors="replace").strip()
    except OSError:
        identity = ""
    return f"{identity}:{platform.node()}"


def claim_bucket(store: ObjectStore, instance: str, *, take: bool = False) -> None:
    """Make or renew the claim of ``instance``. Raises ForeignBucketError, StoreError.

    ``take``: also over a claim of another that has not lapsed. Two claims at the same moment: the
    later write wins, and the other finds out at its next renewal.
    """
    if not take:
        check_claim(store, instance)
    store.put(OWNER_KEY, json.dumps({"instance": instance}).encode())


def check_claim(store: ObjectStore, instance: str) -> None:
    """Raise ForeignBucketError if another miner's claim stands."""
    info = store.head(OWNER_KEY)
    # By the store's clock: those of the two machines may differ by more than a lease.
    if info is None or (info.age_seconds or 0.0) > LAPSES_AFTER.total_seconds():
        return
    owner = _owner(store)
    if owner is not None and owner != instance:
        raise ForeignBucketError(
            f"another miner claimed bucket {store.bucket} {max(0.0, info.age_seconds or 0):.0f} s "
            "ago, so nothing is uploaded here: stop it, or, if it is gone for good, wait "
            f"{LAPSES_AFTER.total_seconds() / 60:.0f} minutes or start with --r2.take_bucket"
        )


def release_bucket(store: ObjectStore, instance: str) -> None:
    """Give the claim up at a clean stop, so that the next machine need not wait."""
    if _owner(store) == instance:
        # A claim that another made since is deleted too; its next renewal writes it again.
        store.delete(OWNER_KEY)


def _owner(store: ObjectStore) -> str | None:
    """Return the claiming miner, None without a readable claim: the next claim replaces it."""
    try:
        owner = json.loads(store.get(OWNER_KEY, limit=_MOST_BYTES) or b"{}").get("instance")
    except (IntegrityError, ValueError, AttributeError, RecursionError):
        return None
    return owner if isinstance(owner, str) else None


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


def sweep_uploads(
    store: ObjectStore,
    *,
    instance: str,
    spare: Callable[[], Collection[str]],
    older_than: timedelta = STUCK_AGE,
) -> None:
    """Abort stuck uploads in the daemon: never raises, logs the result.

    Nothing is aborted in a bucket that another miner than ``instance`` has claimed: uploads that
    look stuck may be that miner's. ``spare``: ids of the uploads that a resume will continue.
    """
    try:
        check_claim(store, instance)
        found = stuck_uploads(store, older_than=older_than)
    except ForeignBucketError:
        return  # whoever tries to upload gets the error
    except StoreError as error:
        log.warning("Stuck multipart uploads could not be listed, next try in an hour: %s", error)
        return
    # After the listing: what was begun or taken up meanwhile is spared.
    kept = spare()
    stuck = [upload for upload in found if upload.upload_id not in kept]
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


def prune_epochs(store: ObjectStore, *, newest: int, keep: int) -> Removed:
    """Delete the objects of outer steps more than ``keep`` - 1 before ``newest``; log the result.

    Steps after ``newest`` stay: they are not ours to judge. Metadata goes first, so that an outer
    step half deleted is not one that anyone is pointed to.
    """

    def delete(key: str) -> None:
        _RETRY(store.delete, key)

    try:
        old = [
            (name, info.key)
            for info in _RETRY(store.list_objects, "epoch-")
            # A name that is not the protocol's is not ours to delete: it counts as the newest
            # step's.
            for step, name in [keys.parse_epoch_key(info.key) or (newest, "")]
            if step <= newest - max(keep, 1)
        ]
        done = _each(delete, [key for name, key in old if name == keys.METADATA])
        # Files without metadata are read by nobody; metadata without files leads into a hole.
        if not done.failed:
            data = _each(delete, [key for name, key in old if name != keys.METADATA])
            done = replace(data, gone=done.gone + data.gone)
    except StoreError as error:  # the bucket cannot be listed
        done = Removed(0, 1, str(error))
    if done.gone:
        log.info("Deleted %d objects of old outer steps from %s", done.gone, store.bucket)
    if done.failed:
        log.warning("Old outer steps stay in %s for now: %s", store.bucket, done.why)
    return done
