"""One rank of a miner without a network: ``miner_ranks.py SCENARIO FOLDER``.

The rank is the product's, built by ``start.build_rank``. Only what is outside of it is here: a
swarm that averages with nobody, a publisher that keeps what it is given, a chain whose next block
is there when somebody asks for it.
"""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import shutil
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import torch

from distributed_training.chain.base import Neuron
from distributed_training.chain.kinds import chain_kind
from distributed_training.chain.server import SignedServer
from distributed_training.common.processes import leave
from distributed_training.data.tokenizer import BYTE_VOCABULARY, build_tokenizer
from distributed_training.exchange.sn38.supervisor import SharedTensors
from distributed_training.miner import assembly, start, start_hivemind
from distributed_training.miner import events as ev
from distributed_training.miner.events import MinerState
from distributed_training.miner.global_state import GlobalEpoch
from distributed_training.miner.own_bucket import OwnBucket
from distributed_training.miner.ranks import join_ranks
from distributed_training.miner.resume import StartupInfo
from distributed_training.node.identity import Member
from distributed_training.protocol.types import (
    AllReduceError,
    AllReduceFault,
    AllReduceResult,
    RoundRequest,
)
from distributed_training.store.opening import open_store
from distributed_training.telemetry import MetricsFile, read_events
from tests.tools import jumping_clock
from tests.tools.miner_parts import KeptUploads, config_of, upload_schedule
from tests.tools.small_miner import FLAGS, RULES
from tests.tools.training_world import memory_ends, tiny, whole_weights

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SHARDS = int(os.environ.get("LOCAL_WORLD_SIZE", WORLD))  # ranks with one copy of the model


class Alone:
    """A swarm of one: the average is what this miner wrote."""

    peer_id = "me"

    def __init__(self, schema: Any) -> None:
        self.memory = SharedTensors([shape for _, shape in schema])
        self.buffers = self.memory.tensors
        self.release = threading.Event()
        self.release.set()
        self.faults: list[AllReduceFault] = []  # of the next rounds

    def average(self, request: RoundRequest, *, cancelled: threading.Event) -> AllReduceResult:
        assert self.release.wait(60)
        if self.faults:
            for buffer in self.buffers:
                buffer.fill_(float("nan"))  # a broken round leaves anything there
            raise AllReduceError(self.faults.pop(0))
        return AllReduceResult(("me",), (), 0.0, 0.0, 0.0)

    def known_peers(self) -> int | None:
        return 0

    def cancel(self) -> None:
        self.release.set()

    def close(self) -> None: ...


class Network:
    """The chain, and all else outside of a miner that ``open_connections`` opens."""

    def __init__(self, folder: Path, info: StartupInfo) -> None:
        self.info = info
        self.uploader, self.server = KeptUploads(succeeds=True), Mock(SignedServer, port=0)
        self.server.counters.return_value = {"connections": 0}
        self.server.called_at.return_value = None
        self.no_room: str | None = None
        self.last_requested: Callable[[], int] = lambda: 0
        nobody: Any = None
        clock: Any = types.SimpleNamespace(fault=str, seconds=float)
        bucket: Any = types.SimpleNamespace(run_seen=None)
        member = Member(nobody, self, info.uid)  # type: ignore[arg-type]
        own, uploader = OwnBucket("mine", ""), cast(Any, self.uploader)
        self.connections = start_hivemind.Connections(
            member, "", own, bucket, nobody, nobody, uploader, clock
        )

    def play(self) -> None:
        """Replace what a rank opens later."""
        product: Any = start_hivemind
        product.open_hivemind = self._open_hivemind
        product.SignedServer = lambda **_: self.server
        product.GlobalEpoch = lambda **_: Mock(
            GlobalEpoch, versions=None, unavailable_since=None
        )  # the global bucket never changes
        product.UploadSchedule = lambda **_: upload_schedule(upload_steps=4, first=2)
        assembled: Any = assembly
        assembled.MetricsFile = partial(MetricsFile, every=0.0)
        product.describe_full_disk = lambda folder, needed: self.no_room
        product.identity = Mock()

    def _open_hivemind(self, *given: Any) -> Alone:
        self.swarm = Alone(given[-1])
        return self.swarm

    def block(self) -> int:
        return max(100, self.last_requested()) + 1

    def counters(self) -> dict[str, int]:
        return {}

    def age(self) -> timedelta:
        return timedelta(0)

    def neurons(self) -> list[Neuron]:
        return []


class Miner:
    """``on_step``: called on rank 0 after each inner step; ``on_micro_batch`` after each other
    micro-batch."""

    def __init__(
        self,
        folder: Path,
        *,
        on_step: Callable[[Miner, int], None],
        on_micro_batch: Callable[[Miner], None] = lambda miner: None,
        flags: Mapping[str, Any] = {},
        rules: Mapping[str, Any] = {},
    ) -> None:
        self.folder = folder
        self.losses: list[float] = []
        self.waits: list[tuple[float, float]] = []  # of each step: for data, in all
        self.on_step, self.on_micro_batch = on_step, on_micro_batch
        self.events: queue.SimpleQueue[ev.Event] = queue.SimpleQueue()
        self.stack = ExitStack()
        self.ranks = join_ranks(environ=os.environ, timeout=timedelta(seconds=60), backend="gloo")
        argv = [f"--{name}={value}" for name, value in {**FLAGS, **flags}.items()]
        tokenizer, eos = build_tokenizer("bytes", folder / f"tokenizer-{RANK}")
        info = StartupInfo(3, tiny(vocab=BYTE_VOCABULARY), str(tokenizer), eos, hotkey="5Miner")
        network: Any = None
        if RANK == 0:
            network = Network(folder, info)
            network.play()
        self.config = config_of(*argv, rules={**RULES, **rules})
        self.product = start.build_rank(
            start.RankContext(
                config=self.config,
                folder=folder,
                device=torch.device("cpu"),
                ranks=self.ranks,
                events=self.events,
                stack=self.stack,
                tick=timedelta(milliseconds=1),
            ),
            info,
            network and network.connections,
        )
        training, self.rank_zero = self.product.training, self.product.rank_zero
        self.trainer, self.data = training.trainer, training.data
        self.checkpointer, self.network = training.checkpointer, network
        if self.rank_zero is not None:
            blocks = self.blocks = self.rank_zero.blocks
            network.last_requested = lambda: blocks._last_requested
            self.swarm, self.publisher, self.server = (
                network.swarm,
                network.uploader,
                network.server,
            )
            self.rank_zero.controller.subscribe(self.on_event)

    def on_event(self, event: ev.Event, state: MinerState) -> None:
        match event:
            case ev.InnerStepDone(report=report):
                self.losses.append(report.loss)
                self.waits.append((report.data_wait_seconds, report.seconds))
                self.on_step(self, len(self.losses))
            case ev.MicroBatchTrained():
                self.on_micro_batch(self)

    def count(self, kind: str) -> int:
        """Return the lines of the event file."""
        return len(list(read_events(self.folder / "events.jsonl", kind)))

    def call(self) -> None:
        """The validator's AllReduce."""
        request = RoundRequest("5Master")
        self.events.put(ev.AllReduceCalled(request, time.monotonic()))

    def stop(self) -> None:
        self.events.put(ev.StopRequested("the test is over"))

    def run(self, name: str) -> None:
        """Until stopped; then what there is to compare goes into ``NAME.json`` and ``NAME.pt``."""
        assert self.product.run() == (0, "the test is over" if RANK == 0 else "")
        weights = whole_weights(self.trainer)
        if RANK == 0:
            assert all(each["world_size"] == SHARDS for each in self.publisher.submitted)
            content = {
                "losses": self.losses,
                "rounds": self.count("round"),
                "outer_steps": self.count("outer_step"),
                "calls_over": self.server.round_ended.call_count,
                "submitted": self.publisher.submitted,
                "waits": self.waits,
                "blocks": self.blocks.blocks(),
                "outer_step": self.trainer.outer_step,
                "inner_step": self.trainer.inner_step,
            }
            (self.folder / f"{name}.json").write_text(json.dumps(content))
            torch.save(weights, self.folder / f"{name}.pt")
        self.stack.close()
        self.ranks.close()


def uninterrupted(folder: Path, name: str, steps: int) -> None:
    Miner(folder, on_step=lambda m, step: m.stop() if step == steps else None).run(name)


#: Scenario -> inner steps: a whole run, and what follows ``killed`` and ``stopped``.
UNINTERRUPTED = {"straight": 12, "resumed": 7, "after_stop": 6}


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


def stopped(folder: Path) -> None:
    """Kill in the middle of the seventh inner step."""

    def on_micro_batch(miner: Miner) -> None:
        if len(miner.losses) == 6:
            miner.stop()

    miner = Miner(folder, on_step=lambda m, step: None, on_micro_batch=on_micro_batch)
    assert miner.trainer.batch_plan.micro_batches > 1
    miner.run("stopped")


def overlapped(folder: Path) -> None:
    """Inner steps continue in a round that takes three of them.

    The outer step leaves the weights as they are: learning rate 1, no momentum, and as average what
    this miner wrote.
    """
    kept: dict[str, Any] = {"modes": []}

    def on_step(miner: Miner, step: int) -> None:
        assert miner.rank_zero is not None
        kept["modes"].append(miner.rank_zero.controller.state.mode.value)
        if step == 3:
            miner.swarm.release.clear()
            miner.call()
        if step == 6:
            miner.swarm.release.set()
        if miner.trainer.outer_step and miner.trainer.inner_step >= 6:
            miner.stop()

    miner = Miner(folder, on_step=on_step, flags={"neuron.train_in_rounds": True})
    miner.trainer.outer.learning_rate, miner.trainer.outer.mu = 1.0, 0.0
    commit = miner.trainer.commit_outer_step

    def committing() -> None:
        shards, steps = miner.trainer.sharded.shards, miner.trainer.inner_step
        before = [s.local.clone() for s in shards]
        commit()
        starts = miner.trainer.outer.epoch_start or []
        for name, those in (("apart", before), ("trained", starts)):
            pairs = zip(those, shards, strict=True)
            kept[name] = max(float((a - s.local).abs().max()) for a, s in pairs)
        kept["steps"] = [steps, miner.trainer.inner_step]

    miner.trainer.commit_outer_step = committing  # type: ignore[method-assign]
    miner.run("overlapped")
    (folder / f"overlapped-{RANK}.json").write_text(json.dumps(kept))


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
    """A round fails in each of its ways, and each leaves the miner what it was; the next works.

    In the last one that fails a rank fails between the average and the vote.
    """

    def on_step(miner: Miner, step: int) -> None:
        if step in (1, 2, 4, 5, 6, 8, 12):
            miner.call()
        if miner.trainer.outer_step:
            miner.stop()

    averages: list[Any] = []

    def prepared(averaged: Any) -> None:
        averages.append(averaged)
        assert miner.trainer.outer.momentum is None
        prepare(averaged)
        if RANK == WORLD - 1 and len(averages) == 1:
            raise RuntimeError("this rank's memory is gone")

    miner = Miner(folder, on_step=on_step)
    prepare = miner.trainer.prepare_outer_step
    miner.trainer.prepare_outer_step = prepared  # type: ignore[method-assign]
    if RANK == 0:
        miner.swarm.faults = [
            AllReduceFault.PEER_FAILED,
            AllReduceFault.TIMEOUT,
            AllReduceFault.NO_GROUP,
            AllReduceFault.NOT_FINITE,
            AllReduceFault.SWARM_DOWN,
        ]
    miner.run("refused")
    outer = miner.trainer.outer
    assert outer._prepared is None and outer.momentum is not None and len(averages) == 2


def full_disk(folder: Path) -> None:
    """No room for a snapshot before step 6, nor in the last rank's memory for the next."""
    refused = False

    def on_step(miner: Miner, step: int) -> None:
        if step == 6:
            assert not miner.publisher.submitted
            miner.network.no_room = None
        if step == 12:
            miner.stop()

    miner = Miner(folder, on_step=on_step)
    take = miner.trainer.snapshot

    def snapshot(*arguments: Any, **fields: Any) -> Any:
        """Written before anybody asks, whatever the disk's pace."""
        nonlocal refused
        first, refused = not refused, True
        with memory_ends(miner.trainer.copier, "copy_boundary", when=first and RANK == WORLD - 1):
            handle = take(*arguments, **fields)
        done = handle.done
        handle.done = lambda: handle.join() or done()
        return handle

    if RANK == 0:
        miner.network.no_room = "the disk is full, says the test"
    miner.trainer.snapshot = snapshot  # type: ignore[method-assign]
    miner.run("full_disk")


def no_room(folder: Path) -> None:
    """The disk of the run folder is full from step 6 until forty blocks were not prepared."""
    filler = folder / "filled"

    def on_step(miner: Miner, step: int) -> None:
        if step == 6:
            filler.write_bytes(bytes(max(0, shutil.disk_usage(folder).free - 4096)))
            miner.rank_zero.controller.subscribe(waits)  # type: ignore[union-attr]

    def waits(event: ev.Event, state: MinerState) -> None:
        if miner.data.counters().get("blocks_failed", 0) >= 40 and filler.exists():
            filler.unlink()
            miner.stop()

    miner = Miner(folder, on_step=on_step)
    miner.run("no_room")


def starved(folder: Path) -> None:
    """The last rank's source is dead after the first block."""
    most = 0.0

    def on_step(miner: Miner, step: int) -> None:
        hungry = [i for i, (waited, _) in enumerate(miner.waits) if waited > 0.5]
        if step == 60 or (hungry and step >= hungry[0] + 3):
            miner.stop()

    miner = Miner(folder, on_step=on_step)
    if miner.rank_zero is not None:
        miner.blocks.patience = 4.0
    ready, broadcast = miner.data.ready, miner.ranks.broadcast
    first: list[int] = []

    def only_first(block: int) -> int | None:
        sequences = ready(block)
        if sequences is not None and not first:
            first.append(block)
        return sequences if block in first else None

    def timed(command: Any) -> Any:
        nonlocal most
        began = time.monotonic()
        got = broadcast(command)
        most = max(most, time.monotonic() - began)
        return got

    if RANK == WORLD - 1:
        miner.data.ready = only_first  # type: ignore[method-assign]
        miner.ranks.broadcast = timed  # type: ignore[method-assign]
    miner.run("starved")
    (folder / f"longest-{RANK}.json").write_text(json.dumps(most))


def release_after_beats(miner: Miner) -> None:
    """The round ends when each rank has shown twice that it lives, as it does once a second."""
    files = [miner.folder / "pids" / f"rank-{rank}.beat" for rank in range(WORLD)]
    for _ in range(2):
        before = [file.stat().st_mtime_ns for file in files]
        while any(file.stat().st_mtime_ns == b for file, b in zip(files, before, strict=True)):
            time.sleep(0.01)
    miner.swarm.release.set()


def hold_snapshots(
    miner: Miner, until: threading.Event, taken: Callable[[], object] = lambda: None
) -> None:
    """A snapshot is not written before ``until`` is set; ``taken`` is called when one is taken."""
    take = miner.trainer.snapshot

    def snapshot(*arguments: Any, **fields: Any) -> Any:
        handle = take(*arguments, **fields)
        done = handle.done
        handle.done = lambda: until.is_set() and done()
        taken()
        return handle

    miner.trainer.snapshot = snapshot  # type: ignore[method-assign]


def awkward(folder: Path) -> None:
    """Calls at awkward moments: before the first step, twice, and while a snapshot is written.

    In the long round of the second, the ranks continue to report that they live.
    """
    (folder / "pids").mkdir(exist_ok=True)
    written = threading.Event()

    def on_step(miner: Miner, step: int) -> None:
        if step == 1:
            assert miner.count("round") == 1, "the call before the first step was carried out"
            miner.swarm.release.clear()
            miner.call()
            miner.call()  # the second is of the same round
            threading.Thread(target=release_after_beats, args=(miner,), daemon=True).start()
        if step == 6:  # the step before ended with a snapshot, whose writing is held up
            miner.call()
        if step == 7:
            assert miner.count("round") == 3
            assert not miner.publisher.submitted
            written.set()
        if step == 9:
            miner.stop()

    miner = Miner(folder, on_step=on_step)
    if RANK == 0:
        hold_snapshots(miner, written)
        miner.call()
    miner.run("awkward")


def overtaken(folder: Path) -> None:
    """A call in the middle of a step, while a snapshot is written; its files are there once the
    swarm averages, which fails when they were submitted."""
    in_round, taken = threading.Event(), threading.Event()

    def on_micro_batch(miner: Miner) -> None:
        if taken.is_set() and not in_round.is_set() and not miner.count("round"):
            miner.call()

    def on_step(miner: Miner, step: int) -> None:
        if step == 12:
            miner.stop()

    search = {"neuron.step_length": "search"}
    miner = Miner(folder, on_step=on_step, on_micro_batch=on_micro_batch, flags=search)

    def average(request: RoundRequest, *, cancelled: threading.Event) -> AllReduceResult:
        assert miner.trainer.step.batches
        in_round.set()
        deadline = time.monotonic() + 20
        while not miner.publisher.submitted and time.monotonic() < deadline:
            time.sleep(0.01)
        raise AllReduceError(AllReduceFault.PEER_FAILED)

    if RANK == 0:
        hold_snapshots(miner, in_round, taken.set)
        miner.swarm.average = average  # type: ignore[method-assign]
    miner.run("overtaken")


def traced(folder: Path) -> None:
    """List the product's files that the loop runs through in a step, an upload and a round."""
    product, files = str(Path(start.__file__).parents[1]) + os.sep, set[str]()

    def profile(frame: types.FrameType, event: str, argument: object) -> None:
        files.add(frame.f_code.co_filename)

    def on_step(miner: Miner, step: int) -> None:
        if step == 4:
            miner.call()
            sys.setprofile(profile)
        if miner.trainer.outer_step and len(miner.publisher.submitted) >= 2:
            sys.setprofile(None)
            miner.stop()
        assert step < 60

    Miner(folder, on_step=on_step).run("traced")
    ours = sorted(name.removeprefix(product) for name in files if name.startswith(product))
    (folder / "files.json").write_text(json.dumps(ours))


def toys(folder: Path) -> None:
    """A thing of each kind comes from ``tests/toys``: three inner steps, a round, an upload.

    The upload's files then go to the toy store, and the toy chain has a commitment of it.
    """
    kinds = ("chain", "compression", "metric", "optimizer", "outer_rule", "source", "store")
    flags = {
        "plugins": " ".join(f"tests.toys.{kind}" for kind in kinds),
        "data.source": "counter",
    }
    rules = {
        "chain.kind": "memory",
        "compression.kind": "sign",
        "store.endpoint": "memory://toys",
        "training.optimizer": "lion",
        "training.outer_rule": "signed",
    }

    def on_step(miner: Miner, step: int) -> None:
        if step == 3:
            miner.call()
        if miner.trainer.outer_step and miner.publisher.submitted:
            miner.stop()
        assert step < 60

    miner = Miner(folder, on_step=on_step, flags=flags, rules=rules)
    miner.run("toys")
    if RANK != 0:
        return
    settings = miner.config.chain
    chain = chain_kind(settings).open(settings, cast(Any, types.SimpleNamespace(ss58="5Me")), None)
    store = open_store(miner.config.store, "mine", write=True)
    upload = Path(miner.publisher.submitted[-1]["folder"])
    for path in filter(Path.is_file, upload.iterdir()):
        store.put(path.name, path.read_bytes())
    uid = chain.join()
    chain.commit(miner.publisher.submitted[-1]["tag"])
    sent = {info.key: store.get(info.key, limit=1 << 30) or b"" for info in store.list_objects()}
    gradient = torch.load(io.BytesIO(sent["gradients.pt"]), weights_only=True)
    found = {
        "uid": uid,
        "commitment": chain.commitment("5Me"),
        "files": sorted(sent),
        "gradient": sorted({key.rpartition(".")[2] for key in gradient if "." in key}),
        "optimizer": miner.trainer.optimizer.names[0],
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
