"""Reading a checkpoint: its parts, wherever they lie, become the rows of the ranks that run now.

A *part* is what one rank wrote: its rows of every state, and what was its alone (data cursor,
random state, unfinished step). A rank reads the parts it needs in its node's folder. What is
missing or damaged there comes from a rank whose node has it. So a checkpoint loads at any number
of ranks and nodes, and onto an empty disk, as long as every part is whole somewhere.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distributed_training.common.files import read_json_object, sha256_of

from .model import Schema
from .shards import RowStream, row_range

log = logging.getLogger(__name__)

FORMAT = 2
DIGEST = "manifest_sha256"
_READ = (1, FORMAT)  # a manifest of format 1 has no digest
BY_STEP = ("weights", "exp_avg", "exp_avg_sq", "residual")
BY_EPOCH = ("epoch_start", "momentum")

#: What reading a file that may hold anything raises.
DAMAGE = (OSError, SafetensorError, ValueError, LookupError, TypeError, ArithmeticError)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why."""


class ElsewhereError(CheckpointError):
    """Whole, as far as this miner's nodes have it; the rest is on nodes that are not here."""


def digest_of(manifest: dict[str, Any]) -> str:
    as_read = json.loads(json.dumps(manifest))  # where keys are text
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def manifest_of(path: Path) -> dict[str, Any]:
    """As it was written. Raises CheckpointError for one that is missing or damaged."""
    content = read_json_object(path)
    if content is None:
        raise CheckpointError(f"{path.name} is missing or damaged")
    digest = content.pop(DIGEST, None)
    if content.get("format") not in _READ or (
        content["format"] > 1 and digest != digest_of(content)
    ):
        raise CheckpointError(
            f"{path.name} is damaged, or of another format than this miner's ({FORMAT})"
        )
    return content


def manifests_in(folder: Path) -> Iterator[dict[str, Any]]:
    """Of all parts there, by rank. Raises CheckpointError."""
    ranks = [path.stem.removeprefix("rank-") for path in folder.glob("rank-*.json")]
    for rank in sorted(int(rank) for rank in ranks if rank.isdigit()):
        yield manifest_of(folder / f"rank-{rank}.json")


def claims_in(folder: Path) -> set[range]:
    """The parts that nodes have of it, by what is in ``folder``: each part names those of its node.
    Raises CheckpointError."""
    found = (m.get("here", (0, m["world_size"])) for m in manifests_in(folder))
    return {range(*here) for here in found}


def is_complete(folder: Path) -> bool:
    try:
        claims = claims_in(folder)
    except (CheckpointError, LookupError, TypeError):
        return False
    return bool(claims) and all(
        (folder / f"rank-{part}.json").exists() for claim in claims for part in claim
    )


def _open(folder: Path, part: int) -> Any:
    """The file of one part, after its size and SHA-256 were compared."""
    path = folder / f"rank-{part}.safetensors"
    manifest = manifest_of(folder / f"rank-{part}.json")
    if path.stat().st_size != manifest["size"] or sha256_of(path) != manifest["sha256"]:
        raise CheckpointError(f"{path.name} is damaged: its bytes are not those that were written")
    return safe_open(path, "pt")


def in_words(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


class Parts:
    """One checkpoint, as all ranks see it. All of them call the same methods in the same order.

    Raises CheckpointError, or what a manifest without a digest may lead to (:data:`DAMAGE`), on all
    ranks alike.
    """

    def __init__(self, folder: Path, name: str, schema: Schema, stream: RowStream) -> None:
        self._folder, self._name = folder, name
        self._schema, self._stream, self._layout = schema, stream, stream.layout
        self._files: dict[int, dict[str, Any]] = {}  # part: by what changes its file, open
        self.manifest = self._agree_on_manifest()  # of one part; its state is that of all
        self._count = int(self.manifest["world_size"])
        replicas = self.manifest.get("replicas", 1)
        self.same_layout = (self._count, replicas) == (self._layout.shards, self._layout.replicas)
        self._epoch = folder / f"epoch-{self.manifest['state']['epoch_id']}-of-{self._count}"
        self._holders, self._kinds = self._find()
        ranks = range(self._layout.world_size)
        #: Every rank has what was its alone.
        self.exact = self.same_layout and all(self._source_of_own(r) is not None for r in ranks)
        self.unfinished = "pending" in self._kinds  # it holds micro-batches of an unfinished step

    def _agree_on_manifest(self) -> dict[str, Any]:
        found, claims, problem = None, set[range](), "it is incomplete: no part of it is here"
        try:
            found = next(manifests_in(self._folder / self._name), None)
            claims = claims_in(self._folder / self._name)
        except DAMAGE as error:
            problem = in_words(error)
        everywhere = self._stream.answers((found, claims, problem))
        manifest = next((m for m, _, _ in everywhere if m is not None), None)
        if manifest is None:
            raise CheckpointError(everywhere[0][2])
        claims = claims.union(*(c for _, c, _ in everywhere))
        for part in range(int(manifest["world_size"])):
            if not any(part in claim for claim in claims):
                raise ElsewhereError(
                    f"it is of {manifest['world_size']} ranks that shared one copy of the model, "
                    f"and what rank {part} had of it is on none of the nodes there are now"
                )
        return manifest

    # --- who has what --------------------------------------------------------------------------

    def _find(self) -> tuple[dict[int, list[int]], set[str]]:
        """The ranks that can read each part, and the kinds of state in it."""
        layout, stream = self._layout, self._stream
        wanted = [self._wanted_by(rank) for rank in range(layout.world_size)]
        problems = {part: self._problem(part) for part in wanted[layout.rank]}
        everywhere = stream.answers(problems)
        lacking = sorted(
            {p for parts, f in zip(wanted, everywhere, strict=True) for p in parts if f[p]}
        )
        for part in lacking[layout.rank % layout.local :: layout.local]:
            if part not in problems:
                problems[part] = self._problem(part)
        kinds = {k.partition("/")[0] for f in self._opened() for k in f.keys()}  # noqa: SIM118
        answers = stream.answers((problems, kinds if self._files else set[str]()))
        holders: dict[int, list[int]] = {}
        for part in {p for parts in wanted for p in parts}:
            holders[part] = [r for r, (f, _) in enumerate(answers) if f.get(part, "") is None]
            if not holders[part]:
                raise CheckpointError(next(f[part] for f, _ in answers if f.get(part)))
        if lacking:
            node = holders[lacking[0]][0] // layout.local
            where = f"node {node}" if node else "the first node"
            why = next(f[lacking[0]] for f in everywhere if f.get(lacking[0]))
            log.info("The state comes from %s, since another has none: %s", where, why)
        return holders, set().union(*(kinds for _, kinds in answers))

    def _opened(self) -> Iterator[Any]:
        for files in self._files.values():
            yield from files.values()

    def _problem(self, part: int) -> str | None:
        """Why this node's folder does not have ``part``; it is open if it does."""
        try:
            folder = self._folder / self._name
            if not (folder / f"rank-{part}.json").exists():
                raise CheckpointError(
                    f"it is incomplete: the miner stopped while writing it, or the disk lost "
                    f"rank-{part}.json"
                )
            files = dict.fromkeys(BY_STEP, _open(folder, part))
            files |= dict.fromkeys(BY_EPOCH, _open(self._epoch, part))
            for kind, file in files.items():
                present = set(file.keys())
                if not any(key.startswith(f"{kind}/") for key in present):
                    continue
                for name, shape in self._schema:
                    first, last = row_range(shape[0], self._count, part)
                    if file.get_slice(f"{kind}/{name}").get_shape() != [last - first, *shape[1:]]:
                        raise CheckpointError(f"{name} has another shape: it is of another model")
            self._files[part] = files
        except DAMAGE as error:
            return in_words(error)
        return None

    def _wanted_by(self, rank: int) -> list[int]:
        """The parts that hold rows of ``rank``, and its own."""
        parts = {part for _, shape in self._schema for part, _, _ in self._pieces(shape[0], rank)}
        own = rank % self._layout.shards
        return sorted(parts | ({own} if self.same_layout else set()) or {0})

    def _pieces(self, rows: int, rank: int) -> list[tuple[int, int, int]]:
        """Where the rows of ``rank`` are: part, first and one past the last row in it."""
        start, stop = row_range(rows, self._layout.shards, rank % self._layout.shards)
        pieces = []
        for part in range(self._count):
            first, last = row_range(rows, self._count, part)
            low, high = max(start, first), min(stop, last)
            if low < high:
                pieces.append((part, low - first, high - first))
        return pieces

    def _source(self, part: int, rank: int) -> int:
        return rank if rank in self._holders[part] else self._holders[part][0]

    def _source_of_own(self, rank: int) -> int | None:
        """Who has what was ``rank``'s alone: copies of a model have parts of the same numbers."""
        source = self._source(rank % self._layout.shards, rank)
        return source if source == rank or self._layout.replicas == 1 else None

    # --- what is in them -----------------------------------------------------------------------

    def rows(self) -> dict[str, list[Tensor] | None]:
        """This rank's rows of every parameter, by kind of state; None for a kind not there."""
        return {
            kind: [self._rows_of(kind, *each) for each in self._schema]
            if kind in self._kinds
            else None
            for kind in (*BY_STEP, *BY_EPOCH)
        }

    def _rows_of(self, kind: str, name: str, shape: tuple[int, ...]) -> Tensor:
        me, group, mine = self._stream.rank, self._stream.group, []
        for rank in range(self._layout.world_size):
            for part, low, high in self._pieces(shape[0], rank):
                source = self._source(part, rank)
                if me == source:
                    rows = self._files[part][kind].get_slice(f"{kind}/{name}")[low:high]
                    if rank != me:
                        dist.send(rows.contiguous(), group=group, group_dst=rank)
                elif me == rank:
                    rows = torch.empty((high - low, *shape[1:]))
                    dist.recv(rows, group=group, group_src=source)
                if me == rank:
                    mine.append(rows)
        return torch.cat(mine) if mine else torch.empty((0, *shape[1:]))

    def own(self) -> dict[str, Any]:
        """``extra`` and, if :attr:`exact`, the random states and unfinished step of this rank."""
        if not self.exact:
            try:
                path = self._folder / self._name / f"rank-{self._layout.shard}.json"
                return {"extra": manifest_of(path)["extra"]}
            except DAMAGE:
                return {"extra": self.manifest.get("first", {})}
        me, group, mine = self._stream.rank, self._stream.group, {}
        for rank in range(self._layout.world_size):
            source = self._source_of_own(rank)
            if source == me:
                found = self._read_own(rank % self._layout.shards)
                if rank == me:
                    mine = found
                else:
                    dist.send_object_list([found], group=group, group_dst=rank)
            elif rank == me:
                box: list[Any] = [None]
                dist.recv_object_list(box, group=group, group_src=source)
                mine = box[0]
        return mine

    def _read_own(self, part: int) -> dict[str, Any]:
        manifest = manifest_of(self._folder / self._name / f"rank-{part}.json")
        found = {key: manifest["state"][key] for key in ("python_rng", "numpy_rng")}
        file = self._files[part][BY_STEP[0]]
        present = set(file.keys())
        for key in ("rng", "cuda_rng", "pending"):
            found[key] = file.get_tensor(key) if key in present else None
        return {**found, "extra": manifest.get("extra", {})}
