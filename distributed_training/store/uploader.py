"""Rank 0's handle on the uploader process, and the messages between the two.

No method waits for the network. A ``Submission`` goes to the process; a ``PublicationReport`` comes
back.
"""

from __future__ import annotations

import contextlib
import queue
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from distributed_training.common.processes import ChildProcess
from distributed_training.config.settings import StoreSettings
from distributed_training.protocol.types import PublicationReport, Revision

from .journal import Submission, last_checked


@dataclass(frozen=True)
class Start:
    """First message to the uploader.

    ``folder``: for its journal, kept across restarts. ``miner_began``: time.time(), absent when the
    uploader only was started again. Earlier snapshots that the journal does not name are leftovers.
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
    """A message to the uploader: write this peer id into the root metadata."""

    peer_id: str


@dataclass(frozen=True)
class Moved:
    """A message from the uploader: ``there`` of the ``size`` bytes are at the store."""

    there: int
    size: int


@dataclass(frozen=True)
class Close:
    """A message to the uploader: end."""


class Uploader:
    """``folder``: for the journal, kept across restarts.

    ``snapshots``: where local snapshots lie that may be deleted once a newer one is uploaded;
    None: they are the caller's to delete.

    An uploader that dies is started again and continues where its journal ends.
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
        self._paused = False
        self._peer_id = ""
        self._outstanding: dict[Revision, Submission] = {}
        self._began = self._took_at = 0.0  # the newest submission, and its last bytes; monotonic
        self._moved: Moved | None = None
        self._child = ChildProcess(
            "The uploader",
            "distributed_training.store.uploader_process",
            begin=self._begin,
            receive=self._receive,
            effect="it continues where it was",
        )
        self._child.start()

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
        with self._child.lock:
            # Noted first: if the process has just died, the next one gets it from here.
            self._outstanding[revision] = submission
            self._began = self._took_at = time.monotonic()
            self._moved = None
            self._child.send(submission)

    def publish_peer_id(self, peer_id: str) -> None:
        """Write this peer id into the root metadata, now and with later uploads."""
        with self._child.lock:
            self._peer_id = peer_id
            self._child.send(PeerId(peer_id))

    def pause(self) -> None:
        """Free the uplink within a second. Parts under way are sent again after :meth:`resume`."""
        with self._child.lock:
            # Also for an uploader that is started again during the round.
            self._paused = True
            self._child.send(Paused(True))

    def resume(self) -> None:
        with self._child.lock:
            self._paused = False
            self._child.send(Paused(False))

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

    def describe(self) -> str:
        """Return in words how far the upload under way is."""
        with self._child.lock:
            tag = "".join(revision.tag for revision in list(self._outstanding)[-1:])
            if not tag:
                return "its snapshot is being written or checked"
            now, sent = time.monotonic(), self._moved
            done = "nothing sent" if sent is None else f"{sent.there / 1e6:.1f}"
            of = "" if sent is None else f" of {sent.size / 1e6:.1f} MB"
            text = f"{tag}, {done}{of} after {now - self._began:.0f} s"
            if self._paused:
                return f"{text}; a round has the network link"
            silent = now - self._took_at
            return text + (f"; the store took nothing for {silent:.0f} s" if silent > 10 else "")

    @property
    def pid(self) -> int:
        """The uploader process's id."""
        return self._child.pid

    def close(self, timeout: timedelta = timedelta(seconds=5)) -> None:
        """Stop at once; an upload under way stays in the journal. Idempotent.

        ``timeout`` covers the uploader's end; after it the process is killed, which loses nothing.
        """
        self._child.close(Close(), timeout=timeout)

    # --- the process ------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Send the settings and the peer id to an uploader that was just started."""
        self._child.send(self._start)
        self._start = replace(self._start, miner_began=None)
        # Before the submissions: an upload begins at once, and must see both.
        if self._peer_id:
            self._child.send(PeerId(self._peer_id))
        if self._paused:
            self._child.send(Paused(True))
        for submission in self._outstanding.values():
            self._child.send(submission)

    def _receive(self, report: PublicationReport | Moved) -> None:
        with self._child.lock:
            if isinstance(report, Moved):
                self._moved, self._took_at = report, time.monotonic()
                return
            # Before the report: whoever reads that may submit the same revision again.
            self._outstanding.pop(report.revision, None)
        self._reports.put(report)
