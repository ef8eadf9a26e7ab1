"""Copy one boundary's weights and moments to host memory, and write files from them meanwhile.

Weights and moments are copied during the next step's micro-batches; only its optimizer step waits
for that. A thread of each rank writes; it uses no collective, because training continues with its
own. All ranks of a member share one file system, so each writes its rows at their place in one
file.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import math
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
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


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    array: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


@dataclass(frozen=True)
class SafetensorsLayout:
    """The place of each tensor in a safetensors file, so that several ranks can write it at once.

    The format is the public one: eight bytes little-endian header size, a JSON header, raw data.
    """

    header: bytes
    offsets: dict[str, int]  # tensor -> offset of its first byte in the file
    size: int

    @classmethod
    def of(
        cls,
        entries: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> SafetensorsLayout:
        table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        position = 0
        starts: dict[str, int] = {}
        for name, dtype, shape in entries:
            size = math.prod(shape) * dtype.itemsize
            table[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [position, position + size],
            }
            starts[name] = position
            position += size
        text = json.dumps(table, separators=(",", ":")).encode()
        # The format wants the data to begin at a multiple of 8.
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return cls(header, {n: s + len(header) for n, s in starts.items()}, position + len(header))


def write_safetensors(
    path: Path,
    entries: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    tensors: Iterable[Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write ``tensors`` (CPU), one after another, durably; return the file's SHA-256."""
    layout = SafetensorsLayout.of(entries, metadata=metadata)
    digest = hashlib.sha256(layout.header)
    with atomic_file(path) as handle:
        handle.write(layout.header)
        for tensor in tensors:
            data = tensor_bytes(tensor)
            digest.update(data)
            handle.write(data)
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class BoundaryCopies:
    """Rows of weights and of the inner optimizer's ``state`` at one step boundary, in host memory.

    With AdamW all of them take 12 bytes per parameter. Nobody changes them. The values of the
    weights that are one row of a file are there at once, all others after :meth:`wait`.
    """

    weights: list[Tensor]
    state: dict[str, list[Tensor]]  # the copies that were asked for, by name
    copying: list[BackgroundWrite] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until all values are there. Raises RuntimeError where they could not be copied."""
        for each in self.copying:
            each.join()
            if each.error is not None:
                raise RuntimeError(f"what is to be written was not copied: {each.error}")


class Stepped(Protocol):
    """An inner optimizer: its rows of every parameter by name, and how many steps it has taken."""

    @property
    def state(self) -> Mapping[str, list[Tensor]]: ...

    @property
    def step_count(self) -> int: ...


class BoundaryCopier:
    """Takes :class:`BoundaryCopies` of one boundary at a time, to bound host memory.

    An upload and a checkpoint of the same boundary share them. Weights and state stay as they are
    until the next optimizer step, so they are copied during its micro-batches; code that changes
    them calls :meth:`finish` first. While copies of an earlier boundary are still being written,
    training waits up to ``patience`` seconds for them. A writer keeps the object until it is done.
    Only the training thread calls these methods.
    """

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        optimizer: Stepped,
        *,
        patience: float = 120.0,
    ) -> None:
        self._shards, self._optimizer, self._patience = shards, optimizer, patience
        self._last: weakref.ref[BoundaryCopies] | None = None
        self._boundary: tuple[int, ...] = ()
        self._under_way: list[BackgroundWrite] = []
        self._released = threading.Event()
        self._released.set()

    def copy_boundary(self, names: Collection[str] | None = None) -> BoundaryCopies:
        """Copy weights and the optimizer's state of now, unless that was done at this boundary.

        ``names``: the wanted parts of the optimizer's state; None: all of it.
        """
        wanted = {
            name: rows
            for name, rows in self._optimizer.state.items()
            if names is None or name in names
        }
        # Counters that change with the values: torch counts the writes to a tensor, but not those
        # of fused AdamW.
        moments = chain.from_iterable(self._optimizer.state.values())
        tensors = (*(shard.local for shard in self._shards), *moments)
        boundary = (self._optimizer.step_count, *(tensor._version for tensor in tensors))
        made = None if self._last is None else self._last()
        pairs: list[Piece] = []
        if made is None or boundary != self._boundary:
            # Drop this reference, or it would keep alive the copies whose end the next line awaits.
            del made
            self.wait()
            made = BoundaryCopies([shard.empty_rows() for shard in self._shards], {})
            pairs = [(s.local, into) for s, into in zip(self._shards, made.weights, strict=True)]
            # The ranks encode these together, at this boundary.
            first = [shard.is_one_row for shard in self._shards]
            fill_host([pair for pair, now in zip(pairs, first, strict=True) if now])
            pairs = [pair for pair, now in zip(pairs, first, strict=True) if not now]
            self._released = released = threading.Event()
            # The threads that write hold this object. When the last one lets go of it, the next
            # copies may be made.
            self._last = weakref.ref(made, lambda _: released.set())
            self._boundary = boundary
        # Add to the same object, which an earlier caller that asked for less may still hold. Add
        # all or none: memory may run out here, and whatever is in the object counts as copied.
        new = {
            name: [torch.empty(each.shape) for each in rows]
            for name, rows in wanted.items()
            if name not in made.state
        }
        device = self._shards[0].local.device
        # Record the event now, so that the copy does not wait for what the next micro-batches
        # queue. A lost GPU raises here, before anything counts as copied or as under way.
        after = queued(device)
        made.state.update(new)
        for name, rows in new.items():
            pairs += zip(wanted[name], rows, strict=True)
        if pairs:
            copying = BackgroundWrite("copies")
            made.copying.append(copying)
            self._under_way.append(copying)
            copying.start(partial(_copy, made, pairs, after, device))
        return made

    def finish(self) -> None:
        """Wait until weights and state are copied: from here on they may change."""
        for copying in self._under_way:
            copying.join()
        self._under_way.clear()

    def wait(self) -> None:
        """Wait until no thread writes earlier copies any more. A round needs the same memory."""
        self.finish()
        if not self._released.wait(self._patience):
            log.warning(
                "An upload or checkpoint is still being written after %.0f s, so training "
                "continues with copies of two boundaries in host memory: use a faster disk for "
                "--neuron.run_folder",
                self._patience,
            )
            self._released.set()  # the warning comes once for each of them


def _copy(
    held: BoundaryCopies,
    pairs: Sequence[Piece],
    after: torch.cuda.Event | None,
    device: torch.device,
    _: BackgroundWrite,
) -> None:
    """Fill ``held`` in a thread, which keeps it until it is complete."""
    enter_thread(device)
    fill_host(pairs, after)


#: How long rank 0 waits for the other ranks' parts of an upload.
PARTS_TIMEOUT = timedelta(minutes=10)


class BackgroundWrite:
    """The writing of files by this rank, in a thread next to training.

    ``of``: one word for what is written.
    """

    def __init__(self, of: str) -> None:
        self._of = of
        self.error: BaseException | None = None  # the error of the writing, once it has ended
        self._ended = threading.Event()
        self._cancelled = threading.Event()

    def start(self, write: Callable[[Self], None]) -> None:
        try:
            threading.Thread(target=self._run, args=(write,), name=self._of).start()
        except RuntimeError:
            # The machine has no thread left, so training waits: a single rank must not end.
            self._run(write)

    def _run(self, write: Callable[[Self], None]) -> None:
        try:
            write(self)
        except BaseException as error:  # noqa: BLE001 - in a thread: ``error`` has it
            # The handle keeps the error, and the error keeps its frames with the copies, for whose
            # end the next upload waits. So drop them from this frame.
            del write
            errors, seen = list[BaseException | None]([error]), set[int]()
            while errors:
                one = errors.pop()
                if one is not None and id(one) not in seen:
                    seen.add(id(one))
                    traceback.clear_frames(one.__traceback__)
                    # torch.save raises an error of its own, with the disk's error as its cause.
                    errors += [one.__context__, one.__cause__]
            del one
            gc.collect()  # Python 3.11.2 makes a cycle of an error that passes a @contextmanager
            self.error = error
        finally:
            self._ended.set()

    def done(self) -> bool:
        """Return True when this rank's files are all there, or writing failed (see ``error``)."""
        return self._ended.is_set()

    def join(self) -> None:
        """Wait until this rank's part is done (rank 0: also the other ranks' parts)."""
        self._ended.wait()

    def cancel(self) -> None:
        """Give up the writing, unless it is done. Returns when the thread has ended."""
        self._cancelled.set()
        self.join()

    def check(self) -> None:
        """Raise RuntimeError after :meth:`cancel`; the writing thread calls it now and then."""
        if self._cancelled.is_set():
            raise RuntimeError(f"the {self._of} was given up")

    def wait_for_parts(self, parts: Path, ranks: Iterable[int]) -> None:
        """Wait until each rank has its part ready.

        Raises RuntimeError where a rank failed, or after :meth:`cancel`, and TimeoutError.
        """
        deadline = time.monotonic() + PARTS_TIMEOUT.total_seconds()
        # Look at files and ask no rank, since a thread's collectives would mix with those of
        # training.
        for rank in ranks:
            ready = ready_file(parts, rank)
            while not ready.exists():
                self.check()
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"rank {rank} did not write its part of the {self._of} in time"
                    )
                time.sleep(0.01)
            if (error := json.loads(ready.read_text())["error"]) is not None:
                raise RuntimeError(
                    f"rank {rank} could not write its part of the {self._of}: {error}"
                )


def ready_file(parts: Path, rank: int) -> Path:
    return parts / f"rank-{rank}.ready.json"
