"""Gradient surgery over domains of a mixture (PCGrad), on gradients split over ranks.

Yu et al., "Gradient Surgery for Multi-Task Learning" (2020), algorithm 1: each domain's gradient
g_i is projected off every other domain's gradient g_j (in random order) with which it has a
negative product, g_i <- g_i - (g_i.g_j / |g_j|^2) g_j; the projected gradients are added up.

Each g_i' stays a combination of the g_k, so the projections need only the products g_i.g_j: one
small matrix, summed over the ranks in one collective, from which every rank computes the same
weight for each g_k. The gradients themselves never travel. (With a copy of the model on each of n
nodes the matrix is n times what it should be, which the weights, quotients of it, do not see.)

Optional (``--train.pcgrad``). Every micro-batch is reduced by
itself and added to its domain's gradient: one more gradient in float32 shards for each domain, and
a reduction for each micro-batch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distributed_training.training.memory_plan import BatchPlan
from distributed_training.training.micro_batches import MicroBatches


class SurgeryMicroBatches(MicroBatches):
    """Micro-batches whose gradients are kept apart by domain until the step's end."""

    reduces_each = True

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._by_domain: dict[int, list[Any]] = {}

    def combine(self, seed: int) -> None:
        domains = [self._by_domain[domain] for domain in sorted(self._by_domain)]
        self._by_domain = {}
        if len(domains) > 1:
            parts = [[gradient.to_local() for gradient in domain] for domain in domains]
            projections = pcgrad(parts, seed=seed, add_up=self.stream.sum)
            if projections:
                self.notes.append(f"PCGrad: {projections} of {len(domains)} domains' conflicts")
        # Those of the first domain hold the result.
        for shard, gradient in zip(self.sharded.shards, domains[0], strict=True):
            shard.dtensor.grad = gradient

    def discard(self) -> None:
        super().discard()
        self._by_domain = {}

    @torch.no_grad()
    def _run(self, batch: Tensor, domain: int, plan: BatchPlan, *, last: bool) -> None:
        """Run a micro-batch, and move what FSDP just reduced to its domain's gradient."""
        with torch.enable_grad():
            super()._run(batch, domain, plan, last=last)
        new: list[Any] = []
        for shard in self.sharded.shards:
            grad = shard.dtensor.grad
            new.append(torch.zeros_like(shard.dtensor) if grad is None else grad)
            shard.dtensor.grad = None
        held = self._by_domain.setdefault(domain, new)
        if held is not new:
            for total, part in zip(held, new, strict=True):
                total.add_(part)


def products(domains: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the products of all pairs of gradients: float64 (domains, domains), on the CPU.

    ``domains``: of each domain, this rank's part of every parameter's gradient; a parameter without
    a part here may be an empty tensor.
    """
    count = len(domains)
    matrix = torch.zeros(count, count, dtype=torch.float64, device=domains[0][0].device)
    for parts in zip(*domains, strict=True):
        # One parameter at a time: never a second copy of all gradients.
        rows = torch.stack([part.reshape(-1) for part in parts]).float()
        # Summed over parameters in float64: the sign of a small product decides.
        matrix += (rows @ rows.T).double()
    return matrix.cpu()


def surgery_weights(gram: Sequence[Sequence[float]], *, seed: int) -> tuple[list[float], int]:
    """Return the weight of each domain's gradient in the result, and the number of projections.

    ``gram``: :func:`products`, of all ranks. ``seed`` fixes the random order; equal on all ranks. A
    NaN or Inf gives weights 1 (the caller's check of the gradient norm finds the problem).
    """
    count = len(gram)
    if not all(math.isfinite(product) for row in gram for product in row):
        return [1.0] * count, 0
    order = random.Random(seed)
    total = [0.0] * count
    projections = 0
    for i in range(count):
        weights = [0.0] * count
        weights[i] = 1.0
        others = [j for j in range(count) if j != i]
        order.shuffle(others)
        for j in others:
            product = sum(weights[k] * gram[k][j] for k in range(count))
            if product < 0 and gram[j][j] > 0:
                weights[j] -= product / gram[j][j]
                projections += 1
        total = [a + b for a, b in zip(total, weights, strict=True)]
    return total, projections


@torch.no_grad()
def pcgrad(
    domains: Sequence[Sequence[Tensor]],
    *,
    seed: int,
    add_up: Callable[[Sequence[float]], Sequence[float]],
) -> int:
    """Replace the first domain's gradients by the sum of all projected ones.

    Where no two conflict it is their plain sum. ``domains``: see :func:`products`; ``add_up`` sums
    numbers over ranks, each element of a gradient being on exactly one. Returns the number of
    projections.
    """
    flat, count = add_up(products(domains).flatten().tolist()), len(domains)
    gram = [flat[i * count : (i + 1) * count] for i in range(count)]
    weights, projections = surgery_weights(gram, seed=seed)
    for result, *others in zip(*domains, strict=True):
        result.mul_(weights[0])
        for weight, tensor in zip(weights[1:], others, strict=True):
            result.add_(tensor, alpha=weight)
    return projections
