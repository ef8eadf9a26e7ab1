"""Train a tiny model with ``Trainer`` alone: no chain, no bucket, no swarm.

    python examples/train_alone.py [OUTER_STEPS] [INNER_STEPS]

Each outer step is what a miner does between two rounds: inner AdamW steps, then the pseudo-gradient
(epoch start - current weights), then one step of Nesterov SGD along it. A miner averages the
pseudo-gradient with its peers in between; here the average is its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distributed_training.common.llama import local_llama_config
from distributed_training.config.settings import TrainingSettings
from distributed_training.data.page_source import StdlibSource
from distributed_training.training.trainer import Trainer

SEQUENCE = 128  # tokens; a token is a byte of text


def batches(size: int) -> Iterator[torch.Tensor]:
    """Yield int64 (size, SEQUENCE) of the standard library's sources, in a fixed random order."""
    text = "".join(StdlibSource().held_out()).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(0, len(tokens) - SEQUENCE, (size,), generator=generator)
        yield tokens[starts[:, None] + torch.arange(SEQUENCE)]


def main(outer_steps: int = 3, inner_steps: int = 20) -> list[float]:
    """Print the loss of each outer step and return them: nats per token of its last inner step."""
    settings = TrainingSettings(
        local_batch_size_train=8,
        local_batch_size_train_effective=8,
        sequence_length=SEQUENCE,
        learning_rate=2e-3,
        warmup_steps=10,
    )
    model = local_llama_config(sequence_length=SEQUENCE)
    trainer = Trainer(settings=settings, model_config=model, device=torch.device("cpu"))
    trainer.load_weights(None)  # initial weights from the seed
    trainer.begin_epoch(0)
    average = [torch.zeros(shape) for _, shape in trainer.schema]
    losses, data = list[float](), batches(trainer.micro_batch_size)
    for _ in range(outer_steps):
        while trainer.inner_step < inner_steps:
            if report := trainer.add_micro_batch(next(data)):  # the step is whole
                loss = report.loss
        norm = trainer.write_pseudo_gradient(average)
        trainer.prepare_outer_step(average)
        trainer.commit_outer_step()
        losses.append(loss)
        print(f"outer step {trainer.outer_step}: loss {loss:.3f}, pseudo-gradient {norm:.2f}")
    return losses


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
