"""Checkpoints: all state of every rank, written beside training, loadable at another world size.

Each rank writes its own row blocks and then ``rank-R.json``, with their SHA-256 and its own.
A checkpoint counts when all ranks' are there; so no rank waits for another, and a kill at any
moment leaves the one before intact. torch.distributed.checkpoint could do this too (its
``async_save`` takes a gloo group of its own, so that its collectives do not meet training's). It
saves no work here: every state is rows of the first dimension, so loading at another world size is
reading other rows, and no rank has to plan with another.

Each node writes into a folder of its own, under the same names. Where nodes hold copies of the
model, its folder is whole. Sharded across nodes, each also keeps what the node before it wrote
(courier.py), so that a disk may be lost. Reading takes parts from where they are (parts.py).

Epoch-start weights and outer momentum change once per outer step. They are written once, into a
folder named by the epoch's identity, which checkpoints refer to.
"""

from __future__ import annotations

import contextlib
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
from torch import Tensor

from distributed_training.common.files import sync_folder, write_json
from distributed_training.config.flags import ConfigError
from distributed_training.protocol.types import Progress

from .courier import Courier
from .parts import (
    BY_EPOCH,
    BY_STEP,
    DAMAGE,
    DIGEST,
    FORMAT,
    CheckpointError,
    ElsewhereError,
    Parts,
    digest_of,
    in_words,
    is_complete,
    manifests_in,
)
from .state import load_state, state_of
from .tensor_files import write_safetensors
from .trainer import Trainer

log = logging.getLogger(__name__)

_HURRIED = 5.0  # seconds that a prune waits for other ranks while training waits for it


class Checkpointer:
    """One per rank; all ranks call the same methods in the same order.

    ``folder`` is on a file system that the ranks of this node share. ``keep``: complete checkpoints
    to leave there. ``owner``: the miner whose they are. ``ranks_timeout`` covers the wait for the
    other ranks' files before older ones are deleted, and each message between nodes.
    """

    def __init__(
        self,
        *,
        trainer: Trainer,
        folder: Path,
        keep: int = 2,
        owner: str = "",
        ranks_timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        self.hold_seconds = 0.0  # how long the last save held training
        self.seconds: float | None = None  # what the last one took this rank, held and written
        self.last_error: str | None = None
        self.exact = True  # the last restore: nothing of an unfinished step was lost
        self._trainer = trainer
        self._layout = trainer.stream.layout
        self._lead = self._layout.shard == self._layout.shards_here.start  # of this folder
        self._folder = folder
        self._keep = max(1, keep)
        self._owner = owner
        self._timeout = ranks_timeout.total_seconds()
        self._thread: threading.Thread | None = None
        self._skip = 0  # checkpoints that a roll-back leaves out
        self._rolled_back_to: int | None = None  # total inner steps
        self._hurry = threading.Event()  # training waits for the thread
        shared = self._layout.shards > self._layout.local
        self._courier = Courier(self._layout, ranks_timeout) if shared else None

    def save(self, extra: dict[str, Any], progress: Progress) -> None:
        """Copy everything to host memory, then write in a thread. Collective.

        ``extra``: this rank's own JSON-able things (data cursor). ``progress``: rank 0's counts.
        Waits first for a write still under way. A failure to write is logged, not raised: training
        goes on with the checkpoint before.
        """
        self.wait()
        started = time.perf_counter()
        self._trainer.stream.first_error(None)  # no rank writes any more
        name, first = cast(Any, self._trainer.stream.from_rank_0((self._next_name(), extra)))
        state = state_of(self._trainer)
        state["python_rng"] = random.getstate()
        state["numpy_rng"] = np.random.get_state()
        content = json.dumps({"extra": extra, "first": first, "progress": asdict(progress)})
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
            if not is_complete(self._folder / name):
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
        layout random states stay, the micro-batches of an unfinished step are dropped
        (:attr:`exact` is False then), and the ``extra`` of a rank that did not exist is rank 0's.
        Raises ConfigError if the only ones are partly on nodes that are not here.
        """
        self.wait()
        stream, elsewhere = self._trainer.stream, ""
        names = self._names_anywhere()
        for name in names[min(skip, max(0, len(names) - 1)) :]:
            try:
                parts = Parts(self._folder, name, self._trainer.schema, stream)
                progress = Progress(**parts.manifest["progress"])
                state: dict[str, Any] = {"pending": None, "cuda_rng": None}
                state |= parts.manifest["state"] | {"tensors": parts.rows()} | (own := parts.own())
            except DAMAGE as error:  # on all ranks alike
                log.warning(
                    "Checkpoint %s is skipped, the one before is tried: %s", name, in_words(error)
                )
                if isinstance(error, ElsewhereError):
                    elsewhere = elsewhere or f"checkpoint {name} cannot be loaded: {error}"
                continue
            load_state(self._trainer, state, same_world_size=parts.exact)
            self.exact = parts.exact or not parts.unfinished
            if parts.exact:
                version, numbers, gauss = state["python_rng"]
                random.setstate((version, tuple(numbers), gauss))
                kind, keys, *rest = state["numpy_rng"]
                np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
            return progress, own["extra"]
        if elsewhere:
            raise ConfigError(
                f"{elsewhere}. Start all nodes that it is of, or copy their folders of that name "
                f"into {self._folder} here; delete it to train from the global state instead"
            )
        return None

    def _names_anywhere(self) -> list[str]:
        """Newest first. Another node's that node 0 lacks count if they are of the same miner."""
        mine, node_0 = self._names(), self._layout.on_node_0
        found = self._trainer.stream.answers([n for n in mine if node_0 or self._is_ours(n)])
        return sorted(set().union(*found), reverse=True)

    def _is_ours(self, name: str) -> bool:
        try:
            first = next(manifests_in(self._folder / name), {})
        except CheckpointError:
            return False
        return bool(self._owner) and first.get("owner") == self._owner

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
        files: list[Path] = []
        try:
            files = self._write_files(self._folder / name, state, json.loads(content))
            self.last_error = None
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
        if self._courier is not None:
            try:
                self._courier.to_next_node(self._folder, files)
            except (OSError, RuntimeError) as error:
                log.warning("Checkpoint %s has no copy on another node: %s", name, error)
        if self.last_error is not None:
            return
        self.seconds = self.hold_seconds + time.perf_counter() - started
        if self._lead:
            try:
                self._prune(name)
                # Read by the launcher: a stop must have the time for one.
                write_json(self._folder / "last.json", {"name": name, "seconds": self.seconds})
            except (OSError, ValueError, KeyError) as error:
                log.warning("Older checkpoints of %s were not deleted: %s", self._folder, error)

    def _write_files(
        self, folder: Path, state: dict[str, Any], content: dict[str, Any]
    ) -> list[Path]:
        rank, world = self._layout.shard, self._layout.shards
        epoch = self._folder / f"epoch-{state['epoch_id']}-of-{world}"
        if not (epoch / f"rank-{rank}.json").exists():
            self._write_part(epoch, self._named(state, BY_EPOCH), {})
        tensors = self._named(state, BY_STEP)
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
        self._write_part(folder, tensors, {"state": scalars, "owner": self._owner, **content})
        sync_folder(self._folder)
        kinds = "safetensors", "json"
        return [place / f"rank-{rank}.{kind}" for place in (epoch, folder) for kind in kinds]

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
        write_json(folder / f"rank-{rank}.json", content | {DIGEST: digest_of(content)})

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
        expected = list(self._layout.shards_here)
        if self._courier is not None:
            expected += [(r - self._layout.local) % self._layout.shards for r in expected]
        while not all((self._folder / newest / f"rank-{r}.json").exists() for r in expected):
            if self._hurry.is_set():
                deadline = min(deadline, time.monotonic() + _HURRIED)
                self._hurry.clear()
            if time.monotonic() > deadline:
                return  # a rank failed to write; nothing is deleted on the strength of it
            time.sleep(0.02)
        keep: list[str] = []
        for name in self._names():
            if len(keep) < self._keep and is_complete(self._folder / name):
                keep.append(name)
            elif name != newest:
                shutil.rmtree(self._folder / name, ignore_errors=True)
        used = set()
        for name in keep:
            manifest = next(manifests_in(self._folder / name))
            used.add(f"epoch-{manifest['state']['epoch_id']}-of-{manifest['world_size']}")
        for folder in self._folder.glob("epoch-*-of-*"):
            if folder.name not in used:
                shutil.rmtree(folder, ignore_errors=True)

    def _names(self) -> list[str]:
        """Newest first."""
        return sorted((p.name for p in self._folder.glob("checkpoint-*")), reverse=True)
