"""Prepare a rank's blocks ahead of time in worker processes, and return batches from them.

A *block* is the next few pages that are assigned to a miner in an outer step, tokenized and cut
into sequences. Each rank gets the same number of pages. A block is requested before it is needed,
prepared by a worker process, and kept on the disk until it has been trained on, so that a restart
continues at the next sequence. When every rank has the next block, rank 0 begins it on all of them.

A worker may die because of a block, or for another reason such as a lack of memory. The worker that
replaces it gets its blocks. A block at which three workers have died is left out.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import queue
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from distributed_training.common.backoff import Repeats, Throttle
from distributed_training.common.files import FULL
from distributed_training.common.memory import MOST_WORKERS
from distributed_training.common.processes import ChildProcess

from . import block_builder
from .block_builder import SUFFIX, Failure, Prepared, WorkerSpec, read_block
from .own_text import units_of_block
from .sources import check_folder

log = logging.getLogger(__name__)


_LEAST_AHEAD, _MOST_AHEAD = 2, 8  # blocks that are prepared ahead; more if the source is slow
_KEPT_FILES = 16  # prepared blocks of this rank that are kept on the disk
_SLOW_LINE_EVERY = 600.0
_TIMED_LEAST = 3  # blocks to time before speeds are compared, because the start distorts them
#: If preparing a block takes more than this fraction of its training time, another worker starts.
_NARROW = 0.8
_MOST_BLAMED = 2  # workers that may die at a block; if one more dies, the block is left out


class DataWorker:
    """A worker as its rank sees it. Nothing here waits for the worker.

    If a worker dies, another one is started and gets the blocks that were not finished. If several
    workers die at the same block, the answer for that block is a :class:`Failure`.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        # The blocks without an answer in the order of their requests, each with its place.
        self.blocks: dict[int, int | None] = {}
        self._arrived: queue.SimpleQueue[Prepared | Failure] = queue.SimpleQueue()
        self._blamed: Counter[int] = Counter()  # block -> number of workers that died at it
        self.child = ChildProcess(
            "A data worker",
            block_builder.__name__,
            begin=self._begin,
            receive=self._receive,
            effect="its blocks are prepared again",
            keep={"HF_TOKEN"},
        )
        self.child.start()

    def submit(self, block: int, place: int | None = None) -> None:
        """Request ``block``, which begins at ``place`` if it is made of own text."""
        with self.child.lock:
            self.blocks[block] = place
            self.child.send((block, place))

    def answers(self) -> Iterator[Prepared | Failure]:
        """Yield the answers since the last call."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._arrived.get_nowait()

    def _begin(self) -> None:
        if self.child.starts > 1 and self.blocks:
            # Only the first block was being prepared; the others were still waiting.
            block = next(iter(self.blocks))
            self._blamed[block] += 1
            if self._blamed[block] > _MOST_BLAMED:
                log.warning("Block %d ends the data worker again and again: it is left out", block)
                self._receive(Failure(block, "it ended the data worker"))
        self.child.send(self._spec)
        for under_way in self.blocks.items():
            self.child.send(under_way)

    def _receive(self, answer: Prepared | Failure) -> None:
        with self.child.lock:
            # Remove the block now, so that it is not prepared again if this worker dies.
            self.blocks.pop(answer.block, None)
            self._blamed.pop(answer.block, None)
        self._arrived.put(answer)


class DataPipeline:
    """Turns the blocks that the loop requests into batches.

    It is not thread-safe, so only the loop's thread may call it. Nothing here waits for a source:
    :meth:`ready` returns None until a block is prepared. ``spec`` says what this rank reads, and
    where prepared blocks and fetched pages are kept across restarts. If ``device`` is a CUDA
    device, batches are in pinned memory, so that copying them to the device does not block.

    Raises ConfigError if ``--data.source`` names something that is not a folder.
    """

    def __init__(
        self, spec: WorkerSpec, *, micro_batch_size: int, device: torch.device | None = None
    ) -> None:
        settings = spec.settings
        check_folder(settings.spec)
        self._spec = spec
        self._settings = settings
        self._micro_batch_size = micro_batch_size
        # The tokens (sequences, sequence_length) of each block, or None while it is being prepared,
        # in the order of the requests.
        self._blocks: dict[int, np.ndarray[Any, Any] | None] = {}
        self._nothing = np.zeros((0, spec.sequence_length), dtype=np.uint16)
        # The place in the own text at which each block begins, and the place for the next block.
        self._places: dict[int, int] = {}
        self._next_place = 0
        self._returned: list[int] = []  # places of blocks that could not be prepared
        self._passes_over = False  # whether the next block, but only that one, skips those places
        # The block that is trained on, and the position in it.
        self._current = 0
        self._sequences = 0  # how many of its sequences are trained on
        self._offset = 0
        # Moving averages of the seconds that it takes to prepare a block and to train on it.
        self._prepare_seconds = 0.0
        self._train_seconds = 0.0
        self._timed = 0  # blocks that were trained on from beginning to end
        self._begun_at: float | None = None
        # The number of batches from the current block, and the time of the last of them.
        self._served, self._served_at = 0, 0.0
        self._missed = 0.0  # seconds without anything to train on since the last batch
        self.wait_seconds = 0.0  # seconds without anything to train on before the last batch
        self._slow_line = Throttle(_SLOW_LINE_EVERY)
        self._counts: Counter[str] = Counter()
        self._full_disk = Repeats(_SLOW_LINE_EVERY)
        self._block_folder = spec.blocks
        self._block_folder.mkdir(parents=True, exist_ok=True)
        for other in self._block_folder.parent.glob(f"rank{spec.rank}-*"):
            if other != self._block_folder:  # it was made with other settings
                shutil.rmtree(other, ignore_errors=True)
        # A worker that was killed while it wrote a file has left a temporary file behind.
        for left in self._block_folder.glob(".*.tmp"):
            left.unlink(missing_ok=True)
        self._pinned = device is not None and device.type == "cuda"
        # Start the workers after the files of earlier ones were removed, since they write at once.
        count = 1 if settings.workers == "auto" else settings.workers
        self._workers = [DataWorker(spec) for _ in range(count)]

    # --- blocks ahead --------------------------------------------------------------------------

    def gather_blocks(self) -> None:
        """Receive what the workers have prepared. The loop calls this at each boundary."""
        for worker in self._workers:
            for answer in worker.answers():
                self._receive(answer)

    def request(self, block: int) -> None:
        """Have ``block`` prepared, unless that is done or in progress. Return at once."""
        # A block that was empty at an earlier request may have text now.
        if self._blocks.get(block, self._nothing) is not self._nothing:
            return
        self._blocks.pop(block, None)
        self._blocks[block] = None
        # Choose the worker with the fewest blocks, since some worker may wait for a slow page.
        worker = min(self._workers, key=lambda worker: len(worker.blocks))
        worker.submit(block, self._place(block) if self._settings.own else None)

    def _place(self, block: int) -> int:
        """Return where ``block`` begins in the own text, and choose that place for a new block."""
        if block not in self._places:
            # Do not use a place again at once, since text on a bad sector would block all the rest.
            if self._returned and not self._passes_over:
                self._places[block] = self._returned.pop(0)
            else:
                self._places[block] = self._next_place
                units, _ = units_of_block(self._settings, self._spec.sequence_length)
                self._next_place += units * self._spec.world_size
            self._passes_over = False
        return self._places[block]

    def ready(self, block: int) -> int | None:
        """Return how many sequences this rank has of ``block``.

        It is None while the block is being prepared, and 0 if it could not be prepared.
        """
        if self._blocks.get(block) is None:
            self.gather_blocks()
        held = self._blocks.get(block)
        return None if held is None else len(held)

    def _receive(self, answer: Prepared | Failure) -> None:
        if isinstance(answer, Failure):
            full = any(os.strerror(number) in answer.line for number in FULL)
            if (again := self._full_disk() if full else "") is not None:
                log.warning(
                    "Block %d could not be prepared: %s%s", answer.block, answer.line, again
                )
            self._counts["blocks_failed"] += 1
            self._blocks[answer.block] = self._nothing
            if answer.block in self._places:  # a later block gets the place, so no text is lost
                self._returned.append(self._places.pop(answer.block))
                self._passes_over = True
            return
        self._counts.update(answer.counts)
        for problem in answer.missing:
            log.warning("A page of block %d is left out: %s", answer.block, problem)
        if not answer.kept:
            self._prepare_seconds = _mean(self._prepare_seconds, answer.seconds)
        held = self._nothing
        if answer.sequences:
            try:
                held, _ = read_block(answer.path)
            except (OSError, ValueError) as error:
                log.warning("Block %d is left out: %s", answer.block, error)
                self._counts["blocks_failed"] += 1
        self._blocks[answer.block] = held

    # --- the block in training -----------------------------------------------------------------

    def begin(self, block: int, sequences: int, start: int = 0) -> None:
        """Serve the first ``sequences`` sequences of ``block``, beginning with number ``start``.

        ``start`` is the position of a checkpoint's cursor; it must be the same on all ranks.
        Raises KeyError if the block was not requested, ValueError if it has fewer sequences.
        """
        held = self._blocks[block]
        have = 0 if held is None else len(held)
        if not 0 < sequences <= have:
            raise ValueError(f"block {block} has {have} sequences, {sequences} were ordered")
        now = time.monotonic()
        if self._begun_at is not None and self._served > 1:
            # Measure up to the last batch rather than up to now, because training may have had to
            # wait for this block.
            seconds = (self._served_at - self._begun_at) * self._served / (self._served - 1)
            self._train_seconds = _mean(self._train_seconds, seconds)
            self._timed += 1
        self._begun_at, self._served = now, 0
        self._current, self._sequences = block, sequences
        self._offset = start
        # All blocks that were requested earlier were trained on or were empty.
        for earlier in [*itertools.takewhile(lambda each: each != block, self._blocks)]:
            del self._blocks[earlier]
        with contextlib.suppress(OSError):  # the disk may be unavailable or read-only
            files = sorted(self._block_folder.glob(f"*{SUFFIX}"), key=lambda p: p.stat().st_mtime)
            for path in files[:-_KEPT_FILES]:
                number = path.name.removesuffix(SUFFIX)
                if not number.isdigit() or int(number) not in self._blocks:
                    path.unlink(missing_ok=True)
        if self._timed >= _TIMED_LEAST:
            self._compare_speeds()

    def _compare_speeds(self) -> None:
        """Start one more worker, or warn, if preparing blocks is slower than training on them."""
        per_worker = self._prepare_seconds / len(self._workers)
        may_grow = self._settings.workers == "auto" and len(self._workers) < MOST_WORKERS
        if may_grow and per_worker > _NARROW * self._train_seconds:
            self._workers.append(DataWorker(self._spec))
            self._timed = 0  # measure again, since there is one more worker
            log.info(
                "Data: a block is prepared in %.1f s and trained on in %.1f s, so this rank has %d "
                "workers from here on",
                per_worker,
                self._train_seconds,
                len(self._workers),
            )
        elif per_worker > self._train_seconds and self._slow_line():
            log.warning(
                "Preparing data is slower (%.1f s per block) than training on it (%.1f s), "
                "so training will wait: raise --data.workers, and see docs/data.md",
                per_worker,
                self._train_seconds,
            )

    def next(self) -> torch.Tensor | None:
        """Return the next batch, int64 (micro-batch, sequence); None when the block is used up.

        Sequences at the end that do not fill a micro-batch are dropped.
        """
        started = time.perf_counter()
        held = self._blocks.get(self._current)
        end = self._offset + self._micro_batch_size
        if held is None or end > self._sequences:
            return None
        batch = torch.from_numpy(held[self._offset : end].astype(np.int64))
        if self._pinned:
            batch = batch.pin_memory()
        self.wait_seconds = self._missed + time.perf_counter() - started
        self._missed = 0.0
        self._offset = end
        self._served += 1
        self._counts["sequences_served"] += self._micro_batch_size
        self._served_at = time.monotonic()
        return batch

    def missed(self, seconds: float) -> None:
        """Add time in which the loop had nothing to train on to the wait for the next batch."""
        if self._served_at:  # a wait before the first batch is part of the start
            self._missed += seconds

    # --- position ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as values that JSON supports.

        The next sequence is number ``offset`` of block ``page_block``, of which only the first
        ``sequences`` sequences are used.
        """
        position: dict[str, Any] = {
            "page_block": self._current,
            "sequences": self._sequences,
            "offset": self._offset,
        }
        if self._settings.own:
            self._places = {b: at for b, at in self._places.items() if b in self._blocks}
            position["next"], position["returned"] = self._next_place, [*self._returned]
            position["places"] = sorted(self._places.items())
        return position

    def load_state_dict(self, cursor: dict[str, Any]) -> None:
        """Request the block that a checkpoint's :meth:`state_dict` names.

        The loop then begins it with ``start=cursor["offset"]``. The block has the same tokens as
        before, because prepared blocks stay on the disk.
        """
        self._next_place = int(cursor.get("next", 0))
        self._returned = [int(place) for place in cursor.get("returned", [])]
        self._places = {int(number): int(at) for number, at in cursor.get("places", [])}
        if block := int(cursor.get("page_block", 0)):
            self.request(block)

    # --- what was done -------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Return the counts since the start, such as pages, failures and rows left out, by name."""
        restarts = sum(worker.child.starts - 1 for worker in self._workers)
        return {**self._counts, "worker_restarts": restarts}

    @property
    def depth(self) -> int:
        """The number of blocks to request ahead of time.

        It is larger if preparing a block takes long compared with training on it.
        """
        if (fixed := self._settings.prefetch_blocks) != "auto":
            return fixed
        if not self._train_seconds:
            return _LEAST_AHEAD
        needed = math.ceil(self._prepare_seconds / self._train_seconds) + 1
        return max(_LEAST_AHEAD, min(_MOST_AHEAD, needed))

    def close(self) -> None:
        """End the workers. Batches that were returned stay valid."""
        for worker in self._workers:
            worker.child.close(timeout=timedelta(seconds=3))
        self._blocks.clear()


def _mean(before: float, new: float) -> float:
    return new if not before else 0.7 * before + 0.3 * new
