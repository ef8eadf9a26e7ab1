"""Train workers that average by four bits, and by float32, and compare their held-out loss.

    python -m bench.four_bits                       ten rounds, three seeds: two minutes of a core

A byte model of 115,000 parameters on the source of Python's library. Three workers begin from the
same weights, take their inner steps on batches of their own, and average their pseudo-gradients as
an all-reduce does: each sends the others their shares, encoded; the reducer adds, encodes the
average once, and takes what it decodes to as all others do. Both ways have the same batches. The
validator's worker is none of them: it applies the same averages.

All models train at once, stacked along the first dimension: each operation serves all of them.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.common import parser, table
from distributed_training.protocol import four_bits
from distributed_training.training.outer_rule import nesterov_sgd

WORKERS = 3
WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 64, 2, 4, 64, 8
RATE, WARMUP = 1e-3, 30
HELD_OUT_BYTES, HELD_OUT_BATCHES = 60_000, 16
GOAL = 0.003  # of the held-out loss

Weights = dict[str, Tensor]
_CPU = torch.device("cpu")


def text() -> Tensor:
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    data = b"".join(file.read_bytes() for file in files[:80])
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def initial(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * rows**-0.5

    weights = {"bytes": matrix(256, WIDTH), "places": 0.1 * matrix(CONTEXT, WIDTH)}
    for layer in range(LAYERS):
        weights |= {
            f"{layer}.attention": matrix(WIDTH, 3 * WIDTH),
            f"{layer}.mixed": matrix(WIDTH, WIDTH) / 2,
            f"{layer}.up": matrix(WIDTH, 4 * WIDTH),
            f"{layer}.down": matrix(4 * WIDTH, WIDTH) / 2,
        }
    return weights


def losses(weights: Weights, tokens: Tensor) -> Tensor:
    """Return each model's mean loss; ``tokens`` are (models, batch, context + 1)."""
    models, batch, _ = tokens.shape
    every = torch.arange(models, device=tokens.device).view(-1, 1, 1)
    x = weights["bytes"][every, tokens[..., :-1]] + weights["places"].unsqueeze(1)
    x = x.view(models, -1, WIDTH)
    heads = (models, batch, CONTEXT, HEADS, WIDTH // HEADS)
    for layer in range(LAYERS):
        normed = F.layer_norm(x, (WIDTH,))
        q, k, v = (
            each.reshape(heads).transpose(2, 3)
            for each in (normed @ weights[f"{layer}.attention"]).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(2, 3)
        x = x + mixed.reshape(models, -1, WIDTH) @ weights[f"{layer}.mixed"]
        inner = F.gelu(F.layer_norm(x, (WIDTH,)) @ weights[f"{layer}.up"])
        x = x + inner @ weights[f"{layer}.down"]
    logits = F.layer_norm(x, (WIDTH,)) @ weights["bytes"].transpose(1, 2)
    each = F.cross_entropy(logits.reshape(-1, 256), tokens[..., 1:].reshape(-1), reduction="none")
    return each.view(models, -1).mean(1)


def batches(
    steps: int, workers: int, device: torch.device = _CPU
) -> Iterator[tuple[float, Tensor]]:
    """Yield each step's share of the learning rate, and its tokens (workers, batch, context + 1).

    They are the same each time.
    """
    data, window = text()[HELD_OUT_BYTES:], torch.arange(CONTEXT + 1)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        places = torch.randint(len(data) - CONTEXT, (workers, BATCH, 1), generator=generator)
        yield min(1.0, (step + 1) / WARMUP), data[places + window].to(device)


@torch.no_grad()
def held_out_losses(weights: Weights) -> list[float]:
    """Return each model's loss on the text that none trains on."""
    data, models = text()[:HELD_OUT_BYTES], weights["bytes"]
    places = torch.linspace(0, len(data) - CONTEXT - 1, BATCH * HELD_OUT_BATCHES).long()
    tokens = data[places.view(1, -1, 1) + torch.arange(CONTEXT + 1)].to(models.device)
    return losses(weights, tokens.expand(len(models), -1, -1)).tolist()


def arguments_of(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    arguments = parser(doc)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--rounds", type=int, default=rounds)
    arguments.add_argument("--steps", type=int, default=30, help="inner steps of a round")
    torch.set_num_threads(1)
    return arguments


def average(gradients: Tensor) -> Tensor:
    """Average pseudo-gradients (workers, values) by four bits, as the all-reduce does."""
    result = torch.empty_like(gradients[0])
    bounds = torch.linspace(0, len(result), len(gradients) + 1).long().tolist()
    for reducer, (first, last) in enumerate(itertools.pairwise(bounds)):
        total = gradients[reducer, first:last].clone()
        for sender in range(len(gradients)):
            if sender != reducer:
                total += passed(gradients[sender, first:last])
        result[first:last] = passed(total / len(gradients))
    return result


def passed(values: Tensor) -> Tensor:
    """Return what arrives of ``values`` that are sent."""
    arrived = torch.empty_like(values)
    four_bits.decode(four_bits.encode(values.contiguous()), arrived)
    return arrived


def train(seeds: int, rounds: int, steps: int) -> tuple[list[float], list[float]]:
    """Return the held-out losses of float32 and of four bits, by seed."""
    groups = 2 * seeds  # of workers: those of float32 first
    starts = [initial(group % seeds) for group in range(groups)]
    momenta: list[Tensor | None] = [None] * groups
    weights = {
        name: torch.stack([s[name] for s in starts for _ in range(WORKERS)]).requires_grad_()
        for name in starts[0]
    }
    optimizer = torch.optim.AdamW(weights.values(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    for step, (warm, tokens) in enumerate(batches(rounds * steps, seeds * WORKERS)):
        optimizer.param_groups[0]["lr"] = RATE * warm
        loss = losses(weights, tokens.repeat(2, 1, 1))
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
        if (step + 1) % steps:
            continue
        print(f"round {(step + 1) // steps}: {loss[: seeds * WORKERS].mean():.4f}", flush=True)
        with torch.no_grad():
            for group in range(groups):
                mine = slice(group * WORKERS, (group + 1) * WORKERS)
                start = torch.cat([t.flatten() for t in starts[group].values()])
                now = torch.cat([t[mine].flatten(1) for t in weights.values()], 1)
                gradients = start - now
                gradient = average(gradients) if group >= seeds else gradients.mean(0)
                new, momenta[group] = nesterov_sgd(start, gradient, momenta[group])
                sizes = [t.numel() for t in starts[group].values()]
                for name, part in zip(starts[group], new.split(sizes), strict=True):
                    starts[group][name] = part.view_as(starts[group][name])
                    weights[name][mine] = starts[group][name]
    found = held_out_losses({n: torch.stack([start[n] for start in starts]) for n in starts[0]})
    return found[:seeds], found[seeds:]


def main() -> None:
    options = arguments_of(__doc__, rounds=10).parse_args()
    exact, four = train(options.seeds, options.rounds, options.steps)
    rows = [
        (seed, f"{a:.4f}", f"{b:.4f}", f"{b / a - 1:+.2%}")
        for seed, (a, b) in enumerate(zip(exact, four, strict=True))
    ]
    mean = sum(four) / sum(exact) - 1
    table(
        ("seed", "float32", "4bit", "difference"),
        [*rows, ("all", "", "", f"{mean:+.2%}"), ("goal", "", "", f"<={GOAL:.1%}")],
    )


if __name__ == "__main__":
    main()
