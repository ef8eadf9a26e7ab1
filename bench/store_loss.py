"""Train workers that exchange through the store, and compare their held-out loss with float32.

    python -m bench.store_loss                  20 rounds of 30 inner steps, three seeds: 15 minutes
    python -m bench.store_loss --steps 120      an hour of a core
    python -m bench.store_loss --late 0.33 --rounds 12
    python -m bench.store_loss --device cuda --steps 120    a minute of a GPU
    python -m bench.store_loss --hivemind       over hivemind, against the store: 10 minutes

The byte model of ``bench.workers``, four workers, the same batches in all ways. Uploads and
update are the product's own files, merged by the validator's own code: 4, 3 or 2 bits a value up
and 4 down, with error feedback. Where the update is late, workers train on meanwhile, and what they
did since their snapshot stays: new epoch start + (weights now - snapshot). ``along`` keeps of what
was trained late only what does not lie along the update, which has that part already. ``one
misses``: the last worker's upload is in time at each fourth close only. It carries its movement
over each of the others, or what does not lie along their updates.

With ``--hivemind`` outer steps follow from the members' average instead: real peer processes of the
workers and of a validator average the files on loopback. The first close, and one whose all-reduce
fails, use the merge, as in a network.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bench.average import Peers
from bench.common import table
from bench.workers import (
    WORKERS,
    Network,
    arguments_of,
    held_out_losses,
    initial,
    inner_steps,
    stack,
)
from distributed_training.protocol.average_file import Average
from distributed_training.protocol.update_file import UpdateFile
from distributed_training.training.outer_rule import nesterov_sgd
from distributed_training.validator.merge import NESTEROV, OuterState, Rule, norm_of

RULE = Rule(NESTEROV, 0.8, 0.9)


class Way(NamedTuple):
    """``bits``: of an upload, None for float32 both ways."""

    name: str
    bits: int | None
    late: bool = False
    goal: float | None = None  # above float32
    along: bool = False
    misses: int = 0  # closes in a row, the last worker
    averages: bool = False  # over hivemind


WAYS = (
    Way("float32", None),
    Way("4 bits", 4, goal=0.003),
    Way("3 bits", 3),
    Way("2 bits", 2, goal=0.02),
    Way("float32, late", None, late=True),
    Way("4 bits, late", 4, late=True, goal=0.01),
    Way("4 bits, late, along", 4, late=True, along=True),
    Way("one misses", 4, late=True, misses=3),
    Way("one misses, along", 4, late=True, along=True, misses=3),
)
OVER_HIVEMIND = (Way("store", 4), Way("hivemind", 4, goal=0.003, averages=True))


@dataclass
class LateNetwork(Network):
    """Train by one method with one seed. ``late``: inner steps between a close and its update."""

    way: Way = WAYS[0]
    late: int = 0
    snapshot: list[Tensor] | None = None  # by parameter, all workers'
    start: Sequence[Tensor] = ()  # of the outer step that was closed last
    missed: bool = False  # by the last worker
    peers: Peers | None = None  # of all networks that average
    usual: float = 0.0  # norm of an upload
    averaged: int = 0  # outer steps that follow from an average

    def close(self, weights: list[Tensor], folder: Path, step: int) -> None:
        """Take the workers' uploads, (workers, ...) by parameter, and merge them."""
        own = [each.cpu().clone() for each in weights]
        moved = [s - w for s, w in zip(self.state.weights, own, strict=True)]
        self.start = self.state.weights
        self.snapshot = [each.clone() for each in weights]
        if self.way.bits is not None:
            self.missed = step % (self.way.misses + 1) > 0
            self.exchange(own, folder, step, missing=int(self.missed))
            return
        before: Sequence[Tensor | None] = self.state.momentum or [None] * len(moved)
        found = [
            nesterov_sgd(w, g.mean(0), m, lr=RULE.learning_rate, mu=RULE.mu)
            for w, g, m in zip(self.state.weights, moved, before, strict=True)
        ]
        self.states = [OuterState([w for w, _ in found], [m for _, m in found])]

    def _merge_all(self, uploads: Sequence[UpdateFile], folder: Path, outer_step: int) -> None:
        usual, self.usual = self.usual, statistics.median_low(map(norm_of, uploads))
        paths = [upload.path for upload in uploads]
        if self.peers is None or not usual or self.peers.round(paths, usual, ahead=1):
            super()._merge_all(uploads, folder, outer_step)
            return
        average = Average(self.peers.folder / "average", uploads[0].layout.schema)
        self.merge([average], [1.0], 1.0, folder, outer_step)
        self.averaged += 1

    def apply(self, weights: list[Tensor]) -> None:
        """Begin the workers' new outer step, in place, with what they trained since the close."""
        assert self.snapshot is not None
        parts = zip(weights, self.state.weights, self.snapshot, self.start, strict=True)
        for mine, new, then, start in parts:
            all_of_last = mine[-1] - start.to(mine.device)
            late = mine.sub_(then)
            if self.missed:
                late[-1] = all_of_last
            new = new.to(late.device)
            if self.way.along:
                _without(late, new - start.to(late.device))
            late.add_(new)


def _without(late: Tensor, update: Tensor) -> None:
    """Take from each worker's ``late`` movement what lies along the common ``update``."""
    flat, along = late.flatten(1), update.flatten()
    share = (flat @ along) / along.square().sum().clamp_min(1e-30)
    late.sub_((share.clamp_min(0)[:, None] * along).view_as(late))


def train(
    ways: Sequence[Way], seeds: int, rounds: int, steps: int, late: float, device: torch.device
) -> dict[str, list[float]]:
    """Return each way's held-out losses, by seed."""
    starts = [initial(seed) for seed in range(seeds)]
    schema = [(name, tuple(weight.shape)) for name, weight in starts[0].items()]
    weights = stack(starts * len(ways), WORKERS, device)
    with tempfile.TemporaryDirectory(prefix="bench-") as made, contextlib.ExitStack() as stop:
        peers = None
        if any(way.averages for way in ways):
            peers = stop.enter_context(
                contextlib.closing(Peers(Path(made), schema, WORKERS + 1, witness=True))
            )
        networks = [
            LateNetwork(
                RULE,
                list(start),
                [OuterState(list(start.values()))],
                codec=f"{way.bits or 4}-bit",
                way=way,
                late=round(late * steps) * way.late,
                peers=peers if way.averages else None,
            )
            for way in ways
            for start in starts
        ]
        for step, loss in inner_steps(weights, rounds * steps, seeds * WORKERS, device):
            with torch.no_grad():
                for number, network in enumerate(networks):
                    mine = slice(number * WORKERS, (number + 1) * WORKERS)
                    own = [weights[name][mine] for name in network.names]
                    if step % steps == 0:
                        network.close(own, Path(made), step // steps)
                    if network.snapshot is not None and step % steps == network.late:
                        network.apply(own)
            if step % steps == 0:
                print(f"round {step // steps}: {loss.mean():.4f}", flush=True)
    merged = {
        name: torch.stack([n.state.weights[i] for n in networks]).to(device)
        for i, name in enumerate(starts[0])
    }
    if peers is not None:
        print("outer steps from an average:", *(n.averaged for n in networks if n.peers))
    found = held_out_losses(merged)
    return {way.name: found[i * seeds : (i + 1) * seeds] for i, way in enumerate(ways)}


def main() -> None:
    arguments = arguments_of(__doc__, rounds=20)
    arguments.add_argument("--late", type=float, default=0.1, help="share of a round")
    arguments.add_argument("--device", type=torch.device, default="cpu")
    arguments.add_argument("--hivemind", action="store_true", help="against the store")
    options = arguments.parse_args()
    ways = OVER_HIVEMIND if options.hivemind else WAYS
    found = train(ways, options.seeds, options.rounds, options.steps, options.late, options.device)
    first, exact = ways[0].name, found[ways[0].name]
    rows = []
    for way in ways:
        ratios = [a / b - 1 for a, b in zip(found[way.name], exact, strict=True)]
        goal = "" if way.goal is None else f"<={way.goal:.1%}"
        mean = sum(found[way.name]) / sum(exact) - 1
        rows.append((way.name, *(f"{r:+.2%}" for r in ratios), f"{mean:+.2%}", goal))
    print(f"{first}: {', '.join(f'{loss:.4f}' for loss in exact)}")
    seeds = [f"seed {seed}" for seed in range(options.seeds)]
    table((f"against {first}", *seeds, "all", "goal"), rows)


if __name__ == "__main__":
    main()
