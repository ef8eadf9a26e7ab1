"""Sending files, in parts when large, resumable by the next process.

A file is sent in two steps: :meth:`Sender.stage` sends everything that can be sent without being
seen (all parts of a multipart upload), :meth:`Sender.publish` makes it appear. So the files of one
revision can appear together although sending them takes long.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from .errors import IntegrityError, StoppedError, StoreError, UploadMissingError
from .interface import ObjectStore, PartInfo
from .journal import Journal, UploadRecord
from .retry import retrying
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


class Sender:
    """``concurrency`` parts or small files are under way at once; a part is never whole in memory.

    ``deadline`` arguments are of time.monotonic() and cover all retries of the call.
    """

    def __init__(
        self,
        *,
        store: ObjectStore,
        journal: Journal,
        uplink: Uplink | None = None,
        concurrency: int = 6,
        part_size: int = 0,
    ) -> None:
        self._store = store
        self._journal = journal
        self._uplink = uplink or Uplink()
        self._part_size = part_size
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="upload")
        self._count_lock = threading.Lock()
        self.sent = Sent()

    def close(self) -> None:
        """Waits for attempts under way (stop the line first to make them end)."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def upload(self, key: str, path: Path, *, deadline: float, sha256: str = "") -> str:
        """Stage and publish one file; its etag."""
        staged = self.stage(key, path, deadline=deadline, sha256=sha256)
        etag = self.publish(staged, deadline=deadline)
        self._journal.drop(key)
        return etag

    def upload_all(self, files: Iterable[tuple[str, Path]], *, deadline: float) -> None:
        """Many files: parts of large ones in parallel, small ones beside each other."""
        staged = [self.stage(key, path, deadline=deadline) for key, path in files]
        self.publish_all(staged, deadline=deadline)
        self._journal.drop(*(s.key for s in staged))

    # --- stage ----------------------------------------------------------------------------------

    def stage(self, key: str, path: Path, *, deadline: float, sha256: str = "") -> Staged:
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
        handle = os.open(path, os.O_RDONLY)
        try:
            return self._stage_parts(handle, key, path, size, part_size, identity, deadline)
        finally:
            os.close(handle)

    def _stage_parts(
        self,
        handle: int,
        key: str,
        path: Path,
        size: int,
        part_size: int,
        identity: str,
        deadline: float,
    ) -> Staged:
        def section(number: int) -> Section:
            start = (number - 1) * part_size
            return Section(handle, start, min(part_size, size - start), self._uplink)

        numbers = range(1, -(-size // part_size) + 1)
        before = self._journal.upload(key)
        kept: dict[int, PartInfo] = {}
        record = None
        if before is not None:
            same = (before.bucket, before.size, before.identity, before.part_size)
            if same == (self._store.bucket, size, identity, part_size):
                record, kept = self._resume(before, numbers, section, deadline)
                if record is not None and record.etag:
                    return Staged(key, path, size, record, etag=record.etag, visible=True)
            else:
                self.abandon(before)
        if record is None:
            upload_id = self._try(
                f"start upload of {key}", lambda: self._store.create_multipart(key), deadline
            )
            # An upload that a crash leaves without its record is found and aborted by its age.
            record = UploadRecord(self._store.bucket, key, upload_id, size, identity, part_size)
            self._journal.put(record)
        held = record

        def send(number: int) -> PartInfo:
            what = f"part {number} of {len(numbers)} of {key}"
            body = section(number)

            def attempt() -> PartInfo:
                body.seek(0)
                return self._store.upload_part(key, held.upload_id, number, body)

            part = self._try(what, attempt, deadline)
            self._count(len(body))
            return part

        missing = [n for n in numbers if n not in kept]
        try:
            for part in self._run([lambda n=n: send(n) for n in missing]):  # type: ignore[misc]
                kept[part.number] = part
        except UploadMissingError:
            # Aborted behind our back. A retry of the publication starts a new one.
            self._journal.drop(key)
            self._try("look for the bucket", self._store.list_multiparts, deadline)  # if it is gone
            raise IntegrityError(
                f"the multipart upload of {key} was aborted by someone else: it is sent again with "
                "the next publication; is another miner using this bucket?"
            ) from None
        parts = tuple(kept[n] for n in numbers)
        return Staged(key, path, size, record, parts, multipart_etag(parts))

    def _resume(
        self,
        record: UploadRecord,
        numbers: range,
        section: Callable[[int], Section],
        deadline: float,
    ) -> tuple[UploadRecord | None, dict[int, PartInfo]]:
        """The upload to go on with and the parts that need not be sent again.

        A record with an etag means: complete and visible. None: start anew.
        """
        key = record.key
        if not record.etag:
            try:
                listed = self._try(
                    f"list parts of {key}",
                    lambda: self._store.list_parts(key, record.upload_id),
                    deadline,
                )
            except UploadMissingError:
                pass  # completed just before the process died, or expired
            else:
                at_store = {p.number: p for p in listed if p.number in numbers}
                local = self._run(
                    [lambda n=n: _local_part(n, section(n)) for n in at_store]  # type: ignore[misc]
                )
                kept = {p.number: p for p in local if at_store[p.number] == p}
                with self._count_lock:
                    self.sent.parts_kept += len(kept)
                log.info("Resuming upload of %s: %d of %d parts kept", key, len(kept), len(numbers))
                return record, kept
        info = self._try(f"look at {key}", lambda: self._store.head(key), deadline)
        if info is not None and info.size == record.size and "-" in info.etag:
            local = self._run([lambda n=n: _local_part(n, section(n)) for n in numbers])  # type: ignore[misc]
            if info.etag == multipart_etag(tuple(local)):
                with self._count_lock:
                    self.sent.parts_kept += len(local)
                done = replace(record, etag=info.etag)
                self._journal.put(done)
                return done, {}
        self._journal.drop(key)
        return None, {}

    # --- publish --------------------------------------------------------------------------------

    def publish(self, staged: Staged, *, deadline: float) -> str:
        """Make the file visible; its etag. Publishing again is harmless."""
        if staged.visible:
            return staged.etag
        if staged.record is None:
            return self._put_small(staged, deadline)
        record = staged.record

        def attempt() -> str:
            try:
                return self._store.complete_multipart(record.key, record.upload_id, staged.parts)
            except UploadMissingError:
                # An earlier Complete whose answer was lost, or somebody's abort: only HEAD tells.
                info = self._store.head(record.key)
                if info is not None and info.etag == staged.etag:
                    return info.etag
                raise

        try:
            etag = self._try(f"complete {staged.key}", attempt, deadline)
        except UploadMissingError:
            self._journal.drop(staged.key)
            raise IntegrityError(
                f"the store lost the multipart upload of {staged.key} and does not hold the "
                "object: it is sent again with the next publication"
            ) from None
        except StoreError as error:
            if not error.retryable and not isinstance(error, StoppedError):
                self.abandon(record)
            raise
        if etag != staged.etag:
            self._journal.drop(staged.key)
            raise IntegrityError(f"{staged.key}: the store put the parts together wrongly")
        self._journal.put(replace(record, etag=etag))
        return etag

    def publish_all(self, staged: Iterable[Staged], *, deadline: float) -> dict[str, str]:
        """Etags by key; all of them side by side, so that they appear within moments."""
        files = list(staged)
        etags = self._run(
            [lambda s=s: self.publish(s, deadline=deadline) for s in files]  # type: ignore[misc]
        )
        return {s.key: etag for s, etag in zip(files, etags, strict=True)}

    def _put_small(self, staged: Staged, deadline: float) -> str:
        handle = os.open(staged.path, os.O_RDONLY)
        try:
            body = Section(handle, 0, staged.size, self._uplink)

            def attempt() -> str:
                body.seek(0)
                return self._store.put(staged.key, body)

            etag = self._try(f"write {staged.key}", attempt, deadline)
        finally:
            os.close(handle)
        self._count(staged.size)
        return etag

    # --- inside ---------------------------------------------------------------------------------

    def abandon(self, record: UploadRecord) -> None:
        """Abort an upload nobody will go on with, and forget it. One attempt: cleanup has more."""
        if not record.etag:
            try:
                self._store.abort_multipart(record.key, record.upload_id)
            except UploadMissingError:
                pass
            except StoreError as error:
                log.warning("Could not abort the upload of %s: %s", record.key, error)
        self._journal.drop(record.key)

    def _try(self, what: str, attempt: Callable[[], Result], deadline: float) -> Result:
        return retrying(what, attempt, deadline=deadline, uplink=self._uplink)

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


def _local_part(number: int, section: Section) -> PartInfo:
    section.seek(0)
    while section.read(Section.BLOCK):
        pass
    return PartInfo(number, len(section), section.md5)


def multipart_etag(parts: Iterable[PartInfo]) -> str:
    """MD5 of the parts' MD5s, and their number: S3's etag of a multipart object."""
    digests = [bytes.fromhex(part.etag) for part in parts]
    whole = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
    return f"{whole}-{len(digests)}"
