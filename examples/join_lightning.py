"""Train adapters with PEFT and a Lightning ``Trainer``, as a member of a network.

    python examples/join_lightning.py NETWORK BASE TEXT ...

BASE is the folder or the name of the base that the network adapts; TEXT is files of your own. The
lines marked ``# network`` are all that a script needs to join. Lightning keeps its own checkpoints
in ``lightning/`` and resumes from the last one. It needs ``pip install lightning``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM

import distributed_training  # network
from distributed_training.lightning import LightningCallback  # network

LENGTH, BATCH = 256, 2  # tokens in a sequence, sequences in a micro-batch


class Windows(IterableDataset[Tensor]):
    """Endless text from random places in the files, int64 (LENGTH,)."""

    def __init__(self, tokenizer: Any, files: Sequence[str]) -> None:
        text = "\n".join(Path(file).read_text() for file in files)
        self._tokens = torch.tensor(tokenizer.encode(text).ids)

    def __iter__(self) -> Iterator[Tensor]:
        torch.seed()  # without it, each start would take the same places
        while True:
            start = int(torch.randint(len(self._tokens) - LENGTH, ()))
            yield self._tokens[start : start + LENGTH]


class Adapted(LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, ids: Tensor, _: int) -> Tensor:
        loss = self.model(input_ids=ids, labels=ids).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def main(network: str, base: str, files: Sequence[str], steps: int = -1) -> None:
    data = Windows(distributed_training.tokenizer(network), files)  # network
    model: Any = AutoModelForCausalLM.from_pretrained(base).train()
    model = get_peft_model(model, distributed_training.lora_config(network))  # network
    trainer = Trainer(
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[
            ModelCheckpoint("lightning", every_n_train_steps=10, save_last=True),
            LightningCallback(network, tokens=2 * BATCH * LENGTH),  # network
        ],
    )
    trainer.fit(Adapted(model), DataLoader(data, batch_size=BATCH), ckpt_path="last")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
