"""Run the data workers of one rank: assign blocks, and replace workers that end.

A worker may end for its own reasons (no memory, a kill) or because of a block. Its blocks go to the
worker that replaces it; a block that ends three workers in a row is left out.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

from distributed_training.common.backoff import Backoff

from .block_builder import Failure, Prepared, WorkerSpec
from .worker import DataWorker

log = logging.getLogger(__name__)

_FIRST_WAIT, _LONGEST_WAIT = timedelta(seconds=2), timedelta(seconds=60)
_MOST_BLAMED = 2  # workers that may end over one block


class WorkerPool:
    """``count`` workers. Not thread-safe; nothing here waits for a worker."""

    def __init__(self, spec: WorkerSpec, *, count: int) -> None:
        self._spec = spec
        self._workers = [DataWorker(spec) for _ in range(count)]
        self._backoff = Backoff(first=_FIRST_WAIT, longest=_LONGEST_WAIT)
        self._blamed: Counter[int] = Counter()  # block: workers that ended over it
        self._retry_at = 0.0
        self.restarts = 0

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def submit(self, block: int) -> None:
        """Give ``block`` to the worker with the least to do."""
        worker = min(self._workers, key=lambda w: len(w.blocks))
        with contextlib.suppress(OSError):  # it is gone; seen and replaced by answers()
            worker.submit(block)

    def answers(self) -> Iterator[Prepared | Failure]:
        """Yield the answers since the last call. Workers that ended are replaced."""
        for index, worker in enumerate(self._workers):
            try:
                arrived = worker.answers()
            except (EOFError, OSError):
                yield from self._replace(index)
                continue
            for answer in arrived:
                if isinstance(answer, Prepared):
                    self._backoff.succeeded()
                self._blamed.pop(answer.block, None)
                yield answer

    def _replace(self, index: int) -> Iterator[Failure]:
        now = time.monotonic()
        if now < self._retry_at:
            return
        # For all workers together: what ends one (no memory) would end the next.
        self._retry_at = now + self._backoff.failed().total_seconds()
        self.restarts += 1
        dead = self._workers[index]
        try:
            self._workers[index] = DataWorker(self._spec)
        except OSError as error:  # no memory, no process or no descriptor left
            log.warning("A data worker ended and could not be started again yet: %s", error)
            return
        log.warning("A data worker ended unexpectedly and is started again")
        # Only now: without a successor it keeps its place in the list, and its blocks.
        dead.close()
        # The first was under way; those behind it had not begun.
        self._blamed.update(dead.blocks[:1])
        for block in dead.blocks:
            if self._blamed[block] > _MOST_BLAMED and block == dead.blocks[0]:
                log.warning("Block %d ends the data worker again and again: it is left out", block)
                del self._blamed[block]
                yield Failure(block, "it ended the data worker")
            else:
                self.submit(block)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
