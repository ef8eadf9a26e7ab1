"""A model small enough to train many times on two cores, trained by the product's trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distributed_training.config.settings import TrainingSettings
from distributed_training.data.page_source import StdlibSource
from distributed_training.data.pipeline import held_out_batches
from distributed_training.data.tokenizer import TextTokenizer, build_tokenizer
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


def text(folder: Path) -> tuple[Tensor, Tensor]:
    """Return training and held-out sequences; ``folder`` gets the tokenizer."""
    path, eos_id = build_tokenizer("bytes", folder)
    source = StdlibSource()
    rows = [
        row
        for config, count in sorted(source.num_rows().items())
        for row in source.rows(config, 0, split="train", limit=min(count, 300))
    ]
    tokens = TextTokenizer(path, eos_id=eos_id).encode_rows(rows, max_length=10_000)
    count = len(tokens) // SEQUENCE
    train = torch.from_numpy(tokens[: count * SEQUENCE].reshape(-1, SEQUENCE).astype(np.int64))
    held = held_out_batches(
        tokenizer_path=path, eos_id=eos_id, sequences=160, sequence_length=SEQUENCE
    )
    shuffled = torch.randperm(len(held), generator=torch.Generator().manual_seed(0))
    return train, held[shuffled]
