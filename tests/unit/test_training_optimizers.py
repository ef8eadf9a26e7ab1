"""Inner optimizers from outside of the package: steps, offload, memory, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from distributed_training.config.settings import TrainingSettings
from distributed_training.config.types import ConfigError
from distributed_training.training.inner_optimizer import OPTIMIZERS, find_state
from distributed_training.training.memory_plan import named_config, plan_memory
from tests.tools.training_world import SETTINGS, train, trainer, whole_weights
from tests.toys.optimizer import lion, sgd

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("process_group")]


def same(one: Sequence[torch.Tensor] | None, two: Sequence[torch.Tensor] | None) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one or (), two or (), strict=True))


@pytest.mark.parametrize(("name", "rate"), [("lion", 2e-3), ("sgd", 0.1)])
def test_a_toy_learns_alike_wherever_its_state_lies(name: str, rate: float) -> None:
    here, there = (
        trainer(optimizer=name, learning_rate=rate, offload_optimizer=where)
        for where in ("off", "on")
    )
    losses = [[r.loss for r in train(made, 0, 6)] for made in (here, there)]
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
    assert same(whole_weights(here), whole_weights(there))


@pytest.mark.parametrize(
    ("name", "factory"),
    [("lion", lion), ("sgd", sgd), ("adamw", None)],
)
def test_a_step_is_that_of_torch(name: str, factory: Callable[..., Any] | None) -> None:
    settings = dataclasses.replace(SETTINGS, optimizer=name)
    made = trainer(optimizer=name)
    plain = [nn.Parameter(p.detach().clone()) for p in made.optimizer._params]
    theirs = (factory or OPTIMIZERS[name])(plain, settings)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        gradients = [torch.randn(p.shape, generator=generator) for p in plain]
        made.optimizer.step(gradients, 1e-2)
        for parameter, gradient in zip(plain, gradients, strict=True):
            parameter.grad = gradient.clone()
        theirs.param_groups[0]["lr"] = 1e-2
        theirs.step()
    assert same([p.detach() for p in plain], [p.detach() for p in made.optimizer._params])


def test_the_memory_plan_counts_what_the_optimizer_keeps() -> None:
    needed = {}
    for name, moments in (("adamw", 2), ("lion", 1), ("sgd", 1)):
        settings = TrainingSettings(optimizer=name, offload_optimizer="off")
        assert len(find_state(settings).rows) == moments
        plan = plan_memory(
            settings, model_config=named_config("1b"), world_size=1, micro_batch=1,
            device_bytes=None,
        )  # fmt: skip
        needed[name] = plan.bytes_needed
    parameters = 1.1e9
    assert needed["lion"] == needed["sgd"]
    assert needed["adamw"] - needed["lion"] == pytest.approx(1.08 * 4 * parameters, rel=0.03)


def test_a_checkpoint_of_another_optimizer_keeps_the_weights_and_begins_its_state() -> None:
    made, other = trainer(), trainer(optimizer="sgd")
    train(made, 0, 3)
    saved = made.state_dict()
    other.load_state_dict(saved | {"momentum_buffer": None})
    assert same(whole_weights(made), whole_weights(other))
    assert other.optimizer.step_count == 0 and other.total_inner_steps == 3
    assert not any(rows.any() for rows in other.optimizer.state["momentum_buffer"])


class Odd(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            begun = state.setdefault("scale", torch.full((), 3.0))
            parameter.data.mul_(begun)
            state["row_sums"] = torch.zeros(2) if self.defaults["momentum"] == 0.5 else None


@pytest.mark.parametrize(
    ("momentum", "refused"),
    [
        (0.5, "keeps row_sums, which has another shape"),
        (0.6, "begins with other values"),
    ],
)
def test_state_that_cannot_be_kept_in_rows_is_refused(
    momentum: float, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"odd": lambda parameters, settings: Odd(parameters, momentum=momentum)}
    monkeypatch.setattr(OPTIMIZERS, "_made", made)
    with pytest.raises(ConfigError, match=refused):
        find_state(TrainingSettings(optimizer="odd"))


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"training\.optimizer: .*'muon': there are adamw, lion"):
        trainer(optimizer="muon")
