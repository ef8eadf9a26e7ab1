"""Publishing one snapshot: all of it, checked, in the order that readers can rely on.

1. Checks of the snapshot (complete, unchanged, finite, of this revision) and the upload rules.
2. All parts of all large files are sent; nothing is visible yet. This is what takes long.
3. ``epoch-N/metadata.json`` is removed, then the files appear together: while they change, no
   metadata in their folder vouches for them.
4. Every object is verified by HEAD (size, etag).
5. ``epoch-N/metadata.json``, then the root ``metadata.json``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

from distributed_training.config.settings import StoreSettings
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import MAX_METADATA_BYTES, Metadata, MetadataError
from distributed_training.protocol.types import PublicationReport, Revision

from .cleanup import check_claim
from .journal import Journal, Submission
from .s3 import IntegrityError, S3ObjectStore, StoppedError, StoreError, Uplink, disk_problem
from .snapshot_folder import check_files, wait_complete
from .transfer import Progress, Sender, Sent, Staged, patient
from .upload_rules import preview_warning, upload_gate

log = logging.getLogger(__name__)


class BlockedError(StoreError):
    """The gate's line."""


@dataclass
class Publication:
    """``newer()``: a newer snapshot waits, so one that is not even complete need not be waited for.

    Used from one thread.
    """

    store: S3ObjectStore
    journal: Journal
    settings: StoreSettings
    instance: str  # whose claim on the bucket must stand
    uplink: Uplink = field(default_factory=Uplink)
    newer: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        limit = min(self.settings.longest_transfer, timedelta(minutes=5))
        self._patient = patient(self.store, each=limit, uplink=self.uplink)

    def run(self, submission: Submission) -> PublicationReport:
        """Publish; every failure but a stop is a report with its reason.

        ``--r2.file_deadline`` covers all transfers with their retries, without the pauses.
        Raises StoppedError; the journal then holds what the next process needs to go on.
        """
        began = time.monotonic()
        reason, sent, age = "", Sent(), None
        revision, checked = submission.revision, submission.preview_delta is not None
        try:
            # First of all: after a kill from here on, the next process goes on with it.
            self.journal.set_pending(submission)
            age = self._publish(submission, sent)
        except StoppedError:
            raise
        except StoreError as error:
            reason = str(error)
        except OSError as error:
            reason = disk_problem(error)
        if not reason:
            self.journal.set_checked(revision.outer_step if checked else None)
        self.journal.set_pending(None)
        return PublicationReport(
            revision=revision,
            ok=not reason,
            seconds=time.monotonic() - began,
            bytes_sent=sent.bytes,
            reason=reason,
            finished_at=time.time(),
            age_seconds=age,
            checked=checked,
        )

    def _publish(self, submission: Submission, sent: Sent) -> float | None:
        """Send a snapshot.

        Return the age of ``gradients.pt`` at the end, seconds by the store's clock.
        """
        revision, settings = submission.revision, self.settings
        _refuse_with(upload_gate(inner_step=revision.inner_step, minimum=1))
        files = wait_complete(
            submission.folder,
            submission.world_size,
            timeout=settings.snapshot_timeout,
            uplink=self.uplink,
            give_up=self.newer,
        )
        extras, not_finite = check_files(submission.folder, files, revision)
        _refuse_with(
            upload_gate(
                inner_step=revision.inner_step,
                minimum=1,  # more is the schedule's to ask for: validators refuse inner step 0 only
                blocks=extras.block_list,
                not_finite=not_finite,
                preview_delta=submission.preview_delta,
                block_on_preview=settings.block_on_preview,
            )
        )
        if warning := preview_warning(submission.preview_delta):
            log.warning("%s", warning)
        deadline = self.uplink.clock() + settings.longest_transfer.total_seconds()
        with Sender(
            store=self.store,
            journal=self.journal,
            deadline=deadline,
            uplink=self.uplink,
            concurrency=settings.concurrency,
            part_size=settings.part_size,
            sent=sent,
            progress=Progress(
                f"Uploading {revision.tag}",
                sum(record.size for record in files.values()),
                clock=self.uplink.clock,
            ),
        ) as sender:
            # Two miners in one bucket overwrite each other's files: the mixture would be scored.
            check_claim(self._patient, self.instance)
            named = {keys.epoch_key(revision.outer_step, n): record for n, record in files.items()}
            sender.abandon_all_but(named)
            staged = [
                sender.stage(key, submission.folder / record.name, until=deadline)
                for key, record in sorted(named.items(), key=lambda item: -item[1].size)
            ]
            # Nothing was visible so far. What fails from here on leaves an outer step without
            # metadata: better none than one that vouches for other files.
            self._withdraw(revision)
            etags = sender.publish_all(staged)
        age = self._verify(staged, etags)
        seen = time.monotonic()
        metadata = Metadata.of(revision, submission.peer_id).to_json()
        epoch = keys.epoch_key(revision.outer_step, keys.METADATA)
        # The root last: it leads readers to the outer step, whose metadata must be there.
        for key in (epoch, keys.ROOT_METADATA):
            self._patient.put(key, metadata)
        # Only now: a kill before the metadata is written must go on with this upload.
        self.journal.drop(*named)
        return None if age is None else age + time.monotonic() - seen

    def _withdraw(self, revision: Revision) -> None:
        """Delete the metadata of this outer step, also when it is of the same revision.

        A miner that went back to a checkpoint comes to the same inner step with other weights.
        """
        key = keys.epoch_key(revision.outer_step, keys.METADATA)
        if self._patient.head(key) is not None:
            self._patient.delete([key])

    def _verify(self, staged: list[Staged], etags: Mapping[str, str]) -> float | None:
        """Compare what the store holds with what was sent; return the age of ``gradients.pt``.

        A store may date an object by when its upload began. Raises IntegrityError.
        """
        age = None
        for file in staged:
            info = self._patient.head(file.key)
            if info is None or info.size != file.size or info.etag != etags[file.key]:
                self.journal.drop(file.key)
                raise IntegrityError(
                    f"{file.key} at the store is not what was sent (another miner's?), so the "
                    "metadata is not written: it is sent again with the next upload"
                )
            if file.path.name == keys.GRADIENTS:
                age = info.age_seconds
        return age

    # --- root metadata --------------------------------------------------------------------------

    def read_root(self) -> Metadata | None:
        """Read the root metadata, None if missing or malformed; the next write repairs it."""
        data = self._patient.get(keys.ROOT_METADATA, limit=MAX_METADATA_BYTES)
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
        check_claim(self._patient, self.instance)
        self._patient.put(keys.ROOT_METADATA, replace(root, peer_id=peer_id).to_json())


def _refuse_with(line: str | None) -> None:
    if line:
        raise BlockedError(line)
