"""A snapshot: everything a miner publishes, of one step boundary, written beside training.

Training waits only for the copy to host memory. After that a thread of each rank writes; no
collective is used, since training goes on with its own. All ranks of a miner share one file
system: each writes its rows of ``model.safetensors`` at their place in the one file, so that the
whole model is in nobody's memory. Files appear under their names only when complete;
``rank-r.done.json`` of a rank comes after its files.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distributed_training.common.files import atomic_file, sha256_of, sync_folder, write_json
from distributed_training.protocol import keys

from .feedback import Code, Codec, Direction
from .published_optimizer import shard_content, write_shard
from .shards import ParameterShard
from .tensor_files import SafetensorsLayout, tensor_bytes, write_safetensors

_PARTS = ".parts"
_INDICES, _VALUES = "idxs", "vals"  # key endings of gradients.pt (protocol page, section 4)


@dataclass(frozen=True)
class SnapshotState:
    """What the training thread hands over; nothing in it changes any more. Host memory.

    ``directions``: what may be published; the first is written to ``gradients.pt``. ``rank`` of
    the ``world_size`` that hold one copy of the model; ``writes``: False where another node writes
    the same; ``own``: False for what this rank writes for one of another node.
    """

    rank: int
    world_size: int
    shards: Sequence[ParameterShard]
    weights: Sequence[Tensor]
    directions: Sequence[Direction]
    codec: Codec
    config: Mapping[str, Any]
    gradients_metadata: Mapping[str, Any]
    mesh: DeviceMesh
    exp_avg: Sequence[Tensor]
    exp_avg_sq: Sequence[Tensor]
    steps: int
    param_group: Mapping[str, Any]
    scheduler_state: Mapping[str, Any]
    writes: bool = True
    own: bool = True


class SnapshotHandle:
    """The writing of one snapshot by this rank."""

    def __init__(self, folder: Path, hold_seconds: float, epoch_id: str) -> None:
        self.folder = folder
        self.hold_seconds = hold_seconds  # how long training was held
        self.epoch_id = epoch_id  # of the epoch start that the gradient is measured from
        # By direction, this rank's codes; there before done(), until a preview took them.
        self.codes: dict[str, list[Code | None]] = {}
        # Rank 0: by direction, the content of gradients.pt.
        self.contents: dict[str, dict[str, Any]] = {}
        self._written: Future[None] | None = None
        self._cancelled = threading.Event()

    def start(self, write: Callable[[SnapshotHandle], None]) -> None:
        pool = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._written = pool.submit(write, self)
        pool.shutdown(wait=False)

    def done(self) -> bool:
        """True when this rank's files are all there, or writing failed (see ``error``)."""
        return self._written is not None and self._written.done()

    @property
    def error(self) -> BaseException | None:
        """Why writing failed; None if it did not, or is not done."""
        return self._written.exception() if self._written and self._written.done() else None

    def join(self) -> None:
        """Until it is done."""
        if self._written is not None:
            wait([self._written])

    def cancel(self) -> None:
        """Give it up, unless it is done. Returns when it has ended."""
        self._cancelled.set()
        self.join()

    def check(self) -> None:
        """For the writing thread, now and then. Raises RuntimeError after :meth:`cancel`."""
        if self._cancelled.is_set():
            raise RuntimeError("the snapshot was given up")

    def forget(self) -> None:
        """Give the memory of the codes back: what is written stays as it is."""
        self.codes, self.contents = {}, {}

    def wait(self, timeout: timedelta | None = None) -> None:
        """Covers all writing of this rank (rank 0: also the other ranks' parts).

        Raises what the writing raised, TimeoutError when it goes on longer than ``timeout``.
        """
        assert self._written is not None
        wait([self._written], None if timeout is None else timeout.total_seconds())
        if not self._written.done():
            raise TimeoutError(f"snapshot {self.folder} is still being written")
        self._written.result()


def prepare_folder(folder: Path) -> None:
    """Rank 0, before any rank writes: an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / _PARTS).mkdir(parents=True)


def write_snapshot(
    state: SnapshotState, handle: SnapshotHandle, *, parts_timeout: timedelta
) -> None:
    """Write this rank's files; rank 0 also puts the ranks' parts together.

    ``handle`` has this rank's codes before any other rank can know that they are made.
    ``parts_timeout`` covers rank 0's wait for the other ranks' parts. Raises TimeoutError, OSError,
    RuntimeError (another rank failed).
    """
    if not state.writes:  # the error feedback advances here as well, and previews need the codes
        handle.codes = {each.name: each.encode(handle.check) for each in state.directions}
        return
    folder = handle.folder
    parts = folder / _PARTS
    files: list[Path] = []
    with ExitStack() as stack:
        stack.push(lambda _, error, __: tell_failure(folder, state.rank, error))
        layout = _write_model_rows(state, parts / keys.MODEL, handle.check)
        codes = {each.name: each.encode(handle.check) for each in state.directions}
        if state.own:
            handle.codes = codes
        if state.rank != 0:
            write_safetensors(_gradient_part(parts, state.rank), _part_tensors(state, codes))
    write_json(_ready(parts, state.rank), {"error": None})
    if state.rank == 0:
        _wait_for_parts(parts, state.world_size, parts_timeout, handle.check)
        assert (parts / keys.MODEL).stat().st_size == layout.size
        os.replace(parts / keys.MODEL, folder / keys.MODEL)
        handle.contents = _contents(state, codes, parts)
        _write_gradients(folder, handle.contents[state.directions[0].name])
        write_json(folder / keys.CONFIG, state.config)
        files += [folder / keys.CONFIG, folder / keys.MODEL, folder / keys.GRADIENTS]
    handle.check()
    inner = folder / keys.inner_optimizer(state.rank, state.world_size)
    write_shard(
        inner,
        shard_content(
            shards=state.shards,
            mesh=state.mesh,
            exp_avg=state.exp_avg,
            exp_avg_sq=state.exp_avg_sq,
            steps=state.steps,
            param_group=state.param_group,
            scheduler_state=state.scheduler_state,
            outer_step=int(state.gradients_metadata["outer_step"]),
        ),
    )
    files.append(inner)
    if state.rank == 0:
        shutil.rmtree(parts)
    sync_folder(folder)
    done = {"rank": state.rank, "world_size": state.world_size, "files": _listed(files)}
    write_json(_done_file(folder, state.rank), done)


def tell_failure(folder: Path, rank: int, error: BaseException | None) -> None:
    """At the end of a rank's part: tell rank 0, which waits for it, if it failed."""
    if error is not None:
        parts = folder / _PARTS
        _gradient_part(parts, rank).unlink(missing_ok=True)  # a full disk needs the room
        with contextlib.suppress(OSError):
            write_json(_ready(parts, rank), {"error": f"{type(error).__name__}: {error}"})


def publish_instead(handle: SnapshotHandle, direction: str, factor: float) -> None:
    """Rank 0, once the snapshot is done: ``gradients.pt`` becomes ``factor`` times the values of
    another ``direction``. Raises OSError; what was written before then stays."""
    chosen = handle.contents[direction]
    scaled = {
        name: value * factor if name.endswith(_VALUES) else value for name, value in chosen.items()
    }
    _write_gradients(handle.folder, scaled)
    path = _done_file(handle.folder, 0)
    done = json.loads(path.read_bytes())
    (fresh,) = _listed([handle.folder / keys.GRADIENTS])
    done["files"] = [fresh if f["name"] == fresh["name"] else f for f in done["files"]]
    write_json(path, done)


def _done_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.done.json"


def _listed(files: Sequence[Path]) -> list[dict[str, Any]]:
    return [{"name": f.name, "size": f.stat().st_size, "sha256": sha256_of(f)} for f in files]


def _write_model_rows(
    state: SnapshotState, path: Path, check: Callable[[], None]
) -> SafetensorsLayout:
    layout = SafetensorsLayout.of(
        [(s.name, torch.float32, s.shape) for s in state.shards],
        metadata=keys.SAFETENSORS_METADATA,
    )
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.ftruncate(handle, layout.size)  # the same size from every rank
        if state.rank == 0:
            _write_at(handle, memoryview(layout.header), 0)
        for shard, rows in zip(state.shards, state.weights, strict=True):
            check()
            start = layout.offsets[shard.name] + shard.start * shard.row_size * 4
            _write_at(handle, tensor_bytes(rows), start)
        os.fsync(handle)
    finally:
        os.close(handle)
    return layout


def _write_at(handle: int, data: memoryview, position: int) -> None:
    while len(data):
        written = os.pwrite(handle, data[: 1 << 30], position)
        data, position = data[written:], position + written


def _ready(parts: Path, rank: int) -> Path:
    return parts / f"rank-{rank}.ready.json"


def _gradient_part(parts: Path, rank: int) -> Path:
    return parts / f"gradients.rank-{rank}.safetensors"


def _part_tensors(
    state: SnapshotState, codes: Mapping[str, Sequence[Code | None]]
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for direction, made in codes.items():
        for shard, code in zip(state.shards, made, strict=True):
            if code is not None:
                name = f"{direction}/{shard.name}"
                tensors[name + _INDICES], tensors[name + _VALUES] = code
    return tensors


def _wait_for_parts(
    parts: Path, world_size: int, timeout: timedelta, check: Callable[[], None]
) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    for rank in range(world_size):
        ready = _ready(parts, rank)
        while not ready.exists():
            check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} did not write its part of the snapshot in time")
            time.sleep(0.01)
        error = json.loads(ready.read_text())["error"]
        if error is not None:
            raise RuntimeError(f"rank {rank} could not write its part of the snapshot: {error}")


def _contents(
    state: SnapshotState, codes: Mapping[str, Sequence[Code | None]], parts: Path
) -> dict[str, dict[str, Any]]:
    """Rank 0: ``gradients.pt`` of each direction, the same bytes of every tensor as encoding the
    whole would give."""
    others = [safe_open(_gradient_part(parts, r), "pt") for r in range(1, state.world_size)]
    contents: dict[str, dict[str, Any]] = {}
    for direction, made in codes.items():
        content: dict[str, Any] = {}
        for shard, code in zip(state.shards, made, strict=True):
            assert code is not None
            shape = state.codec.shape(shard.shape)
            for which, mine in zip((_INDICES, _VALUES), code, strict=True):
                key = f"{direction}/{shard.name}{which}"
                there = [o.get_tensor(key) for o in others if key in o.keys()]  # noqa: SIM118
                flat = torch.cat([p.reshape(-1, shape[-1]) for p in (mine, *there)])
                content[shard.name + which] = flat.reshape(shape)
        contents[direction] = content | {"metadata": dict(state.gradients_metadata)}
    return contents


def _write_gradients(folder: Path, content: Mapping[str, Any]) -> None:
    with atomic_file(folder / keys.GRADIENTS) as handle:
        torch.save(dict(content), handle)
