"""Checkpoints: all state of every rank, written beside training, loadable at another world size.

Each rank writes its own row blocks and then ``rank-R.json``, with their SHA-256 and its own.
A checkpoint counts when all ranks' are there; so no rank waits for another, and a kill at any
moment leaves the one before intact. torch.distributed.checkpoint could do this too (its
``async_save`` takes a gloo group of its own, so that its collectives do not meet training's). It
saves no work here: every state is rows of the first dimension, so loading at another world size is
reading other rows, and no rank has to plan with another.

Each node writes into a folder of its own, under the same names. Where nodes hold copies of the
model, its folder is whole; a node that lacks a checkpoint has the state from the first copy then,
without what was its ranks' alone (data cursor, random state). Sharded across nodes, a folder holds
its ranks' rows, and loads where the ranks are laid out the same.

Epoch-start weights and outer momentum change once per outer step. They are written once, into a
folder named by the epoch's identity, which checkpoints refer to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import random
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distributed_training.common.files import (
    read_json_object,
    sha256_of,
    sync_folder,
    write_json,
)
from distributed_training.protocol.types import Progress

from .shards import row_range
from .state import load_state, state_of
from .tensor_files import write_safetensors
from .trainer import Trainer

log = logging.getLogger(__name__)

FORMAT = 2
_READ = (1, FORMAT)  # a manifest of format 1 has no digest
_DIGEST = "manifest_sha256"
_BY_STEP = ("weights", "exp_avg", "exp_avg_sq", "residual")
_BY_EPOCH = ("epoch_start", "momentum")
_HURRIED = 5.0  # seconds that a prune waits for other ranks while training waits for it


#: State of this rank at this layout, progress and extra, and whether the layout is the same.
_Read = tuple[dict[str, Any], dict[str, Any], bool]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why."""


class Checkpointer:
    """One per rank; all ranks call the same methods in the same order.

    ``folder`` is on a file system that the ranks of this node share. ``keep``: complete checkpoints
    to leave there. ``ranks_timeout`` covers the wait for the other ranks' files before older ones
    are deleted.
    """

    def __init__(
        self,
        *,
        trainer: Trainer,
        folder: Path,
        keep: int = 2,
        ranks_timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        self.hold_seconds = 0.0  # how long the last save held training
        self.seconds: float | None = None  # what the last one took this rank, held and written
        self.last_error: str | None = None
        self._trainer = trainer
        self._layout = trainer.stream.layout
        self._lead = self._layout.shard == self._layout.shards_here.start  # of this folder
        self._folder = folder
        self._keep = max(1, keep)
        self._timeout = ranks_timeout.total_seconds()
        self._thread: threading.Thread | None = None
        self._skip = 0  # checkpoints that a roll-back leaves out
        self._rolled_back_to: int | None = None  # total inner steps
        self._hurry = threading.Event()  # training waits for the thread

    def save(self, extra: dict[str, Any], progress: Progress) -> None:
        """Copy everything to host memory, then write in a thread. Collective.

        ``extra``: this rank's own JSON-able things (data cursor). ``progress``: rank 0's counts.
        Waits first for a write still under way. A failure to write is logged, not raised: training
        goes on with the checkpoint before.
        """
        self.wait()
        started = time.perf_counter()
        self._trainer.stream.first_error(None)  # no rank writes any more
        name = cast(str, self._trainer.stream.from_rank_0(self._next_name()))
        state = state_of(self._trainer)
        state["python_rng"] = random.getstate()
        state["numpy_rng"] = np.random.get_state()
        content = json.dumps({"extra": extra, "progress": asdict(progress)})
        self.hold_seconds = time.perf_counter() - started
        self._thread = threading.Thread(
            target=self._write, args=(name, state, content), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _next_name(self) -> str:
        """Rank 0: later than all there are, also where the clock was set back. What a rank could
        not write whole is deleted, or a disk that was full for a moment would stay full."""
        if not self._lead:
            return ""
        names = self._names()
        for name in names:
            if not self._complete(name):
                shutil.rmtree(self._folder / name, ignore_errors=True)
        last = max((int(n) for name in names if (n := name.partition("-")[2]).isdigit()), default=0)
        return f"checkpoint-{max(last + 1, time.time_ns() // 1_000_000):015d}"

    def wait(self) -> None:
        """Until this rank's write under way is over."""
        if self._thread is not None:
            self._hurry.set()
            self._thread.join()
            self._hurry.clear()
            self._thread = None

    def restore(self, *, skip: int = 0) -> tuple[Progress, dict[str, Any]] | None:
        """Load the newest usable checkpoint; None when there is none. Collective.

        ``skip``: so many of the newest are left out, as long as there is an older one.

        One that is incomplete or damaged is skipped with a line, on all ranks alike. At another
        world size the ``extra`` of a rank that did not exist is ``{}``, and random states stay.
        """
        self.wait()
        names = cast("list[str]", self._trainer.stream.from_rank_0(self._names()))
        for name in names[min(skip, max(0, len(names) - 1)) :]:
            problem, read = None, None
            try:
                read = self._read(name)
            except (
                OSError,
                SafetensorError,
                ValueError,  # and CheckpointError
                LookupError,
                TypeError,
                ArithmeticError,
            ) as error:  # a manifest without a digest may hold anything
                problem = f"{type(error).__name__}: {error}"
            problem, lacking = self._agree(problem)
            if problem is not None:
                log.warning("Checkpoint %s is skipped, the one before is tried: %s", name, problem)
                continue
            if lacking is not None:
                read = self._from_first_copy(read, lacking)
            assert read is not None
            state, content, same = read
            load_state(self._trainer, state, same_world_size=same)
            if same:
                version, numbers, gauss = state["python_rng"]
                random.setstate((version, tuple(numbers), gauss))
                kind, keys, *rest = state["numpy_rng"]
                np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
            return Progress(**content["progress"]), content["extra"]
        return None

    def _agree(self, problem: str | None) -> tuple[str | None, str | None]:
        """Why nobody can load it, and why a copy must have it from the first one."""
        stream, shards = self._trainer.stream, self._layout.shards
        first = stream.first_error(problem if self._layout.rank < shards else None)
        return first, None if first else stream.first_error(problem)

    def _from_first_copy(self, read: _Read | None, lacking: str) -> _Read:
        """What the ranks of the first copy have read, on all; the pending micro-batches of a step
        are nobody's then, as at another world size."""
        log.info("The state comes from the first node, since another has none: %s", lacking)
        stream = self._trainer.stream
        first = self._layout.rank < self._layout.shards
        plain, content = {}, {}
        if read is not None and first:
            plain = {k: v for k, v in read[0].items() if not isinstance(v, Tensor | dict)}
            plain["schedule"] = read[0]["schedule"]
            plain["kinds"] = [k for k, rows in read[0]["tensors"].items() if rows is not None]
            content = read[1]
        plain, progress = cast(
            "tuple[dict[str, Any], dict[str, Any]]",
            stream.from_rank_0((plain, content.get("progress"))),
        )
        tensors: dict[str, Any] = dict.fromkeys((*_BY_STEP, *_BY_EPOCH))
        for kind in plain.pop("kinds"):
            if read is not None and first:
                tensors[kind] = [rows.contiguous() for rows in read[0]["tensors"][kind]]
            else:
                tensors[kind] = [
                    torch.empty_like(s.local, device="cpu") for s in self._trainer.sharded.shards
                ]
            for rows in tensors[kind]:
                stream.replicate(rows)
        state = {**plain, "tensors": tensors, "pending": None, "cuda_rng": None}
        extra = {} if read is None else read[1]["extra"]
        return state, {"progress": progress, "extra": extra}, False

    def roll_back(self) -> tuple[Progress, dict[str, Any]] | None:
        """:meth:`restore` after NaN or Inf, then half the learning rate for a while. Collective."""
        # No finite step since the last one: that checkpoint's weights are the problem.
        fruitless = self._rolled_back_to == self._trainer.total_inner_steps
        self._skip = self._skip + 1 if fruitless else 0
        restored = self.restore(skip=self._skip)
        self._rolled_back_to = self._trainer.total_inner_steps
        self._trainer.slow_down()
        log.warning(
            "%s; the learning rate is halved for %d inner steps",
            "Rolled back to the last good checkpoint"
            if restored is not None
            else "No usable checkpoint to roll back to: training goes on from the present weights",
            self._trainer.settings.nan_slow_steps,
        )
        return restored

    # --- writing --------------------------------------------------------------------------------

    def _write(self, name: str, state: dict[str, Any], content: str) -> None:
        started = time.perf_counter()
        try:
            self._write_files(self._folder / name, state, json.loads(content))
            self.last_error = None
            self.seconds = self.hold_seconds + time.perf_counter() - started
        except Exception as error:  # noqa: BLE001 - in a thread: it would be lost; training goes on
            self.last_error = f"{type(error).__name__}: {error}"
            log.error(
                "Checkpoint %s was not written (%s); a restart would resume from the one before: "
                "check the disk of %s",
                name,
                self.last_error,
                self._folder,
            )
            with contextlib.suppress(OSError):  # a disk that is away has nothing to delete
                for path in (self._folder / name).glob(f"rank-{self._layout.shard}.*"):
                    path.unlink(missing_ok=True)  # a full disk needs the room
            return
        if self._lead:
            try:
                self._prune(name)
                # Read by the launcher: a stop must have the time for one.
                write_json(self._folder / "last.json", {"name": name, "seconds": self.seconds})
            except (OSError, ValueError, KeyError) as error:
                log.warning("Older checkpoints of %s were not deleted: %s", self._folder, error)

    def _write_files(self, folder: Path, state: dict[str, Any], content: dict[str, Any]) -> None:
        rank, world = self._layout.shard, self._layout.shards
        epoch = self._folder / f"epoch-{state['epoch_id']}-of-{world}"
        if not (epoch / f"rank-{rank}.json").exists():
            self._write_part(epoch, self._named(state, _BY_EPOCH), {})
        tensors = self._named(state, _BY_STEP)
        tensors["rng"] = state["rng"]
        if state["cuda_rng"] is not None:
            tensors["cuda_rng"] = state["cuda_rng"]
        if state["pending"] is not None:
            tensors["pending"] = state["pending"]
        numpy_state = state["numpy_rng"]
        scalars = {
            key: state[key]
            for key in ("steps", "domains", "schedule", "outer_learning_rate", "outer_momentum",
                        "epoch_id", "outer_step", "inner_step", "total_inner_steps", "python_rng")
        }  # fmt: skip
        scalars["numpy_rng"] = [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]]
        self._write_part(folder, tensors, {"state": scalars, **content})
        sync_folder(self._folder)

    def _write_part(self, folder: Path, tensors: dict[str, Tensor], more: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        layout = self._layout
        rank, here = layout.shard, layout.shards_here
        path = folder / f"rank-{rank}.safetensors"
        digest = write_safetensors(path, tensors)
        manifest = {
            "format": FORMAT,
            "rank": rank,
            "world_size": layout.shards,
            "replicas": layout.replicas,
            "here": [here.start, here.stop],
            "size": path.stat().st_size,
            "sha256": digest,
        }
        content = manifest | more
        write_json(folder / f"rank-{rank}.json", content | {_DIGEST: _digest(content)})

    def _named(self, state: dict[str, Any], kinds: Sequence[str]) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for kind in kinds:
            rows = state["tensors"][kind]
            if rows is not None:
                names = (f"{kind}/{name}" for name, _ in self._trainer.schema)
                named.update(zip(names, rows, strict=True))
        return named

    def _prune(self, newest: str) -> None:
        """Once ``newest`` is complete: leave ``keep`` complete ones and what they refer to."""
        deadline = time.monotonic() + self._timeout
        while not self._complete(newest):
            if self._hurry.is_set():
                deadline = min(deadline, time.monotonic() + _HURRIED)
                self._hurry.clear()
            if time.monotonic() > deadline:
                return  # a rank failed to write; nothing is deleted on the strength of it
            time.sleep(0.02)
        keep: list[str] = []
        for name in self._names():
            if len(keep) < self._keep and self._complete(name):
                keep.append(name)
            elif name != newest:
                shutil.rmtree(self._folder / name, ignore_errors=True)
        used = set()
        for name in keep:
            manifest = _lead_manifest(self._folder / name)
            used.add(f"epoch-{manifest['state']['epoch_id']}-of-{manifest['world_size']}")
        for folder in self._folder.glob("epoch-*-of-*"):
            if folder.name not in used:
                shutil.rmtree(folder, ignore_errors=True)

    def _complete(self, name: str) -> bool:
        try:
            here = _parts_here(_lead_manifest(self._folder / name))
        except CheckpointError:
            return False
        return all((self._folder / name / f"rank-{r}.json").exists() for r in here)

    def _names(self) -> list[str]:
        """Newest first."""
        return sorted((p.name for p in self._folder.glob("checkpoint-*")), reverse=True)

    # --- reading --------------------------------------------------------------------------------

    def _read(self, name: str) -> _Read:
        """State of this rank at this world size, progress and extra, and whether ranks match."""
        folder = self._folder / name
        if not self._complete(name):
            raise CheckpointError(
                "it is incomplete: the miner stopped while writing it, or the "
                "disk lost a part of it"
            )
        lead = _lead_manifest(folder)
        layout, here = self._layout, _parts_here(lead)
        world, rank = int(lead["world_size"]), layout.shard
        same = (world, lead.get("replicas", 1)) == (layout.shards, layout.replicas)
        if len(here) < world and not (same and here == layout.shards_here):
            raise CheckpointError("it was sharded across nodes, and over other ranks than now")
        mine = _manifest(folder / f"rank-{rank}.json") if rank in here else {}
        epoch = self._folder / f"epoch-{lead['state']['epoch_id']}-of-{world}"
        tensors: dict[str, Any] = {
            **self._rows(folder, world, _BY_STEP),
            **self._rows(epoch, world, _BY_EPOCH),
        }
        state = {**lead["state"], "tensors": tensors, "pending": None, "cuda_rng": None}
        if same:
            state |= {key: mine["state"][key] for key in ("python_rng", "numpy_rng")}
            with safe_open(folder / f"rank-{rank}.safetensors", "pt") as file:
                present = set(file.keys())
                for key in ("rng", "cuda_rng", "pending"):
                    state[key] = file.get_tensor(key) if key in present else None
        content = {"progress": lead["progress"], "extra": mine.get("extra", {})}
        return state, content, same

    def _rows(
        self, folder: Path, world: int, kinds: Sequence[str]
    ) -> dict[str, list[Tensor] | None]:
        """This rank's rows of every parameter, out of the parts that hold them."""
        ours, rank = self._layout.shards, self._layout.shard
        overlap: list[list[tuple[int, int, int]]] = []  # per parameter: part, first, last of part
        for _, shape in self._trainer.schema:
            start, stop = row_range(shape[0], ours, rank)
            pieces = []
            for part in range(world):
                first, last = row_range(shape[0], world, part)
                low, high = max(start, first), min(stop, last)
                if low < high:
                    pieces.append((part, low - first, high - first))
            overlap.append(pieces)
        first = _parts_here(_lead_manifest(folder)).start
        needed = sorted({part for pieces in overlap for part, _, _ in pieces} | {first})
        files = {part: _checked(folder, part) for part in needed}
        result: dict[str, list[Tensor] | None] = {}
        present = set(files[first].keys())
        for kind in kinds:
            if not any(key.startswith(f"{kind}/") for key in present):
                result[kind] = None
                continue
            rows = []
            for (name, shape), pieces in zip(self._trainer.schema, overlap, strict=True):
                key = f"{kind}/{name}"
                slices = [files[part].get_slice(key)[low:high] for part, low, high in pieces]
                if any(tuple(s.shape[1:]) != shape[1:] for s in slices):
                    raise CheckpointError(f"{name} has another shape: it is of another model")
                rows.append(torch.cat(slices) if slices else torch.empty((0, *shape[1:])))
                start, stop = row_range(shape[0], ours, rank)
                if rows[-1].shape[0] != stop - start:
                    raise CheckpointError(f"{name} has another shape: it is of another model")
            result[kind] = rows
        return result


def _manifest(path: Path) -> dict[str, Any]:
    """As it was written. Raises CheckpointError for one that is missing or damaged."""
    content = read_json_object(path)
    if content is None:
        raise CheckpointError(f"{path.name} is missing or damaged")
    digest = content.pop(_DIGEST, None)
    if content.get("format") not in _READ or (content["format"] > 1 and digest != _digest(content)):
        raise CheckpointError(
            f"{path.name} is damaged, or of another format than this miner's ({FORMAT})"
        )
    return content


def _lead_manifest(folder: Path) -> dict[str, Any]:
    """Of the lowest rank there is. Raises CheckpointError."""
    ranks = [path.stem.removeprefix("rank-") for path in folder.glob("rank-*.json")]
    lowest = min((int(rank) for rank in ranks if rank.isdigit()), default=0)
    return _manifest(folder / f"rank-{lowest}.json")


def _parts_here(manifest: dict[str, Any]) -> range:
    """The ranks' parts that the folder holds when it is complete."""
    return range(*manifest.get("here", (0, manifest["world_size"])))


def _digest(manifest: dict[str, Any]) -> str:
    as_read = json.loads(json.dumps(manifest))  # where keys are text
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def _checked(folder: Path, part: int) -> Any:
    """The open file of one rank, after its size and SHA-256 were compared."""
    path = folder / f"rank-{part}.safetensors"
    manifest = _manifest(folder / f"rank-{part}.json")
    if path.stat().st_size != manifest["size"] or sha256_of(path) != manifest["sha256"]:
        raise CheckpointError(f"{path.name} is damaged: its bytes are not those that were written")
    return safe_open(path, "pt")
