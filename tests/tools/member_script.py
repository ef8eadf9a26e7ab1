"""One rank of a script that joined: ``member_script.py KIND MOMENT OUTER_STEP FOLDER``.

KIND is ``ddp`` or ``fsdp``; FOLDER holds the network of a ``member_world.MemberWorld``.
At MOMENT of a round all ranks are killed; with ``none`` the script ends at OUTER_STEP.
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
from distributed_training.member import Net
from distributed_training.miner import events as ev
from distributed_training.miner.events import MinerState
from tests.tools.member_world import played, script_model, settings_in, train_step
from tests.tools.store_ranks import kill, killed_at

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


def follow_to_death(net: Net, moment: str) -> None:
    """Kill all ranks at ``moment``."""

    def follow(event: ev.Event, state: MinerState) -> None:
        if killed_at(moment, event):
            kill()

    if moment == "prepared":
        net._weights.commit_outer_step = kill  # type: ignore[method-assign]
    if net._controller is not None:
        net._controller.subscribe(follow)


def run(kind: str, moment: str, until: int, folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    bucket = folder / "bucket"
    config = json.loads((bucket / "outer" / "0" / "config.json").read_text())
    model = wrapped(kind, script_model(config, seed=RANK + os.getpid()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    network = str(folder / "network.toml")
    with played(bucket):
        net = distributed_training.join(network, model, optimizer, **settings_in(folder))
        follow_to_death(net, moment)
        number = 0
        with net:
            while net.outer_step < until:
                number += 1
                loss = train_step(model, optimizer, WORLD * number + RANK)
                net.step(loss=loss, tokens=64)
    weights = net._weights
    ranks = [torch.zeros_like(each) for each in whole(model)]
    for mine, first in zip(whole(model), ranks, strict=True):
        first.copy_(mine)
        dist.broadcast(first, src=0)
        assert torch.equal(mine, first), "ranks hold other weights"
    starts = weights.outer.epoch_start or []
    found = [torch.zeros(shape) if RANK == 0 else None for _, shape in weights.schema]
    for shard, rows, out in zip(weights.shards, starts, found, strict=True):
        weights.stream.gather(shard.shape, rows, out)
    if RANK == 0:
        torch.save(found, folder / "epoch-start.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, force=True)
    run(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    leave(0)
