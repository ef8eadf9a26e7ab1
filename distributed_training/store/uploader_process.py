"""The uploader: a process of its own, at low CPU and I/O priority.

:class:`~.uploader.Uploader` starts it with one end of a socket; settings with their secrets come
through it. When the other end closes, however rank 0 ended, the uploader stops: multipart uploads
stay at the store, the journal knows them.

    python -m distributed_training.store.uploader_process FD
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from distributed_training.protocol.types import PublicationReport

from .claim import RENEW_EVERY, claim_bucket, release_bucket
from .cleanup import STUCK_AGE, prune_snapshots, sweep_uploads
from .errors import StoppedError, StoreError
from .journal import Journal
from .publication import Publication, Submission
from .s3 import S3ObjectStore
from .uplink import Uplink
from .uploader_messages import Busy, Close, Pause, PeerId, Resume, Said, Start

SWEEP_EVERY = timedelta(hours=1)
_CLAIM_RETRY = timedelta(seconds=15)
_PEER_ID_RETRY = timedelta(seconds=30)


class Worker:
    """One thread works; :meth:`receive` may be called from another."""

    def __init__(self, start: Start, store: S3ObjectStore, send: Callable[[Any], None]) -> None:
        self._settings = start.settings
        self._snapshots = start.snapshots
        self._send = send
        self._store = store
        self._journal = Journal(start.journal)
        self._uplink = Uplink()
        self._publication = Publication(
            store, self._journal, start.settings, self._uplink, self._say, self._newer_waits
        )
        self._wake = threading.Condition()
        self._waiting: Submission | None = None
        self._peer_id: str | None = None  # not published yet
        self._latest_peer_id = ""
        self._closing: Close | None = None
        self._current: Submission | None = None
        self._next_sweep = 0.0
        self._peer_id_after = 0.0
        pending = self._journal.pending
        if pending is not None and Path(pending.folder).is_dir():
            self._waiting = Submission.of(pending)
            self._say("info", f"Going on with the upload of {self._waiting.revision.tag}")
        if start.miner_began is not None:
            # Or a miner that is killed again and again would fill the disk with them.
            age = timedelta(seconds=time.time() - start.miner_began)
            self._prune_snapshots(unused_for=max(timedelta(0), age))

    def receive(self, message: Any) -> None:
        match message:
            case Pause():
                self._uplink.pause()
            case Resume():
                self._uplink.resume()
            case _:
                with self._wake:
                    if isinstance(message, Submission):
                        self._take(message)
                    elif isinstance(message, PeerId):
                        self._peer_id = self._latest_peer_id = message.peer_id
                        self._peer_id_after = 0.0
                    elif isinstance(message, Close):
                        self._closing = message
                        self._uplink.stop()
                    self._wake.notify_all()

    def _take(self, new: Submission) -> None:
        for held in (self._current, self._waiting):
            if held is not None and held.revision == new.revision:
                # Found in the journal and sent again by a restart; or the same step once more, by a
                # miner that went back to a checkpoint: one publication of a step is enough.
                if new.folder != held.folder:
                    self._forget(new.folder)
                return
        if self._waiting is not None and self._waiting.revision != new.revision:
            self._superseded(self._waiting, new)
        self._waiting = new

    def _superseded(self, old: Submission, new: Submission) -> None:
        reason = f"superseded by {new.revision.tag} before it was sent"
        self._send(PublicationReport(old.revision, False, 0.0, 0, reason, time.time()))

    def _give_up(self, reason: str) -> None:
        """Whoever submitted must hear of the end, or nothing would ever be submitted again."""
        current = self._current
        if current is not None:
            with contextlib.suppress(OSError):
                self._journal.set_pending(None)
            self._send(PublicationReport(current.revision, False, 0.0, 0, reason, time.time()))
        time.sleep(1)

    def _newer_waits(self) -> bool:
        with self._wake:
            return self._waiting is not None

    def run(self) -> None:
        """Until closed."""
        # In a thread of its own: an upload takes longer than a claim lasts.
        claim = threading.Thread(target=self._keep_claim, name="claim", daemon=True)
        claim.start()
        while self._closing is None:
            try:
                self._housekeeping()
                submission, peer_id = self._next()
                if peer_id is not None:
                    self._publish_peer_id(peer_id)
                if submission is not None:
                    self._publish(submission)
            except StoppedError:
                break
            except Exception as error:  # one defect must not end publication for weeks
                logging.exception("uploader")
                self._give_up(
                    f"a defect of the uploader ({type(error).__name__}), see its log line"
                )
        if self._closing is not None and self._closing.release:
            with contextlib.suppress(StoreError):
                release_bucket(self._store, self._journal.instance)

    def _next(self) -> tuple[Submission | None, str | None]:
        """What to do now; nothing when only housekeeping is due. Raises StoppedError."""
        with self._wake:
            self._current = None
            if self._waiting is None and self._closing is None:
                due = self._next_sweep
                if self._peer_id is not None:
                    due = min(due, self._peer_id_after)
                if due > time.monotonic():
                    self._send(Busy(False))
                    self._wake.wait(due - time.monotonic())
            if self._closing is not None:
                raise StoppedError("closing")
            self._current, self._waiting = self._waiting, None
            peer_id = None
            if time.monotonic() >= self._peer_id_after:
                peer_id, self._peer_id = self._peer_id, None
            return self._current, peer_id

    def _publish(self, submission: Submission) -> None:
        self._send(Busy(True))
        # One that the journal kept was submitted before a restart, perhaps with another identity.
        submission = replace(submission, peer_id=self._latest_peer_id or submission.peer_id)
        report = self._publication.run(submission)
        self._prune_snapshots(before=submission.folder)
        with self._wake:
            self._current = None
        if not report.ok:
            self._forget(submission.folder)
        self._send(report)

    def _forget(self, folder: Path) -> None:
        """A snapshot that was not published is not sent again, the next publication has its own. An
        outage of a day would fill the disk with them, and then nothing could be published after."""
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
        prune_snapshots(self._snapshots, before=before, unused_for=unused_for, spare=used)

    def _publish_peer_id(self, peer_id: str) -> None:
        try:
            self._publication.publish_peer_id(peer_id)
        except StoppedError:
            raise
        except StoreError as error:
            self._say("warning", f"The peer id is not published yet: {error}")
            with self._wake:
                self._peer_id = self._peer_id or peer_id
                self._peer_id_after = time.monotonic() + _PEER_ID_RETRY.total_seconds()

    def _housekeeping(self) -> None:
        now = time.monotonic()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_EVERY.total_seconds()
            sweep_uploads(
                self._store,
                instance=self._journal.instance,
                spare=self._journal.owned(),
                older_than=max(STUCK_AGE, self._settings.file_deadline),
            )
            self._prune_snapshots(unused_for=2 * self._settings.file_deadline)

    def _keep_claim(self) -> None:
        complaint = ""
        take = self._settings.take_bucket
        while self._closing is None:
            wait = RENEW_EVERY
            try:
                claim_bucket(self._store, self._journal.instance, take=take)
                complaint, take = "", False
            except StoreError as error:
                wait = _CLAIM_RETRY
                if str(error) != complaint:  # once, not every few seconds
                    complaint = str(error)
                    self._say("error", complaint)
            with self._wake:
                self._wake.wait_for(lambda: self._closing is not None, wait.total_seconds())

    def _say(self, level: str, text: str) -> None:
        self._send(Said(level, text))


class _Forward(logging.Handler):
    """Log records of this process become lines of rank 0's log, which masks and formats them."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        super().__init__(logging.INFO)
        self._send_message = send

    def emit(self, record: logging.LogRecord) -> None:
        level = "error" if record.levelno >= 40 else "warning" if record.levelno >= 30 else "info"
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            # The type and place only: texts of foreign exceptions may quote a request.
            error = record.exc_info[1]
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            place = (
                f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
            )
            text = f"{text}: {type(error).__name__} at {place}"
        self._send_message(Said(level, text))


def lower_priority(nice: int) -> None:
    """Training comes first, for the CPU and for the disk. Before any thread is started."""
    with contextlib.suppress(OSError):
        os.nice(nice)
    try:
        import psutil

        process = psutil.Process()
        process.ionice(psutil.IOPRIO_CLASS_BE, 7)  # idle could starve on a busy disk
    except (ImportError, AttributeError, OSError):
        return  # not Linux


def main() -> int:
    connection = Connection(int(sys.argv[1]))
    lock = threading.Lock()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 decides
    # Ends at once; the journal is always in order. Not a handler of Python's: that runs once the
    # main thread comes back from its read, and a signal just before the read is seen too late.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def send(message: Any) -> None:
        with lock, contextlib.suppress(OSError):  # nobody listens any more: the reader ends us
            connection.send(message)

    start: Start = connection.recv()
    lower_priority(start.settings.uploader_nice)
    logging.getLogger().addHandler(_Forward(send))
    logging.getLogger("distributed_training").setLevel(logging.INFO)
    try:
        store = S3ObjectStore.from_settings(
            start.settings, bucket=start.bucket, write=True, ca_bundle=start.ca_bundle
        )
    except ValueError as error:
        send(Said("error", str(error)))
        return 2
    worker = Worker(start, store, send)
    thread = threading.Thread(target=worker.run, name="uploader", daemon=True)
    thread.start()
    try:
        while True:
            message = connection.recv()
            worker.receive(message)
            if isinstance(message, Close):
                thread.join()
                return 0
    except (EOFError, OSError):  # rank 0 is gone
        return 0


if __name__ == "__main__":
    # Threads in the middle of a request must not hold up the end.
    status = main()
    os._exit(status)
