"""``--train.pcgrad`` in the trainer: domains kept apart, combined at the step's end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed_training.training.trainer import Trainer
from tests.tools.training_world import sequences, tiny, trainer, whole_weights

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("process_group")]


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

    from distributed_training.training.model import hf_config

    made = trainer(pcgrad=True, gradient_clip=0.0)
    plain = AutoModelForCausalLM.from_config(hf_config(tiny())).float()
    names = [n for n, _ in made.schema]
    plain.load_state_dict(dict(zip(names, whole_weights(made) or [], strict=True)))
    batches = conflicting(0)
    flat = []
    for domain in (0, 1):
        plain.zero_grad()
        for batch, where in batches:
            if where == domain:
                (plain(input_ids=batch, labels=batch).loss / len(batches)).backward()
        found = dict(plain.named_parameters())
        flat.append(torch.cat([found[n].grad.flatten().clone().double() for n in names]))
    product = flat[0] @ flat[1]
    assert product < 0, "these two conflict"
    expected = (flat[0] - product / (flat[1] @ flat[1]) * flat[1]) + (
        flat[1] - product / (flat[0] @ flat[0]) * flat[0]
    )
    got: list[Tensor] = []
    apply = made.optimizer.step

    def applied(gradients: Sequence[Tensor], rate: float) -> None:
        got.extend(g.clone() for g in gradients)
        apply(gradients, rate)

    monkeypatch.setattr(made.optimizer, "step", applied)
    report = step(made, batches)
    assert "PCGrad: 2" in report.note
    ours = torch.cat([g.flatten() for g in got]).double()
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-6)
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
