"""Rank 0's handle on the uploader process, and the messages between the two.

No method waits for the network. A ``Submission`` goes to the process; a ``PublicationReport`` comes
back.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import subprocess
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from distributed_training.common.backoff import Backoff
from distributed_training.common.processes import Said, start_child, wait_or_kill
from distributed_training.config.settings import StoreSettings
from distributed_training.protocol.types import PublicationReport, Revision

from .journal import Submission, last_checked

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """First message to the uploader.

    ``folder``: for its journal, kept across restarts. ``miner_began``: time.time(), absent when the
    uploader alone was started again; snapshots from before it that the journal does not name are
    leftovers.
    """

    settings: StoreSettings
    bucket: str
    folder: Path
    snapshots: Path | None
    miner_began: float | None = None


@dataclass(frozen=True)
class Paused:
    """A command to transfers: leave the uplink free, or use it."""

    paused: bool


@dataclass(frozen=True)
class PeerId:
    """A message to the uploader: this peer id belongs into the root metadata."""

    peer_id: str


@dataclass(frozen=True)
class Close:
    """A message to the uploader: end."""


_FIRST_WAIT, _LONGEST_WAIT = timedelta(seconds=1), timedelta(minutes=1)  # before it is restarted
_END_SECONDS = 5.0  # for the end of one that hung up
_STEADY = 600.0  # seconds; an uploader that lived so long ended for another reason


class Uploader:
    """``folder``: for the journal, kept across restarts.

    ``snapshots``: where local snapshots lie that may be deleted once a newer one is uploaded;
    None: they are the caller's to delete.

    An uploader that dies is started again and goes on where its journal stands.
    """

    def __init__(
        self,
        *,
        settings: StoreSettings,
        bucket: str,
        folder: Path,
        snapshots: Path | None = None,
    ) -> None:
        self._start = Start(settings, bucket, folder.absolute(), snapshots, miner_began=time.time())
        #: Outer step of the newest upload of runs before, None if its gradient was not checked.
        self.last_checked = last_checked(folder)
        self._reports: queue.SimpleQueue[PublicationReport] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._closed = threading.Event()
        self._paused = False
        self._peer_id = ""
        self._outstanding: dict[Revision, Submission] = {}
        self._launch()
        self._thread = threading.Thread(target=self._listen, name="publisher", daemon=True)
        self._thread.start()

    # --- what the loop calls ----------------------------------------------------------------------

    def submit(
        self,
        folder: Path,
        revision: Revision,
        world_size: int,
        *,
        preview_delta: float | None = None,
    ) -> None:
        """Upload the snapshot in ``folder`` once all ranks' files are there.

        A newer one supersedes one that waits; each ends in exactly one report.
        """
        place = folder.absolute()
        submission = Submission(place, revision, world_size, self._peer_id, preview_delta)
        with self._lock:
            # Noted first: if the process has just died, the next one gets it from here.
            self._outstanding[revision] = submission
            self._send(submission)

    def publish_peer_id(self, peer_id: str) -> None:
        """Write this peer id into the root metadata, now and with later uploads."""
        with self._lock:
            self._peer_id = peer_id
            self._send(PeerId(peer_id))

    def pause(self) -> None:
        """Free the uplink within a second. Parts under way are sent again after :meth:`resume`."""
        with self._lock:
            # Also for an uploader that is started again while the round goes on.
            self._paused = True
            self._send(Paused(True))

    def resume(self) -> None:
        with self._lock:
            self._paused = False
            self._send(Paused(False))

    def reports(self) -> list[PublicationReport]:
        """Return the reports that came since the last call, oldest first."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._reports.get_nowait())
        return found

    @property
    def busy(self) -> bool:
        """An upload that was submitted has not ended yet."""
        return bool(self._outstanding)

    @property
    def pid(self) -> int | None:
        """The uploader process's id."""
        return self._process.pid if self._process else None

    def close(self, timeout: timedelta = timedelta(seconds=5)) -> None:
        """Stop at once; an upload under way stays in the journal. Idempotent.

        ``timeout`` covers the uploader's end; after it the process is killed, which loses nothing.
        """
        if self._closed.is_set():
            return
        with self._lock:
            # Under the lock: a launch is over by now, or finds this and starts nothing.
            self._closed.set()
            self._send(Close())
        process = self._process
        if process is not None:
            wait_or_kill(process, timeout.total_seconds())
        self._thread.join(1)

    # --- the process ------------------------------------------------------------------------------

    def _launch(self) -> None:
        """Call with the lock held (or before the thread starts)."""
        self._process, self._connection = start_child("distributed_training.store.uploader_process")
        self._send(self._start)
        self._start = replace(self._start, miner_began=None)
        # Before the submissions: an upload begins at once, and must see both.
        if self._peer_id:
            self._send(PeerId(self._peer_id))
        if self._paused:
            self._send(Paused(True))
        for submission in self._outstanding.values():
            self._send(submission)

    def _send(self, message: Any) -> None:
        """Send a message; one to a dead uploader is lost here and sent again by the relaunch."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(message)

    def _listen(self) -> None:
        backoff = Backoff(first=_FIRST_WAIT, longest=_LONGEST_WAIT)
        while not self._closed.is_set():
            began = time.monotonic()
            assert self._connection is not None
            assert self._process is not None
            try:
                while True:
                    self._take(self._connection.recv())
            except (EOFError, OSError):
                pass
            except Exception:  # an update put other files under a running miner
                self._process.kill()
                log.exception("The uploader sent what is no message")
            # Not without limit: it may be ending in the kernel, on a disk that does not answer.
            wait_or_kill(self._process, _END_SECONDS)
            if self._closed.is_set():
                return
            if time.monotonic() - began > _STEADY:
                backoff.succeeded()
            wait = backoff.failed().total_seconds()
            log.warning(
                "The uploader ended (status %s); it is started again in %.0f s and goes on where "
                "it was",
                self._process.returncode,
                wait,
            )
            with self._lock:  # not in the middle of a message
                self._connection.close()
            while True:
                if self._closed.wait(wait):
                    return
                with self._lock:
                    if self._closed.is_set():
                        return
                    try:
                        self._launch()
                        break
                    except OSError as error:  # no memory, no process or no descriptor left
                        wait = backoff.failed().total_seconds()
                        log.warning(
                            "The uploader could not be started (%s), so nothing is uploaded; "
                            "trying again in %.0f s",
                            error,
                            wait,
                        )

    def _take(self, message: Any) -> None:
        match message:
            case PublicationReport():
                with self._lock:
                    # Before the report: whoever reads that may submit the same revision again.
                    self._outstanding.pop(message.revision, None)
                self._reports.put(message)
            case Said():
                log.log(message.level, "%s", message.text)
