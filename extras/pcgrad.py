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

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

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
            # pcgrad overwrites the first domain's tensors with the result.
            _, projections = pcgrad(domains, seed=seed, group=self.stream.group)
            if projections:
                self.notes.append(f"PCGrad: {projections} of {len(domains)} domains' conflicts")
        for shard, gradient in zip(self.sharded.shards, domains[0], strict=True):
            shard.dtensor.grad = gradient

    def forget(self) -> None:
        super().forget()
        self._by_domain = {}

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


def local_gradient(gradient: Tensor) -> Tensor:
    """Return this rank's rows of a gradient: what FSDP2 keeps, or the tensor itself."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


@torch.no_grad()
def products(
    domains: Sequence[Sequence[Tensor]], *, group: dist.ProcessGroup | None, reduce: bool
) -> Tensor:
    """Return the products of all pairs of gradients: float64 (domains, domains), on the CPU.

    ``domains``: of each domain, this rank's part of every parameter's gradient; all in the same
    order, each element on exactly one rank. ``reduce`` adds up over ``group`` (gloo, or None for
    the default group); a parameter without a part here may be an empty tensor.
    """
    count = len(domains)
    device = domains[0][0].device if domains and domains[0] else torch.device("cpu")
    matrix = torch.zeros(count, count, dtype=torch.float64, device=device)
    for parts in zip(*domains, strict=True):
        # One parameter at a time: never a second copy of all gradients.
        rows = torch.stack([part.detach().reshape(-1) for part in parts]).float()
        # Summed over parameters in float64: the sign of a small product decides.
        matrix += (rows @ rows.T).double()
    matrix = matrix.cpu()
    if reduce:
        dist.all_reduce(matrix, group=group)
    return matrix


def surgery_weights(matrix: Tensor, *, seed: int) -> tuple[list[float], int]:
    """Return the weight of each domain's gradient in the result, and the number of projections.

    ``matrix``: :func:`products`. ``seed`` fixes the random order; equal on all ranks. A matrix with
    NaN or Inf gives weights 1 (the caller's check of the gradient norm finds the problem).
    """
    count = len(matrix)
    if not bool(torch.isfinite(matrix).all()):
        return [1.0] * count, 0
    gram = matrix.tolist()
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
    group: dist.ProcessGroup | None = None,
    reduce: bool = True,
) -> tuple[list[Tensor], int]:
    """Return the sum of the projected gradients, this rank's part, and the number of projections.

    Where no two gradients conflict it is their plain sum. The tensors of ``domains[0]`` are
    overwritten and returned; see :func:`products` for the arguments. Collective when ``reduce``.
    Raises ValueError for domains of different lengths.
    """
    parts = [[local_gradient(gradient) for gradient in domain] for domain in domains]
    if not parts or len({len(domain) for domain in parts}) != 1:
        raise ValueError("every domain needs a gradient for the same parameters")
    weights, projections = surgery_weights(products(parts, group=group, reduce=reduce), seed=seed)
    for tensors in zip(*parts, strict=True):
        result = tensors[0]
        result.mul_(weights[0])
        for weight, tensor in zip(weights[1:], tensors[1:], strict=True):
            result.add_(tensor.to(result.dtype), alpha=weight)
    return parts[0], projections
