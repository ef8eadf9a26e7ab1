"""Two nodes against one: time of an inner step, and of a snapshot.

    python bench/nodes.py [--rounds 8] [--steps 3]

Processes on this machine, over loopback. An inner step: one node of two ranks (FSDP, the
baseline) against two nodes of one, with a copy each (HSDP), in turn. A snapshot of a copy is one
node's work, so it is held against one node with as many ranks as each of the two has, here one: how
long training is held, and until the files are there. Prints medians and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distributed_training.common.ports import free_ports
from distributed_training.common.processes import leave
from distributed_training.config.settings import TrainingSettings
from distributed_training.protocol.types import Progress
from distributed_training.training.collectives import Layout
from distributed_training.training.memory_plan import local_llama_config
from distributed_training.training.trainer import Trainer

SEQUENCE, EFFECTIVE = 128, 16
TWO_RANKS, TWO_NODES, ONE_RANK = "one node of 2 ranks", "two nodes of 1 rank", "one node of 1 rank"
STEP, HELD, WRITTEN = "inner step", "snapshot holds training", "snapshot is written"

#: What was measured -> in which layout -> seconds.
Figures = dict[str, dict[str, list[float]]]


def trainer(layout: Layout) -> Trainer:
    made = Trainer(
        settings=TrainingSettings(
            local_batch_size_train=2,
            local_batch_size_train_effective=EFFECTIVE,
            sequence_length=SEQUENCE,
            precision="fp32",
        ),
        model_config=local_llama_config(sequence_length=SEQUENCE),
        device=torch.device("cpu"),
        layout=layout,
        say=lambda line: None,
    )
    made.load_weights(None)
    made.begin_epoch(0)
    return made


def run(rank: int, ranks: dict[str, int], port: int, folder: str, rounds: int, steps: int) -> None:
    """``ranks``: layout -> ranks on each node. All layouts have as many in all."""
    torch.set_num_threads(1)
    world = 1 if ONE_RANK in ranks else 2
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    made = {n: trainer(Layout(rank, world, local)) for n, local in ranks.items()}
    vocabulary = local_llama_config(sequence_length=SEQUENCE)["vocab_size"]
    batch = torch.randint(0, vocabulary, (2, SEQUENCE))
    figures: Figures = {what: {name: [] for name in made} for what in (STEP, HELD, WRITTEN)}
    for number in range(rounds + 1):
        for name, one in made.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(steps * one.micro_batches_per_step):
                one.add_micro_batch(batch)
            taken = (time.perf_counter() - began) / steps
            dist.barrier()
            began = time.perf_counter()
            handle = one.snapshot(
                Path(folder) / f"{name}-{number}-{port}",
                progress=Progress(0, number, number, []),
                block=1,
                last_loss=1.0,
            )
            handle.wait(timedelta(minutes=1))
            dist.barrier()
            written = time.perf_counter() - began
            held = max(one.stream.answers(handle.hold_seconds))  # training waits for the last rank
            if number:  # the first one warms up
                figures[STEP][name].append(taken)
                figures[HELD][name].append(held)
                figures[WRITTEN][name].append(written)
    if rank == 0:
        (Path(folder) / f"{port}.json").write_text(json.dumps(figures))
    dist.barrier()
    leave(0)


def measure(folder: str, ranks: dict[str, int], rounds: int, steps: int) -> Figures:
    (port,) = free_ports(1)
    mp.spawn(run, args=(ranks, port, folder, rounds, steps), nprocs=1 if ONE_RANK in ranks else 2)
    found: Figures = json.loads((Path(folder) / f"{port}.json").read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        alone = [measure(folder, {ONE_RANK: 1}, options.rounds, options.steps)]
        both = measure(folder, {TWO_RANKS: 2, TWO_NODES: 1}, options.rounds, options.steps)
        alone.append(measure(folder, {ONE_RANK: 1}, options.rounds, options.steps))
    for what, baseline, name, measured in (
        (STEP, TWO_RANKS, TWO_NODES, both),
        (HELD, ONE_RANK, TWO_NODES, both),
        (WRITTEN, ONE_RANK, TWO_NODES, both),
    ):
        known = measured[what].get(baseline) or [s for f in alone for s in f[what][ONE_RANK]]
        before, now = statistics.median(known), statistics.median(measured[what][name])
        print(f"{what}: {baseline} {before:.3f} s, {name} {now:.3f} s, ratio {now / before:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
