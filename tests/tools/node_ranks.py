"""One rank of a miner of several machines; the launcher starts it. Everything is the product's but
the network of rank 0, which is that of :mod:`miner_ranks`. NODE_SCENARIO says what rank 0 does
there, NODE_STEPS after how many inner steps in all it stops.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from distributed_training.config import Config
from distributed_training.data.tokenizer import BYTE_VOCABULARY
from distributed_training.miner import start
from distributed_training.miner import state_machine as ev
from distributed_training.miner.services import Facts
from distributed_training.node.start import fetch_tokenizer
from distributed_training.protocol.types import RoundRequest
from tests.tools import miner_ranks
from tests.tools.training_world import tiny, whole_weights

STEPS = int(os.environ.get("NODE_STEPS", "0"))


def connect(config: Any, folder: Path, stack: Any, *, wanted: Any) -> Any:
    network: Any = miner_ranks.Network(upload_steps=4)
    tokenizer, eos = fetch_tokenizer(config, folder)
    model = tiny(vocab=BYTE_VOCABULARY)
    network.facts = Facts(3, model, str(tokenizer), eos, hotkey="5Miner")
    return network


class Miner(start.Miner):
    def __init__(self, place: Any, facts: Any, outside: Any) -> None:
        self.place = place
        super().__init__(place, facts, outside)
        if self.rank_zero is not None:
            blocks = self.rank_zero.blocks
            outside.last_requested = lambda: blocks._last_requested
            self.rank_zero.controller._tick = 0.001
            self.rank_zero.controller.subscribe(self.see)

    def see(self, event: ev.Event, state: Any) -> None:
        if not isinstance(event, ev.InnerStepDone):
            return
        step, marker = event.report.total_inner_steps, self.place.folder / "called"
        if step == STEPS:
            self.place.events.put(ev.StopRequested("the test is over"))
        if step == 7 and os.environ.get("NODE_SCENARIO") == "round":
            if not marker.exists():
                self.rank_zero.swarm.release.clear()  # the first round takes until it is cut off
            marker.touch()
            request = RoundRequest("5Master")
            self.place.events.put(ev.AllReduceCalled(request, time.monotonic()))

    def run(self) -> tuple[int, str]:
        ended = super().run()
        layout = self.trainer.stream.layout
        rows = [shard.local.clone() for shard in self.trainer.sharded.shards]
        torch.save(rows, self.place.folder / f"rows-{layout.rank % layout.local}.pt")
        whole = whole_weights(self.trainer)
        if whole is not None:
            torch.save(whole, self.place.folder / "whole.pt")
        return ended


def run_rank(config: Config) -> int:
    start.services.connect = connect  # type: ignore[assignment]
    start.Miner = Miner  # type: ignore[misc]
    return start.run_rank(config)
