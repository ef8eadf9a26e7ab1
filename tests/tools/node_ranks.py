"""Run one rank of a miner, which torchrun or the launcher starts.

Only the network of rank 0 is not the product's, but that of :mod:`miner_ranks`. The rank stops
after NODE_STEPS inner steps in total.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from distributed_training.config import Config
from distributed_training.miner import build, loop, start
from distributed_training.miner import events as ev
from distributed_training.miner.build import StartupInfo
from tests.tools.member_world import open_played
from tests.tools.miner_ranks import leader_of

STEPS = int(os.environ.get("NODE_STEPS", "0"))


def open_connections(config: Config, folder: Path, *given: Any, **named: Any) -> Any:
    leader_of(folder, config.swarm.run_id)
    return open_played(Path(f"{folder}.bucket"), config, folder, *given)


def build_rank(context: start.RankContext, info: StartupInfo, network: Any) -> start.Rank:
    """Build the product's rank; rank 0 stops after NODE_STEPS."""
    rank = product_rank(context, info, network)

    def on_event(event: ev.Event, state: Any) -> None:
        if isinstance(event, ev.InnerStepDone) and event.report.total_inner_steps == STEPS:
            context.events.put(ev.StopRequested("the test is over"))

    if rank.rank_zero is not None:
        rank.rank_zero.controller.subscribe(on_event)
    return rank


product_rank = start.build_rank


def run_rank(config: Config) -> int:
    build.open_connections = open_connections
    start.build_rank, loop.TICK = build_rank, 0.001
    return start.run_rank(config)
