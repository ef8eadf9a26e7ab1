"""Test inner optimizers, ours and plug-ins': steps, offload, memory, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from distributed_training.common.llama import named_config
from distributed_training.common.memory import ModelShape
from distributed_training.config.settings import TrainingSettings
from distributed_training.config.types import ConfigError
from distributed_training.health.machine import count_moments
from distributed_training.protocol.types import Progress
from distributed_training.training.checkpoint import Checkpointer
from distributed_training.training.inner_optimizer import OPTIMIZERS, find_state, moments_of
from distributed_training.training.memory_plan import plan_memory
from distributed_training.training.muon import MatrixRows, Muon
from tests.tools.training_world import (
    SETTINGS,
    same,
    save_checkpoint,
    tiny,
    train,
    trainer,
    whole_weights,
)
from tests.toys.optimizer import lion, sgd

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("process_group")]


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
@pytest.mark.parametrize("tied", [False, True])
def test_weight_decay_on_matrices_spares_norms_and_embeddings(name: str, tied: bool) -> None:
    """Take a step without gradients, which changes only what decays, also with a plug-in."""
    for where in ("off", "on"):
        for on in ("all", "matrices"):
            made = trainer(
                optimizer=name, weight_decay_on=on, weight_decay=0.5, offload_optimizer=where,
                model=tiny(tied=tied),
            )  # fmt: skip
            before = whole_weights(made)
            made.optimizer.step([torch.zeros_like(p) for p in made.optimizer._params], 0.1)
            for (key, shape), old, new in zip(
                made.schema, before, whole_weights(made), strict=True
            ):
                decays = on == "all" or (len(shape) > 1 and "embed_tokens" not in key)
                expected = old * (1 - 0.1 * 0.5) if decays else old
                torch.testing.assert_close(new, expected, rtol=1e-6, atol=0, msg=key)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_run_by_matrices_is_resumed_to_the_bit(name: str, tmp_path: Path) -> None:
    """Resume the run with the state in host memory."""
    by = {"weight_decay_on": "matrices", "weight_decay": 0.5, "optimizer": name}
    unbroken, first, again = trainer(**by), trainer(**by), trainer(**by, offload_optimizer="on")
    losses = [report.loss for report in train(unbroken, 0, 8)]
    train(first, 0, 5)
    save_checkpoint(Checkpointer(trainer=first, folder=tmp_path), Progress(0, 5, 5))
    assert Checkpointer(trainer=again, folder=tmp_path).restore() is not None
    assert [report.loss for report in train(again, 5, 8)] == losses[5:]
    assert same(whole_weights(again), whole_weights(unbroken))
    assert losses != [report.loss for report in train(trainer(weight_decay=0.5), 0, 8)]


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


def test_the_memory_plan_counts_the_optimizers_state() -> None:
    needed = {}
    shape = ModelShape.from_config(named_config("1b"))
    of_rest = shape.embedding_parameters / shape.parameters
    for name, moments in (("adamw", 2), ("lion", 1), ("sgd", 1), ("muon", 1 + of_rest)):
        settings = TrainingSettings(optimizer=name, offload_optimizer="off")
        assert shape.moments(*moments_of(settings)) == count_moments(settings, shape)
        assert count_moments(settings, shape) == pytest.approx(moments)
        plan = plan_memory(
            settings, model_config=named_config("1b"), world_size=1, micro_batch=1,
            device_bytes=None,
        )  # fmt: skip
        needed[name] = plan.bytes_needed
    parameters = 1.1e9
    assert needed["lion"] == needed["sgd"] < needed["muon"] < needed["adamw"]
    assert needed["adamw"] - needed["lion"] == pytest.approx(1.08 * 4 * parameters, rel=0.03)


@pytest.mark.parametrize(("before", "after"), [("adamw", "muon"), ("muon", "adamw")])
def test_a_network_may_come_to_muon_and_leave_it(before: str, after: str, tmp_path: Path) -> None:
    """The weights stay, and the new optimizer starts without the state of the old one."""
    made, other = trainer(optimizer=before), trainer(optimizer=after)
    train(made, 0, 3)
    save_checkpoint(Checkpointer(trainer=made, folder=tmp_path), Progress(0, 3, 3))
    assert Checkpointer(trainer=other, folder=tmp_path).restore() is not None
    assert same(whole_weights(made), whole_weights(other))
    assert other.optimizer.step_count == 0 and other.total_inner_steps == 3
    assert not any(rows.any() for kept in other.optimizer.state.values() for rows in kept)
    train(other, 3, 5)


def test_muon_keeps_one_tensor_of_a_matrix_of_a_layer_and_two_of_the_rest() -> None:
    made = trainer(optimizer="muon")
    for i, (name, shape) in enumerate(made.schema):
        kept = {key for key, rows in made.optimizer.state.items() if rows[i].shape == shape}
        of_layer = ".layers." in name and len(shape) == 2
        assert kept == ({"momentum_buffer"} if of_layer else {"exp_avg", "exp_avg_sq"}), name
    assert made.optimizer.line.startswith("✓ Using fused AdamW and Muon, with the state in")


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    rate=st.floats(1e-4, 0.1),
    decay=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 99),
)
@hypothesis.settings(deadline=None, max_examples=25)
def test_a_step_of_muon_is_that_of_torch_but_for_its_rounding_to_bf16(
    rows: int, columns: int, rate: float, decay: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(rows, columns, generator=generator)
    mine = MatrixRows.of(before.clone(), before.shape)
    theirs = nn.Parameter(before.clone())
    made = Muon([mine], decay)
    made.param_groups[0]["lr"] = rate
    reference = torch.optim.Muon(
        [theirs], lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(3):
        mine.grad = torch.randn(rows, columns, generator=generator)
        theirs.grad = mine.grad.clone()
        made.step()
        reference.step()
    length = rate * 0.2 * max(rows, columns) ** 0.5
    torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=0, atol=0.1 * length)


class Odd(torch.optim.Optimizer):
    """Keeps a strange kind of state, which ``kind`` selects, and uses it in its steps."""

    def __init__(self, parameters: Any, kind: str) -> None:
        super().__init__(parameters, {"lr": 0.0, "kind": kind, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        kind = group["kind"]
        group["steps"] += kind == "in group"
        for p in group["params"]:
            state = self.state[p]
            change = p.grad
            if kind == "row sums":
                state["row_sums"] = p.grad.sum(1)
            elif kind == "scale":
                change = change * state.setdefault("scale", torch.full((), 3.0))
            elif kind == "later":
                state["trace"] = state.get("trace", torch.ones_like(p)) * 0.9
            elif kind == "half":
                state["half"] = torch.zeros_like(p, dtype=torch.bfloat16)
            elif kind == "text":
                state["text"] = "none"
            elif kind == "norm":
                change = change / p.grad.norm()
            elif kind == "momentum":
                state.setdefault("momentum", torch.zeros_like(p)).add_(p.grad)
            p.sub_(change, alpha=group["lr"])


@pytest.fixture
def odd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = request.node.callspec.params["kind"]
    made = {"odd": lambda parameters, settings: Odd(parameters, kind)}
    monkeypatch.setattr(OPTIMIZERS, "_made", made)


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("row sums", "keeps row_sums, which is neither of its parameter's shape nor its step"),
        ("scale", "keeps scale, which is neither"),
        ("later", "does not start at zero"),
        ("half", "keeps half in torch.bfloat16"),
        ("text", "keeps text, which"),
        ("in group", "changes its parameter group"),
        ("norm", "steps a row depending on other rows"),
    ],
)
@pytest.mark.usefixtures("odd")
def test_state_that_cannot_be_kept_in_rows_is_refused(kind: str, refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        find_state(TrainingSettings(optimizer="odd"))


@pytest.mark.usefixtures("odd")
@pytest.mark.parametrize("kind", ["momentum"])
def test_a_name_of_the_outer_step_is_free_for_an_optimizers_state(
    kind: str, tmp_path: Path
) -> None:
    made = trainer(optimizer="odd", learning_rate=1e-2)
    train(made, 0, 3)
    save_checkpoint(Checkpointer(trainer=made, folder=tmp_path), Progress(0, 3, 3))
    again = trainer(optimizer="odd", learning_rate=1e-2)
    assert Checkpointer(trainer=again, folder=tmp_path).restore() is not None
    assert same(again.optimizer.state[kind], made.optimizer.state[kind])
    assert same(again.outer.epoch_start, made.outer.epoch_start)
    assert all(rows.any() for rows in again.optimizer.state[kind])
