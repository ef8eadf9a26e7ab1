"""What training does on a GPU, as far as a machine without one can tell: the same code on the CPU."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent.parent))
from training_world import sequences, tiny, train, trainer

from distributed_training.training import attention
from distributed_training.training.loss import (
    ChunkedLoss,
    choose_loss_kernel,
    fused_logit_gradient,
    linear_cross_entropy,
    logit_gradient,
)
from distributed_training.training.model import hf_config

pytestmark = pytest.mark.timeout(90)

GPU = torch.device("cuda")


@pytest.fixture(autouse=True, scope="module")
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a device: values, or shapes that depend on values."""

    WAITS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in self.WAITS:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers take the attention of a GPU."""
    real = attention.implementation
    monkeypatch.setattr(attention, "implementation", lambda device, *rest: real(GPU, *rest))


def reads_of_a_step(**changes: Any) -> list[Counter[str]]:
    """By micro-batch of the second step."""
    made = trainer(**changes)
    train(made, 0, 1)
    found = []
    for part in sequences(1).split(made.micro_batch_size):
        with Reads() as reads:
            made.add_micro_batch(part)
        found.append(reads.seen)
    return found


@pytest.mark.parametrize("changes", [{}, {"wrap": "block"}, {"activation_checkpointing": "full"}])
def test_no_micro_batch_waits_for_the_device(changes: dict[str, Any], as_on_a_gpu: None) -> None:
    *before, last = reads_of_a_step(**changes)
    assert len(before) == 3 and not any(before)
    assert sum(last.values()) <= 1  # loss and norm, read together at the end of the step


def test_the_count_sees_what_transformers_own_sdpa_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "implementation", lambda *_: "sdpa")
    first, *_ = reads_of_a_step()
    assert first["_local_scalar_dense"] >= 1


def test_the_gpus_attention_is_causal_and_gives_the_same_losses(as_on_a_gpu: None) -> None:
    ours = [r.loss for r in train(trainer(), 0, 4)]
    assert trainer().sharded.model.config._attn_implementation == "sdpa_causal"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "implementation", lambda *_: "sdpa")
        theirs = [r.loss for r in train(trainer(), 0, 4)]
    assert ours == pytest.approx(theirs, abs=1e-5)


def test_the_line_names_the_kernel_that_torch_chooses() -> None:
    config = hf_config(tiny())
    name = attention.sdpa_kernel_name(config, torch.device("cpu"), torch.bfloat16)
    assert name in ("FLASH_ATTENTION", "MATH")


def test_the_form_of_the_loss_that_is_compiled_is_the_eager_one() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(7, 50).bfloat16(), torch.randint(0, 50, (7, 1))
    (one, gradient), (other, fused) = (
        form(logits.clone(), target) for form in (logit_gradient, fused_logit_gradient)
    )
    assert float(one) == pytest.approx(float(other), rel=1e-6)
    assert torch.equal(gradient, fused)


def test_chunks_of_a_batch_are_equally_long() -> None:
    seen: list[int] = []

    def watched(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(len(logits))
        return logit_gradient(logits, target)

    hidden = torch.randn(33, 8, requires_grad=True)
    weight, labels = torch.randn(10, 8), torch.zeros(33, dtype=torch.int64)
    linear_cross_entropy(hidden, weight, labels, chunk=10 * 20, of_logits=watched)
    assert seen == [17, 16]  # not 20 and 13: each length is compiled for


def test_auto_never_takes_liger_and_liger_adds_up_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[dict[str, Any]] = []
    there = ModuleType("liger_kernel.transformers")
    there.LigerFusedLinearCrossEntropyLoss = lambda **how: made.append(how)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", there)
    kernel, _ = choose_loss_kernel("auto", GPU)
    assert isinstance(kernel, ChunkedLoss) and not made
    _, line = choose_loss_kernel("liger", GPU)
    assert made == [{"reduction": "sum", "accum_dtype": torch.float32}] and "liger" in line
    kernel, line = choose_loss_kernel("liger", torch.device("cpu"))
    assert isinstance(kernel, ChunkedLoss) and "needs CUDA" in line
