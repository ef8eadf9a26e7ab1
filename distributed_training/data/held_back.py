"""Sequences that are never trained on: what a gradient about to be published is tried on."""

from __future__ import annotations

import logging
import tokenize
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from distributed_training.common.files import atomic_file

log = logging.getLogger(__name__)


class HeldBack:
    """Kept in ``path`` since they were first set aside, so that a restart holds back the same."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, count: int) -> np.ndarray[Any, Any] | None:
        """(count, sequence_length), or None where there are not so many."""
        try:
            # Mapped: a damaged header may tell of more sequences than there is memory.
            kept = np.load(self._path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError, OverflowError, SyntaxError):
            return None
        except (zipfile.BadZipFile, tokenize.TokenError):  # of what looks like another format
            return None
        if getattr(kept, "ndim", 0) != 2 or kept.dtype.kind not in "iu" or len(kept) < count:
            return None
        return np.array(kept[:count])

    def keep(self, sequences: np.ndarray[Any, Any]) -> None:
        """A full disk costs a line, and others are set aside after a restart."""
        try:
            with atomic_file(self._path, durable=False) as file:
                np.save(file, sequences)
        except OSError as error:
            log.warning("What is held back from training could not be kept on disk: %s", error)
