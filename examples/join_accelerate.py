"""Train adapters with PEFT and Accelerate on several GPUs, as one member of a network.

    accelerate launch --multi_gpu --num_processes 2 join_accelerate.py NETWORK BASE TEXT ...

BASE is the folder or the name of the base that the network adapts; TEXT is files of your own. The
lines marked ``# network`` are all that a script needs to join. Only the first process talks to the
network. With ``ACCELERATE_USE_CPU=1`` before the command it runs without GPUs. The same command
continues, with the optimizer's state, which the loop saves itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

import distributed_training  # network

LENGTH, BATCH = 256, 2  # tokens in a sequence, sequences in a process's micro-batch
STATE = Path("optimizer.pt")


def batches(tokenizer: Any, files: Sequence[str]) -> Iterator[Tensor]:
    """Yield int64 (BATCH, LENGTH) from random places in the files, different in each process."""
    text = "\n".join(Path(file).read_text() for file in files)
    tokens = torch.tensor(tokenizer.encode(text).ids)
    torch.seed()  # without it, all processes would take the same places
    while True:
        starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1))
        yield tokens[starts + torch.arange(LENGTH)]


def main(network: str, base: str, files: Sequence[str]) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model: Any = AutoModelForCausalLM.from_pretrained(base).train()
    model = get_peft_model(model, distributed_training.lora_config(network))  # network
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    if STATE.exists():
        optimizer.load_state_dict(torch.load(STATE))
    with accelerator.main_process_first():
        tokenizer = distributed_training.tokenizer(network)  # network
    with distributed_training.join(network, model, optimizer) as net:  # network
        for ids in batches(tokenizer, files):
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            net.step(loss=loss, tokens=2 * ids.numel())  # network
            accelerator.print(f"loss {loss.item():.3f}", flush=True)
            if accelerator.is_main_process and net.inner_step % 20 == 0:
                torch.save(optimizer.state_dict(), "optimizer.new")
                os.replace("optimizer.new", STATE)  # complete, whenever the process is killed


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
