"""Run one rank of a script that joins a network: ``member_script.py KIND FOLDER``.

KIND is ``ddp`` or ``fsdp``; FOLDER holds the network of a ``member_world.MemberWorld``. The script
ends at the first outer step. tests/unit/test_member.py has the kills.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import distributed_training
from distributed_training.common.processes import leave
from distributed_training.miner.run_folder import RANK_STORE
from tests.tools.member_world import (
    played,
    save_starts,
    script_model,
    settings_in,
    train_step,
)

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)
    return model


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [
        p.full_tensor() if isinstance(p, DTensor) else p.detach().clone()
        for p in (parameter.data for parameter in model.parameters())
    ]


def run(kind: str, folder: Path) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(os.environ[RANK_STORE], WORLD),
        rank=RANK,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    bucket = folder / "bucket"
    config = json.loads((bucket / "outer" / "0" / "config.json").read_text())
    model = wrapped(kind, script_model(config, seed=RANK + os.getpid()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    network = str(folder / "network.toml")
    with played(bucket):
        net = distributed_training.join(network, model, optimizer, **settings_in(folder))
        number = 0
        with net:
            while not net.outer_step:
                number += 1
                loss = train_step(model, optimizer, WORLD * number + RANK)
                net.step(loss=loss, tokens=64)
    weights = net._weights
    ranks = [torch.zeros_like(each) for each in whole(model)]
    for mine, first in zip(whole(model), ranks, strict=True):
        first.copy_(mine)
        dist.broadcast(first, src=0)
        assert torch.equal(mine, first), "ranks hold other weights"
    save_starts(weights, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, force=True)
    run(sys.argv[1], Path(sys.argv[2]))
    leave(0)
