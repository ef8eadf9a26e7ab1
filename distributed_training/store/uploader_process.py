"""The uploader: a process of its own, at low CPU and I/O priority.

:class:`~.uploader.Uploader` starts it with one end of a socket; settings with their secrets come
through it. When the other end closes, however rank 0 ended, the uploader stops: multipart uploads
stay at the store, the journal knows them.

    python -m distributed_training.store.uploader_process FD

Three threads work: one uploads, one renews the claim on the bucket, one cleans up. None of them
waits for another, since an upload, and a cleanup of thousands of stuck ones, may take long.

A snapshot is published whole, checked, and in the order that readers can rely on:

1. Checks of the snapshot (complete, unchanged, finite, of this revision) and the upload rules.
2. All parts of all large files are sent; nothing is visible yet. This is what takes long.
3. ``epoch-N/metadata.json`` is removed, then the files appear together: while they change, no
   metadata in their folder vouches for them.
4. Every object is verified by HEAD (size, etag).
5. ``epoch-N/metadata.json``, then the root ``metadata.json``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from distributed_training.common.backoff import Repeats
from distributed_training.common.processes import ParentConnection, write_stacks_on_signal
from distributed_training.config.settings import StoreSettings
from distributed_training.protocol import keys, lines
from distributed_training.protocol.metadata import MAX_METADATA_BYTES, Metadata, MetadataError
from distributed_training.protocol.types import ExitStatus, PublicationReport

from .base import ObjectInfo, ObjectStore, same_etag
from .cleanup import (
    RENEW_EVERY,
    STUCK_AGE,
    ForeignBucketError,
    check_claim,
    claim_bucket,
    instance_of,
    prune_epochs,
    release_bucket,
    sweep_uploads,
)
from .errors import IntegrityError, StoppedError, StoreError, disk_problem
from .journal import JOURNAL, Journal, Submission
from .opening import open_store
from .snapshot_folder import (
    FileRecord,
    check_files,
    preview_warning,
    prune_snapshots,
    read_config,
    wait_complete,
)
from .transfer import FIRST_WAIT, Progress, Retry, Sender, Sent, Staged
from .uplink import Uplink
from .uploader import Close, Moved, Paused, PeerId, Start

log = logging.getLogger("distributed_training.store.uploader")  # __name__ is __main__ here

_NICENESS = 15  # above training's: at 19 nothing is sent where training fills every core
SWEEP_EVERY = timedelta(hours=1)
_CLAIM_RETRY = timedelta(seconds=15)
_CLAIM_LINES_EVERY = 600.0  # seconds between two lines with the same problem
_DEFECT_WAIT = 30.0  # seconds after an unexpected error: each is a line with its stack
_PEER_ID_RETRY = timedelta(seconds=30)


@dataclass
class Publication:
    """``newer()``: a newer snapshot waits, so one that is not even complete need not be waited for.

    Used from one thread.
    """

    store: ObjectStore
    journal: Journal
    settings: StoreSettings
    instance: str  # whose claim on the bucket must stand
    uplink: Uplink = field(default_factory=Uplink)
    newer: Callable[[], bool] = lambda: False
    moved: Callable[[int, int], None] = lambda there, size: None  # bytes that the store has, of all

    def __post_init__(self) -> None:
        limit = min(self.settings.longest_transfer, timedelta(minutes=5))
        self._retry = Retry(each=limit, uplink=self.uplink)

    def run(self, submission: Submission) -> PublicationReport:
        """Upload one snapshot, from its folder to the metadata that points readers to it.

        Every failure but a stop is a report with its reason. ``settings.longest_transfer`` covers
        all transfers with their retries, without the pauses. Raises StoppedError; the journal then
        holds all that the next process needs to continue.
        """
        began, sent, reason, age = time.monotonic(), Sent(), "", None
        newest: int | None = None
        revision, settings, uplink = submission.revision, self.settings, self.uplink
        checked, files = submission.preview_delta is not None, dict[str, FileRecord]()
        try:
            # First of all: after a kill from here on, the next process continues it.
            self.journal.set_pending(submission)
            # More is the schedule's to ask for: validators refuse inner step 0 only.
            if revision.inner_step < 1:
                raise StoreError(lines.upload_blocked(revision.inner_step, 1))
            files = wait_complete(
                submission.folder,
                submission.world_size,
                content=settings.content,
                timeout=settings.snapshot_timeout,
                uplink=uplink,
                give_up=self.newer,
            )
            check_files(submission.folder, files, revision)
            # Whoever began it may be gone, and what it listed with it.
            newest = max(read_config(submission.folder / keys.CONFIG).block_list, default=None)
            if warning := preview_warning(submission.preview_delta):
                log.warning("%s", warning)
            size = sum(record.size for record in files.values())
            named = {keys.epoch_key(revision.outer_step, n): record for n, record in files.items()}
            deadline = uplink.clock() + settings.longest_transfer.total_seconds()
            with Sender(
                store=self.store,
                journal=self.journal,
                deadline=deadline,
                uplink=uplink,
                concurrency=settings.concurrency,
                part_size=settings.part_size,
                sent=sent,
                progress=Progress(
                    f"Uploading {revision.tag}", size, clock=uplink.clock, moved=self.moved
                ),
            ) as sender:
                # Two miners in one bucket overwrite each other's files: a mixture would be scored.
                self._retry(check_claim, self.store, self.instance)
                sender.abandon_all_but(named)
                staged = [
                    sender.stage(key, submission.folder / record.name, until=deadline)
                    for key, record in sorted(named.items(), key=lambda item: -item[1].size)
                ]
                # Nothing was visible so far. What fails from here on leaves an outer step without
                # metadata: better none than one that vouches for other files. Also one of the same
                # revision: a miner that went back to a checkpoint comes there with other weights.
                epoch_metadata = keys.epoch_key(revision.outer_step, keys.METADATA)
                self._retry(self.store.delete, epoch_metadata)
                etags = sender.publish_all(staged)
            for file in staged:
                info = self._verify(file, etags[file.key])
                if file.path.name == keys.GRADIENTS:
                    age = info.age_seconds  # a store may date an object by when its upload began
            seen = time.monotonic()
            metadata = Metadata.of(revision, submission.peer_id).to_json()
            # The root last: it leads readers to the outer step, whose metadata must be there.
            for key in (epoch_metadata, keys.ROOT_METADATA):
                self._retry(self.store.put, key, metadata)
            # Only now: after a kill before the metadata is written this upload must continue.
            self.journal.drop(*named)
            self.journal.set_checked(revision.outer_step if checked else None)
            if age is not None:
                age += time.monotonic() - seen
        except StoppedError:
            raise
        except StoreError as error:
            reason = str(error)
        except OSError as error:
            reason = disk_problem(error)
        self.journal.set_pending(None)
        return PublicationReport(
            revision=revision,
            ok=not reason,
            seconds=time.monotonic() - began,
            bytes_sent=sent.bytes,
            reason=reason,
            finished_at=time.time(),
            age_seconds=None if reason else age,
            checked=checked,
            model=keys.MODEL in files,
            newest_block=newest,
        )

    def _verify(self, file: Staged, etag: str) -> ObjectInfo:
        """Return what the store holds of a file that was just made visible.

        Raises IntegrityError if the store has other bytes than were sent.
        """
        # One answer that contradicts what was just done is no reason to send it all again.
        for wait in (0.0, FIRST_WAIT.total_seconds()):
            self.uplink.sleep(wait)
            info = self._retry(self.store.head, file.key)
            if info is not None and info.size == file.size and same_etag(info.etag, etag):
                return info
        self.journal.drop(file.key)
        raise IntegrityError(
            f"{file.key} at the store is not what was sent (another miner's?), so the metadata is "
            "not written: it is sent again with the next upload"
        )

    # --- root metadata --------------------------------------------------------------------------

    def publish_peer_id(self, peer_id: str) -> None:
        """Change the peer id in the root metadata and nothing else; without one do nothing.

        Raises StoreError.
        """
        data = self._retry(self.store.get, keys.ROOT_METADATA, limit=MAX_METADATA_BYTES)
        root = None
        with contextlib.suppress(MetadataError):  # a damaged one: the next upload repairs it
            root = None if data is None else Metadata.parse(data)
        if root is None or root.peer_id == peer_id:
            return
        self._retry(check_claim, self.store, self.instance)
        self._retry(self.store.put, keys.ROOT_METADATA, replace(root, peer_id=peer_id).to_json())


class UploadLoop:
    """:meth:`run` works on its thread; :meth:`receive` may be called from another.

    Raises OSError when ``start.folder`` cannot be written.
    """

    def __init__(self, start: Start, store: ObjectStore, send: Callable[[Any], None]) -> None:
        self._settings = start.settings
        self._snapshots = start.snapshots
        self._takes_bucket = start.settings.take_bucket
        self._send = send
        self._store = store
        self._journal = Journal(start.folder / JOURNAL)
        self._instance = instance_of(start.folder)
        self._uplink = Uplink()
        self._publication = Publication(
            store,
            self._journal,
            start.settings,
            self._instance,
            uplink=self._uplink,
            newer=lambda: self._waiting is not None,
            moved=lambda there, size: send(Moved(there, size)),
        )
        self._wake = threading.Condition()
        self._waiting: Submission | None = None
        self._current: Submission | None = None
        self._peer_id = self._peer_id_published = ""
        self._newest_published: int | None = None  # outer step, until old ones were deleted
        self._closing = threading.Event()
        pending = self._journal.pending
        if pending is not None and os.path.isdir(pending.folder):  # never raises
            self._waiting = pending
            log.info("Continuing the upload of %s", pending.revision.tag)
        if start.miner_began is not None:
            # Or a miner that is killed again and again would fill the disk with them.
            age = timedelta(seconds=time.time() - start.miner_began)
            self._prune_snapshots(unused_for=max(timedelta(0), age))

    def receive(self, message: Any) -> None:
        match message:
            case Paused(paused):
                # Without the lock, which a thread holds while it sends to rank 0: a round waits for
                # the uplink.
                (self._uplink.pause if paused else self._uplink.resume)()
                return
            case Close():
                self._closing.set()
                self._uplink.stop()
        with self._wake:
            match message:
                case Submission(folder, revision):
                    for held in (self._current, self._waiting):
                        if held is not None and held.revision == revision:
                            # Found in the journal and sent again by a restart; or the same step
                            # once more, by a miner that went back to a checkpoint: one upload of a
                            # step is enough.
                            if folder != held.folder:
                                self._forget(folder)
                            return
                    if self._waiting is not None:
                        reason = f"superseded by {revision.tag} before it was sent"
                        self._failed(self._waiting, reason)
                    self._waiting = message
                case PeerId(peer_id):
                    self._peer_id = peer_id
            self._wake.notify_all()

    def _failed(self, submission: Submission, reason: str) -> None:
        """Report a failure: without it nothing would ever be submitted again."""
        self._send(PublicationReport(submission.revision, False, 0.0, 0, reason, time.time()))

    # --- the threads ------------------------------------------------------------------------------

    def run(self) -> None:
        """Upload each submitted snapshot until the uploader is closed."""
        for work in (self._renew_claim, self._clean_up):
            threading.Thread(
                target=self._until_closed, args=(work,), name=work.__name__, daemon=True
            ).start()
        self._until_closed(self._upload, self._give_up)
        with contextlib.suppress(StoreError):
            release_bucket(self._store, self._instance)

    def _until_closed(
        self, work: Callable[[], None], failed: Callable[[Exception], None] = lambda error: None
    ) -> None:
        """Run ``work``, and again after an error that it did not expect, which ``failed`` gets."""
        # Ended unseen, it would leave the bucket to another miner after minutes, or to old uploads,
        # or end uploads for weeks.
        while not self._closing.is_set():
            try:
                work()
            except StoppedError:
                return
            except Exception as error:  # also RuntimeError, where no thread can be started
                logging.exception("uploader")
                failed(error)
                self._closing.wait(_DEFECT_WAIT)

    def _upload(self) -> None:
        """Upload the next snapshot, publish a new peer id, or both. Raises StoppedError."""
        with self._wake:
            self._current = None
            self._wake.wait_for(
                lambda: (
                    self._closing.is_set()
                    or self._waiting is not None
                    or self._peer_id != self._peer_id_published
                )
            )
            if self._closing.is_set():
                raise StoppedError("closing")
            submission, self._waiting = self._waiting, None
            self._current = submission
        if (peer_id := self._peer_id) != self._peer_id_published:
            try:
                self._publication.publish_peer_id(peer_id)
                self._peer_id_published = peer_id
            except StoppedError:
                raise
            except StoreError as error:
                log.warning("The peer id is not published yet: %s", error)
                with self._wake:  # there may be something better to do than to wait
                    self._wake.wait_for(
                        lambda: (
                            self._closing.is_set()
                            or self._current
                            or self._waiting
                            or self._peer_id != peer_id
                        ),
                        _PEER_ID_RETRY.total_seconds(),
                    )
        if submission is None:
            return
        # One that the journal kept was submitted before a restart, perhaps with another identity.
        submission = replace(submission, peer_id=self._peer_id or submission.peer_id)
        report = self._publication.run(submission)
        self._prune_snapshots(before=submission.folder)
        with self._wake:
            self._current = None
            if report.ok:
                self._newest_published = submission.revision.outer_step
                self._wake.notify_all()
        if not report.ok:
            self._forget(submission.folder)
        self._send(report)

    def _give_up(self, error: Exception) -> None:
        """Report the upload under way, if there is one, as failed by a defect."""
        if self._current is not None:
            with contextlib.suppress(OSError):
                self._journal.set_pending(None)
            what = f"unexpected error ({type(error).__name__}), see its log line"
            self._failed(self._current, what)

    def _renew_claim(self) -> None:
        lines = Repeats(_CLAIM_LINES_EVERY)
        wait = timedelta(0)
        while not self._closing.wait(wait.total_seconds()):
            wait = RENEW_EVERY
            try:
                claim_bucket(self._store, self._instance, take=self._takes_bucket)
                # Once: the claim of a miner that takes the bucket from this one must stand.
                self._takes_bucket = False
            except ForeignBucketError as error:  # it says what follows
                wait = _CLAIM_RETRY
                if (again := lines("foreign")) is not None:
                    log.error("%s%s", error, again)
            except StoreError as error:
                wait = _CLAIM_RETRY
                if (again := lines(type(error).__name__)) is not None:
                    log.error(
                        "Our bucket %s cannot be used (%s), so uploads wait and are tried again; "
                        "training continues%s",
                        self._store.bucket,
                        error,
                        again,
                    )

    def _clean_up(self) -> None:
        """Abort stuck uploads each hour, delete old outer steps when a new one was uploaded."""
        swept = -math.inf
        while not self._closing.is_set():
            if time.monotonic() - swept >= SWEEP_EVERY.total_seconds():
                swept = time.monotonic()
                sweep_uploads(
                    self._store,
                    instance=self._instance,
                    spare=self._journal.owned,
                    older_than=max(STUCK_AGE, self._settings.longest_transfer),
                )
                self._prune_snapshots(unused_for=2 * self._settings.longest_transfer)
            newest, self._newest_published = self._newest_published, None
            if newest is not None:
                prune_epochs(self._store, newest=newest, keep=self._settings.keep_epochs)
            with self._wake:
                self._wake.wait_for(
                    lambda: self._closing.is_set() or self._newest_published is not None,
                    max(0.0, swept + SWEEP_EVERY.total_seconds() - time.monotonic()),
                )

    # --- snapshots on the disk --------------------------------------------------------------------

    def _forget(self, folder: Path) -> None:
        """Delete a snapshot that was not uploaded: the next upload has its own.

        An outage of a day would fill the disk with them, and then nothing could be uploaded after.
        """
        if self._snapshots is None or folder.parent.resolve() != self._snapshots.resolve():
            return
        with self._wake:
            wanted = self._waiting is not None and self._waiting.folder == folder
        if not wanted:
            shutil.rmtree(folder, ignore_errors=True)

    def _prune_snapshots(
        self, *, before: Path | None = None, unused_for: timedelta | None = None
    ) -> None:
        if self._snapshots is None:
            return
        with self._wake:
            used = [s.folder for s in (self._current, self._waiting) if s is not None]
        try:
            prune_snapshots(self._snapshots, before=before, unused_for=unused_for, spare=used)
        except OSError as error:
            # A network disk may be away for a moment. Raised, it would end the thread that cleans
            # up, for good and unseen, or report an upload as failed that succeeded.
            log.warning("Old snapshots stay for now: %s", disk_problem(error))


# --- the process ----------------------------------------------------------------------------------


def main() -> int:
    parent = ParentConnection()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 decides
    # Ends at once; the journal is always in order. Not a handler of Python's: that runs once the
    # main thread comes back from its read, and a signal just before the read is seen too late.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    write_stacks_on_signal()

    start: Start = parent.receive()
    # Training comes first. Before any thread is started, which inherits it.
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or not allowed
        os.nice(_NICENESS)
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)  # idle could starve on a busy disk
    parent.forward_log()
    logging.getLogger("distributed_training").setLevel(logging.INFO)
    try:
        store = open_store(start.settings, start.bucket, write=True)
        loop = UploadLoop(start, store, parent.send)
    except (ValueError, OSError) as error:
        log.error("%s", disk_problem(error) if isinstance(error, OSError) else error)
        return ExitStatus.FAULT
    thread = threading.Thread(target=loop.run, name="uploader", daemon=True)
    thread.start()
    try:
        while True:
            message = parent.receive()
            loop.receive(message)
            if isinstance(message, Close):
                thread.join()
                return 0
    except (EOFError, OSError):  # rank 0 is gone
        return 0


if __name__ == "__main__":
    # Threads in the middle of a request must not hold up the end.
    status = main()
    os._exit(status)
