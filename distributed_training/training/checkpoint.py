"""Write checkpoints during training: the state of every rank, loadable at any world size.

After a stop or a crash, a miner continues from a checkpoint exactly where it was. Each rank writes
its own row blocks and then the manifest ``rank-R.json``, which has the SHA-256 of the blocks and of
the manifest itself. A checkpoint is complete once all ranks' files exist. So no rank waits for
another, and a kill at any moment leaves the previous checkpoint intact. A rank that loads a
checkpoint reads the rows it needs from whichever files have them, so any number of ranks can load
it (docs/architecture.md, Decisions). Under HSDP (:mod:`.sharding`) each machine writes its own
copy, and all machines continue from the newest checkpoint that every machine has.

torch.distributed.checkpoint could do this too (its ``async_save`` takes its own gloo group, so that
its collectives do not interfere with training's). It would save no work here: all state is split
into rows along the first dimension. Loading at another world size only means reading other rows,
and the ranks need no common plan.

The epoch-start weights and the residual change once per outer step. They are written once, into a
folder that is named after the outer step's identity and that checkpoints refer to.
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

from .collectives import Result, RowStream, enter_thread, row_range
from .copies import BackgroundWrite, write_safetensors
from .held_weights import HeldWeights
from .inner_optimizer import checkpoint_key, may_lack_rows
from .trainer import SLOW_STEPS

log = logging.getLogger(__name__)

FORMAT = 2
DIGEST = "manifest_sha256"

#: Errors that reading a damaged file may raise.
DAMAGE = (OSError, SafetensorError, ValueError, LookupError, TypeError, ArithmeticError)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why."""


def manifest_digest(manifest: dict[str, Any]) -> str:
    as_read = json.loads(json.dumps(manifest))  # JSON turns all keys into strings
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def manifest_of(path: Path) -> dict[str, Any]:
    """Read and verify a manifest. Raises CheckpointError if it is missing or damaged."""
    content = read_json_object(path)
    if content is None:
        raise CheckpointError(f"it is incomplete, since {path.name} is missing or damaged")
    digest = content.pop(DIGEST, None)
    if digest != manifest_digest(content) or content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path.name} is damaged, or not in the format that this miner reads ({FORMAT})"
        )
    return content


def manifests_in(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the manifests of all parts in ``folder``, in rank order. Raises CheckpointError."""
    ranks = [path.stem.removeprefix("rank-") for path in folder.glob("rank-*.json")]
    for rank in sorted(int(rank) for rank in ranks if rank.isdigit()):
        yield manifest_of(folder / f"rank-{rank}.json")


def is_complete(folder: Path) -> bool:
    """Return whether a copy of the model is complete: all of its ranks have written their part."""
    try:
        parts = [manifest["world_size"] for manifest in manifests_in(folder)]
    except CheckpointError:
        return False
    return bool(parts) and len(parts) == parts[0]


def newest_first(folder: Path) -> list[str]:
    """Return the names of all checkpoints in ``folder``, newest first, even incomplete ones."""
    return sorted((p.name for p in folder.glob("checkpoint-*")), reverse=True)


def outer_step_of(checkpoint: Path) -> int | None:
    """Return the outer step of a checkpoint, or None if it cannot be read."""
    progress = (read_json_object(checkpoint / "rank-0.json") or {}).get("progress")
    reached = progress.get("outer_step") if isinstance(progress, dict) else None
    return reached if isinstance(reached, int) else None


def oldest_outer_step(folder: Path, outer_step: int) -> int:
    """Return the lowest outer step of the checkpoints in ``folder``, or else ``outer_step``."""
    found = (outer_step_of(folder / name) for name in newest_first(folder))
    return min((step for step in found if step is not None), default=outer_step)


def _open(folder: Path, part: int) -> Any:
    """Open the file of one part after checking its size and SHA-256."""
    path = folder / f"rank-{part}.safetensors"
    manifest = manifest_of(folder / f"rank-{part}.json")
    # Compare the size first: hashing a truncated file would only waste time.
    if path.stat().st_size != manifest["size"] or sha256_of(path) != manifest["sha256"]:
        raise CheckpointError(f"{path.name} is damaged: its content is not what was written")
    return safe_open(path, "pt")


def in_words(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _kind(key: str) -> str:
    """Return the kind of state that a tensor has rows of, or "" if it has none."""
    kind, slash, _ = key.partition("/")
    return kind if slash else ""


class Parts:
    """One checkpoint that all ranks read. They call the same methods in the same order.

    Raises CheckpointError, or another error of :data:`DAMAGE`, on all ranks alike.
    """

    def __init__(self, folder: Path, name: str, schema: Schema, stream: RowStream) -> None:
        self._folder, self._name = folder, name
        self._schema, self._stream, self._layout = schema, stream, stream.layout
        self._files: dict[int, dict[str, Any]] = {}  # part -> the open file of each tensor, by name
        manifest = self._on_all(lambda: manifest_of(folder / name / "rank-0.json"))
        self.manifest = stream.from_rank_0(manifest)  # the state is the same in all manifests
        self._count = int(self.manifest["world_size"])
        replicas = self.manifest.get("replicas", 1)
        #: Whether each rank also gets back the state that only this rank had.
        self.exact = (self._count, replicas) == (self._layout.shards, self._layout.replicas)
        self._epoch = folder / f"epoch-{self.manifest['state']['epoch_id']}-of-{self._count}"
        # This rank reads its own part and the parts that have its rows.
        shard = self._layout.shard
        parts = {part for _, shape in schema for part, _, _ in self._pieces(shape[0])}
        parts |= {shard} if self.exact else set()
        found = self._on_all(
            lambda: {kind for part in sorted(parts or {0}) for kind in self._open_part(part)}
        )
        self._kinds = set().union(*stream.all_gather(found))

    def _on_all(self, read: Callable[[], Result]) -> Result:
        """Run ``read()`` on all ranks. Raises CheckpointError on all alike if files are damaged."""
        problem = None
        try:
            result = read()
        except DAMAGE as error:
            problem = in_words(error)
        # Let every rank take part before any of them raises: otherwise the others would hang in the
        # next collective.
        self._stream.raise_if_any(problem, CheckpointError)
        return result

    def _open_part(self, part: int) -> set[str]:
        """Open this machine's files of ``part``; return the kinds of state in them."""
        files = {
            key: file
            for file in (_open(self._folder / self._name, part), _open(self._epoch, part))
            for key in file.keys()  # noqa: SIM118
        }
        kinds = {_kind(key) for key in files if _kind(key)}
        for kind in kinds:
            for name, shape in self._schema:
                first, last = row_range(shape[0], self._count, part)
                found = files[f"{kind}/{name}"].get_slice(f"{kind}/{name}").get_shape()
                lacks = may_lack_rows(kind) and found == [0, *shape[1:]]
                if found != [last - first, *shape[1:]] and not lacks:
                    raise CheckpointError(f"{name} has another shape: it is from another model")
        self._files[part] = files
        return kinds

    def _pieces(self, rows: int) -> list[tuple[int, int, int]]:
        """Locate this rank's rows: the part, the first row in it and one past the last."""
        start, stop = row_range(rows, self._layout.shards, self._layout.shard)
        pieces = []
        for part in range(self._count):
            first, last = row_range(rows, self._count, part)
            low, high = max(start, first), min(stop, last)
            if low < high:
                pieces.append((part, low - first, high - first))
        return pieces

    def rows(self) -> dict[str, list[Tensor]]:
        """Return this rank's rows of every parameter, keyed by the kind of state."""
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
        """Return the state that only this rank has ({} unless :attr:`exact`), and its ``extra``."""
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
    """Return the ``saved`` values with exactly the keys of the state dict ``now``.

    A tensor that was not saved is None. Any other value may be missing if an older version wrote
    the checkpoint: then it stays as it is now, which at a start is its component's default. A saved
    value that no component knows is left out. ``say`` gets one line that names all missing values,
    and one that names all unknown values.
    """
    lacking = {key: value for key, value in now.items() if key not in saved}
    missing = [k for k, v in lacking.items() if v is not None and not _are_tensors(v)]
    unknown = sorted(saved.keys() - now.keys())
    if missing:
        say(f"{name} was written without {', '.join(missing)}: using the defaults")
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
_HURRIED = 5.0  # seconds to wait for the other ranks if training waits meanwhile


class Checkpointer:
    """Writes and loads one rank's part of each checkpoint.

    All ranks call the same methods in the same order. ``folder`` is on a file system that the ranks
    of this node share. ``keep``: how many complete checkpoints are kept there.
    """

    def __init__(self, *, trainer: HeldWeights, folder: Path, keep: int = 2) -> None:
        self.hold_seconds = 0.0  # seconds for which the last save paused training
        # Seconds that the last save took on this rank, including the writing.
        self.seconds: float | None = None
        self.last_error: str | None = None
        self.exact = True  # the last restore dropped no micro-batch of an unfinished step
        self._trainer = trainer
        self._layout = trainer.stream.layout
        self._lead = self._layout.shard == 0  # the rank that leads in this folder
        self._folder = folder
        self._keep = max(1, keep)
        self._timeout = _RANKS_TIMEOUT
        self._writing: BackgroundWrite | None = None
        self._skip = 0  # number of newest checkpoints that a roll-back leaves out
        self._rolled_back_to: int | None = None  # total inner steps at the last roll-back
        self._hurry = threading.Event()  # set while training waits for the thread
        self._saved: bool | None = None  # see saved()
        self._repeats = Repeats(_SAY_AGAIN)

    def save(self, extra: dict[str, Any], progress: Progress) -> None:
        """Start copying the state to host memory, and write it in a thread. Collective.

        ``extra``: this rank's own JSON-able values, such as its place in the data. ``progress``:
        rank 0's counts. First waits for a write that is still in progress. A failed write is
        logged, not raised: training continues, and the previous checkpoint stays.
        """
        self.wait()
        self._saved, started = None, time.perf_counter()
        # From here on no rank is writing, so an incomplete checkpoint will stay incomplete, and
        # rank 0 may delete it.
        self._trainer.stream.all_gather(None)
        name = ""
        if self._lead:
            names: list[str] = []
            # If the disk is gone, the writing thread logs that. An error here would end the miner
            # while the other ranks wait for the name.
            with contextlib.suppress(OSError):
                names = newest_first(self._folder)
                for old in names:
                    # Delete incomplete checkpoints: otherwise a disk that was briefly full would
                    # stay full.
                    if not is_complete(self._folder / old):
                        shutil.rmtree(self._folder / old, ignore_errors=True)
            numbers = [int(n) for old in names if (n := old.partition("-")[2]).isdigit()]
            # The number exceeds all others, even if the clock was set back.
            number = max(max(numbers, default=0) + 1, time.time_ns() // 1_000_000)
            name = f"checkpoint-{number:015d}"
        # Rank 0 chooses the name, since the clocks of two nodes would produce two names.
        name, first = self._trainer.stream.from_rank_0((name, extra))
        try:
            # An upload at this boundary shares these copies, so that they take 12 bytes per
            # parameter only once.
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
        # Serialize it now, since the next step changes lists in it.
        text = json.dumps(content | {"progress": asdict(progress)})
        self.hold_seconds = time.perf_counter() - started
        # A daemon thread: a disk that hangs must not keep a stopped miner alive.
        self._writing = BackgroundWrite("checkpoint", daemon=True)
        copies.writers.append(self._writing.ended)
        held = [by_step, by_epoch, copies]
        self._writing.start(partial(self._write, name, held, text))

    def saved(self) -> bool | None:
        """Return whether all ranks of this machine have written the last checkpoint. Rank 0 only.

        None: not known yet.
        """
        return self._saved

    def wait(self) -> None:
        """Wait until this rank's current write has ended."""
        if self._writing is not None:
            self._hurry.set()
            self._writing.join()
            self._hurry.clear()

    def restore(self, *, skip: int = 0) -> tuple[Progress, dict[str, Any]] | None:
        """Load the newest usable checkpoint; return None if there is none. Collective.

        ``skip``: how many of the newest checkpoints to leave out, if there is an older one.

        An incomplete or damaged checkpoint is skipped with a log line, on all ranks alike. The
        micro-batches of an unfinished step are dropped if the layout or the micro-batch of the
        flags has changed; :attr:`exact` is then False. A rank that did not exist when the
        checkpoint was written gets rank 0's ``extra``.
        """
        self.wait()
        stream = self._trainer.stream
        found = [set(names) for names in stream.all_gather(newest_first(self._folder))]
        everywhere, newest = set.intersection(*found), max(set().union(*found), default="")
        lacking = [rank for rank, names in enumerate(found) if newest and newest not in names]
        if lacking and stream.rank == 0:
            log.warning(
                "Skipping checkpoint %s, which node %d lacks: training continues from one that all "
                "nodes have. If that loses too much, stop all nodes and copy the checkpoints there",
                newest,
                lacking[0] // self._layout.shards,
            )
        names = sorted(everywhere, reverse=True)
        # Never skip the oldest checkpoint: a bad one may still be better than none.
        for name in names[min(skip, max(0, len(names) - 1)) :]:
            try:
                parts = Parts(self._folder, name, self._trainer.schema, stream)
                saved_at = parts.manifest["progress"]
                # Ignore other keys, such as the list of blocks that earlier versions wrote.
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
        """Call :meth:`restore` after NaN or Inf, then halve the learning rate for a while.

        Collective.
        """
        # If there was no finite step since the last roll-back, that checkpoint's weights are the
        # problem.
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
            # The manifest is written last, so the tensors are complete if it exists.
            if not (self._folder / epoch / f"rank-{self._layout.shard}.json").exists():
                self._write_part(self._folder / epoch, held[1], {})
            # Write this part after the epoch's part: a complete checkpoint must not refer to a
            # missing file.
            self._write_part(self._folder / name, held[0], parsed)
            sync_folder(self._folder)
            self.last_error = None
        except Exception as error:  # any error is logged, and training continues
            why = f"{type(error).__name__}: {error}; check the disk of {self._folder}"
            self._not_written(name, error, why)
            with contextlib.suppress(OSError):  # if the disk is gone, there is nothing to delete
                for path in (self._folder / name).glob(f"rank-{self._layout.shard}.*"):
                    path.unlink(missing_ok=True)  # it takes room on a disk that may be full
            raise
        finally:
            held.clear()  # otherwise this thread's arguments would hold the copies until it ends
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
                # The launcher reads this to allow enough time for the checkpoint at a stop.
                write_json(self._folder / "last.json", {"name": name, "seconds": self.seconds})
            except (OSError, ValueError, KeyError) as error:
                if (again := self._repeats("older")) is not None:
                    what = f"Older checkpoints in {self._folder} were not deleted"
                    log.warning("%s: %s%s", what, error, again)
            finally:
                self._saved = bool(self._saved)

    def _not_written(self, name: str, error: Exception, why: str) -> None:
        self.last_error, self._saved = why, False
        restart = "a restart would resume from the previous one"
        # Log each cause only now and then: a disk may be full for hours, and the log is on it.
        # Compare causes without their text, which names a different file each time.
        if (again := self._repeats((type(error), getattr(error, "errno", None)))) is not None:
            log.error("Checkpoint %s was not written (%s); %s%s", name, why, restart, again)

    def _write_part(self, folder: Path, tensors: dict[str, Tensor], more: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        layout = self._layout
        rank = layout.shard
        path = folder / f"rank-{rank}.safetensors"
        # Write the manifest after the tensors, so that a kill between the two leaves a part that is
        # not valid.
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
        """Return the tensors of a state dict, keyed by their names in a file."""
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

        The epoch files that the remaining ones refer to stay, too. Return whether ``newest`` became
        complete.
        """
        deadline = time.monotonic() + self._timeout
        ranks = range(self._layout.shards)
        while not all((self._folder / newest / f"rank-{r}.json").exists() for r in ranks):
            if self._hurry.is_set():
                # Training is waiting for this thread; older checkpoints can be deleted next time.
                deadline = min(deadline, time.monotonic() + _HURRIED)
                self._hurry.clear()
            if time.monotonic() > deadline:
                return False  # a rank failed to write, so delete nothing
            # Poll for files, since this thread must not use a collective while training uses its
            # own.
            time.sleep(0.02)
        self._saved = True
        keep: list[str] = []
        for name in newest_first(self._folder):
            if len(keep) < self._keep and is_complete(self._folder / name):
                keep.append(name)
            elif name != newest:
                shutil.rmtree(self._folder / name, ignore_errors=True)
        # Delete epoch folders after the checkpoints that refer to them, so that a kill in between
        # may leave one too many, but never one too few.
        used = set()
        for name in keep:
            manifest = next(manifests_in(self._folder / name))
            used.add(f"epoch-{manifest['state']['epoch_id']}-of-{manifest['world_size']}")
        for folder in self._folder.glob("epoch-*-of-*"):
            if folder.name not in used:
                shutil.rmtree(folder, ignore_errors=True)
        return True
