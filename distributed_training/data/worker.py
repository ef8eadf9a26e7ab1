"""A data worker: a process of its own that prepares blocks, and the rank's end of it.

``python -m distributed_training.data.worker FD``: the rank sends a :class:`WorkerSpec`, then block
numbers, over a socket pair; answers are :class:`~.block_builder.Prepared`. It is started as a plain
program because ``multiprocessing``'s spawn would import the rank's program, torch included, and
because a worker must end with its rank however that ends: it does when the socket closes.
"""

from __future__ import annotations

import contextlib
import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

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

    @property
    def pid(self) -> int:
        return self._process.pid

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
