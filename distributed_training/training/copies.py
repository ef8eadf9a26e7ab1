"""Copy one boundary's weights and moments to host memory, and write files from them.

Weights and moments are copied during the next step's micro-batches; only the optimizer step waits
for the copies. On each rank a thread writes the files. It uses no collectives, because training
continues with its own. All ranks of a member share one file system, so each writes its rows to
their place in one file.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from distributed_training.common.files import atomic_file

from .collectives import ParameterShard, Piece, enter_thread, fill_host, queued

log = logging.getLogger(__name__)

_NAMES = {
    torch.float32: "F32", torch.int64: "I64", torch.int16: "I16", torch.uint8: "U8",
    torch.bfloat16: "BF16", torch.float16: "F16",
}  # fmt: skip


def write_safetensors(
    path: Path,
    entries: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    tensors: Iterable[Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write the CPU ``tensors`` one after another, durably; return the file's SHA-256.

    The format is the public one: the header's size in eight little-endian bytes, a JSON header,
    and the raw data.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in entries:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    # In this format the data start at a multiple of 8.
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(header)
    with atomic_file(path) as handle:
        handle.write(header)
        for tensor in tensors:
            # View the bytes without a copy.
            array: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
            digest.update(memoryview(array))
            handle.write(memoryview(array))
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class BoundaryCopies:
    """Copies in host memory of the weights and the optimizer's ``state`` at one step boundary.

    With AdamW they take 12 bytes per parameter. Nothing may change them. Weights that are one row
    of a file are copied immediately, all other values by the time :meth:`wait` returns. A writer
    adds an event to ``writers``, and sets it once it has written the copies and dropped them.
    """

    weights: list[Tensor]
    state: dict[str, list[Tensor]]  # the copies that were requested, by name
    copying: list[BackgroundWrite] = field(default_factory=list)
    writers: list[threading.Event] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until all values are copied. Raises RuntimeError if they could not be copied."""
        for each in self.copying:
            each.join()
            if each.error is not None:
                raise RuntimeError(f"the data to write was not copied: {each.error}")


class Stepped(Protocol):
    """An inner optimizer: the state rows it keeps, by name, and how many steps it has taken."""

    @property
    def state(self) -> Mapping[str, list[Tensor]]: ...

    @property
    def step_count(self) -> int: ...


class BoundaryCopier:
    """Makes :class:`BoundaryCopies` of one boundary at a time, to bound host memory.

    An upload and a checkpoint at the same boundary share them. Weights and state do not change
    until the next optimizer step, so they are copied during its micro-batches; code that changes
    them calls :meth:`finish` first. While copies of an earlier boundary are still being written,
    training waits up to ``patience`` seconds for them. Only the training thread calls these
    methods.
    """

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        optimizer: Stepped,
        *,
        patience: float = 120.0,
    ) -> None:
        self._shards, self._optimizer, self._patience = shards, optimizer, patience
        # Only the writers hold the copies, so that the memory is freed afterwards.
        self._last: Callable[[], BoundaryCopies | None] = lambda: None
        self._boundary: tuple[int, ...] = ()
        self._copying: list[BackgroundWrite] = []  # threads that fill the last copies
        self._writers: list[threading.Event] = []  # set once the last copies are written

    def copy_boundary(self, names: Collection[str] | None = None) -> BoundaryCopies:
        """Copy the current weights and optimizer state, unless this boundary was already copied.

        ``names``: which parts of the optimizer's state to copy; None: all of it.
        """
        wanted = {
            name: rows
            for name, rows in self._optimizer.state.items()
            if names is None or name in names
        }
        # These counters change whenever the values do: torch counts the writes to a tensor, and the
        # step count covers fused AdamW, whose writes torch does not count.
        moments = chain.from_iterable(self._optimizer.state.values())
        tensors = (*(shard.local for shard in self._shards), *moments)
        boundary = (self._optimizer.step_count, *(tensor._version for tensor in tensors))
        made = self._last()
        pairs: list[Piece] = []
        if made is None or boundary != self._boundary:
            made = None  # free the earlier copies before making new ones
            self.wait()
            made = BoundaryCopies([shard.empty_rows() for shard in self._shards], {})
            pairs = [(s.local, into) for s, into in zip(self._shards, made.weights, strict=True)]
            # Copy these now, since the ranks encode them together at this boundary.
            first = [shard.is_one_row for shard in self._shards]
            fill_host([pair for pair, now in zip(pairs, first, strict=True) if now])
            pairs = [pair for pair, now in zip(pairs, first, strict=True) if not now]
            self._last, self._boundary = weakref.ref(made), boundary
            self._copying, self._writers = made.copying, made.writers
        # Add to the same object: an earlier caller that asked for less may still hold it. Add all
        # or nothing: memory may run out here, and whatever is in the object counts as copied.
        new = {
            name: [torch.empty(each.shape) for each in rows]
            for name, rows in wanted.items()
            if name not in made.state
        }
        device = self._shards[0].local.device
        # Record the event now, so that the copy does not wait for work that the next micro-batches
        # queue. If the GPU is lost, this raises before anything counts as copied or as started.
        after = queued(device)
        made.state.update(new)
        for name, rows in new.items():
            pairs += zip(wanted[name], rows, strict=True)
        if pairs:
            copying = BackgroundWrite("copies")
            made.copying.append(copying)
            copying.start(partial(_copy, made, pairs, after, device))
        return made

    def finish(self) -> None:
        """Wait until weights and state are copied; afterwards they may change."""
        for copying in self._copying:
            copying.join()

    def wait(self) -> None:
        """Wait until no thread is writing earlier copies: a round needs the same memory."""
        self.finish()
        deadline = time.monotonic() + self._patience
        if not all(each.wait(max(0.0, deadline - time.monotonic())) for each in self._writers):
            log.warning(
                "An upload or checkpoint is still being written after %.0f s, so training "
                "continues with copies of two boundaries in host memory: use a faster disk for "
                "--neuron.run_folder",
                self._patience,
            )
            self._writers = []  # warn only once about each of them


def _copy(
    held: BoundaryCopies,
    pairs: Sequence[Piece],
    after: torch.cuda.Event | None,
    device: torch.device,
    _: BackgroundWrite,
) -> None:
    """Fill ``held`` in a thread, which keeps it alive until it is complete."""
    enter_thread(device)
    fill_host(pairs, after)


class BackgroundWrite:
    """A job in which this rank writes files, in a thread alongside training.

    ``of``: one word for what is written. ``daemon``: whether the process may exit meanwhile.
    """

    def __init__(self, of: str, *, daemon: bool = False) -> None:
        self._of, self._daemon = of, daemon
        self.error: BaseException | None = None  # the error with which writing ended, if any
        self.ended = threading.Event()

    def start(self, write: Callable[[Self], None]) -> None:
        try:
            threading.Thread(
                target=self._run, args=(write,), name=self._of, daemon=self._daemon
            ).start()
        except RuntimeError:
            # The machine cannot start another thread. Let training wait instead, because one rank
            # must not end without the others.
            self._run(write)

    def _run(self, write: Callable[[Self], None]) -> None:
        try:
            write(self)
        except BaseException as error:  # noqa: BLE001 - this is a thread: kept in ``error``
            # Drop the traceback, since its frames hold the copies.
            self.error = error.with_traceback(None)
            error.__context__ = error.__cause__ = None
        finally:
            del write
            if self.error is not None:
                # In Python 3.11.2 an error that passes through a @contextmanager becomes a cycle.
                gc.collect()
            self.ended.set()

    def done(self) -> bool:
        """Return True once all of this rank's files exist or writing has failed (see ``error``)."""
        return self.ended.is_set()

    def join(self) -> None:
        """Wait until this rank's part is done (rank 0: also the other ranks' parts)."""
        self.ended.wait()
