"""Sequences that are never trained on: what a gradient about to be published is tried on."""

from __future__ import annotations

import logging
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
            kept = np.load(self._path, allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        return kept[:count] if len(kept) >= count else None

    def keep(self, sequences: np.ndarray[Any, Any]) -> None:
        """A full disk costs a line, and others are set aside after a restart."""
        try:
            with atomic_file(self._path, durable=False) as file:
                np.save(file, sequences)
        except OSError as error:
            log.warning("What is held back from training could not be kept on disk: %s", error)
