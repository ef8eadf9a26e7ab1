"""Test the parts of training that need no trainer: schedule, outer step, loss, plans, rows."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from distributed_training.common.gpus import peak_flops
from distributed_training.common.llama import local_llama_config, named_config
from distributed_training.config.settings import TrainingSettings
from distributed_training.config.types import ConfigError
from distributed_training.training import sharding, weights
from distributed_training.training.collectives import (
    Layout,
    ParameterShard,
    open_stream,
    row_range,
)
from distributed_training.training.inner_optimizer import Schedule
from distributed_training.training.memory_plan import compute_dtype, plan_batch, plan_memory
from distributed_training.training.model import (
    UnfitModelError,
    build_meta_model,
    hf_config,
    linear_cross_entropy,
)
from distributed_training.training.outer_rule import nesterov_sgd
from distributed_training.training.throughput import flops_per_token
from distributed_training.training.weights import load_weights
from tests.tools.training_world import trainer

pytestmark = pytest.mark.timeout(60)


def test_a_rank_without_rows_of_a_parameter_loads_weights_too(tmp_path: Path) -> None:
    whole = torch.randn(5, 3)
    save_file({"w": whole}, tmp_path / "w.safetensors")
    loaded = torch.zeros(5, 3)
    for start, stop in ((0, 4), (4, 5), (5, 5)):  # the last of three ranks has none
        shard = ParameterShard("w", (5, 3), start, stop, loaded)
        sharding.load_file([shard], tmp_path / "w.safetensors", open_stream(Layout()))
    assert torch.equal(loaded, whole)


def test_schedule_is_the_public_cosine_down_to_a_tenth_of_its_peak() -> None:
    schedule = Schedule(2.5e-4, 1000, 88000)
    lowest = 2.5e-4 * 0.1
    for finished in range(0, 88_000, 7):
        step = finished + 1
        warm = step / 1000
        public = 0.5 * (1.0 + math.cos(math.pi * ((step - 1000) / 87_000)))
        shape = warm if step <= 1000 else public
        expected = 2.5e-4 * shape if step <= 1000 or shape > 0.1 else lowest
        assert schedule.rate(finished) == expected  # bit for bit
    assert schedule.rate(70_000) > lowest  # the rate reaches its lowest near 80 % of the steps
    assert {schedule.rate(n) for n in (70_200, 79_200, 87_998, 87_999, 200_000)} == {lowest}


def test_schedule_slows_down_for_a_while_and_compounds() -> None:
    schedule, other = Schedule(1.0, 0, 10**9), Schedule(1.0, 0, 10**9)
    schedule.slow_down(10, steps=50)
    assert schedule.rate(59) == pytest.approx(0.5)
    assert schedule.rate(60) == pytest.approx(1.0)
    schedule.slow_down(20, steps=50)
    assert schedule.rate(21) == pytest.approx(0.25)
    other.load_state_dict(schedule.state_dict())
    assert other.rate(21) == schedule.rate(21)


@pytest.mark.parametrize("seed", range(20))
def test_a_constant_rate_decays_where_the_network_says_so(seed: int) -> None:
    """The rate is at its peak before the decay, falls as 1 - sqrt(progress), and is 0 after it."""
    draw = random.Random(seed)
    peak, warm, lasts = 10 ** draw.uniform(-5, -1), draw.randrange(50), draw.randint(1, 300)
    begins = warm + draw.randrange(300)
    network = TrainingSettings(
        learning_rate=peak, warmup_steps=warm, total_steps=10**6, schedule="constant"
    )
    decays = Schedule.of(dataclasses.replace(network, decay_from=begins, decay_steps=lasts))
    stays = Schedule.of(network)
    for step in range(1, begins + lasts + 50):
        shape = step / warm if step <= warm else 1.0
        assert stays.rate(step - 1) == peak * shape
        if step > begins:
            shape = 1.0 - min(1.0, (step - begins) / lasts) ** 0.5
        assert decays.rate(step - 1) == pytest.approx(peak * shape, rel=1e-12, abs=0)
    assert (decays.lowest_from, stays.lowest_from) == (begins + lasts, None)
    assert decays.rate(begins + lasts - 1) == decays.rate(10**9) == 0.0


def test_nesterov_has_the_bits_of_torch() -> None:
    torch.manual_seed(0)
    whole = torch.randn(97, 33)
    param = nn.Parameter(whole.clone())
    reference = torch.optim.SGD([param], lr=0.8, momentum=0.9, nesterov=True)
    top, bottom = whole[:49].clone(), whole[49:].clone()
    momenta: list[torch.Tensor | None] = [None, None]
    for _ in range(4):
        grad = torch.randn_like(whole)
        param.grad = grad.clone()
        reference.step()
        top, momenta[0] = nesterov_sgd(top, grad[:49], momenta[0], lr=0.8, mu=0.9)
        bottom, momenta[1] = nesterov_sgd(bottom, grad[49:], momenta[1], lr=0.8, mu=0.9)
    assert torch.equal(torch.cat([top, bottom]), param.detach())


@pytest.mark.parametrize("error", [AssertionError(), MemoryError(), RecursionError("deep")])
def test_error_of_any_library_is_reported_as_the_files_fault(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks and the validator expect only a ValueError."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    monkeypatch.setattr(weights, "safe_open", mock.Mock(side_effect=error))
    with pytest.raises(ValueError, match=type(error).__name__):
        load_weights(path, [("a", (2,))])


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_chunked_loss_and_gradients_equal_the_whole_ones(rows: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(33, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 50, (33,))
    whole = nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
    expected = torch.autograd.grad(whole / 7, (hidden, weight))
    ours = linear_cross_entropy(hidden, weight, labels, chunk=rows * 50)
    assert ours.item() == pytest.approx(whole.item(), rel=1e-6)
    found = torch.autograd.grad(ours / 7, (hidden, weight))
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    with torch.no_grad():
        without = linear_cross_entropy(hidden, weight, labels, chunk=rows * 50)
        assert float(without) == float(ours)


def test_bad_inputs_name_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"--neuron\.local_batch_size_train 8 is larger"):
        plan_batch(micro_batch=8, effective=4, world_size=1)
    with pytest.raises(ConfigError, match=r"training\.sequence_length 4096"):
        trainer(sequence_length=4096)
    with pytest.raises(ConfigError, match="model_type"):
        hf_config({"hidden_size": 3})
    with pytest.raises(ConfigError, match="does not know model_type 'nonsense'"):
        hf_config({"model_type": "nonsense"})


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "abc"},
        {"rope_theta": "x"},
        {"num_attention_heads": 0},
        {"hidden_act": "nope"},
        {"torch_dtype": "float99"},
        {"pad_token_id": 10**9},
        {"hidden_size": 2**40},
    ],
)
def test_a_config_with_a_value_of_no_model_is_one_line(change: dict[str, Any]) -> None:
    with pytest.raises(UnfitModelError, match=r"^no model .* from config.json .*global_bucket$"):
        build_meta_model(local_llama_config() | change)


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_labels", "n_layer"])
def test_objects_made_one_by_one_are_bounded_before(name: str) -> None:
    with pytest.raises(UnfitModelError, match=rf"^config.json asks for 1000000 as {name}"):
        build_meta_model(local_llama_config() | {name: 10**6})


def test_bf16_without_hardware_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(Path, "read_text", lambda _: "flags : fpu avx2 avx512f\nbugs:\n")
    dtype, line = compute_dtype("bf16", cpu)
    assert dtype is torch.float32 and "has no bf16" in line
    monkeypatch.setattr(Path, "read_text", lambda _: "flags : fpu avx512_bf16\nbugs:\n")
    assert compute_dtype("auto", cpu)[0] is torch.bfloat16
    assert compute_dtype("fp32", cpu)[0] is torch.float32


def test_memory_decides_which_activations_are_kept() -> None:
    four = named_config("4b")
    settings = TrainingSettings(activation_checkpointing="none")

    def plan(gigabytes: float, world_size: int, host: float = 200) -> tuple[bool, bool, bool]:
        found = plan_memory(
            settings,
            model_config=four,
            world_size=world_size,
            micro_batch=2,
            device_bytes=int(gigabytes * 1e9),
            host_bytes=int(host * 1e9),
        )
        way = found.way
        return way.keep_unsharded, not way.reduce_at_last, way.offload_optimizer

    assert plan(141, 1) == (True, False, False)
    assert plan(80, 4) == (True, False, False)
    assert plan(20, 8) == (False, True, False)
    # Moving AdamW's state to host memory comes before options that cost time in every micro-batch.
    # It does not fit into 128 GB together with the copies of a boundary, so there it comes last.
    assert plan(80, 1) == (True, False, True)
    assert plan(80, 1, host=128) == (False, False, False)
    assert plan(64, 1, host=128)[2] and plan(24, 4)[2]
    fixed = dataclasses.replace(settings, gradient_sync="every", keep_unsharded="off")
    kept = plan_memory(fixed, model_config=four, world_size=4, micro_batch=1, device_bytes=None)
    assert not (kept.way.keep_unsharded or kept.way.reduce_at_last)
    tiny = named_config("tiny")
    small = plan_memory(settings, model_config=tiny, world_size=2, micro_batch=1, device_bytes=None)
    assert not small.per_block
    with pytest.raises(ConfigError, match="num_attention_heads"):
        plan_memory(
            settings, model_config={"hidden_size": 8}, world_size=1, micro_batch=1,
            device_bytes=None,
        )  # fmt: skip


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 64])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_row_ranges_equal_torch_chunks(rows: int, world: int) -> None:
    chunks = list(torch.arange(rows).chunk(world))
    chunks += [torch.empty(0)] * (world - len(chunks))
    for rank, chunk in enumerate(chunks):
        start, stop = row_range(rows, world, rank)
        assert torch.arange(start, stop).tolist() == chunk.tolist()


def test_peaks_are_found_by_whole_words_or_not_at_all() -> None:
    for name, tera in {
        "H100 80GB HBM3": 989.4, "H100 PCIe": 756, "A100-SXM4-80GB": 312, "L4": 121, "L40S": 362
    }.items():  # fmt: skip
        assert peak_flops(f"NVIDIA {name}") == tera * 1e12
    for unknown in ("NVIDIA GeForce RTX 4090 D", "NVIDIA A4000", "NVIDIA Tesla T4", ""):
        assert peak_flops(unknown) is None


def test_flops_per_token_by_hand() -> None:
    config = local_llama_config()
    model = build_meta_model(config)
    params = sum(p.numel() for p in model.parameters()) - 264 * 192
    assert flops_per_token(model, 128) == 6 * params + 12 * 4 * 192 * 128
