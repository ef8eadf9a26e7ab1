"""One rank of a miner; torchrun or the launcher starts it. Everything is the product's but
the network of rank 0, which is that of :mod:`miner_ranks`. NODE_STEPS says after how many inner
steps in all it stops.
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from distributed_training.config import Config
from distributed_training.miner import build, start
from distributed_training.miner import events as ev
from distributed_training.miner.build import StartupInfo
from tests.tools.member_world import open_played
from tests.tools.miner_ranks import leader_of
from tests.tools.training_world import whole_weights

STEPS = int(os.environ.get("NODE_STEPS", "0"))


def open_connections(config: Config, folder: Path, *given: Any) -> Any:
    leader_of(folder, config.swarm.run_id)
    return open_played(Path(f"{folder}.bucket"), config, folder, *given)


class Played:
    """The product's rank; rank 0 stops after NODE_STEPS."""

    def __init__(self, context: start.RankContext, info: StartupInfo, network: Any) -> None:
        self.context = replace(context, tick=timedelta(milliseconds=1))
        self.rank = build_rank(self.context, info, network)
        if self.rank.rank_zero is not None:
            self.rank.rank_zero.controller.subscribe(self.on_event)

    def on_event(self, event: ev.Event, state: Any) -> None:
        if isinstance(event, ev.InnerStepDone) and event.report.total_inner_steps == STEPS:
            self.context.events.put(ev.StopRequested("the test is over"))

    def run(self) -> tuple[int, str]:
        ended, trainer = self.rank.run(), self.rank.loop._trainer
        layout = trainer.stream.layout
        rows = [shard.local.clone() for shard in trainer.sharded.shards]
        torch.save(rows, self.context.folder / f"rows-{layout.shard}.pt")
        whole = whole_weights(trainer)
        if whole is not None:
            torch.save(whole, self.context.folder / "whole.pt")
        return ended


build_rank = start.build_rank


def run_rank(config: Config) -> int:
    build.open_connections = open_connections
    start.build_rank = Played  # type: ignore[assignment]
    return start.run_rank(config)
