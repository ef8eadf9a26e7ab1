"""Levers that the arena tries and the product does not have.

Two kinds. A *training* lever gets a trainer and returns what is called after each inner step. A
*rescale* lever changes the codes of a publication before its length is searched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distributed_training.training.error_feedback import Code
from distributed_training.training.trainer import Trainer

Codes = Mapping[str, Sequence[Code | None]]

LOOK_AHEAD_STEPS, LOOK_AHEAD_RATE, LOOK_AHEAD_MOMENTUM = 10, 0.7, 0.5
MUON_MOMENTUM = 0.95


def look_ahead(trainer: Trainer) -> Callable[[], None]:
    """SNOO (arXiv 2510.15830): every so many inner steps, Nesterov momentum on their sum."""
    shards = trainer.sharded.shards
    slow = [s.local.clone() for s in shards]  # where the last look ahead led
    momentum = [torch.zeros_like(s.local) for s in shards]

    @torch.no_grad()
    def after_step() -> None:
        if trainer.inner_step == 1:  # of a new outer step: what came before is another's
            for kept, start in zip(slow, trainer.outer.epoch_start or [], strict=True):
                kept.copy_(start)
        if trainer.inner_step % LOOK_AHEAD_STEPS:
            return
        for shard, kept, moved in zip(shards, slow, momentum, strict=True):
            delta = shard.local - kept
            moved.mul_(LOOK_AHEAD_MOMENTUM).add_(delta)
            kept.add_(delta + LOOK_AHEAD_MOMENTUM * moved, alpha=LOOK_AHEAD_RATE)
            shard.local.copy_(kept)
        trainer.drop_step()

    return after_step


def muon(trainer: Trainer) -> Callable[[], None]:
    """Muon for the matrices of the blocks, AdamW for the rest. AdamW's moments of all parameters
    go on as they were, so that the published optimizer shards stay what validators read."""
    adamw, shards = trainer.optimizer, trainer.sharded.shards
    ours = [i for i, s in enumerate(shards) if len(s.shape) == 2 and ".layers." in s.name]
    momentum = {i: torch.zeros_like(shards[i].local) for i in ours}
    plain_step = adamw.step

    @torch.no_grad()
    def step(gradients: Sequence[Tensor], learning_rate: float) -> None:
        before = {i: shards[i].local.clone() for i in ours}
        directions = {}
        for i in ours:
            momentum[i].mul_(MUON_MOMENTUM).add_(gradients[i])
            directions[i] = orthogonal(gradients[i] + MUON_MOMENTUM * momentum[i])
        plain_step(gradients, learning_rate)
        for i in ours:
            weights = shards[i].local
            # As long a step as AdamW's (arXiv 2502.16982, section 2.2).
            length = 0.2 * max(weights.shape) ** 0.5
            weights.copy_(before[i] * (1 - learning_rate * adamw.weight_decay))
            weights.sub_(directions[i], alpha=learning_rate * length)

    changed: Any = adamw
    changed.step = step
    return lambda: None


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """Its singular values moved to about 1 by Newton-Schulz steps (Keller Jordan, 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x if wide is matrix else x.T


def rows_rescaled(
    codes: Codes, start: Sequence[Tensor], current: Sequence[Tensor], learning_rate: float
) -> Codes:
    """The values of each row as long together as the row of the pseudo-gradient they stand for."""
    whole = [(a - b) * learning_rate for a, b in zip(start, current, strict=True)]

    def one(code: Code | None, rows: Tensor) -> Code | None:
        if code is None or rows.dim() != 2 or code[1].shape[0] != rows.shape[0]:
            return code
        length = rows.norm(dim=1, keepdim=True) / code[1].norm(dim=1, keepdim=True).clamp_min(1e-12)
        return code[0], code[1] * length

    return {
        name: [one(c, r) for c, r in zip(parts, whole, strict=True)]
        for name, parts in codes.items()
    }


def rows_of_off(
    codes: Codes, start: Sequence[Tensor], current: Sequence[Tensor], learning_rate: float
) -> Codes:
    """As :func:`rows_rescaled`, of the direction ``off`` alone: ``upload`` stays the public way."""
    rescaled = rows_rescaled({"off": codes["off"]}, start, current, learning_rate)
    return {**codes, **rescaled}


#: By name: training levers take a trainer, those of rows take codes.
LEVERS: Mapping[str, Callable[..., Any]] = {
    "snoo": look_ahead,
    "muon": muon,
    "rows": rows_rescaled,
    "rows of off": rows_of_off,
}
