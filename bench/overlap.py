"""Measure whether inner steps that go on while the swarm averages lower the loss.

    python -m bench.overlap                          three seeds, two at a time
    python -m bench.overlap --during 8               a longer average
    python -m bench.overlap --seeds 1 --rounds 1     a quick look

``--miners`` small models train on parts of one text and take outer steps together, by the product's
trainer and outer step. A round period has room for ``--steps`` inner steps, an average takes as
long as ``--during`` of them. Ways to spend it:

``paused``      as the miner does by default: no inner step while the swarm averages
``overlapped``  as with ``--neuron.train_in_rounds``: inner steps go on; then weights :=
                outer(start, average) + what was trained since
                the pseudo-gradient was written. So the next pseudo-gradient holds it, and no step
                is lost; but these steps were taken from weights without the outer step
``no pause``    an average that takes no time: what cannot be had

Printed is the loss of the common weights on held-out text after each round.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

import torch
import torch.distributed as dist
from torch import Tensor

from bench.small_model import EFFECTIVE, MICRO, SEQUENCE, new_trainer, text

WAYS = ("paused", "overlapped", "no pause")


class Miner:
    """A trainer and its share of the text."""

    def __init__(self, number: int, sequences: Tensor, seed: int) -> None:
        self.trainer = new_trainer(seed=seed)
        self._sequences = sequences
        self._dice = torch.Generator().manual_seed(100 * seed + number)

    def train(self, steps: int) -> None:
        for _ in range(steps * EFFECTIVE // MICRO):
            picked = torch.randint(len(self._sequences), (MICRO,), generator=self._dice)
            self.trainer.add_micro_batch(self._sequences[picked])

    def pseudo_gradient(self, *, trains_on: bool) -> list[Tensor]:
        buffers = [torch.zeros(shape) for _, shape in self.trainer.schema]
        self.trainer.write_pseudo_gradient(buffers, trains_on=trains_on)
        return buffers

    def outer_step(self, average: Sequence[Tensor]) -> None:
        self.trainer.prepare_outer_step(average)
        self.trainer.commit_outer_step()

    @torch.no_grad()
    def loss(self, held: Tensor) -> float:
        """Of the weights that the outer step under way began with."""
        trainer = self.trainer
        kept, start = trainer.outer.current(), trainer.outer.epoch_start
        assert start is not None
        total = 0.0
        for weights, measured in ((start, True), (kept, False)):
            for shard, rows in zip(trainer.sharded.shards, weights, strict=True):
                shard.local.copy_(rows)
            trainer.drop_step()
            if measured:
                total = sum(float(trainer.sharded.loss_of(b)) for b in held.split(MICRO))
        return total / (len(held) * (SEQUENCE - 1))


def run(way: str, seed: int, options: argparse.Namespace) -> list[float]:
    """Held-out loss after each round. In a process of its own, on one thread."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        sequences, held = text(Path(folder))
    parts = sequences.chunk(options.miners)
    miners = [Miner(number, part, seed) for number, part in enumerate(parts)]
    losses = []
    for _ in range(options.rounds):
        before = options.steps if way == "no pause" else options.steps - options.during
        for miner in miners:
            miner.train(before)
        overlapped = way == "overlapped"
        gradients = [miner.pseudo_gradient(trains_on=overlapped) for miner in miners]
        average = [torch.stack(list(each)).mean(0) for each in zip(*gradients, strict=True)]
        for miner in miners:
            if overlapped:
                miner.train(options.during)
            miner.outer_step(average)
        losses.append(miners[0].loss(held))
    dist.destroy_process_group()
    print(f"seed {seed}, {way}: {losses[-1]:.4f}", file=sys.stderr, flush=True)
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--miners", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40, help="inner steps of a round period")
    parser.add_argument("--during", type=int, default=4, help="of which while the swarm averages")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    options = parser.parse_args()
    with ProcessPoolExecutor(
        options.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        waiting = {
            (way, seed): pool.submit(run, way, seed, options)
            for seed in options.seeds
            for way in WAYS
        }
        found = {key: each.result() for key, each in waiting.items()}
    print("| after round | " + " | ".join(WAYS) + " | overlapped - paused of each seed |")
    print("|---|" + "---|" * (len(WAYS) + 1))
    for number in range(options.rounds):
        losses = {key: each[number] for key, each in found.items()}
        cells = [f"{mean(losses[way, seed] for seed in options.seeds):.4f}" for way in WAYS]
        apart = [losses["overlapped", seed] - losses["paused", seed] for seed in options.seeds]
        cells.append(" ".join(f"{each:+.4f}" for each in apart))
        print(f"| {number + 1} | " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
