"""Draw the first weights of a trainer that has no network, the same on any layout and device."""

from __future__ import annotations

import torch

from distributed_training.training.trainer import Trainer


@torch.no_grad()
def begin(made: Trainer, *, frozen: bool = False) -> None:
    """Draw the weights from the trainer's seed, and make them the epoch start of outer step 0.

    ``frozen``: also draw the parameters that are not trained.
    """
    draw(made, frozen=frozen)
    made.begin_epoch(0)


@torch.no_grad()
def draw(made: Trainer, *, frozen: bool = False) -> None:
    """Draw the weights from the trainer's seed; see :func:`begin`."""
    made.copier.finish()
    spread = getattr(made.sharded.model.config, "initializer_range", 0.02)
    # Matrices are normal, biases 0 and norms 1.
    for index, shard in enumerate((*made.shards, *(made.sharded.frozen if frozen else ()))):
        if len(shard.shape) == 1:
            shard.local.fill_(0.0 if shard.name.endswith("bias") else 1.0)
            continue
        # Draw the whole matrix on the host with its own seed, so that no value depends on the
        # number of ranks or on the device.
        generator = torch.Generator().manual_seed(made.settings.seed * 1_000_003 + index)
        whole = torch.empty(shard.shape).normal_(0.0, float(spread), generator=generator)
        shard.local.copy_(whole[shard.start : shard.stop])
    made.drop_step()
