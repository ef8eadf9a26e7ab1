"""Move a member's weights, and write and decode its files, without a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from distributed_training.protocol.update_file import UpdateFile
from distributed_training.training.trainer import Trainer
from tests.tools.outer_steps import header, write_file

Schema = Sequence[tuple[str, tuple[int, ...]]]


def write_update(path: Path, schema: Schema, movement: Sequence[Tensor]) -> UpdateFile:
    """Write an update that moves all weights by about ``-movement``."""
    return write_file(path, movement, header("update", 0), schema=list(schema))


def decoded(path: Path, schema: Schema) -> list[Tensor]:
    file = UpdateFile.reopen(path, list(schema))
    return [file.decode(name, shape) for name, shape in schema]


def move(made: Trainer, whole: Callable[[int, tuple[int, ...]], Tensor]) -> None:
    """Take an inner step that moves each parameter by ``whole(index, shape)``."""
    for index, shard in enumerate(made.sharded.shards):
        shard.local.add_(whole(index, shard.shape)[shard.start : shard.stop])
    made.inner_step += 1
    made.total_inner_steps += 1
    made.drop_step()


def drawn(seed: int, scale: float = 1e-2) -> Callable[[int, tuple[int, ...]], Tensor]:
    """Return a function for :func:`move` that draws from ``seed``, the same at any world size."""

    def whole(index: int, shape: tuple[int, ...]) -> Tensor:
        return scale * torch.randn(
            shape, generator=torch.Generator().manual_seed(1000 * seed + index)
        )

    return whole
