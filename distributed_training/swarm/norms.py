"""The norms of the last averages, kept across restarts."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import deque
from pathlib import Path

_KEPT = 5


class PastNorms:
    """At most five, oldest first, of the swarm named ``run_id``; another swarm's do not count.

    A file that cannot be read or written costs the memory of past rounds, never a round.
    """

    def __init__(self, path: Path, *, run_id: str) -> None:
        self._path = path
        self._run_id = run_id
        self._norms: deque[float] = deque(self._read(), maxlen=_KEPT)

    def _read(self) -> list[float]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(self._path.read_bytes())
            norms = [float(norm) for norm in kept["norms"]]
            if kept["run_id"] == self._run_id and all(math.isfinite(norm) for norm in norms):
                return norms
        return []

    def __call__(self) -> tuple[float, ...]:
        return tuple(self._norms)

    def add(self, norm: float) -> None:
        """NaN and Inf are no measure and are left out."""
        if not math.isfinite(norm):
            return
        self._norms.append(norm)
        aside = self._path.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            aside.write_text(json.dumps({"run_id": self._run_id, "norms": list(self._norms)}))
            os.replace(aside, self._path)
