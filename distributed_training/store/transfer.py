"""Move files between disk and bucket: with retries, in parts, and resumed by the next process.

A download fills one file with parallel ranges; the file appears complete or not at all. An upload
keeps no notes on this disk: the store lists the uploads that were begun for a key and the parts
that they hold, and MD5s show whether a part belongs to the file. So after a kill at any moment the
next process sends the missing parts, and aborts uploads that nobody will continue.

Retries are outside botocore on purpose: its retry quota is shared by all threads of a client, so a
five-second outage that hits several parts at once would exhaust it and fail the upload. Here each
operation backs off with jitter until a deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import ParamSpec, TypeVar

from distributed_training.common.backoff import Backoff
from distributed_training.common.files import (
    free_bytes,
    is_full,
    read_state,
    sync_folder,
    write_at,
    write_state,
)
from distributed_training.common.memory import DISK_RESERVE
from distributed_training.protocol.network_report import span

from .base import (
    CONCURRENT,
    OF_PARTS,
    PART,
    MultipartInfo,
    MultipartStore,
    ObjectInfo,
    ObjectStore,
    PartInfo,
    Section,
    Uplink,
    is_md5,
    put_once,
    require_same,
    same_etag,
)
from .errors import (
    AccessDeniedError,
    DeadlineError,
    IntegrityError,
    NoRoomError,
    ObjectMissingError,
    OtherBytesError,
    PreconditionError,
    StoreError,
    UnsupportedError,
    UploadMissingError,
)

log = logging.getLogger(__name__)

EVERY = 60.0  # minimum seconds between two log lines of a download

#: Gets the bytes so far, the total bytes, and the seconds left if they are known.
Follower = Callable[[int, int, float | None], None]
_FOLLOWED = 1e8  # bytes: smaller downloads are over before anybody looks
_follower: ContextVar[Follower | None] = ContextVar("follower", default=None)


@contextlib.contextmanager
def followed(follower: Follower) -> Iterator[None]:
    """Report to ``follower`` once a minute on large downloads that this thread begins."""
    token = _follower.set(follower)
    try:
        yield
    finally:
        _follower.reset(token)


class _Progress:
    """Counts the bytes of one download and logs a line a minute. Thread-safe.

    ``held``: bytes that an earlier attempt has fetched.
    """

    def __init__(self, what: str, total: int, held: int) -> None:
        self._what = what
        self._total = total
        self._there = held
        self._lock = threading.Lock()
        self._since = time.monotonic(), held  # time of the last line, and the bytes at that time
        self._follower = _follower.get() if total >= _FOLLOWED else None
        if self._follower:
            self._follower(held, total, None)

    def add(self, count: int) -> None:
        """Count bytes that have just arrived, and log a line if one is due."""
        with self._lock:
            self._there += count
            now, (at, before) = time.monotonic(), self._since
            if now - at < EVERY or self._there >= self._total:
                return
            rate = (self._there - before) / (now - at)
            self._since = now, self._there
        seconds = (self._total - self._there) / max(rate, 1.0)
        there, total = size_text(self._there), size_text(self._total)
        log.info(
            "%s: %s of %s, %s/s, %s left", self._what, there, total, size_text(rate), span(seconds)
        )
        if self._follower:
            self._follower(self._there, self._total, seconds)


Item = TypeVar("Item")
Result = TypeVar("Result")

FIRST_WAIT = timedelta(seconds=0.25)
LONGEST_WAIT = timedelta(seconds=15)


P = ParamSpec("P")


class Retry:
    """Repeats an operation until it succeeds, fails permanently, or runs out of time.

    ``until``: ``time.monotonic()`` by which all operations must be done; ``each``: how long one
    operation may take with its retries. Only errors that are marked retryable are retried. When
    time is up, an OtherBytesError is raised as it is, and any other error becomes a DeadlineError
    with the same text.
    """

    def __init__(
        self,
        *,
        until: float = math.inf,
        each: timedelta = timedelta.max,
        uplink: Uplink | None = None,
    ) -> None:
        self._until = until
        self._each = each
        self._uplink = uplink or Uplink()

    def __call__(self, operation: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        """Return what ``operation`` returns. Raises StoreError."""
        uplink = self._uplink
        deadline = min(self._until, time.monotonic() + self._each.total_seconds())
        waits = Backoff(first=FIRST_WAIT, longest=LONGEST_WAIT)
        while True:
            uplink.check_stopped()
            try:
                return operation(*args, **kwargs)
            except StoreError as error:
                if not error.retryable:
                    raise
                uplink.check_stopped()
                pause = waits.failed().total_seconds()
                if time.monotonic() + pause > deadline:
                    if isinstance(error, OtherBytesError):  # a reader may look elsewhere
                        raise
                    raise DeadlineError(f"{error}: did not succeed in time") from None
            uplink.sleep(pause)


def run_all(
    pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item]
) -> list[Result]:
    """Run ``work`` on all items and return the results in order.

    The first error cancels the remaining items and is raised. Call this from a thread outside the
    pool.
    """
    futures = [pool.submit(work, item) for item in items]
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
        # If several items failed, this raises the error of the first one in the list.
        return [future.result() for future in futures if future.done()]
    finally:
        for future in futures:
            future.cancel()
        # Wait for running tasks, since they still use the file, which the caller closes next.
        wait(futures)


def deadline_in(duration: timedelta) -> float:
    return time.monotonic() + duration.total_seconds()


# --- downloads ----------------------------------------------------------------------------------

RANGE = 16 * 1024 * 1024
NO_PROGRESS = timedelta(minutes=5)  # how long one range is retried without progress
_MAKE_ROOM = "free some disk space, or move --neuron.run_folder"


@dataclass(frozen=True)
class _Notes:
    """The state of an interrupted download; ``done``: the start offsets of the ranges on disk."""

    etag: str
    size: int
    done: list[int]


def download(
    store: ObjectStore,
    key: str,
    path: Path,
    *,
    limit: int,
    deadline: float,
    uplink: Uplink | None = None,
) -> ObjectInfo:
    """Download one object into ``path``, in parallel ranges, complete or not at all.

    An interrupted download of the same object continues where it stopped, even in another process.
    ``limit``: the object's maximum size in bytes; ``deadline`` (time.monotonic()): the end of
    the whole download, after which no range is begun. Up to ``CONCURRENT`` ranges are in memory at
    once. ``DISK_RESERVE`` bytes stay free for the checkpoints.

    Raises ObjectMissingError, IntegrityError (larger than ``limit``, or replaced meanwhile),
    NoRoomError, DeadlineError (also if a range fails for ``NO_PROGRESS``), StoppedError, OSError.
    """
    place = f"{store.bucket}/{key}"
    retry = Retry(until=deadline, each=NO_PROGRESS, uplink=uplink)
    info = retry(store.head, key)
    if info is None:
        raise ObjectMissingError(f"{place}: no such object")
    if info.size > limit:
        raise IntegrityError(f"{place} has {info.size} bytes, more than the {limit} allowed")
    part, notes = path.with_name(f".{path.name}.part"), path.with_name(f".{path.name}.part.json")
    done: set[int] = set()
    known = read_state(notes, _Notes, lost="the file is downloaded from the beginning")
    if known and (known.etag, known.size) == (info.etag, info.size) and part.exists():
        done.update(known.done)
    else:  # the partial file is of another version of the object: do not mix their ranges
        part.unlink(missing_ok=True)
    missing = [start for start in range(0, info.size, RANGE) if start not in done]
    needed = sum(min(RANGE, info.size - start) for start in missing)
    progress = _Progress(f"Downloading {key}", info.size, info.size - needed)
    require_room(path.parent, needed, what=key)
    # Do not truncate the file, because it may hold ranges from an earlier attempt.
    handle = os.open(part, os.O_RDWR | os.O_CREAT, 0o644)
    lock = threading.Lock()

    def read(start: int, length: int) -> bytes:
        data = store.get_range(key, start, length, etag=info.etag)
        if len(data) != length:
            raise OtherBytesError(f"{place}: {len(data)} bytes arrived instead of {length}")
        return data

    def fetch(start: int) -> None:
        # If the store is merely slow, no request fails, so no retry would check the deadline.
        if time.monotonic() > deadline:
            there = min(len(done) * RANGE, info.size)
            raise DeadlineError(
                f"{key}: only {there} of {info.size} bytes arrived in time; the next attempt "
                "continues from there"
            )
        length = min(RANGE, info.size - start)
        require_room(path.parent, length, what=key)  # others write to this disk too
        write_at(handle, retry(read, start, length), start)
        # Write the notes under the lock, or a slower thread could overwrite them with older ones.
        with lock:
            done.add(start)
            # The bytes of a range must be on disk before the notes call it done.
            os.fdatasync(handle)
            write_state(notes, _Notes(info.etag, info.size, sorted(done)))
        progress.add(length)

    try:
        os.ftruncate(handle, info.size)
        with ThreadPoolExecutor(CONCURRENT, thread_name_prefix="download") as pool:
            run_all(pool, fetch, missing)
    except PreconditionError:
        raise IntegrityError(f"{place} was replaced while it was read") from None
    except OSError as error:
        if not is_full(error):
            raise
        # The reserve is gone as well, so a checkpoint could not be written either: free all of it.
        part.unlink(missing_ok=True)
        notes.unlink(missing_ok=True)
        raise NoRoomError(
            f"no room to download {key}: {path.parent} became full meanwhile "
            f"({error.strerror}), so the next attempt starts this file again: {_MAKE_ROOM}"
        ) from error
    finally:
        os.close(handle)
    # Rename the file first: notes without their part are ignored, but a part without notes is lost.
    part.replace(path)
    notes.unlink(missing_ok=True)
    sync_folder(path.parent)
    return info


# --- checking whether files fit on the disk -------------------------------------------------------


def require_room(folder: Path, needed: int, *, what: str) -> None:
    """Raise NoRoomError unless ``needed`` bytes fit into ``folder``, with the reserve left free."""
    if shortage := describe_shortage(folder, needed):
        raise NoRoomError(
            f"no room to download {what}: the rest {shortage}; what was fetched so far is kept: "
            f"{_MAKE_ROOM}"
        )


def describe_shortage(folder: Path, needed: int) -> str | None:
    """Return None if ``needed`` bytes fit and ``DISK_RESERVE`` stays free, else how many are free.

    Raises OSError.
    """
    free = free_bytes(folder)
    if free is None or free >= needed + DISK_RESERVE:
        return None
    return (
        f"needs {size_text(needed)} in {folder}, but only {size_text(free)} is free "
        f"({size_text(DISK_RESERVE)} stays in reserve)"
    )


def describe_full_disk(folder: Path, needed: int) -> str | None:
    """Return None if an upload of ``needed`` bytes fits, else a line with the reason.

    ``folder`` need not exist yet.
    """
    place = folder
    try:
        # Before the first upload the folder does not exist, and disk_usage() would raise.
        while not place.exists() and place != place.parent:
            place = place.parent
        shortage = describe_shortage(place, needed)
    except OSError as error:  # for example a network disk that is not available
        return (
            f"UPLOAD BLOCKED: the disk of {folder} does not answer ({error.strerror or error}), so "
            "no upload can be written. Training continues without uploads: bring the disk back "
            "or move --neuron.run_folder"
        )
    if shortage is None:
        return None
    return (
        f"UPLOAD BLOCKED: an upload {shortage}. Training continues without uploads: free some "
        "disk space or move --neuron.run_folder"
    )


def size_text(count: float) -> str:
    """Return a number of bytes in a readable form: ``12.4 GB``, ``0.3 MB``."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


# --- uploads ------------------------------------------------------------------------------------


def upload(
    store: ObjectStore,
    key: str,
    path: Path,
    *,
    until: float,
    uplink: Uplink | None = None,
    once: bool = False,
) -> int:
    """Upload a file, in parts if it is large; return how many bytes were sent.

    An interrupted upload in parts continues where it stopped, even in another process. A part is
    never in memory as a whole.

    Args:
        store: The bucket.
        key: The object's name in the bucket. Nobody else may write it.
        path: The file.
        until: ``time.monotonic()`` at which the last retry ends; no part is begun after it.
        uplink: Stopping it stops the upload.
        once: Whether the object must never be replaced.

    Raises:
        TakenError: ``once`` is set, and the object holds other bytes.
        IntegrityError: The store lost parts, or joined them into other bytes.
        StoreError: The file was not sent, for example DeadlineError; parts stay at the store.
        StoppedError: ``uplink`` was stopped; parts stay at the store.
        OSError: The file cannot be read.
    """
    retry = Retry(until=until, uplink=uplink)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        whole = Section(file.fileno(), 0, size, uplink)
        in_parts = store.multipart()
        if in_parts is None or size <= PART:
            if once:
                retry(put_once, store, key, whole)
            else:
                retry(store.put, key, whole)
            return size
        bodies = [whole.part(at, min(PART, size - at)) for at in range(0, size, PART)]
        with ThreadPoolExecutor(CONCURRENT, thread_name_prefix="upload") as pool:
            return _InParts(in_parts, key, whole, bodies, retry, pool, until, once).send()


@dataclass
class _InParts:
    """One file that is sent in parts: ``bodies`` are the parts of ``whole``."""

    store: MultipartStore
    key: str
    whole: Section
    bodies: Sequence[Section]
    retry: Retry
    pool: ThreadPoolExecutor
    until: float
    once: bool
    upload_id: str = ""
    listed: dict[int, PartInfo] = field(default_factory=dict)  # parts that the store has
    #: (upload id, part number) -> a part that this process has sent.
    sent: dict[tuple[str, int], PartInfo] = field(default_factory=dict)

    def send(self) -> int:
        """Send the parts that the store lacks; return how many bytes were sent."""
        for _ in range(2):
            if self._is_there():
                break
            self._begin()
            try:
                self._complete(run_all(self.pool, self._send_part, range(len(self.bodies))))
                break
            except UploadMissingError:
                continue  # either completed, but the answer was lost, or aborted: ask the store
        else:
            raise IntegrityError(
                f"{self.store.bucket}/{self.key}: the store lost the multipart upload: it is "
                "sent again with the next upload; is another miner using this bucket?"
            )
        return sum(part.size for part in self.sent.values())

    def _is_there(self) -> bool:
        """Return whether the object holds this file. Raises TakenError."""
        held, size = self.retry(self.store.head, self.key), len(self.whole)
        if held is None:
            return False
        same = False
        if held.size == size and OF_PARTS.fullmatch(held.etag):
            digests = run_all(self.pool, lambda body: body.md5, self.bodies)
            same = same_etag(held.etag, multipart_etag(digests))
        if same or not self.once:
            return same
        # An etag of other parts, or one not made of MD5s, proves nothing, so read the object back.
        # That is worth the traffic only if nobody may replace the object.
        self.retry(require_same, self.store, self.key, held, self.whole)
        return True

    def _begin(self) -> None:
        """Continue an upload that was already begun for this key, or begin a new one."""
        store, key, retry = self.store, self.key, self.retry
        try:
            began = [one.upload_id for one in retry(store.list_multiparts, key) if one.key == key]
        except (AccessDeniedError, UnsupportedError) as error:
            log.warning("Could not look for earlier uploads of %s: %s", key, error)
            began = []
        for other in began[:-1]:
            with contextlib.suppress(UploadMissingError):
                retry(store.abort_multipart, key, other)
        for self.upload_id in began[-1:]:
            with contextlib.suppress(UploadMissingError):
                parts = retry(store.list_parts, key, self.upload_id)
                log.info("Continuing the upload of %s: %d parts are stored", key, len(parts))
                self.listed = {part.number: part for part in parts}
                return
        self.upload_id, self.listed = retry(store.create_multipart, key), {}

    def _send_part(self, index: int) -> PartInfo:
        number, body = index + 1, self.bodies[index]
        place, held = (self.upload_id, number), self.listed.get(number)
        # If etags are not MD5s, only parts that this process has sent are known to be correct.
        if (
            held is not None
            and held.size == len(body)
            and (held == self.sent.get(place) or same_etag(held.etag, body.md5))
        ):
            return held
        # If the link is merely slow, no request fails, so no retry would check the deadline.
        if time.monotonic() > self.until:
            raise DeadlineError(
                f"{self.key}: part {number} of {len(self.bodies)} was not sent in the time for an "
                "upload (round.grace), so the upload was given up"
            )
        part = self.retry(self.store.upload_part, self.key, *place, body)
        self.sent[place] = part
        return part

    def _complete(self, parts: Sequence[PartInfo]) -> None:
        """Have the store join the parts. Raises IntegrityError if the object is then wrong."""
        store, key = self.store, self.key
        try:
            etag = self.retry(store.complete_multipart, key, self.upload_id, parts)
        except StoreError as error:
            if not isinstance(error, (DeadlineError, UploadMissingError)):
                # This refusal is final, so keeping the parts would only cost money.
                with contextlib.suppress(StoreError):
                    store.abort_multipart(key, self.upload_id)
            raise
        wanted = multipart_etag([part.etag for part in parts])
        if same_etag(etag, wanted):
            return
        # Check the object itself: by its etag if that is made of MD5s, otherwise by its size.
        held = self.retry(store.head, key)
        found = held.etag if held is not None else ""
        other = wanted and OF_PARTS.fullmatch(found) and not same_etag(found, wanted)
        if held is None or held.size != len(self.whole) or other:
            raise IntegrityError(
                f"{key}: the store joined the parts incorrectly: etag {found or etag:.80} "
                f"instead of {wanted}, so it is sent again with the next upload"
            )


def upload_all(store: ObjectStore, files: Iterable[tuple[str, Path]], *, until: float) -> int:
    """Upload many files, several small ones at a time; return how many bytes were sent.

    Raises the same exceptions as :func:`upload`.
    """
    sizes = [(path.stat().st_size, key, path) for key, path in files]

    def send(one: tuple[int, str, Path]) -> int:
        return upload(store, *one[1:], until=until)

    sent = sum(send(one) for one in sizes if one[0] > PART)
    with ThreadPoolExecutor(CONCURRENT, thread_name_prefix="uploads") as pool:
        return sent + sum(run_all(pool, send, [one for one in sizes if one[0] <= PART]))


def multipart_etag(etags: Sequence[str]) -> str:
    """Return S3's etag for a multipart object: the MD5 of the parts' MD5s, and their number.

    ``etags``: the parts' etags. If they are not MD5s, the object's etag cannot be known, and "" is
    returned.
    """
    if not all(map(is_md5, etags)):
        return ""
    digests = b"".join(map(bytes.fromhex, etags))
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(etags)}"


# --- stuck uploads: begun but never completed, so they are billed but not visible -----------------

STUCK_AGE = timedelta(hours=1)
_OF_REQUEST = timedelta(seconds=30)  # time limit of one request with its retries


def stuck_uploads(
    store: ObjectStore,
    *,
    prefix: str,
    is_stuck: Callable[[MultipartInfo], bool],
    uplink: Uplink | None = None,
) -> list[MultipartInfo]:
    """List stuck uploads, oldest first. Raises StoreError if the list cannot be fetched."""
    in_parts, retry = store.multipart(), Retry(each=_OF_REQUEST, uplink=uplink)
    found = [] if in_parts is None else retry(in_parts.list_multiparts, prefix)
    return sorted(filter(is_stuck, found), key=lambda one: one.initiated)


def abort_uploads(
    store: ObjectStore, uploads: Sequence[MultipartInfo], *, uplink: Uplink | None = None
) -> list[str]:
    """Abort uploads; return the store's answer for each upload that could not be aborted.

    An upload that the store no longer knows counts as aborted.
    """
    in_parts, retry = store.multipart(), Retry(each=_OF_REQUEST, uplink=uplink)

    def abort(one: MultipartInfo) -> str:
        assert in_parts is not None, "there are uploads"
        try:
            with contextlib.suppress(UploadMissingError):
                retry(in_parts.abort_multipart, one.key, one.upload_id)
        except StoreError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(8, thread_name_prefix="cleanup") as pool:  # there may be thousands
        return [answer for answer in pool.map(abort, uploads) if answer]


def sweep_uploads(
    store: ObjectStore,
    *,
    prefix: str,
    is_stuck: Callable[[MultipartInfo], bool] = lambda one: one.age >= STUCK_AGE,
    uplink: Uplink | None = None,
) -> None:
    """Abort stuck uploads of keys that begin with ``prefix``, and log the result.

    Raises only StoppedError, once ``uplink`` is stopped.
    """
    try:
        stuck = stuck_uploads(store, prefix=prefix, is_stuck=is_stuck, uplink=uplink)
    except StoreError as error:
        log.warning("Could not list stuck multipart uploads, will try again later: %s", error)
        return
    failed = abort_uploads(store, stuck, uplink=uplink)
    if len(stuck) > len(failed):
        log.info("Aborted %d stuck multipart uploads in %s", len(stuck) - len(failed), store.bucket)
    if failed:
        log.warning(
            "%d stuck multipart uploads stay in %s until the next cleanup (%s)",
            *(len(failed), store.bucket, failed[-1]),
        )
