"""Gradient surgery against the published algorithm written out, in one process and over ranks."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from extras.pcgrad import pcgrad, surgery_weights

pytestmark = pytest.mark.timeout(240)

SHAPES = [(6, 4), (8,), (4, 2, 3)]


def gradients(domains: int, seed: int = 0) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(s, generator=generator) for s in SHAPES] for _ in range(domains)]


def reference(domains: list[list[Tensor]], *, seed: int) -> tuple[Tensor, int]:
    """Algorithm 1 of the paper over whole, flat gradients."""
    flat = [torch.cat([t.flatten() for t in domain]).double() for domain in domains]
    order = random.Random(seed)
    total = torch.zeros_like(flat[0])
    projections = 0
    for i, gradient in enumerate(flat):
        projected = gradient.clone()
        others = [j for j in range(len(flat)) if j != i]
        order.shuffle(others)
        for j in others:
            product = projected @ flat[j]
            if product < 0:
                projected -= product / (flat[j] @ flat[j]) * flat[j]
                projections += 1
        total += projected
    return total, projections


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors]).double()


@pytest.mark.parametrize("domains", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_published_algorithm(domains: int, seed: int) -> None:
    expected, projections = reference(gradients(domains, seed), seed=seed)
    result, made = pcgrad(gradients(domains, seed), seed=seed, reduce=False)
    assert made == projections
    torch.testing.assert_close(flat(result), expected, rtol=1e-5, atol=1e-6)


def test_opposite_gradients_and_zeros_stay_finite() -> None:
    one = [torch.tensor([1.0, 2.0])]
    result, _ = pcgrad([[one[0].clone()], [-one[0]], [torch.zeros(2)]], seed=3, reduce=False)
    torch.testing.assert_close(result[0], torch.zeros(2), atol=1e-6, rtol=0)


def test_not_finite_gradients_are_left_for_the_norm_check() -> None:
    matrix = torch.tensor([[float("nan"), 1.0], [1.0, 2.0]])
    assert surgery_weights(matrix, seed=0) == ([1.0, 1.0], 0)
