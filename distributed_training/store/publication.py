"""Publishing one snapshot: all of it, checked, in the order that readers can rely on.

1. Checks of the snapshot (complete, unchanged, finite, of this revision) and the gate.
2. All parts of all large files are sent; nothing is visible yet. This is what takes long.
3. ``epoch-N/metadata.json`` is removed, then the files appear together: while they change, no
   metadata in their folder vouches for them.
4. Every object is verified by HEAD (size, etag).
5. ``epoch-N/metadata.json``, then the root ``metadata.json``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from distributed_training.config.store import StoreSettings
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import MAX_METADATA_BYTES, Metadata, MetadataError
from distributed_training.protocol.types import PublicationReport, Revision

from .claim import check_claim
from .cleanup import prune_epochs
from .errors import IntegrityError, StoppedError, StoreError, disk_problem
from .gate import preview_warning, upload_gate
from .interface import ObjectStore
from .journal import Journal, PendingRecord
from .retry import deadline_in, retrying
from .snapshot_folder import check_files, wait_complete
from .uplink import Uplink
from .upload import Sender, Staged

Result = TypeVar("Result")


@dataclass(frozen=True)
class Submission:
    """A snapshot to publish. ``preview_delta``: see :func:`~.gate.upload_gate`."""

    folder: Path
    revision: Revision
    world_size: int
    peer_id: str
    preview_delta: float | None = None

    def record(self) -> PendingRecord:
        r = self.revision
        return PendingRecord(
            str(self.folder),
            r.run,
            r.outer_step,
            r.inner_step,
            self.world_size,
            self.peer_id,
            self.preview_delta,
        )

    @classmethod
    def of(cls, record: PendingRecord) -> Submission:
        revision = Revision(record.run, record.outer_step, record.inner_step)
        folder = Path(record.folder)
        return cls(folder, revision, record.world_size, record.peer_id, record.preview_delta)


class BlockedError(StoreError):
    """The gate's line."""


@dataclass
class Publication:
    """``say(level, text)`` receives lines for the operator. ``newer()``: a newer snapshot waits, so
    one that is not even complete need not be waited for. Used from one thread."""

    store: ObjectStore
    journal: Journal
    settings: StoreSettings
    uplink: Uplink = field(default_factory=Uplink)
    say: Callable[[str, str], None] = lambda level, text: None
    newer: Callable[[], bool] = lambda: False

    def run(self, submission: Submission) -> PublicationReport:
        """Publish; every failure but a stop is a report with its reason.

        ``--r2.file_deadline`` covers all transfers with their retries, pauses included.
        Raises StoppedError; the journal then holds what the next process needs to go on.
        """
        began = time.monotonic()
        settings = self.settings
        sender = Sender(
            store=self.store,
            journal=self.journal,
            uplink=self.uplink,
            concurrency=settings.concurrency,
            part_size=settings.part_size,
        )
        reason = ""
        try:
            self.journal.set_pending(submission.record())
            self._publish(submission, sender)
        except StoppedError:
            raise
        except StoreError as error:
            reason = str(error)
        except OSError as error:
            reason = disk_problem(error)
        finally:
            sender.close()
        with contextlib.suppress(OSError):  # a full disk; whoever submitted must hear of the end
            self.journal.set_pending(None)
        return PublicationReport(
            revision=submission.revision,
            ok=not reason,
            seconds=time.monotonic() - began,
            bytes_sent=sender.sent.bytes,
            reason=reason,
            finished_at=time.time(),
        )

    def _publish(self, submission: Submission, sender: Sender) -> None:
        revision, settings = submission.revision, self.settings
        self._gate(revision.inner_step)
        files = wait_complete(
            submission.folder,
            submission.world_size,
            timeout=settings.snapshot_timeout,
            uplink=self.uplink,
            give_up=self.newer,
        )
        extras, not_finite = check_files(submission.folder, files, revision)
        self._gate(revision.inner_step, extras.block_list, not_finite, submission.preview_delta)
        deadline = deadline_in(settings.file_deadline)
        self._try("look for another miner", lambda: check_claim(self.store, self.journal.instance))
        root = self.read_root()
        if root is not None and revision.inner_step == 0 < root.inner_step:
            raise BlockedError(
                f"UPLOAD BLOCKED: inner_step is 0 and the bucket holds {root.revision.tag}: "
                "validators do not score inner step 0"
            )
        named = {
            keys.epoch_key(revision.outer_step, name): record for name, record in files.items()
        }
        for record in self.journal.uploads():
            if record.key not in named or record.bucket != self.store.bucket:
                sender.abandon(record)  # of an outer step that is over, or another bucket
        staged = [
            sender.stage(
                key, submission.folder / record.name, deadline=deadline, sha256=record.sha256
            )
            for key, record in sorted(named.items(), key=lambda item: -item[1].size)
        ]
        self._withdraw(revision)
        etags = sender.publish_all(staged, deadline=deadline)
        self._verify(staged, etags, sender)
        metadata = Metadata.of(revision, submission.peer_id).to_json()
        epoch = keys.epoch_key(revision.outer_step, keys.METADATA)
        for key in (epoch, keys.ROOT_METADATA):
            self._try(f"write {key}", lambda key=key: self.store.put(key, metadata))  # type: ignore[misc]
        self.journal.drop(*named)
        self._prune(revision)

    def _gate(
        self,
        inner_step: int,
        blocks: tuple[int, ...] | None = None,
        not_finite: str | None = None,
        preview_delta: float | None = None,
    ) -> None:
        line = upload_gate(
            inner_step=inner_step,
            minimum=self.settings.minimum_valid_inner_step,
            blocks=blocks,
            not_finite=not_finite,
            preview_delta=preview_delta,
            block_on_preview=self.settings.block_on_preview,
        )
        if line:
            raise BlockedError(line)
        warning = preview_warning(preview_delta)
        if warning:
            self.say("warning", warning)

    def _withdraw(self, revision: Revision) -> None:
        """Also of the same revision: a miner that went back to a checkpoint comes to the same inner
        step with other weights."""
        key = keys.epoch_key(revision.outer_step, keys.METADATA)
        if self._try(f"look at {key}", lambda: self.store.head(key)) is not None:
            self._try(f"delete {key}", lambda: self.store.delete([key]))

    def _verify(self, staged: list[Staged], etags: Mapping[str, str], sender: Sender) -> None:
        for file in staged:
            info = self._try(f"verify {file.key}", lambda key=file.key: self.store.head(key))  # type: ignore[misc]
            if info is None or info.size != file.size or info.etag != etags[file.key]:
                self.journal.drop(file.key)
                raise IntegrityError(
                    f"{file.key} at the store is not what was sent (another miner's?), so the "
                    "metadata is not written: it is sent again with the next publication"
                )

    def _prune(self, revision: Revision) -> None:
        try:
            count = prune_epochs(
                self.store, newest=revision.outer_step, keep=self.settings.keep_epochs
            )
        except StoreError as error:
            self.say("warning", f"Old outer steps could not be deleted from the bucket: {error}")
            return
        if count:
            self.say("info", f"Deleted {count} objects of old outer steps from the bucket")

    # --- root metadata --------------------------------------------------------------------------

    def read_root(self) -> Metadata | None:
        """None also for a document that is none: writing a good one is the cure."""
        data = self._try(
            "read metadata.json",
            lambda: self.store.get(keys.ROOT_METADATA, limit=MAX_METADATA_BYTES),
        )
        try:
            return None if data is None else Metadata.parse(data)
        except MetadataError:
            return None

    def publish_peer_id(self, peer_id: str) -> None:
        """Change the peer id in the root metadata and nothing else; without one do nothing.

        Raises StoreError.
        """
        root = self.read_root()
        if root is None or root.peer_id == peer_id:
            return
        self._try("look for another miner", lambda: check_claim(self.store, self.journal.instance))
        data = root.with_peer_id(peer_id).to_json()
        self._try("write metadata.json", lambda: self.store.put(keys.ROOT_METADATA, data))

    def _try(self, what: str, attempt: Callable[[], Result]) -> Result:
        limit = min(self.settings.file_deadline, timedelta(minutes=5))
        return retrying(what, attempt, deadline=deadline_in(limit), uplink=self.uplink)
