"""Keep the facts that an uploader needs after a SIGKILL: its multipart uploads and its snapshot.

Written before the first part of an upload is sent. It does not hold which parts arrived: the
store's ListParts is the better source, and comparing its MD5s with the file's proves it. So a lost
journal costs sending a snapshot again, nothing else: its uploads are found and aborted by age.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from distributed_training.common.files import read_state, write_state
from distributed_training.protocol.types import Revision

JOURNAL = "uploads.json"
_LOST = "an interrupted upload starts over"
# A full disk must not turn an upload that ended well into one that failed: its blocks would be
# listed twice. The store tells the next process what is over.
_LATER = "the next start asks the store what of an upload is there"

Count = Annotated[int, Field(ge=0, lt=2**53)]  # above any size, step or number of ranks
Text = Annotated[str, StringConstraints(max_length=4096, pattern=r"^[^\x00-\x1f]*$")]


@dataclass(frozen=True)
class UploadRecord:
    """One file's multipart upload. ``etag`` is set once it was completed."""

    bucket: Text
    key: Text
    upload_id: Text
    size: Count
    identity: Text  # the file's inode and mtime
    part_size: Count
    etag: Text = ""


@dataclass(frozen=True)
class Submission:
    """A snapshot to upload. ``preview_delta``: see :func:`~.snapshot_folder.preview_warning`."""

    folder: Path
    revision: Revision
    world_size: int
    peer_id: str
    preview_delta: float | None = None


@dataclass(frozen=True)
class _Pending:
    """A submission as the file holds it, flat."""

    folder: Text
    run: Count
    outer_step: Count
    inner_step: Count
    world_size: Count
    peer_id: Text
    preview_delta: float | None  # NaN is possible

    @classmethod
    def of(cls, new: Submission) -> _Pending:
        at, folder = new.revision, str(new.folder)
        place = (at.run, at.outer_step, at.inner_step)
        return cls(folder, *place, new.world_size, new.peer_id, new.preview_delta)

    def submission(self) -> Submission:
        revision = Revision(self.run, self.outer_step, self.inner_step)
        folder = Path(self.folder)
        return Submission(folder, revision, self.world_size, self.peer_id, self.preview_delta)


@dataclass(frozen=True)
class _Content:
    uploads: dict[str, UploadRecord]  # by key
    pending: _Pending | None = None
    checked: int | None = None  # outer step of the newest upload, if its gradient was checked


def last_checked(folder: Path) -> int | None:
    """Return the outer step of the last upload of ``folder``'s journal, None if unchecked."""
    content = read_state(folder / JOURNAL, _Content, lost=_LOST)
    return content.checked if content else None


class Journal:
    """One JSON file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        content = read_state(path, _Content, lost=_LOST) or _Content({})
        self._uploads = dict(content.uploads)
        self._pending = content.pending.submission() if content.pending else None
        self._checked = content.checked
        if not path.exists():
            self._save()  # a disk that cannot be written is reported now, not amid an upload

    def _save(self, lost: str = "") -> None:
        """Write the file. Raises OSError, unless ``lost`` names the consequence for a line."""
        # Under the lock, since several threads complete files: the one that writes last would else
        # put back what another has dropped.
        pending = _Pending.of(self._pending) if self._pending else None
        write_state(self._path, _Content(self._uploads, pending, self._checked), lost=lost)

    @property
    def pending(self) -> Submission | None:
        with self._lock:
            return self._pending

    def set_pending(self, pending: Submission | None) -> None:
        with self._lock:
            if pending != self._pending:
                self._pending = pending
                self._save(_LATER if pending is None else "")

    def set_checked(self, outer_step: int | None) -> None:
        """Note the outer step of an upload that has ended well, None if it was not checked."""
        with self._lock:
            if outer_step != self._checked:
                self._checked = outer_step
                self._save(_LATER)

    def upload(self, key: str) -> UploadRecord | None:
        with self._lock:
            return self._uploads.get(key)

    def uploads(self) -> list[UploadRecord]:
        with self._lock:
            return list(self._uploads.values())

    def owned(self) -> frozenset[str]:
        """Return ids of the multipart uploads that a resume will continue."""
        with self._lock:
            # One with an etag is complete: the store no longer knows its id.
            return frozenset(r.upload_id for r in self._uploads.values() if not r.etag)

    def put(self, record: UploadRecord) -> None:
        with self._lock:
            self._uploads[record.key] = record
            self._save(_LATER if record.etag else "")

    def drop(self, *keys: str) -> None:
        with self._lock:
            known = [key for key in keys if key in self._uploads]
            for key in known:
                del self._uploads[key]
            if known:
                self._save(_LATER)
