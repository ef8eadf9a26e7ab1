"""Move files between disk and bucket: with retries, in parts, resumable by the next process.

Retries are outside botocore on purpose: its retry quota is shared by all threads of a client, so a
five-second outage met by several parts at once exhausts it and ends the upload. Here each operation
backs off with jitter until one deadline.

A download fills one file by parallel ranges; the file appears complete or not at all. An upload has
two steps: :meth:`Sender.stage` sends everything that can be sent without being seen (all parts of a
multipart upload), :meth:`Sender.publish` makes it appear. So the files of one revision can appear
together although sending them takes long. Miner and validator both upload this way.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import ParamSpec, TypeVar

from distributed_training.common.backoff import Backoff
from distributed_training.common.files import (
    is_full,
    read_state,
    sync_folder,
    write_at,
    write_state,
)

from .base import MultipartStore, ObjectInfo, ObjectStore, PartInfo, is_md5, same_etag
from .errors import (
    CertificateError,
    ContradictionError,
    DeadlineError,
    IntegrityError,
    NoRoomError,
    ObjectMissingError,
    PreconditionError,
    StoppedError,
    StoreError,
    UploadMissingError,
)
from .journal import Journal, UploadRecord
from .room import describe_shortage
from .uplink import Section, Uplink

log = logging.getLogger(__name__)

EVERY = 60.0  # seconds between two lines of a transfer, at least


#: Gets bytes there, bytes in all, and the seconds left where they are known.
Follower = Callable[[int, int, float | None], None]
_FOLLOWED = 1e8  # bytes: smaller transfers are over before anybody looks
_follower: ContextVar[Follower | None] = ContextVar("follower", default=None)


@contextlib.contextmanager
def followed(follower: Follower) -> Iterator[None]:
    """Show ``follower`` the large transfers that this thread begins meanwhile, once a minute."""
    token = _follower.set(follower)
    try:
        yield
    finally:
        _follower.reset(token)


class TransferProgress:
    """Count the bytes of one transfer and log a line a minute. Thread-safe.

    ``what`` begins each line: "Downloading global state of outer step 56". ``total``: bytes of all
    files; ``held``: those of them that an earlier attempt brought. ``moved`` is called with the
    bytes that are there, and with all.
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        held: int = 0,
        clock: Callable[[], float] = time.monotonic,
        moved: Callable[[int, int], None] = lambda there, total: None,
    ) -> None:
        self._moved = moved
        self._what = what
        self._total = total
        self._there = held
        self._clock = clock
        self._lock = threading.Lock()
        self._since = clock(), held  # when the last line was logged, and how much was there then
        self._follower = _follower.get() if total >= _FOLLOWED else None
        if self._follower:
            self._follower(held, total, None)

    def add(self, count: int, *, held: int = 0) -> None:
        """Count bytes that came just now, and log a line if one is due.

        ``held``: further ones that an earlier attempt brought, which do not tell how fast this is.
        """
        with self._lock:
            self._there += count + held
            self._moved(self._there, self._total)
            now, (at, before) = self._clock(), self._since
            before += held
            self._since = at, before
            # Kept bytes give no rate, and so no remaining time.
            if not count or now - at < EVERY or self._there >= self._total:
                return
            rate = (self._there - before) / (now - at)
            self._since = now, self._there
        unit, name = (1e9, "GB") if self._total >= 1e8 else (1e6, "MB")
        seconds = (self._total - self._there) / max(rate, 1.0)
        minutes = round(seconds / 60)
        left = f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
        log.info(
            "%s: %.1f of %.1f %s, %.*f MB/s, %s left",
            self._what,
            self._there / unit,
            self._total / unit,
            name,
            0 if rate >= 1e7 else 1,
            rate / 1e6,
            left if minutes else "less than a minute",
        )
        if self._follower:
            self._follower(self._there, self._total, seconds)


Item = TypeVar("Item")
Result = TypeVar("Result")

FIRST_WAIT = timedelta(seconds=0.25)
_MOST_UNTRUSTED = 6  # certificates that are not accepted, over 8 s
LONGEST_WAIT = timedelta(seconds=15)


P = ParamSpec("P")


class Retry:
    """Tries an operation again until it succeeds, fails for good, or its time is up.

    ``until``: ``time.monotonic()`` at which the last operation must be done; ``each``: how long one
    may take. Only errors marked retryable are tried again; of a ContradictionError the second one
    in an operation is an IntegrityError, and a CertificateError is raised after some seconds.
    DeadlineError holds the last of the others.
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
        damaged, untrusted = False, 0
        while True:
            uplink.check_stopped()
            try:
                return operation(*args, **kwargs)
            except StoreError as error:
                if not error.retryable:
                    raise
                uplink.check_stopped()
                if isinstance(error, ContradictionError):
                    if damaged:  # or this would last for an hour, at the price of all that is sent
                        raise IntegrityError(
                            f"{error}; so it was twice, and it is not sent again"
                        ) from None
                    damaged = True
                if isinstance(error, CertificateError):
                    untrusted += 1
                    if untrusted == _MOST_UNTRUSTED:
                        raise
                pause = waits.failed().total_seconds()
                if time.monotonic() + pause > deadline:
                    raise DeadlineError(f"{error}: no success in the time allowed") from None
            uplink.sleep(pause)


def run_all(
    pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item]
) -> list[Result]:
    """Return ``work`` of each item, in order. The first error ends the rest and is raised.

    Call it from a thread outside the pool.
    """
    futures = [pool.submit(work, item) for item in items]
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
        # If one failed, this raises: of several errors, that of the first item.
        return [future.result() for future in futures if future.done()]
    finally:
        for future in futures:
            future.cancel()
        # Those that run still use the file, which the caller closes next.
        wait(futures)


def deadline_in(duration: timedelta) -> float:
    return time.monotonic() + duration.total_seconds()


RANGE = 16 * 1024 * 1024
NO_PROGRESS = timedelta(minutes=5)  # that one range is tried again and again
_MAKE_ROOM = "free the disk, or move --neuron.run_folder"


def download(
    store: ObjectStore,
    key: str,
    path: Path,
    *,
    limit: int,
    deadline: float,
    concurrency: int = 6,
    uplink: Uplink | None = None,
    progress: TransferProgress | None = None,
) -> ObjectInfo:
    """Download one object into ``path``, in parallel ranges, complete or not at all.

    An interrupted download of the same object continues where it was, also in another process.
    ``limit``: most bytes; ``deadline`` (time.monotonic()) covers all, and no range is begun after
    it; ``concurrency`` ranges are in memory at once; ``progress`` is of a transfer of several
    files, else this one has its own. ``room.DISK_RESERVE`` bytes stay free for the
    checkpoints and the journal.

    Raises ObjectMissingError, IntegrityError (larger than ``limit``, replaced twice meanwhile),
    NoRoomError, DeadlineError (also when a range fails for ``NO_PROGRESS``), StoppedError, OSError.
    """
    place = f"{store.bucket}/{key}"
    retry = Retry(until=deadline, each=NO_PROGRESS, uplink=uplink)
    for _ in range(2):
        info = retry(store.head, key)
        if info is None:
            raise ObjectMissingError(f"{place}: no such object")
        if info.size > limit:
            raise IntegrityError(f"{place} has {info.size} bytes, more than the {limit} allowed")
        own = progress or TransferProgress(
            f"Downloading {key}",
            info.size,
            held=info.size - bytes_missing(info, path),
            clock=time.monotonic,
        )
        try:
            _download(
                store,
                info,
                path,
                retry=retry,
                deadline=deadline,
                concurrency=concurrency,
                progress=own,
            )
            return info
        except PreconditionError:
            continue  # replaced between two ranges: once more, from its beginning
    raise IntegrityError(f"{place} was replaced again and again while it was read")


def _download(
    store: ObjectStore,
    info: ObjectInfo,
    path: Path,
    *,
    retry: Retry,
    deadline: float,
    concurrency: int,
    progress: TransferProgress,
) -> None:
    part, notes = _part_of(path)
    require_room(path.parent, bytes_missing(info, path), what=info.key)
    done = _ranges_done(notes, part, info)
    # Not truncated: it holds the ranges of an earlier attempt.
    handle = os.open(part, os.O_RDWR | os.O_CREAT, 0o644)
    lock = threading.Lock()
    try:
        os.ftruncate(handle, info.size)

        def fetch(start: int) -> None:
            if time.monotonic() > deadline:
                there = min(len(done) * RANGE, info.size)
                raise DeadlineError(
                    f"{info.key}: {there} of {info.size} bytes came in the time allowed; the next "
                    "attempt continues from there"
                )
            length = min(RANGE, info.size - start)
            require_room(path.parent, length, what=info.key)  # others write to this disk too
            for _ in range(2):
                data = retry(store.get_range, info.key, start, length, etag=info.etag)
                if len(data) == length:
                    break
            else:
                raise IntegrityError(
                    f"{info.key}: the store sent {len(data)} bytes instead of {length}, twice"
                )
            write_at(handle, data, start)
            # One at a time: the notes of a slower thread, written later, would forget this range.
            with lock:
                done.add(start)
                # Bytes of a range are on disk before it is called done.
                os.fdatasync(handle)
                write_state(notes, _Notes(info.etag, info.size, sorted(done)))
            progress.add(length)

        missing = [start for start in range(0, info.size, RANGE) if start not in done]
        with ThreadPoolExecutor(concurrency, thread_name_prefix="download") as pool:
            run_all(pool, fetch, missing)
    except OSError as error:
        if not is_full(error):
            raise
        # The reserve is gone as well, so a checkpoint could not be written either: give back all.
        part.unlink(missing_ok=True)
        notes.unlink(missing_ok=True)
        raise NoRoomError(
            f"no room to download {info.key}: {path.parent} became full meanwhile "
            f"({error.strerror}), so this file begins again with the next attempt: {_MAKE_ROOM}"
        ) from error
    finally:
        os.close(handle)
    # The file first: notes that outlive their part are ignored, a part without notes is lost.
    part.replace(path)
    notes.unlink(missing_ok=True)
    sync_folder(path.parent)


def bytes_missing(info: ObjectInfo, path: Path) -> int:
    """Return how many bytes of the object an earlier, interrupted download did not bring."""
    part, notes = _part_of(path)
    starts = _ranges_done(notes, part, info)
    return info.size - sum(min(RANGE, info.size - start) for start in starts)


def require_room(folder: Path, needed: int, *, what: str, older: int = 0) -> None:
    """Raise NoRoomError unless ``needed`` bytes fit into ``folder``, with the reserve left free.

    ``older``: bytes of states there that can be deleted for it.
    """
    if shortage := describe_shortage(folder, needed, older=older):
        raise NoRoomError(
            f"no room to download {what}: the rest {shortage}; what came of it is kept: "
            f"{_MAKE_ROOM}"
        )


def _part_of(path: Path) -> tuple[Path, Path]:
    return path.with_name(f".{path.name}.part"), path.with_name(f".{path.name}.part.json")


@dataclass(frozen=True)
class _Notes:
    """The state of an interrupted download; ``done``: the beginnings of the ranges on disk."""

    etag: str
    size: int
    done: list[int]


def _ranges_done(notes: Path, part: Path, info: ObjectInfo) -> set[int]:
    known = read_state(notes, _Notes, lost="the file is downloaded from its beginning")
    if known and (known.etag, known.size) == (info.etag, info.size) and part.exists():
        return set(known.done)
    # Of another version of the object: its ranges would be mixed with those of the new one.
    part.unlink(missing_ok=True)
    return set()


MIB = 1024 * 1024
MOST_PARTS = 10_000


def part_size_for(size: int, wanted: int = 0) -> int:
    """Return the size of the parts of a file; they are equal, as R2 requires.

    16 MiB below 512 MiB, 32 MiB above, more when the file would need more than 10,000 of them.
    ``wanted`` overrides the first two.
    """
    part = wanted or (16 if size < 512 * MIB else 32) * MIB
    while -(-size // part) > MOST_PARTS:
        part *= 2
    return part


@dataclass(frozen=True)
class Staged:
    """A file whose bytes are at the store but, if in parts, not yet visible."""

    key: str
    path: Path
    size: int
    record: UploadRecord | None = None  # None: small, sent in one piece by publish()
    parts: tuple[PartInfo, ...] = ()
    etag: str = ""  # expected of the multipart object


@dataclass
class Sent:
    """Running totals, for reports and tests."""

    bytes: int = 0
    parts: int = 0
    parts_kept: int = 0


@dataclass(frozen=True)
class _Parts:
    """An open file cut into equal parts, numbered from 1."""

    handle: int
    size: int
    part_size: int
    uplink: Uplink

    @property
    def numbers(self) -> range:
        return range(1, -(-self.size // self.part_size) + 1)

    def section(self, number: int) -> Section:
        start = (number - 1) * self.part_size
        return Section(self.handle, start, min(self.part_size, self.size - start), self.uplink)

    def local(self, number: int) -> PartInfo:
        """Describe a part as most stores would list it. Raises StoppedError."""
        section = self.section(number)
        return PartInfo(number, len(section), section.md5)


class Sender:
    """Send files in parts, continuing where an earlier attempt stopped.

    ``deadline``, of ``time.monotonic()``, covers everything it sends with all retries.

    ``concurrency`` parts or small files are under way at once; a part is never whole in memory. A
    context manager; its end waits for attempts under way (stop the uplink to make them end).
    """

    def __init__(
        self,
        *,
        store: ObjectStore,
        journal: Journal,
        deadline: float,
        uplink: Uplink | None = None,
        concurrency: int = 6,
        part_size: int = 0,
        sent: Sent | None = None,
        progress: TransferProgress | None = None,
    ) -> None:
        self._uplink = uplink or Uplink()
        self._store = store
        self._retry = Retry(until=deadline, uplink=self._uplink)
        self._journal = journal
        self._part_size = part_size
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="upload")
        self._count_lock = threading.Lock()
        self.sent = sent or Sent()
        self._progress = progress or TransferProgress("", 0)  # no lines

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def upload_all(self, files: Iterable[tuple[str, Path]]) -> None:
        """Upload many files: parts of a large one in parallel, several small ones at a time."""
        staged = [self.stage(key, path) for key, path in files]
        self.publish_all(staged)
        self._journal.drop(*(s.key for s in staged))

    @property
    def _multipart(self) -> MultipartStore:
        found = self._store.multipart()
        assert found is not None, "the journal has uploads in parts of other stores only"
        return found

    # --- stage ----------------------------------------------------------------------------------

    def stage(self, key: str, path: Path, *, until: float = math.inf) -> Staged:
        """Send all parts of a large file; a small one is only looked at.

        No part is begun after ``until``, of ``time.monotonic()``. Inode and mtime tell whether
        an upload of an earlier process was of the same file. Parts found at the store are compared
        by MD5 in any case.
        """
        status = path.stat()
        size = status.st_size
        part_size = part_size_for(size, self._part_size)
        if size <= part_size or self._store.multipart() is None:
            return Staged(key, path, size)
        identity = f"{status.st_ino}:{status.st_mtime_ns}"
        with path.open("rb") as file:
            cut = _Parts(file.fileno(), size, part_size, self._uplink)
            record, kept = self._resume(key, cut, identity)
            if record is None:
                # Of an uploader that was killed, or that lost the store's answer, before they were
                # in the journal. One attempt: the cleanup finds what stays.
                try:
                    for upload in self._multipart.list_multiparts(key):
                        # Each member sends to keys of its own, so they are nobody else's.
                        if upload.key == key and upload.upload_id not in self._journal.owned():
                            with contextlib.suppress(UploadMissingError):
                                self._multipart.abort_multipart(key, upload.upload_id)
                except StoreError as error:
                    log.warning("Could not look for earlier uploads of %s: %s", key, error)
                upload_id = self._retry(self._multipart.create_multipart, key)
                record = UploadRecord(self._store.bucket, key, upload_id, size, identity, part_size)
                # On the disk before a part is sent: parts of an upload without a record are paid
                # for, and nothing would continue them.
                self._journal.put(record)
            if record.etag:
                return Staged(key, path, size, record)
            parts = self._send_missing(record, cut, kept, until)
        return Staged(key, path, size, record, parts, multipart_etag(parts))

    def _resume(
        self, key: str, cut: _Parts, identity: str
    ) -> tuple[UploadRecord | None, dict[int, PartInfo]]:
        """Return the upload to continue and the parts that need not be sent again.

        A record with an etag means: complete and visible. None: start again from the first part.
        """
        record = self._journal.upload(key)
        if record is None:
            return None, {}
        before = (record.bucket, record.size, record.identity, record.part_size)
        if before != (self._store.bucket, cut.size, identity, cut.part_size):
            self.abandon(record)
            return None, {}
        # With an etag it was completed: the store has forgotten its parts.
        listed = None if record.etag else self._parts_at_store(record)
        if listed is not None:
            at_store = {p.number: p for p in listed if p.number in cut.numbers}
            local = run_all(self._pool, cut.local, at_store)
            # Of a store whose etags are no MD5 none is kept.
            kept = {
                part.number: held
                for part in local
                if (held := at_store[part.number]).size == part.size
                and same_etag(held.etag, part.etag)
            }
            self._count_kept(kept.values())
            log.info("Resuming upload of %s: %d of %d parts kept", key, len(kept), len(cut.numbers))
            return record, kept
        info = self._retry(self._store.head, key)
        # The answer to Complete may have been lost: the etag shows whether this very file is there.
        if info is not None and info.size == record.size and "-" in info.etag:
            local = run_all(self._pool, cut.local, cut.numbers)
            if same_etag(info.etag, multipart_etag(local)):
                self._count_kept(local)
                done = replace(record, etag=info.etag)
                self._journal.put(done)
                return done, {}
        self._journal.drop(key)
        return None, {}

    def _parts_at_store(self, record: UploadRecord) -> list[PartInfo] | None:
        """List the parts at the store; None if the upload was completed, expired, or never was.

        It may have been completed just before the process died. Asked twice: after one odd answer
        everything would be sent again.
        """
        for _ in range(2):
            try:
                return self._retry(self._multipart.list_parts, record.key, record.upload_id)
            except UploadMissingError:
                continue
            except StoreError as error:
                if type(error) is not StoreError:
                    raise
                return None  # no such id can exist: a damaged journal must not stop uploads
        return None

    def _send_missing(
        self, record: UploadRecord, cut: _Parts, kept: dict[int, PartInfo], until: float
    ) -> tuple[PartInfo, ...]:
        """Send the missing parts; return all parts in their order.

        Raises IntegrityError if the upload was aborted meanwhile.
        """
        upload_part = self._multipart.upload_part

        def send(number: int) -> PartInfo:
            # A slow link fails at nothing, so no retry would ever look at its deadline.
            if time.monotonic() > until:
                raise DeadlineError(
                    f"{record.key}: part {number} of {len(cut.numbers)} was not sent in the time "
                    "an upload has (round.grace), so it is given up"
                )
            body = cut.section(number)
            try:
                part = self._retry(upload_part, record.key, record.upload_id, number, body)
            except UploadMissingError:
                if self._parts_at_store(record) is None:
                    raise
                # One odd answer: all that was sent is there.
                part = self._retry(upload_part, record.key, record.upload_id, number, body)
            self._count(len(body))
            return part

        missing = [n for n in cut.numbers if n not in kept]
        try:
            sent = run_all(self._pool, send, missing)
        except UploadMissingError:
            self._journal.drop(record.key)
            self._retry(self._multipart.list_multiparts)  # raises if the bucket is gone
            raise IntegrityError(
                f"the multipart upload of {record.key} was aborted by someone else: it is sent "
                "again with the next upload; is another miner using this bucket?"
            ) from None
        parts = kept | {part.number: part for part in sent}
        return tuple(parts[n] for n in cut.numbers)

    # --- publish --------------------------------------------------------------------------------

    def publish(self, staged: Staged) -> str:
        """Make the file visible; return its etag. Publishing again is harmless.

        Raises IntegrityError if the store put other bytes together.
        """
        record = staged.record
        if record is None:
            with staged.path.open("rb") as file:
                body = Section(file.fileno(), 0, staged.size, self._uplink)
                etag = self._retry(self._store.put, staged.key, body)
            self._count(staged.size)
            return etag
        if record.etag:  # an earlier attempt completed it
            return record.etag
        try:
            etag = self._complete(record, staged)
        except StoreError as error:
            if not isinstance(error, (StoppedError, DeadlineError, IntegrityError)):
                self.abandon(record)  # refused for good: the parts would only be billed
            raise
        if not same_etag(etag, staged.etag):
            # Asked again: the object itself tells, by its etag where that is one of MD5s, else by
            # its size.
            info = self._retry(self._store.head, staged.key)
            answered, etag = etag, info.etag if info is not None else ""
            other = staged.etag and _OF_PARTS.fullmatch(etag) and not same_etag(etag, staged.etag)
            if info is None or info.size != staged.size or other:
                self._journal.drop(staged.key)
                raise IntegrityError(
                    f"{staged.key}: the store put the parts together wrongly: etag "
                    f"{etag or answered:.80} instead of {staged.etag}, so it is sent again with "
                    "the next upload"
                )
        self._journal.put(replace(record, etag=etag))
        return etag

    def _complete(self, record: UploadRecord, staged: Staged) -> str:
        """Complete the upload; return the etag. Raises IntegrityError if the store lost it."""
        complete = self._multipart.complete_multipart
        for _ in range(2):
            try:
                return self._retry(complete, record.key, record.upload_id, staged.parts)
            except UploadMissingError:
                # An earlier Complete whose answer was lost, or somebody's abort: HEAD tells.
                info = self._retry(self._store.head, staged.key)
                if info is not None and same_etag(info.etag, staged.etag):
                    return info.etag
                if self._parts_at_store(record) is None:
                    break
        self._journal.drop(staged.key)
        raise IntegrityError(
            f"the store lost the multipart upload of {staged.key} and does not hold the object: it "
            "is sent again with the next upload"
        )

    def publish_all(self, staged: Iterable[Staged]) -> dict[str, str]:
        """Complete all files side by side, so that they appear within moments.

        Returns etags by key.
        """
        files = list(staged)
        etags = run_all(self._pool, self.publish, files)
        return {s.key: etag for s, etag in zip(files, etags, strict=True)}

    # --- inside ---------------------------------------------------------------------------------

    def abandon(self, record: UploadRecord) -> None:
        """Abort an upload that nobody continues, and forget it. One attempt: cleanup has more."""
        # Of another store, before --r2.endpoint_url was changed, where this one takes no parts.
        if not record.etag and self._store.multipart() is not None:
            try:
                self._multipart.abort_multipart(record.key, record.upload_id)
            except UploadMissingError:
                pass
            except StoreError as error:
                log.warning("Could not abort the upload of %s: %s", record.key, error)
        # In any case: or the next upload would look for it again.
        self._journal.drop(record.key)

    def abandon_all_but(self, keys: Iterable[str]) -> None:
        """Abandon the journal's uploads of outer steps that are over, or of another bucket."""
        wanted = frozenset(keys)
        for record in self._journal.uploads():
            if record.key not in wanted or record.bucket != self._store.bucket:
                self.abandon(record)

    def _count_kept(self, parts: Collection[PartInfo]) -> None:
        self.sent.parts_kept += len(parts)
        self._progress.add(0, held=sum(part.size for part in parts))

    def _count(self, size: int) -> None:
        with self._count_lock:
            self.sent.bytes += size
            self.sent.parts += 1
        self._progress.add(size)


_OF_PARTS = re.compile(r"[0-9a-fA-F]{32}-\d+")


def multipart_etag(parts: Collection[PartInfo]) -> str:
    """Return S3's etag of a multipart object: MD5 of the parts' MD5s, and their number.

    "" where the parts' etags are no MD5: nobody can tell then.
    """
    if not all(is_md5(part.etag) for part in parts):
        return ""
    digests = [bytes.fromhex(part.etag) for part in parts]
    whole = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
    return f"{whole}-{len(digests)}"
