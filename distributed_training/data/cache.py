"""Fetched pages on disk, within a size bound. Several processes may share the folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import zlib
from pathlib import Path
from typing import Any

from distributed_training.common.files import write_bytes

log = logging.getLogger(__name__)

_SWEEP_EVERY = 32  # writes between two looks at the folder's size


class PageCache:
    """JSON values by key. The least recently used are deleted above ``limit_bytes``.

    A file that is damaged counts as absent. A full disk or a folder that cannot be written costs
    the cache, not the training: one line, then no more writes.
    """

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self._folder = folder
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._writes = 0
        self._usable = True

    def get(self, key: str) -> Any | None:
        path = self._path(key)
        try:
            data = path.read_bytes()
            checksum, body = data[:4], data[4:]
            if zlib.crc32(body).to_bytes(4, "big") != checksum:
                raise ValueError("checksum")
            stored = json.loads(zlib.decompress(body))
            if stored["key"] != key:
                return None
            os.utime(path)  # the sweep looks at it
            return stored["value"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, zlib.error):
            with contextlib.suppress(OSError):
                path.unlink()
            return None

    def put(self, key: str, value: Any) -> None:
        if not self._usable:
            return
        path = self._path(key)
        body = zlib.compress(json.dumps({"key": key, "value": value}).encode(), 1)
        try:
            write_bytes(path, zlib.crc32(body).to_bytes(4, "big") + body, durable=False)
        except OSError as error:
            self._usable = False
            log.warning(
                "The cache of pages %s cannot be written (%s), so every page is fetched anew: make "
                "room or give --data.cache_dir",
                self._folder,
                error.strerror,
            )
            return
        with self._lock:
            self._writes += 1
            due = self._writes % _SWEEP_EVERY == 1
        if due:
            self.sweep()

    def sweep(self) -> None:
        """Delete down to nine tenths of the bound, oldest use first."""
        files = []
        for path in self._folder.glob("??/*"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                files.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in files)
        if total <= self._limit:
            return
        for _, size, path in sorted(files):
            if total <= self._limit * 0.9:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()
        return self._folder / name[:2] / name[2:34]
