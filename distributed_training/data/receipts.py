"""Receipts: what was trained on, block by block, for previews and audits.

One line of JSON per served block, appended when the next block begins: the block, the pages its
tokens came from, how many sequences were served and the SHA-256 of exactly those tokens (as
little-endian uint32, in the order they were served).
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from distributed_training.common.files import rotated

log = logging.getLogger(__name__)

_LIMIT_BYTES = 16 * 2**20


class Receipts:
    """The receipts of one rank in ``path``; the file before the last turn is ``path.1``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._usable = True

    def add(self, **fields: Any) -> None:
        if not self._usable:
            return
        line = json.dumps({**fields, "at": round(time.time(), 3)}) + "\n"
        try:
            if self._path.exists() and self._path.stat().st_size > _LIMIT_BYTES:
                self._path.replace(rotated(self._path))
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            self._usable = False
            log.warning(
                "Receipts of trained blocks cannot be written to %s (%s); training goes on without",
                self._path,
                error.strerror,
            )
