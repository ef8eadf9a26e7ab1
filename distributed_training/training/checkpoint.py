"""Write checkpoints: all state of every rank, during training, loadable at any world size.

With a checkpoint a miner continues exactly where it was, after a stop or a crash. Each rank writes
its own row blocks and then ``rank-R.json``, with their SHA-256 and its own. A checkpoint counts
when all ranks' files are there; so no rank waits for another, and a kill at any moment leaves the
checkpoint before intact. A rank that loads reads the rows it needs from whichever files have them,
so a checkpoint loads at any number of ranks (docs/architecture.md, Decisions). Under HSDP
(:mod:`.sharding`) each machine writes its own copy, and all continue from the newest that every
machine has.

torch.distributed.checkpoint could do this too (its ``async_save`` takes a gloo group of its own, so
that its collectives do not meet training's). It saves no work here: every state is rows of the
first dimension, so loading at another world size is reading other rows, and no rank has to plan
with another.

Epoch-start weights and residual change once per outer step. They are written once, into a
folder named by the outer step's identity, which checkpoints refer to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distributed_training.common.backoff import Repeats
from distributed_training.common.files import read_json_object, sha256_of, sync_folder, write_json
from distributed_training.protocol.types import Progress, RankFailedError, Schema

from .collectives import RowStream, enter_thread, row_range
from .copies import BackgroundWrite, write_safetensors
from .held_weights import HeldWeights
from .inner_optimizer import checkpoint_key, may_lack_rows
from .trainer import SLOW_STEPS

log = logging.getLogger(__name__)

FORMAT = 2
DIGEST = "manifest_sha256"

#: The errors that reading a damaged file may raise.
DAMAGE = (OSError, SafetensorError, ValueError, LookupError, TypeError, ArithmeticError)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why."""


def manifest_digest(manifest: dict[str, Any]) -> str:
    as_read = json.loads(json.dumps(manifest))  # in JSON all keys are text
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def manifest_of(path: Path) -> dict[str, Any]:
    """Read a manifest as it was written. Raises CheckpointError if it is missing or damaged."""
    content = read_json_object(path)
    if content is None:
        raise CheckpointError(f"{path.name} is missing or damaged")
    digest = content.pop(DIGEST, None)
    if digest != manifest_digest(content) or content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path.name} is damaged, or of another format than this miner's ({FORMAT})"
        )
    return content


def manifests_in(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the manifests of all parts in ``folder``, by rank. Raises CheckpointError."""
    ranks = [path.stem.removeprefix("rank-") for path in folder.glob("rank-*.json")]
    for rank in sorted(int(rank) for rank in ranks if rank.isdigit()):
        yield manifest_of(folder / f"rank-{rank}.json")


def is_complete(folder: Path) -> bool:
    """Return whether the part of every rank of one copy of the model is there."""
    try:
        parts = [manifest["world_size"] for manifest in manifests_in(folder)]
    except CheckpointError:
        return False
    return bool(parts) and len(parts) == parts[0]


def newest_first(folder: Path) -> list[str]:
    """Return the names of the checkpoints in ``folder``, complete or not."""
    return sorted((p.name for p in folder.glob("checkpoint-*")), reverse=True)


def outer_step_of(checkpoint: Path) -> int | None:
    """Return the outer step of a checkpoint; None if that cannot be read."""
    progress = (read_json_object(checkpoint / "rank-0.json") or {}).get("progress")
    reached = progress.get("outer_step") if isinstance(progress, dict) else None
    return reached if isinstance(reached, int) else None


def oldest_outer_step(folder: Path, outer_step: int) -> int:
    """Return the first outer step of the checkpoints in ``folder``; without one ``outer_step``."""
    found = (outer_step_of(folder / name) for name in newest_first(folder))
    return min((step for step in found if step is not None), default=outer_step)


def _open(folder: Path, part: int) -> Any:
    """Open the file of one part, after comparing its size and SHA-256."""
    path = folder / f"rank-{part}.safetensors"
    manifest = manifest_of(folder / f"rank-{part}.json")
    # Compare the size first: reading all bytes of a file that was cut short would only cost time.
    if path.stat().st_size != manifest["size"] or sha256_of(path) != manifest["sha256"]:
        raise CheckpointError(f"{path.name} is damaged: its bytes are not those that were written")
    return safe_open(path, "pt")


def in_words(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _kind(key: str) -> str:
    """Return the kind of state whose rows a tensor holds; empty if it holds no rows."""
    kind, slash, _ = key.partition("/")
    return kind if slash else ""


class Parts:
    """One checkpoint, as all ranks see it. All of them call the same methods in the same order.

    Raises CheckpointError, or another of :data:`DAMAGE`, on all ranks alike.
    """

    def __init__(self, folder: Path, name: str, schema: Schema, stream: RowStream) -> None:
        self._folder, self._name = folder, name
        self._schema, self._stream, self._layout = schema, stream, stream.layout
        self._files: dict[int, dict[str, Any]] = {}  # part -> the open file of each tensor, by name
        found, problem = None, "it is incomplete"
        try:
            found = next(manifests_in(folder / name), None)
        except DAMAGE as error:
            problem = in_words(error)
        # Every rank takes part before any rank raises, since a rank that left would hold up the
        # others in the next collective.
        everywhere = stream.all_gather((found, problem))
        manifests = [manifest for manifest, _ in everywhere if manifest is not None]
        if len(manifests) < len(everywhere):
            raise CheckpointError(next(why for manifest, why in everywhere if manifest is None))
        self.manifest = manifests[0]  # the manifest of one part; its state is that of all parts
        self._count = int(self.manifest["world_size"])
        replicas = self.manifest.get("replicas", 1)
        #: Whether every rank also gets the state that belonged only to it.
        self.exact = (self._count, replicas) == (self._layout.shards, self._layout.replicas)
        self._epoch = folder / f"epoch-{self.manifest['state']['epoch_id']}-of-{self._count}"
        # This rank reads its own part, and the parts that have its rows.
        shard = self._layout.shard
        parts = {part for _, shape in schema for part, _, _ in self._pieces(shape[0])}
        parts |= {shard} if self.exact else set()
        problems = [self._problem(part) for part in sorted(parts or {0})]
        kinds = {_kind(key) for files in self._files.values() for key in files if _kind(key)}
        answers = stream.all_gather((problems, kinds))
        for found_problems, _ in answers:
            for problem in filter(None, found_problems):
                raise CheckpointError(problem)
        self._kinds = set().union(*(kinds for _, kinds in answers))

    def _problem(self, part: int) -> str | None:
        """Open ``part`` in this machine's folder; return the reason if that fails."""
        try:
            folder = self._folder / self._name
            if not (folder / f"rank-{part}.json").exists():
                raise CheckpointError(
                    f"it is incomplete: the miner stopped while writing it, or the disk lost "
                    f"rank-{part}.json"
                )
            files = {
                key: file
                for file in (_open(folder, part), _open(self._epoch, part))
                for key in file.keys()  # noqa: SIM118
            }
            for kind in {_kind(key) for key in files if _kind(key)}:
                for name, shape in self._schema:
                    first, last = row_range(shape[0], self._count, part)
                    found = files[f"{kind}/{name}"].get_slice(f"{kind}/{name}").get_shape()
                    lacks = may_lack_rows(kind) and found == [0, *shape[1:]]
                    if found != [last - first, *shape[1:]] and not lacks:
                        raise CheckpointError(f"{name} has another shape: it is of another model")
            self._files[part] = files
        except DAMAGE as error:
            return in_words(error)
        return None

    def _pieces(self, rows: int) -> list[tuple[int, int, int]]:
        """Locate this rank's rows: part, first and one past the last row in it."""
        start, stop = row_range(rows, self._layout.shards, self._layout.shard)
        pieces = []
        for part in range(self._count):
            first, last = row_range(rows, self._count, part)
            low, high = max(start, first), min(stop, last)
            if low < high:
                pieces.append((part, low - first, high - first))
        return pieces

    def rows(self) -> dict[str, list[Tensor]]:
        """Return this rank's rows of every parameter, by kind of state."""
        return {
            kind: [self._rows_of(f"{kind}/{name}", shape) for name, shape in self._schema]
            for kind in self._kinds
        }

    def _rows_of(self, key: str, shape: tuple[int, ...]) -> Tensor:
        mine = [
            rows[low:high]
            for part, low, high in self._pieces(shape[0])
            if (rows := self._files[part][key].get_slice(key)).get_shape()[0]
        ]
        return torch.cat(mine) if mine else torch.empty((0, *shape[1:]))

    def own(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what only this rank has (nothing unless :attr:`exact`) and its ``extra``."""
        part = self._layout.shard
        path = self._folder / self._name / f"rank-{part}.json"
        if not self.exact:
            try:
                return {}, manifest_of(path)["extra"]
            except DAMAGE:
                return {}, self.manifest.get("first", {})
        manifest, files = manifest_of(path), self._files[part]
        alone = {key: file.get_tensor(key) for key, file in files.items() if not _kind(key)}
        return manifest["state"] | alone, manifest.get("extra", {})


def _are_tensors(value: object) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], Tensor)
    )


def matched(
    now: Mapping[str, Any], saved: Mapping[str, Any], name: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return what was ``saved``, with exactly the keys of the state dict ``now``.

    A tensor that was not saved is None. Another value that was not, since an older version wrote
    the checkpoint, stays what it is now: at a start its component's default. A saved value that no
    component knows is left out. ``say`` gets a line for each missing and each unknown value.
    """
    lacking = {key: value for key, value in now.items() if key not in saved}
    missing = [k for k, v in lacking.items() if v is not None and not _are_tensors(v)]
    unknown = sorted(saved.keys() - now.keys())
    if missing:
        say(f"{name} was written without {', '.join(missing)}: as after a first start")
    if unknown:
        say(f"{name} holds {', '.join(unknown)}, which this version does not know: left out")
    state: dict[str, Any] = {}
    for key, value in now.items():
        if isinstance(value, dict):
            state[key] = matched(value, saved.get(key, value), f"{name}: {key}", say)
        else:
            state[key] = value if key in missing else saved.get(key)
    return state


#: Seconds to wait for the other ranks' files before older checkpoints are deleted.
_RANKS_TIMEOUT = 600.0
_SAY_AGAIN = 600.0  # seconds between two lines with the same cause
_HURRIED = 5.0  # seconds that a prune waits for other ranks while training waits for it


class Checkpointer:
    """Writes and loads one rank's part of checkpoints.

    All ranks call the same methods in the same order. ``folder`` is on a file system that the ranks
    of this node share. ``keep``: how many complete checkpoints stay there.
    """

    def __init__(self, *, trainer: HeldWeights, folder: Path, keep: int = 2) -> None:
        self.hold_seconds = 0.0  # seconds for which the last save paused training
        # Seconds of the last save on this rank, until it was written.
        self.seconds: float | None = None
        self.last_error: str | None = None
        self.exact = True  # the last restore lost nothing of an unfinished step
        self._trainer = trainer
        self._layout = trainer.stream.layout
        self._lead = self._layout.shard == 0  # the rank that leads in this folder
        self._folder = folder
        self._keep = max(1, keep)
        self._timeout = _RANKS_TIMEOUT
        self._writing: BackgroundWrite | None = None
        self._skip = 0  # checkpoints that a roll-back leaves out
        self._rolled_back_to: int | None = None  # total inner steps at the last roll-back
        self._hurry = threading.Event()  # set while training waits for the thread
        self._saved: bool | None = None  # see saved()
        self._repeats = Repeats(_SAY_AGAIN)

    def save(self, extra: dict[str, Any], progress: Progress) -> None:
        """Copy the state to host memory from now on, and write it in a thread. Collective.

        ``extra``: this rank's own JSON-able values, such as its place in the data. ``progress``:
        rank 0's counts. Waits first for a write that is still under way. A failure to write is
        logged, not raised: training continues with the checkpoint before.
        """
        self.wait()
        self._saved, started = None, time.perf_counter()
        # Once no rank writes any more, whatever is incomplete was given up: rank 0 may delete it.
        self._trainer.stream.all_gather(None)
        name = ""
        if self._lead:
            names: list[str] = []
            # If the disk is away, the writing thread logs it. An error here would end the miner
            # while the other ranks wait for the name.
            with contextlib.suppress(OSError):
                names = newest_first(self._folder)
                for old in names:
                    # Delete incomplete checkpoints, or a disk that was full for a moment would stay
                    # full.
                    if not is_complete(self._folder / old):
                        shutil.rmtree(self._folder / old, ignore_errors=True)
            numbers = [int(n) for old in names if (n := old.partition("-")[2]).isdigit()]
            # The number is above all others, also after the clock was set back.
            number = max(max(numbers, default=0) + 1, time.time_ns() // 1_000_000)
            name = f"checkpoint-{number:015d}"
        # Rank 0 gives the name, since the clocks of two nodes would give two names.
        name, first = self._trainer.stream.from_rank_0((name, extra))
        try:
            # An upload of this boundary shares these copies, so that 12 bytes per parameter are
            # taken only once.
            copies = self._trainer.boundary_copies()
        except RankFailedError as error:
            self._not_written(name, error, str(error))
            return
        moments = {checkpoint_key(name): rows for name, rows in copies.state.items()}
        state = {**self._trainer.state_dict(), "weights": copies.weights, **moments}
        of_epoch, tensors = self._trainer.outer.of_epoch, self._named(state)
        by_epoch = {key: rows for key, rows in tensors.items() if _kind(key) in of_epoch}
        by_step = {key: tensor for key, tensor in tensors.items() if key not in by_epoch}
        scalars = {k: v for k, v in state.items() if v is not None and not _are_tensors(v)}
        content = {"state": scalars, "extra": extra, "first": first}
        # Make text of it now, since the next step changes lists in it.
        text = json.dumps(content | {"progress": asdict(progress)})
        self.hold_seconds = time.perf_counter() - started
        # Let a disk that hangs not keep a stopped miner alive.
        self._writing = BackgroundWrite("checkpoint", daemon=True)
        copies.writers.append(self._writing.ended)
        held = [by_step, by_epoch, copies]
        self._writing.start(partial(self._write, name, held, text))

    def saved(self) -> bool | None:
        """Return whether all ranks of this machine have written the last one; None: not known yet.

        Rank 0 only.
        """
        return self._saved

    def wait(self) -> None:
        """Wait until this rank's write under way is over."""
        if self._writing is not None:
            self._hurry.set()
            self._writing.join()
            self._hurry.clear()

    def restore(self, *, skip: int = 0) -> tuple[Progress, dict[str, Any]] | None:
        """Load the newest usable checkpoint; None when there is none. Collective.

        ``skip``: how many of the newest to leave out, if there is an older one.

        One that is incomplete or damaged is skipped with a line, on all ranks alike. At another
        layout the micro-batches of an unfinished step are dropped, and the ``extra`` of a rank that
        did not exist is rank 0's. Flags of another micro-batch drop them too. :attr:`exact` is
        False if micro-batches were dropped.
        """
        self.wait()
        stream = self._trainer.stream
        found = [set(names) for names in stream.all_gather(newest_first(self._folder))]
        everywhere, newest = set.intersection(*found), max(set().union(*found), default="")
        lacking = [rank for rank, names in enumerate(found) if newest and newest not in names]
        if lacking and stream.rank == 0:
            log.warning(
                "Skipping checkpoint %s, which node %d lacks: training continues from one that all "
                "nodes have. Where that loses much, stop all and copy the folder checkpoints there",
                newest,
                lacking[0] // self._layout.shards,
            )
        names = sorted(everywhere, reverse=True)
        # Never skip the oldest checkpoint: one that may be bad is better than none.
        for name in names[min(skip, max(0, len(names) - 1)) :]:
            try:
                parts = Parts(self._folder, name, self._trainer.schema, stream)
                saved_at = parts.manifest["progress"]
                # A checkpoint of an earlier edition also has a list of blocks, which is left out.
                progress = Progress(**{f.name: saved_at[f.name] for f in fields(Progress)})
                own, extra = parts.own()
                saved = {**parts.manifest["state"], **parts.rows(), **own}
                say = log.info if stream.rank == 0 else log.debug
                state = matched(self._trainer.state_dict(), saved, f"Checkpoint {name}", say)
            except DAMAGE as error:  # on all ranks alike
                if stream.rank == 0:
                    why = in_words(error)
                    log.warning("Skipping checkpoint %s, trying the one before: %s", name, why)
                continue
            self.exact = self._trainer.load_state_dict(state)
            return progress, extra
        return None

    def roll_back(self) -> tuple[Progress, dict[str, Any]] | None:
        """Do :meth:`restore` after NaN or Inf, then halve the learning rate for a while.

        Collective.
        """
        # There was no finite step since the last roll-back, so the weights of that checkpoint are
        # the problem.
        fruitless = self._rolled_back_to == self._trainer.total_inner_steps
        self._skip = self._skip + 1 if fruitless else 0
        restored = self.restore(skip=self._skip)
        self._rolled_back_to = self._trainer.total_inner_steps
        self._trainer.slow_down()
        log.warning(
            "%s; the learning rate is halved for %d inner steps",
            "Rolled back to the last good checkpoint"
            if restored is not None
            else "No usable checkpoint to roll back to: training continues from these weights",
            SLOW_STEPS,
        )
        return restored

    # --- writing --------------------------------------------------------------------------------

    def _write(self, name: str, held: list[Any], content: str, _: BackgroundWrite) -> None:
        enter_thread(self._trainer.device, background=True)
        started = time.perf_counter()
        try:
            held[2].wait()
            parsed = json.loads(content)
            epoch = f"epoch-{parsed['state']['epoch_id']}-of-{self._layout.shards}"
            # The manifest is written last, so the tensors are whole if it is there.
            if not (self._folder / epoch / f"rank-{self._layout.shard}.json").exists():
                self._write_part(self._folder / epoch, held[1], {})
            # Write this part after the epoch's, since a complete checkpoint must not refer to a
            # missing file.
            self._write_part(self._folder / name, held[0], parsed)
            sync_folder(self._folder)
            self.last_error = None
        except Exception as error:  # training continues
            why = f"{type(error).__name__}: {error}; check the disk of {self._folder}"
            self._not_written(name, error, why)
            with contextlib.suppress(OSError):  # a disk that is away has nothing to delete
                for path in (self._folder / name).glob(f"rank-{self._layout.shard}.*"):
                    path.unlink(missing_ok=True)  # a full disk needs the room
            raise
        finally:
            held.clear()  # otherwise this thread's arguments hold the copies until it ends
        self.seconds = self.hold_seconds + time.perf_counter() - started
        if self._lead:
            try:
                if self._prune(name):
                    size = sum(path.stat().st_size for path in (self._folder / name).iterdir())
                    log.info(
                        "Checkpoint written: outer step %d, inner step %d (%.1f MB in %.1f s)",
                        parsed["progress"]["outer_step"],
                        parsed["progress"]["inner_step"],
                        size / 1e6,
                        self.seconds,
                    )
                # The launcher reads this, since a stop must have time for a checkpoint.
                write_json(self._folder / "last.json", {"name": name, "seconds": self.seconds})
            except (OSError, ValueError, KeyError) as error:
                if (again := self._repeats("older")) is not None:
                    what = f"Older checkpoints of {self._folder} were not deleted"
                    log.warning("%s: %s%s", what, error, again)
            finally:
                self._saved = bool(self._saved)

    def _not_written(self, name: str, error: Exception, why: str) -> None:
        self.last_error, self._saved = why, False
        restart = "a restart would resume from the one before"
        # Log a cause seldom: a disk may be full for hours, and the log is on it. Compare causes
        # without the text, which names another file each time.
        if (again := self._repeats((type(error), getattr(error, "errno", None)))) is not None:
            log.error("Checkpoint %s was not written (%s); %s%s", name, why, restart, again)

    def _write_part(self, folder: Path, tensors: dict[str, Tensor], more: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        layout = self._layout
        rank = layout.shard
        path = folder / f"rank-{rank}.safetensors"
        # Write the manifest after its file, so that a kill between the two leaves a part that does
        # not count.
        entries = [(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()]
        digest = write_safetensors(path, entries, tensors.values())
        manifest = {
            "format": FORMAT,
            "rank": rank,
            "world_size": layout.shards,
            "replicas": layout.replicas,
            "size": path.stat().st_size,
            "sha256": digest,
        }
        content = manifest | more
        write_json(folder / f"rank-{rank}.json", content | {DIGEST: manifest_digest(content)})

    def _named(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors of a state dict by their names in a file."""
        named: dict[str, Tensor] = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                named[key] = value
            elif _are_tensors(value):
                names = (f"{key}/{name}" for name, _ in self._trainer.schema)
                named.update(zip(names, value, strict=True))
        return named

    def _prune(self, newest: str) -> bool:
        """Wait until ``newest`` is complete, then delete all but ``keep`` complete checkpoints.

        The files that those refer to stay, too. Return whether ``newest`` became complete.
        """
        deadline = time.monotonic() + self._timeout
        ranks = range(self._layout.shards)
        while not all((self._folder / newest / f"rank-{r}.json").exists() for r in ranks):
            if self._hurry.is_set():
                # Training waits for this thread, and older checkpoints can be deleted next time.
                deadline = min(deadline, time.monotonic() + _HURRIED)
                self._hurry.clear()
            if time.monotonic() > deadline:
                return False  # a rank failed to write, so delete nothing
            # Look at files, since this thread must not use a collective while training uses its
            # own.
            time.sleep(0.02)
        self._saved = True
        keep: list[str] = []
        for name in newest_first(self._folder):
            if len(keep) < self._keep and is_complete(self._folder / name):
                keep.append(name)
            elif name != newest:
                shutil.rmtree(self._folder / name, ignore_errors=True)
        # Delete epochs after the checkpoints that refer to them, so that a kill in between leaves
        # one too many and never one too few.
        used = set()
        for name in keep:
            manifest = next(manifests_in(self._folder / name))
            used.add(f"epoch-{manifest['state']['epoch_id']}-of-{manifest['world_size']}")
        for folder in self._folder.glob("epoch-*-of-*"):
            if folder.name not in used:
                shutil.rmtree(folder, ignore_errors=True)
        return True
