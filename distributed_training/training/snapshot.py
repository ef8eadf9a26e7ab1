"""A snapshot: what a miner uploads, of one step boundary, written during training.

Weights and moments are copied to host memory during the next step's micro-batches; only its
optimizer step waits for that. A thread of each rank writes; it uses no collective, since training
continues with its own. All ranks of a miner share one file system: each writes its rows of
``model.safetensors`` at their place in the one file, so no process holds the whole model. Files
appear under their names only when complete; ``rank-r.done.json`` of a rank comes after its files.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import math
import os
import shutil
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
from safetensors import safe_open
from torch import Tensor

from distributed_training.common.files import atomic_file, sync_folder, write_at, write_json
from distributed_training.protocol import keys
from distributed_training.protocol.compression import Code, Compression

from .collectives import Layout, ParameterShard, Piece, enter_thread, fill_host, queued
from .error_feedback import Direction

log = logging.getLogger(__name__)

_NAMES = {torch.float32: "F32", torch.int64: "I64", torch.int16: "I16", torch.uint8: "U8"}


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
    offsets: dict[str, int]  # of the first byte, from the start of the file
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
        # The data begin at a multiple of 8, as the format wants it.
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return cls(header, {n: s + len(header) for n, s in starts.items()}, position + len(header))


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write ``tensors`` (CPU) durably; returns the SHA-256, computed on the way."""
    entries = [(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    layout = SafetensorsLayout.of(entries)
    digest = hashlib.sha256(layout.header)
    with atomic_file(path) as handle:
        handle.write(layout.header)
        for tensor in tensors.values():
            data = tensor_bytes(tensor)
            digest.update(data)
            handle.write(data)
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class BoundaryCopies:
    """Rows of weights and of the inner optimizer's ``state`` at one step boundary, in host memory.

    With AdamW all of them take 12 bytes a parameter. Nobody changes them. The values of the
    weights' vectors are there at once, all others after :meth:`wait`.
    """

    weights: list[Tensor]
    state: dict[str, list[Tensor]]  # what was asked for, by name
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
    """Takes :class:`BoundaryCopies`; of one boundary at a time, or host memory would hold several.

    A snapshot and a checkpoint of the same boundary get the same ones. Weights and state stay as
    they are until the next optimizer step, so they are copied during its micro-batches; whoever
    changes them calls :meth:`finish` before. While copies of an earlier boundary are still being
    written, training waits up to ``patience`` seconds for them. Who writes keeps the object until
    he is done. For the training thread.
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

        ``names``: of the optimizer's state what is wanted; None: all of it.
        """
        wanted = {
            name: rows
            for name, rows in self._optimizer.state.items()
            if names is None or name in names
        }
        # Counters that change with the values. torch counts the writes to a tensor, except those of
        # fused AdamW.
        moments = chain.from_iterable(self._optimizer.state.values())
        tensors = (*(shard.local for shard in self._shards), *moments)
        boundary = (self._optimizer.step_count, *(tensor._version for tensor in tensors))
        made = None if self._last is None else self._last()
        pairs: list[Piece] = []
        if made is None or boundary != self._boundary:
            # This very reference would keep alive what is waited for.
            del made
            self.wait()
            made = BoundaryCopies([shard.empty_rows() for shard in self._shards], {})
            pairs = [(s.local, into) for s, into in zip(self._shards, made.weights, strict=True)]
            # The ranks encode vectors together, at this boundary.
            fill_host([pair for pair in pairs if pair[0].dim() == 1])
            pairs = [pair for pair in pairs if pair[0].dim() != 1]
            self._released = released = threading.Event()
            # Who writes holds the object. When the last one lets go of it, the next copies may be
            # made.
            self._last = weakref.ref(made, lambda _: released.set())
            self._boundary = boundary
        # Into the same object, which whoever copied less before may hold for longer. All of them or
        # none: memory may end here, and what is in it counts as copied.
        new = {
            name: [torch.empty(each.shape) for each in rows]
            for name, rows in wanted.items()
            if name not in made.state
        }
        device = self._shards[0].local.device
        # The event now: what the next micro-batches queue is no reason to wait. And before anything
        # counts as copied, or as under way: a GPU that is lost raises here.
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
                "A snapshot or checkpoint is still being written after %.0f s, so training "
                "continues with copies of two boundaries in host memory: use a faster disk for "
                "--neuron.run_folder",
                self._patience,
            )
            self._released.set()  # once for each


def _copy(
    held: BoundaryCopies,
    pairs: Sequence[Piece],
    after: torch.cuda.Event | None,
    device: torch.device,
    _: BackgroundWrite,
) -> None:
    """Fill what ``held`` has, which stays until it is whole, in a thread."""
    enter_thread(device)
    fill_host(pairs, after)


PARTS = ".parts"  # folder of what ranks hand to rank 0, in a snapshot's
#: Covers rank 0's wait for the other ranks' parts of a snapshot.
PARTS_TIMEOUT = timedelta(minutes=10)
_PIECE = 1 << 22  # elements that are summed up at once


@dataclass(frozen=True)
class SnapshotState:
    """The state that the training thread hands over, in host memory.

    Nothing in it changes any more.

    ``directions``: candidates for the upload; the first is written to ``gradients.pt``. Of a rank
    that is not on node 0 nothing is written: its node 0 peer writes the same. ``parts``: what is
    written. ``write_inner`` writes this rank's inner optimizer.
    """

    layout: Layout
    shards: Sequence[ParameterShard]
    copies: BoundaryCopies
    directions: Sequence[Direction]
    compression: Compression
    config: Mapping[str, Any]
    gradients_metadata: Mapping[str, Any]
    write_inner: Callable[[Path], None]
    parts: keys.Parts = "all"

    @property
    def rank(self) -> int:
        """Return this rank's number among those that hold one copy of the model."""
        return self.layout.shard


@dataclass(frozen=True)
class Epoch:
    """The weights a gradient is measured from, kept since a round may end before its check.

    ``start``: this rank's rows of the weights, in host memory; nothing changes them.
    """

    epoch_id: str
    start: Sequence[Tensor]
    learning_rate: float  # outer


class BackgroundWrite:
    """The writing of files by this rank, in a thread next to training.

    ``of``: what is written, in one word.
    """

    def __init__(self, of: str) -> None:
        self._of = of
        self.error: BaseException | None = None  # of the writing, once it is done
        self._ended = threading.Event()
        self._cancelled = threading.Event()

    def start(self, write: Callable[[Self], None]) -> None:
        try:
            threading.Thread(target=self._run, args=(write,), name=self._of).start()
        except RuntimeError:
            # The machine has no thread left. Training waits: a single rank must not end.
            self._run(write)

    def _run(self, write: Callable[[Self], None]) -> None:
        try:
            write(self)
        except BaseException as error:  # noqa: BLE001 - in a thread: ``error`` has it
            # The handle keeps the error, the error its frames, this one too, and they the copies,
            # which the next snapshot waits for.
            del write
            errors, seen = list[BaseException | None]([error]), set[int]()
            while errors:
                one = errors.pop()
                if one is not None and id(one) not in seen:
                    seen.add(id(one))
                    traceback.clear_frames(one.__traceback__)
                    errors += [one.__context__, one.__cause__]  # torch.save's has the disk's
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
        """Give it up, unless it is done. Returns when it has ended."""
        self._cancelled.set()
        self.join()

    def check(self) -> None:
        """Raise RuntimeError after :meth:`cancel`; the writing thread calls it now and then."""
        if self._cancelled.is_set():
            raise RuntimeError(f"the {self._of} was given up")

    def wait_for_parts(self, parts: Path, ranks: Iterable[int]) -> list[str | None]:
        """Wait until each rank has its part ready; return what in it holds NaN or Inf.

        Raises RuntimeError where a rank failed, or after :meth:`cancel`, and TimeoutError.
        """
        found: list[str | None] = []
        deadline = time.monotonic() + PARTS_TIMEOUT.total_seconds()
        # Files are looked at, no rank is asked: a thread's collectives would meet training's.
        for rank in ranks:
            ready = ready_file(parts, rank)
            while not ready.exists():
                self.check()
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"rank {rank} did not write its part of the {self._of} in time"
                    )
                time.sleep(0.01)
            answer = json.loads(ready.read_text())
            if answer["error"] is not None:
                raise RuntimeError(
                    f"rank {rank} could not write its part of the {self._of}: {answer['error']}"
                )
            found.append(answer["not_finite"])
        return found


class SnapshotHandle(BackgroundWrite):
    """The writing of one snapshot by this rank."""

    def __init__(self, folder: Path, hold_seconds: float, epoch: Epoch) -> None:
        super().__init__("snapshot")
        self.folder = folder
        self.hold_seconds = hold_seconds  # how long training was held
        self.epoch: Epoch | None = epoch  # until a gradient check took it
        # By direction, this rank's codes; there before done(), until a preview took them.
        self.codes: dict[str, list[Code | None]] = {}
        # Rank 0: by direction, the content of gradients.pt.
        self.contents: dict[str, dict[str, Any]] = {}

    def forget(self) -> None:
        """Free the memory of the encoded gradients. Files that were written are kept."""
        self.codes, self.contents, self.epoch = {}, {}, None


def write_snapshot(state: SnapshotState, handle: SnapshotHandle) -> None:
    """Write this rank's files; rank 0 also puts the ranks' parts together.

    ``handle`` has this rank's codes before any other rank can know that they are made. Raises
    TimeoutError, OSError, RuntimeError (another rank failed).
    """
    enter_thread(state.shards[0].local.device, background=True)
    # The error feedback advances here as well, and previews need the codes.
    if not state.layout.on_node_0:
        state.copies.wait()
        handle.codes = {each.name: each.encode(handle.check) for each in state.directions}
        return
    try:
        state.copies.wait()
        _write_files(state, handle)
    except BaseException as error:
        parts, why = handle.folder / PARTS, f"{type(error).__name__}: {error}"
        _gradient_part(parts, state.rank).unlink(missing_ok=True)  # a full disk needs the room
        # To both: rank 0 may have its part and read no more of this rank, and the uploader would
        # wait ten minutes for the rest.
        for path in (ready_file(parts, state.rank), _done_file(handle.folder, state.rank)):
            with contextlib.suppress(OSError):
                write_json(path, {"error": why})
        raise


def _write_files(state: SnapshotState, handle: SnapshotHandle) -> None:
    folder = handle.folder
    parts = folder / PARTS
    files: dict[Path, str | None] = {}  # and what in it holds NaN or Inf
    if state.parts != "scored":
        _write_rows(state, handle, parts / keys.MODEL)
    bad_weights = _not_finite(state.shards, state.copies.weights, handle.check)
    codes = {each.name: each.encode(handle.check) for each in state.directions}
    handle.codes = codes
    if state.rank != 0:
        part: dict[str, Tensor] = {}
        for direction, made in codes.items():
            for shard, code in zip(state.shards, made, strict=True):
                if code is not None:
                    for ending, tensor in zip(state.compression.endings, code, strict=True):
                        part[f"{direction}/{shard.name}{ending}"] = tensor
        write_safetensors(_gradient_part(parts, state.rank), part)
    # After the part: rank 0 reads it as soon as this is there. Without a sync: nothing reads it
    # after a crash, and rank 0 may have removed the folder before that began.
    write_json(
        ready_file(parts, state.rank), {"error": None, "not_finite": bad_weights}, durable=False
    )
    if state.rank == 0:
        bad_of_ranks = handle.wait_for_parts(parts, range(state.layout.shards))
        bad_weights = next(filter(None, bad_of_ranks), None)
        if state.parts != "scored":
            # Whole and synced by now: each rank synced its rows before it was ready.
            os.replace(parts / keys.MODEL, folder / keys.MODEL)
            files[folder / keys.MODEL] = bad_weights
        handle.contents = _contents(state, codes, parts)
        handle.check()
        bad_gradient = _write_gradients(folder, handle.contents[state.directions[0].name])
        write_json(folder / keys.CONFIG, state.config)
        files[folder / keys.CONFIG] = None
        # Where the weights are not uploaded, what was made of bad ones is not either.
        files[folder / keys.GRADIENTS] = bad_gradient or bad_weights
    handle.check()
    if state.parts == "all":
        inner = folder / keys.inner_optimizer(state.rank, state.layout.shards)
        state.write_inner(inner)
        kept = state.copies.state.values()
        bad = (_not_finite(state.shards, rows, handle.check) for rows in kept)
        files[inner] = next((name for name in bad if name is not None), None)
    if state.rank == 0:
        # No rank needs them: all were ready before this one continued.
        shutil.rmtree(parts)
    sync_folder(folder)
    # Last: where this is, the uploader takes the rank's files for whole.
    done = {"rank": state.rank, "world_size": state.layout.shards, "files": _listed(files)}
    write_json(_done_file(folder, state.rank), done)


def _write_rows(state: SnapshotState, handle: SnapshotHandle, path: Path) -> None:
    """Write this rank's rows of the weights at their place in ``path``, durably."""
    layout = SafetensorsLayout.of(
        [(s.name, torch.float32, s.shape) for s in state.shards],
        metadata=keys.SAFETENSORS_METADATA,
    )
    # Not truncated: all ranks write their rows into this one file.
    model = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.ftruncate(model, layout.size)  # the same size from every rank
        if state.rank == 0:
            write_at(model, layout.header, 0)
        for shard, rows in zip(state.shards, state.copies.weights, strict=True):
            handle.check()
            start = layout.offsets[shard.name] + shard.start * math.prod(shard.shape[1:]) * 4
            write_at(model, tensor_bytes(rows), start)
        os.fsync(model)
    finally:
        os.close(model)


def publish_instead(
    handle: SnapshotHandle, direction: str, factor: float, scaled: tuple[str, ...]
) -> None:
    """Replace ``gradients.pt`` by ``factor`` times the values of another ``direction``.

    ``scaled``: how the names of tensors end that are multiplied, see ``Compression``. For rank 0,
    once the snapshot is done. Raises OSError; what was written before then stays, or nothing is
    uploaded.
    """
    chosen = handle.contents[direction]
    content = {
        name: value * factor if name.endswith(scaled) else value for name, value in chosen.items()
    }
    file, path = handle.folder / keys.GRADIENTS, _done_file(handle.folder, 0)
    # A rename gives the file another inode: that tells which content a failed write has left.
    before, inode = json.loads(path.read_bytes()), file.stat().st_ino
    # No file has this size, so the uploader refuses the snapshot until both files agree again.
    _list_instead(path, before, {"name": file.name, "size": -1, "not_finite": None})
    try:
        bad = _write_gradients(handle.folder, content)
    except OSError:
        if file.stat().st_ino == inode:  # not replaced
            write_json(path, before)
        raise
    _list_instead(path, before, *_listed({file: bad}))


def _list_instead(path: Path, done: Mapping[str, Any], file: Mapping[str, Any]) -> None:
    """Write ``done`` with ``file`` in place of the one of its name."""
    files = [file if f["name"] == file["name"] else f for f in done["files"]]
    write_json(path, {**done, "files": files})


def _done_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.done.json"


def _listed(files: Mapping[Path, str | None]) -> list[dict[str, Any]]:
    return [
        {"name": path.name, "size": path.stat().st_size, "not_finite": bad}
        for path, bad in files.items()
    ]


def _not_finite(
    shards: Sequence[ParameterShard], tensors: Sequence[Tensor], check: Callable[[], None]
) -> str | None:
    """Return the name of the first parameter whose rows in ``tensors`` hold NaN or Inf."""
    for shard, rows in zip(shards, tensors, strict=True):
        check()
        if not _is_finite(rows):
            return shard.name
    return None


def _is_finite(values: Tensor) -> bool:
    # In float64 a sum of float32 values cannot overflow: it is finite if all of them are. Pieces,
    # since torch copies what it sums up in another dtype.
    pieces = values.reshape(-1).split(_PIECE)
    return all(math.isfinite(float(piece.sum(dtype=torch.float64))) for piece in pieces)


def ready_file(parts: Path, rank: int) -> Path:
    return parts / f"rank-{rank}.ready.json"


def _gradient_part(parts: Path, rank: int) -> Path:
    return parts / f"gradients.rank-{rank}.safetensors"


def _contents(
    state: SnapshotState, codes: Mapping[str, Sequence[Code | None]], parts: Path
) -> dict[str, dict[str, Any]]:
    """Make ``gradients.pt`` of each direction on rank 0.

    The bytes of every tensor are those that encoding the whole would give.
    """
    # In the order of ranks, whose rows follow each other in the whole.
    others = [safe_open(_gradient_part(parts, r), "pt") for r in range(1, state.layout.shards)]
    contents: dict[str, dict[str, Any]] = {}
    for direction, made in codes.items():
        content: dict[str, Any] = {}
        for shard, code in zip(state.shards, made, strict=True):
            assert code is not None
            whole = state.compression.shapes(shard.shape)
            for ending, mine, (shape, _) in zip(
                state.compression.endings, code, whole, strict=True
            ):
                key = f"{direction}/{shard.name}{ending}"
                there = [o.get_tensor(key) for o in others if key in o.keys()]  # noqa: SIM118
                flat = torch.cat([p.reshape(-1, *shape[-1:]) for p in (mine, *there)])
                content[shard.name + ending] = flat.reshape(shape)
        contents[direction] = content | {"metadata": dict(state.gradients_metadata)}
    return contents


def _write_gradients(folder: Path, content: Mapping[str, Any]) -> str | None:
    """Write ``gradients.pt``. Return the name of what in it holds NaN or Inf."""
    with atomic_file(folder / keys.GRADIENTS) as handle:
        torch.save(dict(content), handle)
    if not math.isfinite(content["metadata"]["loss"]):
        return "loss"
    tensors = {name: part for name, part in content.items() if isinstance(part, Tensor)}
    values = (name for name, part in tensors.items() if part.is_floating_point())
    return next((name for name in values if not _is_finite(tensors[name])), None)
