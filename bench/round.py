"""What a round costs: host memory beside training, or with ``--pause`` time without training.

    python bench/round.py --ranks 2
    python bench/round.py --ranks 2 --pause
    python bench/round.py --ranks 1 --model 1b --sequence-length 32

Real ranks (FSDP over gloo), the swarm host of rank 0, and one more peer that is not counted. What
counts is the proportional set size (a page that n processes share counts 1/n in each) of rank 0 and
all that it started; sampled all the time, the peak of each phase is told.
The baseline of the memory is rank 0 after inner steps, without swarm, epoch start and outer
momentum: weights, gradient and AdamW's moments are in it, which on GPUs are in the GPU's memory.
With ``--pause`` nothing is sampled: how long training stands still in each round, from before the
pseudo-gradient to after the commit and its checkpoint's copy, against matchmaking and transfer of
the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch
import torch.distributed as dist

from distributed_training.config.settings import SwarmSettings, TrainingSettings
from distributed_training.protocol.types import (
    AllReduceError,
    Progress,
    RoundRequest,
)
from distributed_training.swarm import HivemindSwarm
from distributed_training.training.checkpoint import Checkpointer
from distributed_training.training.collectives import Layout
from distributed_training.training.memory_plan import named_config
from distributed_training.training.model import Schema, build_meta_model, schema_of
from distributed_training.training.trainer import Trainer

MATCHMAKING = timedelta(seconds=3)
ROUNDS = 3


def proportional_bytes(process: psutil.Process) -> int:
    """Of a process and all that it started; those that end meanwhile are left out."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            rollup = Path(f"/proc/{one.pid}/smaps_rollup").read_text()
            total += next(int(x.split()[1]) for x in rollup.splitlines() if x.startswith("Pss:"))
    return 1024 * total


class Sampler:
    """Of this process and all that it started: the most since the last :meth:`peak`."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._peak = max(self._peak, proportional_bytes(self._process))
            time.sleep(0.01)

    def peak(self) -> int:
        peak, self._peak = max(self._peak, proportional_bytes(self._process)), 0
        return peak

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


def swarm_of(schema: Schema, folder: Path, peers: tuple[str, ...]) -> HivemindSwarm:
    return HivemindSwarm(
        settings=SwarmSettings(dht_port=0, dht_listen_ip="127.0.0.1", initial_peers=peers),
        schema=schema,
        run_folder=folder,
    )


def request() -> RoundRequest:
    return RoundRequest(
        caller="",
        timeout=timedelta(minutes=5),
        min_group_size=2,
        min_matchmaking_time=MATCHMAKING,
    )


def meeting(folder: str) -> dist.Store:
    """Where rank 0 and the other peer wait for each other."""
    store = dist.FileStore(f"{folder}/meeting", -1)
    store.set_timeout(timedelta(minutes=5))
    return store


def other_peer(options: argparse.Namespace) -> None:
    """Takes part in every round with zeros."""
    schema = schema_of(build_meta_model(named_config(options.model)))
    swarm = swarm_of(schema, Path(options.folder) / "other", ())
    store = meeting(options.folder)
    store.set("address", swarm.visible_maddrs[0])
    for number in range(ROUNDS):
        store.wait([f"round {number}"])
        with contextlib.suppress(AllReduceError):  # nothing of its own to compare the average with
            swarm.average(request())
    store.wait(["end"])
    swarm.close()


def run(options: argparse.Namespace, rank: int, world: int) -> None:
    settings = TrainingSettings(
        local_batch_size_train=1,
        local_batch_size_train_effective=2 * world,
        sequence_length=options.sequence_length,
    )
    config = named_config(options.model)
    trainer = Trainer(
        settings=settings, model_config=config, device=torch.device("cpu"),
        layout=Layout(rank, world), say=lambda line: None,
    )  # fmt: skip
    trainer.load_weights(None)
    ids = torch.randint(0, config["vocab_size"], (1, settings.sequence_length))

    def train(steps: int = 3) -> None:
        for _ in range(steps * trainer.micro_batches_per_step):
            trainer.add_micro_batch(ids)

    model = 4 * sum(math.prod(shape) for _, shape in trainer.schema)
    train()
    if options.pause:
        pauses(options, trainer, train, model)
        return
    mine = Sampler() if rank == 0 else None
    rows: list[tuple[str, float]] = []

    def note(name: str) -> None:
        dist.barrier()
        if mine is not None:
            rows.append((name, mine.peak() / model))
        dist.barrier()

    note("inner steps, nothing of the outer step (the baseline)")
    trainer.begin_epoch(0)
    note("with the epoch start")
    # As a publication leaves it: this rank's rows of what was not sent.
    rows_of = [shard.local for shard in trainer.sharded.shards]
    trainer.outer.feedback.residual = [torch.ones_like(each, device="cpu") for each in rows_of]
    note("and the error feedback")
    swarm: HivemindSwarm | None = None
    store = meeting(options.folder)
    if rank == 0:
        address = store.get("address").decode()
        swarm = swarm_of(trainer.schema, Path(options.folder) / "mine", (address,))
    train()
    note("and the swarm's host, before any round")
    for number in range(ROUNDS):
        store.set(f"round {number}", "go")
        buffers = swarm.buffers if swarm is not None else None
        trainer.write_pseudo_gradient(buffers)
        note(f"round {number + 1}: pseudo-gradient into the buffers")
        if swarm is not None:
            swarm.average(request())
        note(f"round {number + 1}: matchmaking and all-reduce")
        trainer.prepare_outer_step(buffers)
        trainer.commit_outer_step()
        note(f"round {number + 1}: outer step")
        train()
    note("inner steps after it")
    if swarm is not None:
        assert mine is not None
        mine.close()
        store.set("end", "now")
        swarm.close()
        base = rows[0][1]
        print(f"{model / 1e6:.0f} MB of fp32 model, {world} rank(s)")
        for name, value in rows:
            print(f"{name:55} {value:6.2f} x the model, beside training {value - base:6.2f} x")
        most = max(value for name, value in rows if name.startswith("round")) - base
        print(f"\nmost beside training in {ROUNDS} rounds: {most:.2f} x the fp32 model (goal 4.2)")


def pauses(
    options: argparse.Namespace, trainer: Trainer, train: Callable[[], None], model: int
) -> None:
    """``model``: its bytes in fp32."""
    trainer.begin_epoch(0)
    swarm: HivemindSwarm | None = None
    store = meeting(options.folder)
    folder = Path(options.folder)
    if trainer.rank == 0:
        swarm = swarm_of(trainer.schema, folder / "mine", (store.get("address").decode(),))
    keeper = Checkpointer(trainer=trainer, folder=folder / "checkpoints")
    shares: list[float] = []
    for number in range(ROUNDS):
        train()
        keeper.wait()
        dist.barrier()
        began = time.perf_counter()
        buffers = swarm.buffers if swarm is not None else None
        trainer.write_pseudo_gradient(buffers)
        written = time.perf_counter()
        store.set(f"round {number}", "go")  # the other peer is as fast as we are
        result = swarm.average(request()) if swarm is not None else None
        averaged = time.perf_counter()
        trainer.prepare_outer_step(buffers)
        trainer.commit_outer_step()
        committed = time.perf_counter()
        keeper.save({}, Progress(trainer.outer_step, 0, 0, []))
        ended = time.perf_counter()
        if result is None:
            continue
        assert result.matchmaking_seconds is not None and result.transfer_seconds is not None
        swarm_time = result.matchmaking_seconds + result.transfer_seconds
        shares.append((ended - began - swarm_time) / swarm_time)
        print(
            f"round {number + 1}: {ended - began:.2f} s without training: matchmaking "
            f"{result.matchmaking_seconds:.2f}, transfer {result.transfer_seconds:.2f}; beyond "
            f"them {100 * shares[-1]:.1f} %: pseudo-gradient {written - began:.2f}, averager "
            f"{averaged - written - swarm_time:.2f}, outer step {committed - averaged:.2f}, "
            f"checkpoint's copy {ended - committed:.2f}"
        )
    keeper.wait()
    if swarm is not None:
        store.set("end", "now")
        swarm.close()
        print(
            f"{model / 1e6:.0f} MB of fp32 model, {trainer.world_size} rank(s): beyond matchmaking "
            f"and transfer {100 * statistics.median(shares):.1f} % of them (median; goal 10)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="125m")
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--pause", action="store_true", help="time instead of memory")
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        other_peer(options)
        return
    if "RANK" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(os.environ["BENCH_STORE"], world),
            rank=rank,
            world_size=world,
            timeout=timedelta(minutes=10),
        )
        run(options, rank, world)
        dist.barrier()
        os._exit(0)  # the group's threads need not be unwound
    with tempfile.TemporaryDirectory(prefix="bench-round-memory-") as folder:
        environment = {
            **os.environ,
            "WORLD_SIZE": str(options.ranks),
            "OMP_NUM_THREADS": "1",
            "BENCH_STORE": f"{folder}/store",
        }
        command = [sys.executable, *sys.argv, "--folder", folder]
        processes = [subprocess.Popen([*command, "--peer"], env=environment)]
        processes += [
            subprocess.Popen(command, env={**environment, "RANK": str(rank)})
            for rank in range(options.ranks)
        ]
        try:
            failed = max(abs(process.wait()) for process in processes[1:])
        finally:
            for process in processes:
                process.kill()
                process.wait()
        raise SystemExit(failed)


if __name__ == "__main__":
    main()
