"""Train a causal model in a plain PyTorch loop, as a member of a network.

    python examples/join.py NETWORK [TEXT ...]

NETWORK is the network's file, URL or name; TEXT is files of your own, without which the network
provides the text. Run it in the folder with the ``miner.toml`` that ``dt-join`` wrote. The lines
marked ``# network`` are all that a loop needs to join. Ctrl-C ends it. The same command continues
with the weights in the run folder and with the optimizer's state, which the loop saves itself.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import distributed_training  # network

LENGTH, BATCH = 256, 4  # tokens in a sequence, sequences in a step
STATE = Path("optimizer.pt")


def make_model(network: str) -> Any:
    """Return the model that a network's file describes, with random weights."""
    config = AutoConfig.for_model(**distributed_training.model_config(network))  # network
    return AutoModelForCausalLM.from_config(config)


def batches(network: str, files: Sequence[str]) -> Iterator[Tensor]:
    """Yield int64 (BATCH, LENGTH) from random places in the files, endlessly."""
    text = "\n".join(Path(file).read_text() for file in files)
    tokens = torch.tensor(distributed_training.tokenizer(network).encode(text).ids)
    torch.seed()  # without it, each start would take the same places
    while True:
        starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1))
        yield tokens[starts + torch.arange(LENGTH)]


def main(network: str, files: Sequence[str], steps: int | None = None) -> None:
    model = make_model(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    if STATE.exists():
        optimizer.load_state_dict(torch.load(STATE))
    with distributed_training.join(network, model, optimizer) as net:  # network
        data = batches(network, files) if files else net.batches()  # network
        for step, ids in enumerate(itertools.islice(data, steps), start=1):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            net.step(loss=loss, tokens=ids.numel())  # network
            print(f"loss {loss.item():.3f}", flush=True)
            if step % 20 == 0:
                torch.save(optimizer.state_dict(), "optimizer.new")
                os.replace("optimizer.new", STATE)  # complete, whenever the process is killed


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
