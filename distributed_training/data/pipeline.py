"""One rank's data: blocks fetched and tokenized ahead in a worker process, batches handed out."""

from __future__ import annotations

import logging
from collections import OrderedDict
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distributed_training.config.data import DataSettings

from .corpus import StdlibSource
from .tokenizer import TextTokenizer
from .work import BlockTokens, WorkerSpec, block_tokens, start_worker

log = logging.getLogger(__name__)

_KEPT_BLOCKS = 4  # used blocks kept, to train on again should the source die


class DataPipeline:
    """Blocks in, batches out. Not thread-safe: the loop's thread calls.

    ``tokenizer_path`` and ``eos_id`` come from :func:`~.tokenizer.build_tokenizer`. Nothing here
    waits for a source: :meth:`ready` says None until a block is there.
    """

    def __init__(
        self,
        *,
        settings: DataSettings,
        uid: int,
        local_rank: int,
        sequence_length: int,
        micro_batch_size: int,
        tokenizer_path: Path,
        eos_id: int,
        pin_memory: bool = False,
    ) -> None:
        self._sequence_length = sequence_length
        self._micro_batch_size = micro_batch_size
        self._pin_memory = pin_memory
        self._spec = WorkerSpec(settings, uid, local_rank, tokenizer_path, eos_id)
        self._futures: dict[int, Future[BlockTokens]] = {}
        self._blocks: OrderedDict[int, np.ndarray[Any, Any]] = OrderedDict()
        self._current: tuple[int, int] = (0, 0)  # block, sequences served of it
        self._offset = 0
        self._pool = self._new_pool()

    def _new_pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            1, mp_context=get_context("spawn"), initializer=start_worker, initargs=(self._spec,)
        )

    def request(self, block: int) -> None:
        """Start fetching ``block``, unless it is here or under way. Returns at once."""
        if block in self._futures or block in self._blocks:
            return
        try:
            self._futures[block] = self._pool.submit(block_tokens, block)
        except BrokenProcessPool:
            log.warning("The data worker died and is started again")
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = self._new_pool()
            self._futures[block] = self._pool.submit(block_tokens, block)

    def ready(self, block: int) -> int | None:
        """Sequences of ``block`` on this rank; None while under way, 0 if it cannot be had."""
        if block in self._blocks:
            return len(self._blocks[block])
        future = self._futures.get(block)
        if future is None or not future.done():
            return None
        del self._futures[block]
        try:
            result = future.result()
        except (BrokenProcessPool, OSError, ValueError) as error:
            log.warning("Block %d could not be prepared: %r", block, error)
            tokens = np.zeros(0, dtype=np.int32)
        else:
            tokens = result.tokens
            for problem in result.missing:
                log.warning("A page of block %d is left out: %s", block, problem)
        count = len(tokens) // self._sequence_length
        sequences = tokens[: count * self._sequence_length]
        self._blocks[block] = sequences.reshape(count, self._sequence_length)
        return count

    def begin(self, block: int, sequences: int) -> None:
        """Serve the first ``sequences`` of ``block`` from now on.

        Raises KeyError if the block is not ready, ValueError if it has fewer sequences.
        """
        held = self._blocks[block]
        if sequences > len(held):
            raise ValueError(f"block {block} has {len(held)} sequences, {sequences} were ordered")
        self._blocks.move_to_end(block)
        self._current, self._offset = (block, sequences), 0
        while len(self._blocks) > _KEPT_BLOCKS + len(self._futures):
            oldest = next(iter(self._blocks))
            if oldest == block:
                break
            del self._blocks[oldest]

    def next(self) -> torch.Tensor | None:
        """int64 (micro-batch, sequence) on the CPU; None when the block is used up.

        A rest smaller than a micro-batch is dropped.
        """
        block, sequences = self._current
        end = self._offset + self._micro_batch_size
        if end > sequences:
            return None
        batch = torch.from_numpy(self._blocks[block][self._offset : end].astype(np.int64))
        self._offset = end
        return batch.pin_memory() if self._pin_memory else batch

    def cursor(self) -> dict[str, Any]:
        """Position as JSON-able values."""
        block, sequences = self._current
        return {"block": block, "sequences": sequences, "offset": self._offset}

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in list((self._pool._processes or {}).values()):
            process.terminate()  # a worker in a long request would keep the miner from ending


def held_out_batches(
    *, tokenizer_path: Path, eos_id: int, sequences: int, sequence_length: int
) -> torch.Tensor:
    """Held-out text of the local corpus, never part of a page: int64 (sequences, sequence_length).

    Raises ValueError when there is less text than asked for.
    """
    tokenizer = TextTokenizer(tokenizer_path, eos_id=eos_id)
    tokens = tokenizer.encode_rows(StdlibSource().held_out(), max_length=10**9)
    if len(tokens) < sequences * sequence_length:
        raise ValueError(
            f"held-out text has {len(tokens)} tokens, {sequences * sequence_length} are asked for"
        )
    # Spread over all held-out text rather than the first file.
    starts = np.linspace(0, len(tokens) - sequence_length, sequences).astype(np.int64)
    picked = np.stack([tokens[s : s + sequence_length] for s in starts])
    return torch.from_numpy(picked.astype(np.int64))
