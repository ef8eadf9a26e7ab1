"""Train workers that exchange through the store, and compare their held-out loss with float32.

    python -m bench.store_loss                  20 rounds of 30 inner steps, three seeds: 15 minutes
    python -m bench.store_loss --steps 120      an hour of a core
    python -m bench.store_loss --late 0.33 --rounds 12
    python -m bench.store_loss --device cuda --steps 120    a minute of a GPU

The byte model of ``bench.four_bits``, four workers, the same batches in all ways. Uploads and
update are the product's own files, merged by the validator's own code: 4, 3 or 2 bits a value up
and 4 down, with error feedback. Where the update is late, workers train on meanwhile, and what they
did since their snapshot stays: new epoch start + (weights now - snapshot). ``half`` and ``none``
keep that share of it. ``own first`` is the field's correction (Kale et al. 2025, arXiv 2502.12996):
at the close a worker applies the outer rule to its own pseudo-gradient, trains on from there, and
puts the common update in its place when that comes. ``along`` keeps of what was trained late only
what does not lie along the update, which has that part already.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bench.common import table
from bench.four_bits import RATE, arguments_of, batches, held_out_losses, initial, losses
from distributed_training.protocol.update_file import (
    Header,
    UpdateFile,
    UpdateLayout,
    finish,
    rows_and_columns,
    write_rows,
)
from distributed_training.training.outer_rule import nesterov_sgd
from distributed_training.validator.merge import NESTEROV, OuterState, Rule, merge

WORKERS = 4
RULE = Rule(NESTEROV, 0.8, 0.9)
DOWN = 4  # bits of the update


class Way(NamedTuple):
    """``bits``: of an upload, None for float32 both ways. ``kept``: of what is trained late."""

    name: str
    bits: int | None
    late: bool = False
    kept: float = 1.0
    goal: float | None = None  # above float32
    own_first: bool = False
    along: bool = False


WAYS = (
    Way("float32", None),
    Way("4 bits", 4, goal=0.003),
    Way("3 bits", 3),
    Way("2 bits", 2, goal=0.02),
    Way("float32, late", None, late=True),
    Way("4 bits, late", 4, late=True, goal=0.01),
    Way("4 bits, late, half", 4, late=True, kept=0.5),
    Way("4 bits, late, none", 4, late=True, kept=0.0),
    Way("4 bits, late, own first", 4, late=True, own_first=True),
    Way("4 bits, late, along", 4, late=True, along=True),
)


def sign(message: bytes) -> bytes:
    return bytes(64)


@dataclass
class Network:
    """One way with one seed: the validator's state, and what each worker's upload left out."""

    way: Way
    state: OuterState
    names: list[str]
    late: int  # inner steps
    residuals: list[list[Tensor] | None] = field(default_factory=lambda: [None] * WORKERS)
    snapshot: list[Tensor] | None = None  # by parameter, all workers'
    start: Sequence[Tensor] = ()  # of the outer step that was closed last

    def close(self, weights: list[Tensor], folder: Path, step: int) -> None:
        """Take the workers' uploads, (workers, ...) by parameter, and merge them."""
        own = [each.cpu() for each in weights]
        moved = [s - w for s, w in zip(self.state.weights, own, strict=True)]
        self.start = self.state.weights
        if self.way.own_first:
            self._apply_own(weights, moved)
        self.snapshot = [each.clone() for each in weights]
        if self.way.bits is None:
            before: Sequence[Tensor | None] = self.state.momentum or [None] * len(moved)
            found = [
                nesterov_sgd(w, g.mean(0), m, lr=RULE.learning_rate, mu=RULE.mu)
                for w, g, m in zip(self.state.weights, moved, before, strict=True)
            ]
            self.state = OuterState([w for w, _ in found], [m for _, m in found])
            return
        uploads = []
        for worker in range(WORKERS):
            wanted, kept = [g[worker] for g in moved], self.residuals[worker]
            if kept is not None:
                wanted = [g + k for g, k in zip(wanted, kept, strict=True)]
            upload = self._write(folder / f"{worker}", wanted, step)
            self.residuals[worker] = [
                w - upload.decode(name, w.shape) for name, w in zip(self.names, wanted, strict=True)
            ]
            uploads.append(upload)
        path = folder / "update"
        path.unlink(missing_ok=True)
        factors = [1.0] * WORKERS
        layout = self._layout("update", DOWN, step)
        _, self.state = merge(
            uploads, factors, self.state, RULE, path=path, layout=layout, sign=sign
        )

    def apply(self, weights: list[Tensor]) -> None:
        """Begin the workers' new outer step, in place, with what they trained since the close."""
        assert self.snapshot is not None
        parts = zip(weights, self.state.weights, self.snapshot, self.start, strict=True)
        for mine, new, then, start in parts:
            late = mine.sub_(then).mul_(self.way.kept)
            new = new.to(late.device)
            if self.way.along:
                _without(late, new - start.to(late.device))
            late.add_(new)

    def _apply_own(self, weights: list[Tensor], moved: list[Tensor]) -> None:
        """Take the outer step of each worker's own pseudo-gradient, in place."""
        momenta: Sequence[Tensor | None] = self.state.momentum or [None] * len(moved)
        for mine, start, own, momentum in zip(
            weights, self.state.weights, moved, momenta, strict=True
        ):
            alike = None if momentum is None else momentum.expand_as(own)
            new, _ = nesterov_sgd(
                start.expand_as(own), own, alike, lr=RULE.learning_rate, mu=RULE.mu
            )
            mine.copy_(new)

    def _write(self, path: Path, tensors: list[Tensor], step: int) -> UpdateFile:
        path.unlink(missing_ok=True)
        assert self.way.bits is not None
        layout = self._layout("upload", self.way.bits, step)
        for index, tensor in enumerate(tensors):
            write_rows(path, layout, index, 0, tensor.reshape(rows_and_columns(tensor.shape)))
        finish(path, layout, sign)
        return UpdateFile.reopen(path, layout.schema)

    def _layout(self, kind: str, bits: int, step: int) -> UpdateLayout:
        header = Header(
            kind="update" if kind == "update" else "upload", run_id="bench", outer_step=step,
            serial=0, hotkey="bench", start="0" * 64, bits=bits, inner_steps=1, tokens=1,
        )  # fmt: skip
        shapes = [tuple(weight.shape) for weight in self.state.weights]
        return UpdateLayout.of(list(zip(self.names, shapes, strict=True)), header)


def _without(late: Tensor, update: Tensor) -> None:
    """Take from each worker's ``late`` movement what lies along the common ``update``."""
    flat, along = late.flatten(1), update.flatten()
    share = (flat @ along) / along.square().sum().clamp_min(1e-30)
    late.sub_((share.clamp_min(0)[:, None] * along).view_as(late))


def train(
    seeds: int, rounds: int, steps: int, late: float, device: torch.device
) -> dict[str, list[float]]:
    """Return each way's held-out losses, by seed."""
    networks = []
    for way in WAYS:
        for seed in range(seeds):
            start = initial(seed)
            state = OuterState(list(start.values()))
            networks.append(Network(way, state, list(start), round(late * steps) * way.late))
    names = networks[0].names
    weights = {
        name: torch.stack([n.state.weights[i] for n in networks for _ in range(WORKERS)]).to(device)
        for i, name in enumerate(names)
    }
    for weight in weights.values():
        weight.requires_grad_()
    optimizer = torch.optim.AdamW(weights.values(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    with tempfile.TemporaryDirectory(prefix="bench-") as made:
        for step, (warm, tokens) in enumerate(batches(rounds * steps, seeds * WORKERS, device)):
            optimizer.param_groups[0]["lr"] = RATE * warm
            loss = losses(weights, tokens.repeat(len(WAYS), 1, 1))
            optimizer.zero_grad()
            loss.sum().backward()
            optimizer.step()
            with torch.no_grad():
                for number, network in enumerate(networks):
                    mine = slice(number * WORKERS, (number + 1) * WORKERS)
                    own = [weights[name][mine] for name in names]
                    if (step + 1) % steps == 0:
                        network.close(own, Path(made), (step + 1) // steps)
                    if network.snapshot is not None and (step + 1) % steps == network.late:
                        network.apply(own)
            if (step + 1) % steps == 0:
                print(f"round {(step + 1) // steps}: {loss.detach().mean():.4f}", flush=True)
    merged = {
        name: torch.stack([n.state.weights[i] for n in networks]).to(device)
        for i, name in enumerate(names)
    }
    found = held_out_losses(merged)
    return {way.name: found[i * seeds : (i + 1) * seeds] for i, way in enumerate(WAYS)}


def main() -> None:
    arguments = arguments_of(__doc__, rounds=20)
    arguments.add_argument("--late", type=float, default=0.1, help="share of a round")
    arguments.add_argument("--device", type=torch.device, default="cpu")
    options = arguments.parse_args()
    found = train(options.seeds, options.rounds, options.steps, options.late, options.device)
    exact = found[WAYS[0].name]
    rows = []
    for way in WAYS:
        ratios = [a / b - 1 for a, b in zip(found[way.name], exact, strict=True)]
        goal = "" if way.goal is None else f"<={way.goal:.1%}"
        mean = sum(found[way.name]) / sum(exact) - 1
        rows.append((way.name, *(f"{r:+.2%}" for r in ratios), f"{mean:+.2%}", goal))
    print(f"float32: {', '.join(f'{loss:.4f}' for loss in exact)}")
    seeds = [f"seed {seed}" for seed in range(options.seeds)]
    table(("against float32", *seeds, "all", "goal"), rows)


if __name__ == "__main__":
    main()
