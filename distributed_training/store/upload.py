"""Files into a bucket: in parts when large, resumable by the next process.

A file is sent in two steps: :meth:`Sender.stage` sends everything that can be sent without being
seen (all parts of a multipart upload), :meth:`Sender.publish` makes it appear. So the files of one
revision can appear together although sending them takes long. Miner and validator both send this
way; :mod:`~.download` is the way back.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from .errors import (
    DeadlineError,
    IntegrityError,
    StoppedError,
    StoreError,
    UploadMissingError,
)
from .journal import Journal, UploadRecord
from .retry import patient
from .s3 import PartInfo, S3ObjectStore
from .uplink import Section, Uplink

log = logging.getLogger(__name__)
Result = TypeVar("Result")

MIB = 1024 * 1024
LEAST_PART = 5 * MIB  # S3 and R2; a last part may be smaller
MOST_PARTS = 10_000


def part_size_for(size: int, wanted: int = 0) -> int:
    """Equal parts (R2 requires it): 16 MiB below 512 MiB, 32 MiB above, more when the file would
    need more than 10,000 of them. ``wanted`` overrides the first two."""
    part = max(wanted, LEAST_PART) if wanted else (16 if size < 512 * MIB else 32) * MIB
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
    visible: bool = False


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
        return Section(self.handle, *self._range(number), self.uplink)

    def local(self, number: int) -> PartInfo:
        """As the store would list it. Reads the part, also while the uplink is paused.

        Raises StoppedError.
        """
        section = Section(self.handle, *self._range(number))
        while section.read(Section.BLOCK):
            self.uplink.check_stopped()
        return PartInfo(number, len(section), section.md5)

    def _range(self, number: int) -> tuple[int, int]:
        start = (number - 1) * self.part_size
        return start, min(self.part_size, self.size - start)


class Sender:
    """``deadline`` (time.monotonic()) covers everything it sends, with all retries and pauses.

    ``concurrency`` parts or small files are under way at once; a part is never whole in memory.
    A context manager; its end waits for attempts under way (stop the uplink to make them end).
    """

    def __init__(
        self,
        *,
        store: S3ObjectStore,
        journal: Journal,
        deadline: float,
        uplink: Uplink | None = None,
        concurrency: int = 6,
        part_size: int = 0,
        sent: Sent | None = None,
    ) -> None:
        self._uplink = uplink or Uplink()
        self._store = patient(store, until=deadline, uplink=self._uplink)
        self._once = store  # for what others mend: one attempt
        self._journal = journal
        self._part_size = part_size
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="upload")
        self._count_lock = threading.Lock()
        self.sent = sent or Sent()

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def upload_all(self, files: Iterable[tuple[str, Path]]) -> None:
        """Many files: parts of large ones in parallel, small ones beside each other."""
        staged = [self.stage(key, path) for key, path in files]
        self.publish_all(staged)
        self._journal.drop(*(s.key for s in staged))

    # --- stage ----------------------------------------------------------------------------------

    def stage(self, key: str, path: Path, *, sha256: str = "") -> Staged:
        """Send all parts of a large file; a small one is only looked at.

        ``sha256`` of the file tells whether an upload of an earlier process was of the same bytes;
        without it inode and mtime do. Parts found at the store are compared by MD5 in any case.
        """
        status = path.stat()
        size = status.st_size
        part_size = part_size_for(size, self._part_size)
        if size <= part_size:
            return Staged(key, path, size)
        identity = sha256 or f"{status.st_ino}:{status.st_mtime_ns}"
        with path.open("rb") as file:
            cut = _Parts(file.fileno(), size, part_size, self._uplink)
            record, kept = self._resume(key, cut, identity)
            if record is None:
                record = self._begin(key, cut, identity)
            if record.etag:
                return Staged(key, path, size, record, etag=record.etag, visible=True)
            parts = self._send_missing(record, cut, kept)
        return Staged(key, path, size, record, parts, multipart_etag(parts))

    def _begin(self, key: str, cut: _Parts, identity: str) -> UploadRecord:
        self._abort_unknown(key)
        upload_id = self._store.create_multipart(key)
        record = UploadRecord(self._store.bucket, key, upload_id, cut.size, identity, cut.part_size)
        self._journal.put(record)
        return record

    def _abort_unknown(self, key: str) -> None:
        """Abort uploads of ``key`` without a record: their uploader was killed, or the answer of
        the store was lost, before the journal knew them. Only one uploader sends a key, so they
        cannot be another's. One attempt: the hourly cleanup finds what stays."""
        try:
            for upload in self._once.list_multiparts(key):
                if upload.key == key and upload.upload_id not in self._journal.owned():
                    with contextlib.suppress(UploadMissingError):
                        self._once.abort_multipart(key, upload.upload_id)
        except StoreError as error:
            log.warning("Could not look for earlier uploads of %s: %s", key, error)

    def _resume(
        self, key: str, cut: _Parts, identity: str
    ) -> tuple[UploadRecord | None, dict[int, PartInfo]]:
        """The upload to go on with and the parts that need not be sent again.

        A record with an etag means: complete and visible. None: start anew.
        """
        record = self._journal.upload(key)
        if record is None:
            return None, {}
        before = (record.bucket, record.size, record.identity, record.part_size)
        if before != (self._store.bucket, cut.size, identity, cut.part_size):
            self.abandon(record)
            return None, {}
        listed = None if record.etag else self._parts_at_store(record)
        if listed is not None:
            at_store = {p.number: p for p in listed if p.number in cut.numbers}
            local = self._run([lambda n=n: cut.local(n) for n in at_store])  # type: ignore[misc]
            kept = {p.number: p for p in local if at_store[p.number] == p}
            self.sent.parts_kept += len(kept)
            log.info("Resuming upload of %s: %d of %d parts kept", key, len(kept), len(cut.numbers))
            return record, kept
        info = self._store.head(key)
        if info is not None and info.size == record.size and "-" in info.etag:
            local = self._run([lambda n=n: cut.local(n) for n in cut.numbers])  # type: ignore[misc]
            if info.etag == multipart_etag(local):
                self.sent.parts_kept += len(local)
                done = replace(record, etag=info.etag)
                self._journal.put(done)
                return done, {}
        self._journal.drop(key)
        return None, {}

    def _parts_at_store(self, record: UploadRecord) -> list[PartInfo] | None:
        """None: the upload was completed just before the process died, expired, or never was."""
        try:
            return self._store.list_parts(record.key, record.upload_id)
        except UploadMissingError:
            return None
        except StoreError as error:
            if type(error) is not StoreError:
                raise
            return None  # no such id can exist: a damaged journal must not stop publication

    def _send_missing(
        self, record: UploadRecord, cut: _Parts, kept: dict[int, PartInfo]
    ) -> tuple[PartInfo, ...]:
        """All parts in their order. Raises IntegrityError if the upload was aborted meanwhile."""

        def send(number: int) -> PartInfo:
            body = cut.section(number)
            part = self._store.upload_part(record.key, record.upload_id, number, body)
            self._count(len(body))
            return part

        missing = [n for n in cut.numbers if n not in kept]
        try:
            sent = self._run([lambda n=n: send(n) for n in missing])  # type: ignore[misc]
        except UploadMissingError:
            self._journal.drop(record.key)
            self._store.list_multiparts()  # raises if the bucket is gone
            raise IntegrityError(
                f"the multipart upload of {record.key} was aborted by someone else: it is sent "
                "again with the next publication; is another miner using this bucket?"
            ) from None
        parts = kept | {part.number: part for part in sent}
        return tuple(parts[n] for n in cut.numbers)

    # --- publish --------------------------------------------------------------------------------

    def publish(self, staged: Staged) -> str:
        """Make the file visible; its etag. Publishing again is harmless."""
        if staged.visible:
            return staged.etag
        if staged.record is None:
            return self._put_small(staged)
        record = staged.record
        try:
            etag = self._complete(staged, record)
        except UploadMissingError:
            self._journal.drop(staged.key)
            raise IntegrityError(
                f"the store lost the multipart upload of {staged.key} and does not hold the "
                "object: it is sent again with the next publication"
            ) from None
        except StoreError as error:
            if not isinstance(error, (StoppedError, DeadlineError)):
                self.abandon(record)  # refused for good: the parts would only be billed
            raise
        if etag != staged.etag:
            self._journal.drop(staged.key)
            raise IntegrityError(f"{staged.key}: the store put the parts together wrongly")
        self._journal.put(replace(record, etag=etag))
        return etag

    def _complete(self, staged: Staged, record: UploadRecord) -> str:
        try:
            return self._store.complete_multipart(record.key, record.upload_id, staged.parts)
        except UploadMissingError:
            # An earlier Complete whose answer was lost, or somebody's abort: only HEAD tells.
            info = self._store.head(record.key)
            if info is not None and info.etag == staged.etag:
                return info.etag
            raise

    def publish_all(self, staged: Iterable[Staged]) -> dict[str, str]:
        """Etags by key; all of them side by side, so that they appear within moments."""
        files = list(staged)
        etags = self._run([lambda s=s: self.publish(s) for s in files])  # type: ignore[misc]
        return {s.key: etag for s, etag in zip(files, etags, strict=True)}

    def _put_small(self, staged: Staged) -> str:
        with staged.path.open("rb") as file:
            body = Section(file.fileno(), 0, staged.size, self._uplink)
            etag = self._store.put(staged.key, body)
        self._count(staged.size)
        return etag

    # --- inside ---------------------------------------------------------------------------------

    def abandon(self, record: UploadRecord) -> None:
        """Abort an upload nobody will go on with, and forget it. One attempt: cleanup has more."""
        if not record.etag:
            try:
                self._once.abort_multipart(record.key, record.upload_id)
            except UploadMissingError:
                pass
            except StoreError as error:
                log.warning("Could not abort the upload of %s: %s", record.key, error)
        self._journal.drop(record.key)

    def abandon_all_but(self, keys: Iterable[str]) -> None:
        """What the journal still holds of outer steps that are over, or of another bucket."""
        wanted = frozenset(keys)
        for record in self._journal.uploads():
            if record.key not in wanted or record.bucket != self._store.bucket:
                self.abandon(record)

    def _run(self, tasks: list[Callable[[], Result]]) -> list[Result]:
        """All tasks in the pool; the first error ends the rest. From a thread outside the pool."""
        futures: list[Future[Result]] = [self._pool.submit(task) for task in tasks]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            failed = next((f for f in futures if f.done() and f.exception()), None)
            if failed is not None:
                failed.result()
            return [f.result() for f in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)

    def _count(self, size: int) -> None:
        with self._count_lock:
            self.sent.bytes += size
            self.sent.parts += 1


def multipart_etag(parts: Iterable[PartInfo]) -> str:
    """MD5 of the parts' MD5s, and their number: S3's etag of a multipart object."""
    digests = [bytes.fromhex(part.etag) for part in parts]
    whole = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
    return f"{whole}-{len(digests)}"
