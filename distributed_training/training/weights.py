"""Weights into shards: from a safetensors file, or initial ones from a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .sharding import ShardedModel
from .shards import ParameterShard, RowStream


@torch.no_grad()
def load(sharded: ShardedModel, path: Path | None, stream: RowStream, *, seed: int) -> None:
    """Collective; ``path`` is rank 0's, None for initial weights. The ranks of its node read their
    own rows there, and other nodes have theirs from them. Raises ValueError on all ranks alike,
    changing nothing."""
    shards, tied = sharded.shards, sharded.tied
    shared = cast("str | None", stream.from_rank_0(None if path is None else str(path)))
    if shared is None:
        spread = getattr(sharded.model.config, "initializer_range", 0.02)
        _initialize(shards, float(spread), seed)  # type: ignore[arg-type]
        return
    error, problem, layout = None, None, stream.layout
    try:
        if layout.on_node_0:
            with safe_open(shared, "pt") as file:
                problem = _mismatch(shards, file, tied)
    except (OSError, SafetensorError) as failure:
        problem = f"{type(failure).__name__}: {failure}"
    if problem is not None:
        error = f"{shared} was not loaded: {problem}. Fetch the global state again"
    error = stream.first_error(error)
    if error is not None:
        raise ValueError(error)
    with safe_open(shared, "pt") if layout.on_node_0 else nullcontext() as opened:
        _copy(sharded, opened, stream)


def _copy(sharded: ShardedModel, file: Any, stream: RowStream) -> None:
    """``file``: open on node 0, None elsewhere."""
    present = set(file.keys()) if file is not None else set()
    across = stream.layout.shards > stream.layout.local
    for shard in sharded.shards:
        rows, whole = torch.empty((shard.stop - shard.start, *shard.shape[1:])), None
        if file is not None:
            stored = _stored_name(shard.name, present, sharded.tied)
            if not across:
                rows = file.get_slice(stored)[shard.start : shard.stop].float()
            elif stream.rank == 0:
                whole = file.get_tensor(stored).float()
        if across:
            stream.scatter(shard.shape, whole, rows)
        else:
            stream.replicate(rows)
        shard.local.copy_(rows)


def _stored_name(name: str, present: set[str], tied: Mapping[str, str]) -> str:
    """A tied weight may be stored under another of its names."""
    if name in present:
        return name
    return next((other for other, first in tied.items() if first == name), name)


def _mismatch(shards: Sequence[ParameterShard], file: Any, tied: Mapping[str, str]) -> str | None:
    present = set(file.keys())
    for shard in shards:
        name = _stored_name(shard.name, present, tied)
        if name not in present:
            return f"it holds no {shard.name}"
        shape = tuple(file.get_slice(name).get_shape())
        if shape != shard.shape:
            return f"{name} is {shape}, the model has {shard.shape}"
    unknown = present - {s.name for s in shards} - set(tied)
    return f"the model has no {min(unknown)}" if unknown else None


@torch.no_grad()
def _initialize(shards: Sequence[ParameterShard], std: float, seed: int) -> None:
    """Normal matrices, zero biases, unit norms: the same for every world size and device."""
    for index, shard in enumerate(shards):
        if len(shard.shape) == 1:
            shard.local.fill_(0.0 if shard.name.endswith("bias") else 1.0)
            continue
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        whole: Tensor = torch.empty(shard.shape).normal_(0.0, std, generator=generator)
        shard.local.copy_(whole[shard.start : shard.stop])
