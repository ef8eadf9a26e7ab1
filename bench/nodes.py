"""Two nodes against one with as many ranks: time of an inner step, and what a snapshot holds it.

    python bench/nodes.py [--rounds 8] [--steps 3]

Two processes on this machine, over loopback. Both train the same model in turn as one node of two
ranks (FSDP, the baseline) and as two nodes of one (a copy each, HSDP). Prints medians and their
ratio.
"""

from __future__ import annotations

import argparse
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
from distributed_training.config.training import TrainingSettings
from distributed_training.protocol.types import Progress
from distributed_training.training.layout import Layout
from distributed_training.training.sizes import local_llama_config
from distributed_training.training.trainer import Trainer

SEQUENCE, EFFECTIVE = 128, 16


def trainer(rank: int, local: int) -> Trainer:
    made = Trainer(
        settings=TrainingSettings(
            local_batch_size_train=2,
            local_batch_size_train_effective=EFFECTIVE,
            sequence_length=SEQUENCE,
            precision="fp32",
        ),
        model_config=local_llama_config(sequence_length=SEQUENCE),
        device=torch.device("cpu"),
        layout=Layout(rank, 2, local),
        say=lambda line: None,
    )
    made.load_weights(None)
    made.begin_epoch(0)
    return made


def run(rank: int, port: int, folder: str, rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    made = {"one node": trainer(rank, 2), "two nodes": trainer(rank, 1)}
    vocabulary = local_llama_config(sequence_length=SEQUENCE)["vocab_size"]
    batch = torch.randint(0, vocabulary, (2, SEQUENCE))
    seconds: dict[str, list[float]] = {name: [] for name in made}
    held: dict[str, list[float]] = {name: [] for name in made}
    for number in range(rounds + 1):
        for name, one in made.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(steps * one.micro_batches_per_step):
                one.add_micro_batch(batch)
            taken = (time.perf_counter() - began) / steps
            handle = one.snapshot(
                Path(folder) / f"{name}-{number}",
                progress=Progress(0, number, number, []),
                block=1,
                last_loss=1.0,
            )
            handle.wait(timedelta(minutes=1))
            if number:  # the first one warms up
                seconds[name].append(taken)
                held[name].append(handle.hold_seconds)
    if rank == 0:
        for title, figures in (("inner step", seconds), ("snapshot holds training", held)):
            alone, both = (statistics.median(figures[name]) for name in made)
            ratio = both / alone
            print(f"{title}: one node {alone:.3f} s, two nodes {both:.3f} s, ratio {ratio:.3f}")
    dist.barrier()
    leave(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (free_ports(1)[0], folder, options.rounds, options.steps)
        mp.spawn(run, args=arguments, nprocs=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
