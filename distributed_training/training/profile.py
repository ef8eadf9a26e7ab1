"""A torch profiler trace of a few inner steps, taken without stopping the miner."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class StepProfiler:
    """Records ``steps`` inner steps after the first ``start``; writes ``profile-rank-R.json``
    (Chrome trace) into ``folder``. ``steps`` 0: nothing at all."""

    def __init__(self, *, steps: int, start: int, rank: int, folder: Path | None = None) -> None:
        self._steps, self._start, self._rank = steps, start, rank
        self._folder = folder or Path.cwd()
        self._seen = 0
        self._profiler: Any = None
        if steps > 0 and start == 0:
            self._begin()

    def step(self) -> None:
        """An inner step is complete."""
        if self._steps <= 0:
            return
        self._seen += 1
        if self._seen == self._start:
            self._begin()
        elif self._profiler is not None and self._seen == self._start + self._steps:
            self._profiler.stop()
            path = self._folder / f"profile-rank-{self._rank}.json"
            self._profiler.export_chrome_trace(str(path))
            self._profiler = None
            log.info("Profile of %d inner steps written to %s", self._steps, path)

    def _begin(self) -> None:
        from torch.profiler import profile

        self._profiler = profile()  # all activities this build supports
        self._profiler.start()
