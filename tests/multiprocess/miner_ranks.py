"""One rank of a miner without a network: ``miner_ranks.py SCENARIO FOLDER``.

Loop, leader, trainer, data, checkpoints and snapshots are the miner's own. The swarm averages with
nobody, the publisher keeps what it is given, the chain's block moves when somebody looks.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import jumping_clock
import torch
from training_world import SETTINGS, tiny, whole_weights

from distributed_training.common.processes import leave
from distributed_training.config.data import DataSettings
from distributed_training.data import DataPipeline, WorkerSpec, build_tokenizer
from distributed_training.data.tokenizer import BYTE_VOCABULARY
from distributed_training.miner import state as st
from distributed_training.miner.blocks import BlockFeed
from distributed_training.miner.leader import Leader
from distributed_training.miner.loop import MinerLoop
from distributed_training.miner.orders import OrderKind, open_control_channel
from distributed_training.miner.rank_zero import Cadence, RankZeroSide
from distributed_training.miner.round_clock import RoundClock
from distributed_training.protocol.types import (
    AllReduceError,
    AllReduceFault,
    AllReduceResult,
    PublicationReport,
    Revision,
    RoundRequest,
)
from distributed_training.store.upload_schedule import UploadSchedule
from distributed_training.telemetry import MetricsFile
from distributed_training.training import Checkpointer, Trainer

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Alone:
    """A swarm of one: the average is what this miner wrote."""

    def __init__(self, schema: Any) -> None:
        self.buffers = [torch.zeros(shape) for _, shape in schema]
        self.release = threading.Event()
        self.release.set()
        self.faults: list[AllReduceFault] = []  # of the next rounds

    def average(
        self,
        request: RoundRequest,
        *,
        weight: float = 1.0,
        cancelled: threading.Event | None = None,
    ) -> AllReduceResult:
        assert self.release.wait(60)
        if self.faults:
            for buffer in self.buffers:
                buffer.fill_(float("nan"))  # a broken round leaves anything there
            raise AllReduceError(self.faults.pop(0))
        return AllReduceResult(("me",), (), 0.0, 0.0, 0.0)

    def cancel(self) -> None:
        self.release.set()


class Publisher:
    def __init__(self) -> None:
        self.submitted: list[dict[str, Any]] = []
        self.paused = False
        self._reports: list[PublicationReport] = []

    def submit(self, folder: Path, revision: Revision, delta: float | None) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.submitted.append(
            {"tag": revision.tag, "delta": delta, "blocks": config["block_list"]}
            | {"paused": self.paused}
        )
        self._reports.append(PublicationReport(revision, True, 0.0, 1, "", time.time()))

    busy = False

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def reports(self) -> list[PublicationReport]:
        reports, self._reports = self._reports, []
        return reports


class Watch:
    def compare_soon(self) -> None: ...

    def fetch(self, outer_step: int) -> None: ...

    def compare_weights(self, outer_step: int) -> None: ...


class Miner:
    """``on_step``: called on rank 0 after each inner step, to post events."""

    def __init__(
        self,
        folder: Path,
        *,
        on_step: Callable[[Miner, int], None],
        fault_hook: Callable[[str, int], None] | None = None,
        upload_steps: int = 4,
        checkpoint_steps: int = 5,
        before_order: Callable[[Miner, Any], None] | None = None,
        patience: float = 60.0,
    ) -> None:
        self.folder = folder
        self.patience = patience
        self.disk_problem: str | None = None
        self.waits: list[tuple[float, float]] = []  # of each step: for data, in all
        self.channel = open_control_channel(
            environ=os.environ, timeout=timedelta(seconds=60), backend="gloo"
        )
        self.trainer = Trainer(
            settings=SETTINGS,
            model_config=tiny(vocab=BYTE_VOCABULARY),
            device=torch.device("cpu"),
            rank=RANK,
            world_size=WORLD,
        )
        self.checkpointer = Checkpointer(trainer=self.trainer, folder=folder / "checkpoints")
        tokenizer, eos = build_tokenizer("bytes", folder / f"tokenizer-{RANK}")
        self.data = DataPipeline(
            WorkerSpec(
                settings=DataSettings(source="stdlib", pages_per_block=1, rows_per_page=1),
                uid=3,
                rank=RANK,
                world_size=WORLD,
                sequence_length=SETTINGS.sequence_length,
                tokenizer_path=tokenizer,
                eos_id=eos,
                folder=folder / "data",
            ),
            micro_batch_size=self.trainer.micro_batch_size,
        )
        restored = self.checkpointer.restore()
        extra: dict[str, Any] = {} if restored is None else restored[1]
        if restored is None:
            self.trainer.load_weights(None)
            self.trainer.begin_epoch(0)
        self.data.restore(extra.get("data", {}))
        self.zero: RankZeroSide | None = None
        self.losses: list[float] = []
        self.events: list[str] = []
        if RANK == 0:
            self._lead(extra, upload_steps, checkpoint_steps, on_step, before_order)
        self.loop = MinerLoop(
            channel=self.channel,
            trainer=self.trainer,
            data=self.data,
            checkpointer=self.checkpointer,
            snapshots=folder / "snapshots",
            rank_zero=self.zero,
            fault_hook=fault_hook,
        )

    def _lead(
        self,
        extra: dict[str, Any],
        upload_steps: int,
        checkpoint_steps: int,
        on_step: Callable[[Miner, int], None],
        before_order: Callable[[Miner, Any], None] | None,
    ) -> None:
        self.chain = 100

        def next_block() -> int:
            self.chain = max(self.chain, self.blocks._last_requested) + 1
            return self.chain

        held = self.trainer.preview_micro_batches
        self.blocks = BlockFeed(
            chain_block=next_block,
            data=self.data,
            channel=self.channel,
            micro_batch_size=self.trainer.micro_batch_size,
            prefetch=lambda: 1,  # in order, whatever the ranks' pace
            hold_back=0 if self.data.holds_back(held) else held,
            patience=self.patience,
        )
        self.blocks.restore(extra.get("rank_zero", {}).get("blocks", {}), extra.get("data", {}))
        self.swarm, self.publisher = Alone(self.trainer.schema), Publisher()
        self.leader = Leader(
            state=st.MinerState(mode=st.Mode.TRAINING, outer_step=self.trainer.outer_step),
            timing=st.Timing(3600.0),
            channel=self.channel,
            swarm=self.swarm,
            publisher=self.publisher,
            global_watch=Watch(),
            blocks=self.blocks,
            chain_block=lambda: 7,
            record=self._record,
            tick=timedelta(milliseconds=1),
        )
        self._on_step = on_step
        self.zero = RankZeroSide(
            leader=self.leader,
            blocks=self.blocks,
            swarm=self.swarm,
            schedule=UploadSchedule(
                upload_steps=upload_steps,
                minimum_inner_step=2,
                age_limit=timedelta(hours=9),
                slack=timedelta(0),
            ),
            round_clock=RoundClock(
                chain_block=lambda: 7, blocks_per_allreduce=400, last_allreduce_block=None
            ),
            disk_problem=lambda: self.disk_problem,
            submit=self.publisher.submit,
            run=5,
            bucket="mine",
            cadence=Cadence(checkpoint_steps, 3),
            record=self._record,
            warnings=lambda report: [],
            round_over=lambda: self.events.append("call over"),
            reload_timeout=timedelta(hours=1),
            metrics=MetricsFile(self.folder / "metrics.prom", every=0.0),
            counts={"data": self.data.counters},
            gauges={},
        )
        self.leader.on_publication = self.zero.publication
        self.leader.on_round_failed = self.zero.round_failed
        self.leader.on_snapshot_dropped = self.zero.snapshot_dropped
        if before_order is not None:
            inner = self.leader.next_order

            def next_order() -> Any:
                order = inner()
                before_order(self, order)
                return order

            self.leader.next_order = next_order  # type: ignore[method-assign]

    def _record(self, kind: str, **fields: Any) -> None:
        self.events.append(kind)
        if kind == "step":
            self.losses.append(fields["loss"])
            self.waits.append((fields["data_wait_seconds"], fields["seconds"]))
            self._on_step(self, len(self.losses))

    def call(self) -> None:
        """The validator's AllReduce."""
        self.leader.post(st.AllReduceCalled(RoundRequest("5Master", time.time()), time.monotonic()))

    def stop(self) -> None:
        self.leader.post(st.StopRequested("the test is over"))

    def run(self, name: str) -> None:
        """Until stopped; then what there is to compare goes into ``NAME.json`` and ``NAME.pt``."""
        assert self.loop.run() == 0
        weights = whole_weights(self.trainer)
        if RANK == 0:
            content = {
                "losses": self.losses,
                "events": self.events,
                "submitted": self.publisher.submitted,
                "waits": self.waits,
                "blocks": self.blocks.blocks(),
                "outer_step": self.trainer.outer_step,
                "inner_step": self.trainer.inner_step,
            }
            (self.folder / f"{name}.json").write_text(json.dumps(content))
            torch.save(weights, self.folder / f"{name}.pt")
        self.data.close()
        self.channel.close()


def straight(folder: Path) -> None:
    Miner(folder, on_step=lambda m, step: m.stop() if step == 12 else None).run("straight")


def jumping(folder: Path) -> None:
    """As ``straight``, but the wall clock is set an hour forth, then an hour back."""

    def on_step(miner: Miner, step: int) -> None:
        jumping_clock.offset = 3600.0 if step == 1 else -3600.0
        if (step >= 12 and len(miner.publisher.submitted) >= 2) or step == 60:
            miner.stop()

    Miner(folder, on_step=on_step).run("jumping")


def killed(folder: Path) -> None:
    """Until step 8, three steps past the checkpoint."""

    def on_step(miner: Miner, step: int) -> None:
        if step == 8:
            miner.checkpointer.wait()  # rank 1's: see below
            os.kill(0, 9)  # the whole process group

    miner = Miner(folder, on_step=on_step)
    if RANK != 0:
        written = miner.checkpointer.save

        def save(*arguments: Any) -> None:
            written(*arguments)
            miner.checkpointer.wait()

        miner.checkpointer.save = save  # type: ignore[method-assign]
    miner.run("killed")


def resumed(folder: Path) -> None:
    Miner(folder, on_step=lambda m, step: m.stop() if step == 7 else None).run("resumed")


def stopped(folder: Path) -> None:
    """In the middle of the seventh inner step."""
    seen = 0

    def before_order(miner: Miner, order: Any) -> None:
        nonlocal seen
        seen += order.kind is OrderKind.CONTINUE
        if seen == 6 * miner.trainer.micro_batches_per_step + 1:
            miner.stop()

    Miner(folder, on_step=lambda m, step: None, before_order=before_order).run("stopped")


def after_stop(folder: Path) -> None:
    Miner(folder, on_step=lambda m, step: m.stop() if step == 6 else None).run("after_stop")


def vote(folder: Path) -> None:
    """Two rounds: in the first, the last rank fails between the average and the vote."""
    rounds, kept = 0, {}

    def fault(place: str, rank: int) -> None:
        nonlocal rounds
        assert place == "before_vote"
        rounds += 1
        if rounds == 1 and rank == WORLD - 1:
            raise RuntimeError("this rank's memory is gone")

    def on_step(miner: Miner, step: int) -> None:
        if step in (3, 6):
            miner.call()
        if step == 8:
            miner.stop()

    miner = Miner(folder, on_step=on_step, fault_hook=fault)
    roll_back, commit = miner.trainer.roll_back_outer_step, miner.trainer.commit_outer_step

    def before() -> None:
        kept["before"] = [s.local.clone() for s in miner.trainer.sharded.shards]

    write = miner.trainer.write_pseudo_gradient

    def written(buffers: Any) -> float:
        before()
        return write(buffers)

    def rolled_back() -> None:
        roll_back()
        outer = miner.trainer.outer
        kept["same"] = all(
            torch.equal(a, s.local)
            for a, s in zip(kept["before"], miner.trainer.sharded.shards, strict=True)
        )
        kept["untouched"] = outer.momentum is None and miner.trainer.outer.feedback.residual is None
        kept["steps"] = [miner.trainer.outer_step, miner.trainer.inner_step]

    def committed() -> None:
        commit()
        kept["committed"] = [miner.trainer.outer_step, miner.trainer.inner_step]

    miner.trainer.write_pseudo_gradient = written  # type: ignore[method-assign]
    miner.trainer.roll_back_outer_step = rolled_back  # type: ignore[method-assign]
    miner.trainer.commit_outer_step = committed  # type: ignore[method-assign]
    miner.run("vote")
    kept.pop("before")
    (folder / f"vote-{RANK}.json").write_text(json.dumps(kept))


def before_commit(folder: Path) -> None:
    """Killed, all ranks at once, between the average and the commit."""

    def fault(place: str, rank: int) -> None:
        if rank == 0:
            os.kill(0, 9)
        time.sleep(60)

    Miner(
        folder,
        on_step=lambda m, step: m.call() if step == 8 else None,
        fault_hook=fault,
    ).run("before_commit")


def after_commit(folder: Path) -> None:
    """Killed in the first round when rank 0 has written its checkpoint of it, rank 1 not."""

    def on_step(miner: Miner, step: int) -> None:
        if step == 5:
            miner.checkpointer.wait()
        if step == 8:
            miner.call()

    miner = Miner(folder, on_step=on_step)
    save, write, commit = (
        miner.checkpointer.save,
        miner.checkpointer._write,
        miner.trainer.commit_outer_step,
    )
    committed = False

    def committing() -> None:
        nonlocal committed
        commit()
        committed = True

    def writing(*arguments: Any) -> None:
        if committed and RANK == 1:
            time.sleep(60)
        write(*arguments)

    def saving(*arguments: Any) -> None:
        save(*arguments)
        if not committed:
            miner.checkpointer.wait()
        elif RANK == 0:
            deadline = time.monotonic() + 30
            while len(list(folder.glob("checkpoints/checkpoint-*/rank-0.json"))) < 2:
                assert time.monotonic() < deadline
            os.kill(0, 9)

    miner.trainer.commit_outer_step = committing  # type: ignore[method-assign]
    miner.checkpointer._write = writing  # type: ignore[method-assign]
    miner.checkpointer.save = saving  # type: ignore[method-assign]
    miner.run("after_commit")


def refused(folder: Path) -> None:
    """A round fails in each of its ways, and each leaves the miner what it was."""

    def on_step(miner: Miner, step: int) -> None:
        if step in (2, 4, 6, 8, 10):
            miner.swarm.release.clear()
            miner.call()
        if step == 12:
            miner.stop()

    miner = Miner(folder, on_step=on_step)
    if RANK == 0:
        miner.swarm.faults = [
            AllReduceFault.PEER_FAILED,
            AllReduceFault.TIMEOUT,
            AllReduceFault.NO_GROUP,
            AllReduceFault.NOT_FINITE,
            AllReduceFault.SWARM_DOWN,
        ]
    anticipate, held = miner.trainer.anticipate_outer_step, []

    def anticipating() -> None:
        anticipate()
        held.append(miner.trainer.outer._ahead is not None)
        if RANK == 0:
            miner.swarm.release.set()  # only now the round fails

    miner.trainer.anticipate_outer_step = anticipating  # type: ignore[method-assign]
    miner.run("refused")
    assert held == [True] * 5 and miner.trainer.outer._ahead is None


def full_disk(folder: Path) -> None:
    """No room for a snapshot before step 6."""

    def on_step(miner: Miner, step: int) -> None:
        if step == 6:
            assert not miner.publisher.submitted
            miner.disk_problem = None
        if step == 12:
            miner.stop()

    miner = Miner(folder, on_step=on_step)
    miner.disk_problem = "the disk is full, says the test"
    take = miner.trainer.snapshot

    def snapshot(*arguments: Any, **fields: Any) -> Any:
        """Written before anybody asks, whatever the disk's pace."""
        handle = take(*arguments, **fields)
        done = handle.done
        handle.done = lambda: handle._thread.join(30) or done()
        return handle

    if RANK == 0:
        miner.trainer.snapshot = snapshot  # type: ignore[method-assign]
    miner.run("full_disk")


def starved(folder: Path) -> None:
    """The last rank's source is dead after the first block."""
    most = 0.0

    def on_step(miner: Miner, step: int) -> None:
        hungry = [i for i, (waited, _) in enumerate(miner.waits) if waited > 0.5]
        if step == 60 or (hungry and step >= hungry[0] + 3):
            miner.stop()

    miner = Miner(folder, on_step=on_step, patience=4.0)
    ready, exchange = miner.data.ready, miner.channel.exchange
    first: list[int] = []

    def only_first(block: int) -> int | None:
        sequences = ready(block)
        if sequences is not None and not first:
            first.append(block)
        return sequences if block in first else None

    def timed(order: Any) -> Any:
        nonlocal most
        began = time.monotonic()
        got = exchange(order)
        most = max(most, time.monotonic() - began)
        return got

    if RANK == WORLD - 1:
        miner.data.ready = only_first  # type: ignore[method-assign]
        miner.channel.exchange = timed  # type: ignore[method-assign]
    miner.run("starved")
    (folder / f"longest-{RANK}.json").write_text(json.dumps(most))


def awkward(folder: Path) -> None:
    """Calls at awkward moments: before the first step, twice, and while a snapshot is written."""
    written = threading.Event()

    def on_step(miner: Miner, step: int) -> None:
        if step == 1:
            assert miner.events.count("round") == 1, (
                "the call before the first step was carried out"
            )
            miner.swarm.release.clear()
            miner.call()
            miner.call()  # the second is of the same round
            threading.Timer(0.3, miner.swarm.release.set).start()
        if step == 6:  # the step before ended with a snapshot, whose writing is held up
            miner.call()
        if step == 7:
            assert miner.events.count("round") == 3
            assert not miner.publisher.submitted
            written.set()
        if step == 9:
            miner.stop()

    miner = Miner(folder, on_step=on_step)
    take = miner.trainer.snapshot

    def snapshot(*arguments: Any, **fields: Any) -> Any:
        handle = take(*arguments, **fields)
        done = handle.done
        handle.done = lambda: written.is_set() and done()
        return handle

    if RANK == 0:
        miner.trainer.snapshot = snapshot  # type: ignore[method-assign]
        miner.call()
    miner.run("awkward")


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
    leave(0)
