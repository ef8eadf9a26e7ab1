"""Keep the facts that a sender needs after a SIGKILL: its multipart uploads.

Written before the first part of an upload is sent. It does not hold which parts arrived: the
store's ListParts is the better source, and comparing its MD5s with the file's proves it. So a lost
journal costs sending a file again, nothing else: its uploads are found and aborted by age.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from distributed_training.common.files import read_state, write_state

JOURNAL = "uploads.json"
_LOST = "an interrupted upload starts over"
# A full disk must not turn an upload that ended well into one that failed. The store tells the next
# process what is over.
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
class _Content:
    uploads: dict[str, UploadRecord]  # by key


class Journal:
    """One JSON file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        content = read_state(path, _Content, lost=_LOST) or _Content({})
        self._uploads = dict(content.uploads)
        if not path.exists():
            self._save()  # a disk that cannot be written is reported now, not amid an upload

    def _save(self, lost: str = "") -> None:
        """Write the file. Raises OSError, unless ``lost`` names the consequence for a line."""
        # Under the lock, since several threads complete files: the one that writes last would else
        # put back what another has dropped.
        write_state(self._path, _Content(self._uploads), lost=lost)

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
