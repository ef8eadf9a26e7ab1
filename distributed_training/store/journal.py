"""What an uploader must remember across a SIGKILL: which multipart uploads are its own, and which
snapshot it was publishing.

Written before the first part of an upload is sent. Which parts arrived is not in it: the store
knows that better (ListParts), and comparing its MD5s with the file's proves it. So a lost journal
costs sending a snapshot again, nothing else: the uploads it knew are found and aborted by age.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed_training.common.files import read_json_object, write_json
from distributed_training.protocol.types import Revision

log = logging.getLogger(__name__)

_COUNTS = 2**53  # above any size, step or number of ranks


@dataclass(frozen=True)
class UploadRecord:
    """One file's multipart upload. ``etag`` is set once it was completed."""

    bucket: str
    key: str
    upload_id: str
    size: int
    identity: str  # the file's inode and mtime
    part_size: int
    etag: str = ""

    @classmethod
    def parse(cls, raw: Any) -> UploadRecord:
        """Raises ValueError."""
        texts = {n: _text(raw, n) for n in ("bucket", "key", "upload_id", "identity", "etag")}
        return cls(**texts, size=_count(raw, "size"), part_size=_count(raw, "part_size"))


@dataclass(frozen=True)
class Submission:
    """A snapshot to publish. ``preview_delta``: see :func:`~.gate.upload_gate`."""

    folder: Path
    revision: Revision
    world_size: int
    peer_id: str
    preview_delta: float | None = None

    def plain(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "folder": str(self.folder),
            **dataclasses.asdict(self.revision),
            "world_size": self.world_size,
            "peer_id": self.peer_id,
            "preview_delta": self.preview_delta,
        }

    @classmethod
    def parse(cls, raw: Any) -> Submission:
        """Raises ValueError."""
        place = [_count(raw, name) for name in ("run", "outer_step", "inner_step")]
        delta = raw.get("preview_delta")
        if delta is not None and type(delta) not in (int, float):  # NaN is possible
            raise ValueError("preview_delta is not a number")
        folder, peer_id = Path(_text(raw, "folder")), _text(raw, "peer_id")
        return cls(folder, Revision(*place), _count(raw, "world_size"), peer_id, delta)


class Journal:
    """One JSON file. One that cannot be read is set aside as ``.damaged``, with a warning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._uploads: dict[str, UploadRecord] = {}
        self._pending: Submission | None = None
        if not path.exists():
            self._save()  # a disk that cannot be written is told now, not amid an upload
            return
        try:
            self._load(read_json_object(path))
        except ValueError as error:
            log.warning(
                "%s is damaged (%s): it is set aside, and what was being uploaded is sent again",
                path,
                error,
            )
            with contextlib.suppress(OSError):
                path.replace(path.with_suffix(".damaged"))
            self._save()

    def _load(self, raw: dict[str, Any] | None) -> None:
        if raw is None or not isinstance(raw.get("uploads"), dict):
            raise ValueError("it is not what an uploader wrote")
        records = [UploadRecord.parse(value) for value in raw["uploads"].values()]
        pending = raw.get("pending")
        self._pending = None if pending is None else Submission.parse(pending)
        self._uploads = {record.key: record for record in records}

    def _save(self) -> None:
        write_json(
            self._path,
            {
                "pending": self._pending and self._pending.plain(),
                "uploads": {k: dataclasses.asdict(r) for k, r in self._uploads.items()},
            },
        )

    @property
    def pending(self) -> Submission | None:
        with self._lock:
            return self._pending

    def set_pending(self, pending: Submission | None) -> None:
        with self._lock:
            if pending != self._pending:
                self._pending = pending
                self._save()

    def upload(self, key: str) -> UploadRecord | None:
        with self._lock:
            return self._uploads.get(key)

    def uploads(self) -> list[UploadRecord]:
        with self._lock:
            return list(self._uploads.values())

    def owned(self) -> frozenset[str]:
        """Ids of the multipart uploads that a resume will go on with."""
        with self._lock:
            return frozenset(r.upload_id for r in self._uploads.values() if not r.etag)

    def put(self, record: UploadRecord) -> None:
        with self._lock:
            self._uploads[record.key] = record
            self._save()

    def drop(self, *keys: str) -> None:
        with self._lock:
            known = [key for key in keys if key in self._uploads]
            for key in known:
                del self._uploads[key]
            if known:
                self._save()


def _text(raw: Any, name: str) -> str:
    value = raw.get(name) if isinstance(raw, dict) else None
    if not isinstance(value, str) or not value.isprintable() or len(value) > 4096:
        raise ValueError(f"{name} is not text")
    return value


def _count(raw: Any, name: str) -> int:
    value = raw.get(name) if isinstance(raw, dict) else None
    if type(value) is not int or not 0 <= value < _COUNTS:
        raise ValueError(f"{name} is not a count")
    return value
