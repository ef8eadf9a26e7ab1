"""Gradient surgery against the published algorithm, and ``--train.pcgrad`` in the trainer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed_training.training.model import hf_config
from distributed_training.training.trainer import Trainer
from extras.pcgrad import pcgrad, surgery_weights
from tests.tools.training_world import sequences, tiny, trainer, whole_weights

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("process_group")]

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
    made = gradients(domains, seed)
    assert pcgrad(made, seed=seed, add_up=list) == projections
    torch.testing.assert_close(flat(made[0]), expected, rtol=1e-5, atol=1e-6)


def test_opposite_gradients_and_zeros_stay_finite() -> None:
    one = torch.tensor([1.0, 2.0])
    pcgrad([[one], [-one], [torch.zeros(2)]], seed=3, add_up=list)
    torch.testing.assert_close(one, torch.zeros(2), atol=1e-6, rtol=0)


def test_not_finite_gradients_are_left_for_the_norm_check() -> None:
    assert surgery_weights([[float("nan"), 1.0], [1.0, 2.0]], seed=0) == ([1.0, 1.0], 0)


def conflicting(step: int) -> list[tuple[Tensor, int]]:
    """Four micro-batches in turn of two domains: the same text, forwards and backwards."""
    ids = sequences(step)[:4]
    return [(part, i % 2) for i, part in enumerate([ids[:2], ids[:2].flip(1)] * 2)]


def step(made: Trainer, batches: list[tuple[Tensor, int]]) -> Any:
    for batch, domain in batches:
        report = made.add_micro_batch(batch, domain=domain)
    return report


def test_the_gradient_is_that_of_the_published_algorithm_in_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import AutoModelForCausalLM

    made = trainer(pcgrad=True, gradient_clip=0.0)
    plain = AutoModelForCausalLM.from_config(hf_config(tiny())).float()
    names = [n for n, _ in made.schema]
    plain.load_state_dict(dict(zip(names, whole_weights(made) or [], strict=True)))
    batches = conflicting(0)
    both = []
    for domain in (0, 1):
        plain.zero_grad()
        for batch, where in batches:
            if where == domain:
                (plain(input_ids=batch, labels=batch).loss / len(batches)).backward()
        found = dict(plain.named_parameters())
        both.append(torch.cat([found[n].grad.flatten().clone().double() for n in names]))
    product = both[0] @ both[1]
    assert product < 0, "these two conflict"
    expected = (both[0] - product / (both[1] @ both[1]) * both[1]) + (
        both[1] - product / (both[0] @ both[0]) * both[0]
    )
    got: list[Tensor] = []
    apply = made.optimizer.step

    def applied(gradients: Sequence[Tensor], rate: float) -> None:
        got.extend(g.clone() for g in gradients)
        apply(gradients, rate)

    monkeypatch.setattr(made.optimizer, "step", applied)
    report = step(made, batches)
    assert "PCGrad: 2" in report.note
    torch.testing.assert_close(flat(got), expected, rtol=1e-3, atol=1e-6)
    assert report.grad_norm == pytest.approx(float(expected.norm()), rel=1e-4)


def test_a_step_under_way_is_in_the_checkpoint_with_its_domains() -> None:
    made = trainer(pcgrad=True)
    step(made, conflicting(0))
    for batch, domain in conflicting(1)[:3]:
        made.add_micro_batch(batch, domain=domain)
    again = trainer(pcgrad=True, seed=9)
    again.load_state_dict(made.state_dict())
    last = conflicting(1)[3:]
    assert step(made, last).grad_norm == step(again, last).grad_norm
    for a, b in zip(whole_weights(made) or [], whole_weights(again) or [], strict=True):
        assert torch.equal(a, b)


def test_out_of_memory_runs_the_step_again_with_domains_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, plain = trainer(pcgrad=True), trainer(pcgrad=True)
    real, seen = made.sharded.root.forward, [0]

    def forward(ids: Tensor) -> Tensor:
        seen[0] += 1
        if seen[0] == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(ids)

    monkeypatch.setattr(made.sharded.root, "forward", forward)
    one, two = step(made, conflicting(0)), step(plain, conflicting(0))
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-4)
    assert "retried with 1 instead of 2" in one.note and "PCGrad: 2" in one.note
