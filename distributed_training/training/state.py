"""A rank's whole state as a checkpoint holds it: taken from a trainer, and given back to one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .host_copies import to_host
from .trainer import Trainer

log = logging.getLogger(__name__)


def state_of(trainer: Trainer) -> dict[str, Any]:
    """This rank's part of a checkpoint, in host memory; later steps do not change it.

    The micro-batches of an unfinished step are in it, so that none is lost or trained twice.
    """
    outer, optimizer, step = trainer.outer, trainer.optimizer, trainer.step
    on_gpu = trainer.device.type == "cuda"
    return {
        "tensors": {
            "weights": outer.current(),
            "exp_avg": to_host(optimizer.exp_avg),
            "exp_avg_sq": to_host(optimizer.exp_avg_sq),
            "epoch_start": outer.epoch_start,
            "momentum": outer.momentum,
            "residual": outer.feedback.residual,
        },
        "pending": step.pending(),
        "domains": list(step.domains),
        "steps": optimizer.step_count,
        "schedule": trainer.schedule.state(),
        "outer_learning_rate": outer.learning_rate,
        "outer_momentum": outer.mu,
        "epoch_id": outer.epoch_id,
        "outer_step": trainer.outer_step,
        "inner_step": trainer.inner_step,
        "total_inner_steps": trainer.total_inner_steps,
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state() if on_gpu else None,
    }


@torch.no_grad()
def load_state(trainer: Trainer, state: Mapping[str, Any], *, same_world_size: bool) -> None:
    """Back to a :func:`state_of`, its tensors already cut to this rank's rows. All ranks.

    The random state is restored only at the same world size: otherwise ranks would share one.
    """
    outer, tensors = trainer.outer, state["tensors"]
    trainer.drop_step()
    for item, rows in zip(trainer.sharded.shards, tensors["weights"], strict=True):
        item.local.copy_(rows)
    trainer.optimizer.load(tensors["exp_avg"], tensors["exp_avg_sq"], int(state["steps"]))
    outer.epoch_start = tensors["epoch_start"]
    outer.momentum = tensors["momentum"]
    outer.learning_rate = float(state["outer_learning_rate"])
    outer.mu = float(state["outer_momentum"])
    outer.epoch_id = state["epoch_id"]
    outer.feedback.residual = tensors["residual"]
    trainer.schedule.load(state["schedule"])
    trainer.outer_step = int(state["outer_step"])
    trainer.inner_step = int(state["inner_step"])
    trainer.total_inner_steps = int(state["total_inner_steps"])
    if same_world_size:
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None and trainer.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"])
    if state["pending"] is not None:
        _run_again(trainer, state["pending"], state["domains"])


def _run_again(trainer: Trainer, pending: Tensor, domains: list[int]) -> None:
    """Batches were stored, not gradients."""
    shape = (trainer.micro_batch_size, trainer.settings.sequence_length)
    if tuple(pending.shape[1:]) != shape:
        log.info(
            "%d micro-batch(es) of the inner step under way are dropped: they are of %s tokens, "
            "the flags say %s",
            len(pending),
            tuple(pending.shape[1:]),
            shape,
        )
        return
    with torch.enable_grad():
        for i, batch in enumerate(pending[: trainer.micro_batches_per_step - 1]):
            trainer.add_micro_batch(batch, domain=domains[i])
