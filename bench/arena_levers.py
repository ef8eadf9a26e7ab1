"""Ways to train that the arena tries and the product does not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.small_model import EFFECTIVE
from distributed_training.training.trainer import Trainer

LOOK_AHEAD_STEPS, LOOK_AHEAD_RATE, LOOK_AHEAD_MOMENTUM = 10, 0.7, 0.5


@dataclass(frozen=True)
class Training:
    """``batch``: sequences of an inner step, in as much time as they take; ``rate``: by the share
    of the round period that has passed, the factor of the learning rate."""

    batch: int = EFFECTIVE
    rate: Callable[[float], float] = lambda passed: 1.0
    looks_ahead: bool = False


#: By name; "": as the product trains.
TRAININGS = {
    "": Training(),
    "half batch": Training(batch=EFFECTIVE // 2),
    "double batch": Training(batch=EFFECTIVE * 2),
    "half rate": Training(rate=lambda passed: 0.5),
    "double rate": Training(rate=lambda passed: 2.0),
    "rate falls": Training(rate=lambda passed: 2.0 ** (1 - 2 * passed)),
    "rate rises": Training(rate=lambda passed: 2.0 ** (2 * passed - 1)),
    "snoo": Training(looks_ahead=True),
}


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
