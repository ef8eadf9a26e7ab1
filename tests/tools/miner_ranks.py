"""Run one rank of a miner in a simulated network: ``miner_ranks.py SCENARIO FOLDER``.

``start.build_rank`` builds the rank as in the product. Its store is a folder next to FOLDER, where
rank 0's :class:`~tests.tools.store_leader.Leader` stands for the validator. ``store_ranks`` has the
scenarios with kills within a round.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from distributed_training.common.processes import leave
from distributed_training.data.tokenizer import BYTE_VOCABULARY
from distributed_training.exchange import store_rounds
from distributed_training.miner import events as ev
from distributed_training.miner.events import MinerState
from distributed_training.miner.ranks import join_ranks
from distributed_training.miner.run_folder import rank_environment
from distributed_training.protocol.update_file import UpdateFile
from distributed_training.telemetry import read_events
from tests.tools.member_world import MINER, STORE_RULES, UID, build_played
from tests.tools.miner_parts import config_of
from tests.tools.small_miner import FLAGS
from tests.tools.store_leader import Leader
from tests.tools.training_world import tiny, whole_weights

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def leader_of(folder: Path, run_id: str) -> Leader | None:
    """Begin the network of the miner in ``folder``; return None if it has begun before."""
    bucket = Path(f"{folder}.bucket")
    if bucket.exists():
        return None
    model = tiny(vocab=BYTE_VOCABULARY)
    return Leader(bucket, model, run_id=run_id, members={UID: MINER.ss58_address})


class Miner:
    """Run one rank of a miner.

    ``on_step``: called on rank 0 after each inner step. ``on_micro_batch``: called there after each
    micro-batch that ends no inner step. ``on_other``: called there with each event.
    """

    leader: Leader

    def __init__(
        self,
        folder: Path,
        *,
        on_step: Callable[[Miner, int], None],
        on_micro_batch: Callable[[Miner], None] = lambda miner: None,
        on_other: Callable[[Miner, ev.Event], None] = lambda miner, event: None,
        flags: Mapping[str, Any] = {},
        rules: Mapping[str, Any] = {},
    ) -> None:
        store_rounds._INTERVAL, store_rounds._SOON = 0.2, 0.1
        self.folder = folder
        self.losses: list[float] = []
        # For each step: seconds spent waiting for data, and seconds in total.
        self.waits: list[tuple[float, float]] = []
        self.on_step, self.on_micro_batch, self.on_other = on_step, on_micro_batch, on_other
        self.events: queue.SimpleQueue[ev.Event] = queue.SimpleQueue()
        self.stack = ExitStack()
        self.ranks = join_ranks(rank_environment(), timeout=timedelta(seconds=60), backend="gloo")
        argv = [f"--{name}={value}" for name, value in {**FLAGS, **flags}.items()]
        self.config = config_of(*argv, rules={**STORE_RULES, **rules})
        if RANK == 0 and (leader := leader_of(folder, self.config.swarm.run_id)) is not None:
            self.leader = leader
        place = Path(f"{folder}.bucket")
        self.product = build_played(place, self.config, folder, self.ranks, self.events, self.stack)
        loop, self.rank_zero = self.product.loop, self.product.rank_zero
        self.trainer, self.data, self.checkpointer = loop._trainer, loop._text, loop._checkpointer
        if self.rank_zero is not None:
            self.blocks = self.rank_zero.blocks
            self.rank_zero.controller.subscribe(self.on_event)

    def on_event(self, event: ev.Event, state: MinerState) -> None:
        match event:
            case ev.InnerStepDone(report=report):
                self.losses.append(report.loss)
                self.waits.append((report.data_wait_seconds, report.seconds))
                self.on_step(self, len(self.losses))
            case ev.MicroBatchEnded(trained=True):
                self.on_micro_batch(self)
        self.on_other(self, event)

    def stop(self) -> None:
        self.events.put(ev.StopRequested("the test is over"))

    def run(self, name: str) -> None:
        """Run until a stop; then write what tests compare to ``NAME.json`` and ``NAME.pt``."""
        assert self.product.run() == (0, "the test is over" if RANK == 0 else "")
        weights = whole_weights(self.trainer)
        if RANK == 0:
            uploads = read_events(self.folder / "events.jsonl", "publication")
            content = {
                "losses": self.losses,
                "uploads": [event["revision"] for event in uploads if event["ok"]],
                "waits": self.waits,
                "pages": self.blocks.pages(),
                "outer_step": self.trainer.outer_step,
                "inner_step": self.trainer.inner_step,
            }
            (self.folder / f"{name}.json").write_text(json.dumps(content))
            torch.save(weights, self.folder / f"{name}.pt")
        self.stack.close()
        self.ranks.close()


def uninterrupted(folder: Path, name: str, steps: int) -> None:
    Miner(folder, on_step=lambda m, step: m.stop() if step == steps else None).run(name)


#: Scenario -> inner steps: a whole run, and the runs that follow ``killed`` and ``stopped``.
UNINTERRUPTED = {"straight": 12, "resumed": 7, "after_stop": 6}


def killed(folder: Path) -> None:
    """Kill the miner at step 8, three steps after its checkpoint."""

    def on_step(miner: Miner, step: int) -> None:
        if step == 8:
            miner.checkpointer.wait()  # rank 1 waits too: see below
            os.kill(0, 9)  # the whole process group

    miner = Miner(folder, on_step=on_step)
    if RANK != 0:
        written = miner.checkpointer.save

        def save(*arguments: Any) -> None:
            written(*arguments)
            miner.checkpointer.wait()

        miner.checkpointer.save = save  # type: ignore[method-assign]
    miner.run("killed")


def stopped(folder: Path) -> None:
    """Stop in the middle of the seventh inner step."""

    def on_micro_batch(miner: Miner) -> None:
        if len(miner.losses) == 6:
            miner.stop()

    miner = Miner(folder, on_step=lambda m, step: None, on_micro_batch=on_micro_batch)
    assert miner.trainer.batch_plan.micro_batches > 1
    miner.run("stopped")


def starved(folder: Path) -> None:
    """Let the last rank's source fail until the miner has waited four seconds for it."""
    most = 0.0

    def on_step(miner: Miner, step: int) -> None:
        hungry = [i for i, (waited, _) in enumerate(miner.waits) if waited > 0.5]
        if step == 60 or (hungry and step >= hungry[0] + 3):
            miner.stop()

    miner = Miner(folder, on_step=on_step)
    ready, broadcast = miner.data.ready, miner.ranks.broadcast
    count_missed = miner.data.missed
    first, back = list[int](), list[float]()

    def only_first(block: int) -> int | None:
        sequences = ready(block)
        if sequences is not None and not first:
            first.append(block)
        answers = block in first or bool(back and time.monotonic() > back[0])
        return sequences if answers else None

    def missed(seconds: float) -> None:
        if miner.trainer.total_inner_steps:  # a wait during the start belongs to no step
            back.append(time.monotonic() + 4.0)
        count_missed(seconds)

    def timed(command: Any) -> Any:
        nonlocal most
        began = time.monotonic()
        got = broadcast(command)
        most = max(most, time.monotonic() - began)
        return got

    if RANK == WORLD - 1:
        miner.data.ready = only_first  # type: ignore[method-assign]
        miner.data.missed = missed  # type: ignore[method-assign]
        miner.ranks.broadcast = timed  # type: ignore[method-assign]
    miner.run("starved")
    (folder / f"longest-{RANK}.json").write_text(json.dumps(most))


def toys(folder: Path) -> None:
    """Train, upload and take an outer step with a plug-in of each kind from ``tests/toys``."""
    kinds = ("codec", "metric", "optimizer", "outer_rule", "source")
    flags = {
        "plugins": " ".join(f"tests.toys.{kind}" for kind in kinds),
        "data.source": "counter",
    }
    rules = {"training.optimizer": "lion", "training.outer_rule": "signed"}
    rules["round.codec"] = "eight"

    def on_step(miner: Miner, step: int) -> None:
        if step == 3:
            miner.leader.open_close()
        if miner.trainer.outer_step:
            miner.stop()

    def on_other(miner: Miner, event: ev.Event) -> None:
        if isinstance(event, ev.UploadEnded):
            miner.leader.take_outer_step(UID)

    miner = Miner(folder, on_step=on_step, on_other=on_other, flags=flags, rules=rules)
    miner.run("toys")
    leader = miner.leader
    uploads = (leader.bucket / "uploads").rglob("*.safetensors")
    found = {
        "codecs": [UpdateFile.reopen(each, leader.schema).header.codec for each in uploads],
        "optimizer": miner.trainer.optimizer.line,
        "metrics": (folder / "metrics.prom").read_text(),
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, force=True)
    scenario, place = sys.argv[1], Path(sys.argv[2])
    if scenario in UNINTERRUPTED:
        uninterrupted(place, scenario, UNINTERRUPTED[scenario])
    else:
        globals()[scenario](place)
    leave(0)
