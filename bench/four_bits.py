"""Train workers that average by four bits, and by float32, and compare their held-out loss.

    python -m bench.four_bits                       ten rounds, three seeds: two minutes of a core

A byte model of 115,000 parameters on the source of Python's library. Three workers begin from the
same weights, take their inner steps on batches of their own, and average their pseudo-gradients as
an all-reduce does: each sends the others their shares, encoded; the reducer adds, encodes the
average once, and takes what it decodes to as all others do. Both ways have the same batches. The
validator's worker is none of them: it applies the same averages.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from bench.common import table
from bench.workers import arguments_of, held_out_losses, initial, inner_steps, stack
from distributed_training.protocol import four_bits
from distributed_training.training.outer_rule import nesterov_sgd

WORKERS = 3
GOAL = 0.003  # of the held-out loss


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
    weights = stack(starts, WORKERS)
    for step, loss in inner_steps(weights, rounds * steps, seeds * WORKERS):
        if step % steps:
            continue
        print(f"round {step // steps}: {loss[: seeds * WORKERS].mean():.4f}", flush=True)
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
