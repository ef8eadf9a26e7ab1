"""What an uploader must remember across a SIGKILL: which multipart uploads are its own, and which
snapshot it was publishing.

Written before the first part of an upload is sent. Which parts arrived is not in it: the store
knows that better (ListParts), and comparing its MD5s with the file's proves it.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed_training.common.files import write_json


@dataclass(frozen=True)
class UploadRecord:
    """One file's multipart upload. ``etag`` is set once it was completed."""

    bucket: str
    key: str
    upload_id: str
    size: int
    identity: str  # sha256 of the file, or where that is not known its inode and mtime
    part_size: int
    etag: str = ""


@dataclass(frozen=True)
class PendingRecord:
    """The publication under way; ``folder`` is its snapshot."""

    folder: str
    run: int
    outer_step: int
    inner_step: int
    world_size: int
    peer_id: str
    preview_delta: float | None = None


class Journal:
    """One JSON file. ``instance`` identifies this miner's folder; made at the first start.

    A journal that cannot be read is set aside: uploads it owned are then found and aborted by age.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._uploads: dict[str, UploadRecord] = {}
        self._pending: PendingRecord | None = None
        self.instance = secrets.token_hex(8)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            try:
                self._load(json.loads(path.read_text()))
            except (ValueError, TypeError, KeyError, AttributeError):
                path.replace(path.with_suffix(".damaged"))
                self._save()
        else:
            self._save()

    def _load(self, raw: dict[str, Any]) -> None:
        uploads = {k: UploadRecord(**v) for k, v in raw["uploads"].items()}
        pending = PendingRecord(**raw["pending"]) if raw["pending"] else None
        self.instance = str(raw["instance"])
        self._uploads, self._pending = uploads, pending

    def _save(self) -> None:
        write_json(
            self._path,
            {
                "instance": self.instance,
                "pending": dataclasses.asdict(self._pending) if self._pending else None,
                "uploads": {k: dataclasses.asdict(r) for k, r in self._uploads.items()},
            },
        )

    @property
    def pending(self) -> PendingRecord | None:
        with self._lock:
            return self._pending

    def set_pending(self, pending: PendingRecord | None) -> None:
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
