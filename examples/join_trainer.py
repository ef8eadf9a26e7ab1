"""Train adapters with PEFT and a Hugging Face ``Trainer``, as a member of a network.

    python examples/join_trainer.py NETWORK BASE TEXT ...

BASE is the folder or the name of the base that the network adapts; TEXT is files of your own. The
lines marked ``# network`` are all that a script needs to join; to train a whole model, it needs
only the last of them. A ``Trainer`` keeps its own checkpoints in ``trainer/`` and resumes from the
last one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import distributed_training  # network
from distributed_training.huggingface import NetworkCallback  # network

LENGTH = 256  # tokens in a sequence


class Windows(Dataset[dict[str, Tensor]]):
    """The text of files, in sequences of LENGTH tokens: int64 ``input_ids`` and ``labels``."""

    def __init__(self, tokenizer: Any, files: Sequence[str]) -> None:
        text = "\n".join(Path(file).read_text() for file in files)
        self._tokens = torch.tensor(tokenizer.encode(text).ids)

    def __len__(self) -> int:
        return len(self._tokens) // LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self._tokens[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": ids, "labels": ids}


def last_checkpoint(folder: Path) -> str | None:
    """Return the newest complete checkpoint: its ``trainer_state.json`` is written last."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    newest = max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    return None if newest is None else str(newest)


def main(network: str, base: str, files: Sequence[str], steps: int = 1_000_000) -> None:
    folder = Path("trainer")
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        logging_steps=5,
        save_steps=10,
        save_total_limit=2,
        include_num_input_tokens_seen="all",
        report_to="none",
    )
    data = Windows(distributed_training.tokenizer(network), files)  # network
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    model = get_peft_model(model, distributed_training.lora_config(network))  # network
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.add_callback(NetworkCallback(network))  # network
    trainer.train(resume_from_checkpoint=last_checkpoint(folder))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
