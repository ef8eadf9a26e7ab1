"""A model small enough to train many times on two cores, trained by the product's trainer."""

from __future__ import annotations

from typing import Any

import torch

from distributed_training.config.settings import TrainingSettings
from distributed_training.training.memory_plan import llama_config
from distributed_training.training.trainer import Trainer

SEQUENCE, MICRO, EFFECTIVE = 128, 8, 16


def small_config() -> dict[str, Any]:
    """Return the model: about 0.27 M parameters, rows of 96 and 256 entries."""
    return llama_config(
        hidden=96,
        layers=2,
        heads=4,
        kv_heads=4,
        intermediate=256,
        vocab=264,
        max_positions=SEQUENCE,
    )


def new_trainer(*, seed: int) -> Trainer:
    """Return a trainer alone in its process group: weights of ``seed``, outer step 0 begun."""
    settings = TrainingSettings(
        local_batch_size_train=MICRO,
        local_batch_size_train_effective=EFFECTIVE,
        sequence_length=SEQUENCE,
        learning_rate=1e-3,
        warmup_steps=20,
        total_steps=10_000,
        seed=seed,
    )
    made = Trainer(
        settings=settings,
        model_config=small_config(),
        device=torch.device("cpu"),
        say=lambda line: None,
    )
    made.load_weights(None)
    made.begin_epoch(0)
    return made
