"""Muon as the inner optimizer of matrices against AdamW, merged through the store.

    python -m bench.muon                           20 rounds of 30 inner steps, three seeds
    python -m bench.muon --device cuda --steps 60  a minute of a GPU

The byte model of ``bench.workers``, four workers, the same batches in all ways. Each optimizer
runs at several learning rates, and its best one counts. Uploads and the update have 4 bits a value,
by the product's own encoder; what the update's encoding leaves out is carried into the next one.
The outer rule is the public one.

Muon is the product's own, so both have learning rates of one kind. Embeddings stay with AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench.common import table
from bench.workers import (
    RATE,
    WORKERS,
    Weights,
    arguments_of,
    batches,
    held_out_losses,
    initial,
    losses,
)
from distributed_training.protocol.codecs import CODECS
from distributed_training.training.muon import MatrixRows, Muon
from distributed_training.training.outer_rule import nesterov_sgd

CODEC = CODECS["4-bit"]
RATES = tuple(RATE * factor for factor in (1, 3, 10, 30))
DECAY = 0.1
GOAL = 0.01  # below AdamW


@dataclass
class Way:
    """An optimizer at one rate, in all seeds at once: ``weights`` are (seeds * workers, ...)."""

    name: str
    rate: float
    weights: Weights
    starts: Weights  # (seeds, ...)
    momenta: dict[str, Tensor | None] = field(default_factory=dict)
    residuals: Weights = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.momenta = dict.fromkeys(self.weights)
        self.residuals = {n: torch.zeros_like(s) for n, s in self.starts.items()}
        hidden = [n for n in self.weights if self.name == "Muon" and n[0].isdigit()]
        rest = [w for n, w in self.weights.items() if n not in hidden]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=DECAY)
        ]
        if hidden:  # stacked matrices, (models, rows, columns) each
            matrices = [
                MatrixRows.of(self.weights[n].detach(), self.weights[n].shape) for n in hidden
            ]
            self.weights |= dict(zip(hidden, matrices, strict=True))
            self.optimizers.append(Muon(matrices, DECAY))

    def step(self, tokens: Tensor, warm: float) -> float:
        loss = losses(self.weights, tokens)
        for weight in self.weights.values():
            weight.grad = None
        loss.sum().backward()
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = self.rate * warm
            optimizer.step()
        return float(loss.detach().mean())

    @torch.no_grad()
    def close(self) -> None:
        """Merge the workers' movements, and begin the next outer step from what comes out."""
        for name, weight in self.weights.items():
            start = self.starts[name]
            own = weight.view(len(start), WORKERS, *start.shape[1:])
            gradient = passed(start.unsqueeze(1) - own).mean(1)
            new, self.momenta[name] = nesterov_sgd(start, gradient, self.momenta[name])
            wanted = start - new + self.residuals[name]
            update = passed(wanted)
            self.residuals[name] = wanted - update
            self.starts[name] = start - update
            own.copy_(self.starts[name].unsqueeze(1))


def passed(values: Tensor) -> Tensor:
    """Return what arrives of ``values``, (..., columns), that are sent."""
    rows = values.reshape(-1, values.shape[-1])
    arrived = torch.empty_like(rows)
    CODEC.decode_rows(*CODEC.encode_rows(rows), arrived)
    return arrived.view_as(values)


def train(seeds: int, rounds: int, steps: int, device: torch.device) -> list[Way]:
    first = [initial(seed) for seed in range(seeds)]
    ways = []
    for name in ("AdamW", "Muon"):
        for rate in RATES:
            starts = {n: torch.stack([s[n] for s in first]).to(device) for n in first[0]}
            weights = {
                n: s.repeat_interleave(WORKERS, 0).requires_grad_() for n, s in starts.items()
            }
            ways.append(Way(name, rate, weights, starts))
    for step, (warm, tokens) in enumerate(batches(rounds * steps, seeds * WORKERS, device)):
        now = [way.step(tokens, warm) for way in ways]
        if (step + 1) % steps == 0:
            for way in ways:
                way.close()
            line = " ".join(f"{loss:.4f}" for loss in now)
            print(f"round {(step + 1) // steps}: {line}", flush=True)
    return ways


def main() -> None:
    arguments = arguments_of(__doc__, rounds=20)
    arguments.add_argument("--device", type=torch.device, default="cpu")
    options = arguments.parse_args()
    ways = train(options.seeds, options.rounds, options.steps, options.device)
    found = [held_out_losses(way.starts) for way in ways]
    means = [sum(each) / len(each) for each in found]
    best = min(mean for way, mean in zip(ways, means, strict=True) if way.name == "AdamW")
    rows = [
        (way.name, f"{way.rate:g}", *(f"{x:.4f}" for x in each), f"{mean / best - 1:+.2%}")
        for way, each, mean in zip(ways, found, means, strict=True)
    ]
    seeds = [f"seed {seed}" for seed in range(options.seeds)]
    goal = ("goal", "", *("" for _ in seeds), f"<={-GOAL:.0%}")
    table(("optimizer", "rate", *seeds, "against AdamW's best"), [*rows, goal])


if __name__ == "__main__":
    main()
