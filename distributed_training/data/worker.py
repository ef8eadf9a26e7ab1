"""Data workers: processes that prepare blocks, and the rank's end of them.

``python -m distributed_training.data.worker FD``: the rank sends a :class:`WorkerSpec`, then block
numbers, over a socket pair; answers are :class:`~.block_builder.Prepared`. It is started as a plain
program because ``multiprocessing``'s spawn would import the rank's program, torch included, and
because a worker must end with its rank however that ends: it does when the socket closes.

A worker may end for its own reasons (no memory, a kill) or because of a block. Its blocks go to the
worker that replaces it; a block that ends three workers in a row is left out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial

from distributed_training.common.backoff import Backoff
from distributed_training.common.processes import (
    Parent,
    Said,
    start_child,
    wait_or_kill,
    write_stacks_on_signal,
)

from .block_builder import BlockMaker, Failure, Prepared, WorkerSpec

log = logging.getLogger(__name__)

_NICENESS = 5  # training goes first
_FIRST_WAIT, _LONGEST_WAIT = timedelta(seconds=2), timedelta(seconds=60)
_MOST_BLAMED = 2  # workers that may end over one block


class DataWorker:
    """The rank's end. Never blocks: what the worker has to say waits until it is asked for."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._process, self._connection = start_child(
            __name__,
            keep={"HF_TOKEN"},
            start_new_session=True,  # a Ctrl-C in the terminal is the rank's to handle
        )
        self.blocks: list[int] = []  # under way, in order
        self._connection.send(spec)

    def submit(self, block: int) -> None:
        """Send a block to the worker. Raises OSError when the worker is gone."""
        self.blocks.append(block)
        self._connection.send(block)

    def answers(self) -> list[Prepared | Failure]:
        """Return the answers since the last call.

        Raises EOFError or OSError when the worker is gone and all its messages were read.
        """
        found: list[Prepared | Failure] = []
        try:
            while self._connection.poll():
                answer = self._connection.recv()
                if isinstance(answer, Said):
                    log.log(answer.level, "%s", answer.text)
                    continue
                if answer.block in self.blocks:
                    self.blocks.remove(answer.block)
                found.append(answer)
        except (EOFError, OSError):
            # Answers that came before its end are whole: they are taken first.
            if not found:
                raise  # it comes again at the next call
        return found

    def close(self) -> None:
        """Close the socket, at which the worker ends by itself; wait for that, but not long."""
        self._connection.close()
        wait_or_kill(self._process, 3)


class WorkerPool:
    """``count`` workers. Not thread-safe; nothing here waits for a worker."""

    def __init__(self, spec: WorkerSpec, *, count: int) -> None:
        self._spec = spec
        self._workers = [DataWorker(spec) for _ in range(count)]
        self._backoff = Backoff(first=_FIRST_WAIT, longest=_LONGEST_WAIT)
        self._blamed: Counter[int] = Counter()  # block: workers that ended over it
        self._retry_at = 0.0
        self.restarts = 0

    def submit(self, block: int) -> None:
        """Give ``block`` to the worker with the least to do."""
        # By what is under way, not in turn: a worker may hang in one slow page.
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


# --- in the process of its own ------------------------------------------------------------------


def _run(parent: Parent) -> None:
    spec: WorkerSpec = parent.receive()
    parent.take_log()
    logging.getLogger().setLevel(logging.WARNING)
    maker: BlockMaker | None = None

    def prepare(block: int) -> Prepared:
        nonlocal maker
        maker = maker or BlockMaker(spec)  # at each block again: what is in the way may pass
        return maker.prepare(block)

    def tell(block: int, prepared: Future[Prepared]) -> None:
        error = prepared.exception()  # whatever it is, it must not end the worker
        failed = f"{type(error).__name__}: {error}"
        parent.send(prepared.result() if error is None else Failure(block, failed))

    # One thread: the tokenizer is not for several. This one goes on receiving, so that the worker
    # ends at once when the socket closes.
    pool = ThreadPoolExecutor(1)
    while True:
        block = parent.receive()
        pool.submit(prepare, block).add_done_callback(partial(tell, block))


def main() -> None:
    os.nice(_NICENESS)
    write_stacks_on_signal()
    with contextlib.suppress(EOFError, OSError):  # the rank is gone
        _run(Parent())
    os._exit(0)  # without waiting for requests under way


if __name__ == "__main__":
    main()
