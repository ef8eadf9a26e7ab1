"""Compare the model of memory with transformers, with measurements and with the documents."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from distributed_training.common.llama import named_config
from distributed_training.common.memory import (
    Arrangement,
    ModelShape,
    device_memory,
    disk_space,
    host_memory,
    loss_chunk,
)
from distributed_training.training.model import parameter_schema
from tests.tools.training_world import tiny

pytestmark = pytest.mark.timeout(60)

FOUR = ModelShape.from_config(named_config("4b"))
ONE = ModelShape.from_config(named_config("1b"))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"head_dim": 8}], ids=str)
def test_the_shape_equals_transformers_model(changes: dict[str, Any]) -> None:
    config = tiny() | changes
    shape = ModelShape.from_config(config)
    assert sorted(shape.tensors) == sorted(s for _, s in parameter_schema(config))


def test_a_reduction_at_the_last_micro_batch_takes_the_whole_gradient() -> None:
    # The accumulated and the reduced gradient exist at the same time, in separate memory pools.
    for world in (2, 4):
        at_last = Arrangement(world, micro_batch=1, sequence_length=1024)
        # Here only two layers' gradients exist in addition to the shard.
        every = dataclasses.replace(at_last, reduce_at_last=False)
        layer = (FOUR.parameters - FOUR.embedding_parameters) / FOUR.layers
        more = device_memory(FOUR, at_last) - device_memory(FOUR, every)
        assert more == pytest.approx(1.08 * (4 * FOUR.parameters - 8 * layer))


@pytest.mark.parametrize(
    ("shape", "changes", "measured"),
    [
        (ONE, {"micro_batch": 8}, 28.5e9),
        (ONE, {}, 35.9e9),
        (ONE, {"micro_batch": 32}, 50.7e9),
        (ONE, {"compiled": False}, 53.7e9),
        (ONE, {"checkpointing": "budget"}, 32.9e9),
        (ONE, {"checkpointing": "selective"}, 29.4e9),
        (ONE, {"checkpointing": "full"}, 23.0e9),
        (FOUR, {"micro_batch": 8}, 84.3e9),
    ],
)
def test_the_estimate_is_a_little_above_an_h200s_memory_use(
    shape: ModelShape, changes: dict[str, Any], measured: float
) -> None:
    how = Arrangement(1, 16, 1024, keep_unsharded=True, loss_chunk=loss_chunk(150 * 10**9))
    assert 1.0 < device_memory(shape, dataclasses.replace(how, **changes)) / measured < 1.2


def test_muon_saves_what_the_page_of_requirements_says() -> None:
    shape = ModelShape.from_config(named_config("4b"))

    def used(moments: float) -> list[float]:
        how = Arrangement(1, 1, 2048, offload_optimizer=True, moments=moments)
        on_gpu = device_memory(shape, dataclasses.replace(how, offload_optimizer=False))
        on_disk = disk_space(shape, keep_checkpoints=2, moments=moments)
        return [each / shape.parameters for each in (on_gpu, host_memory(shape, how), on_disk)]

    gpu, host, disk = (round(most - least) for most, least in zip(used(2), used(1), strict=True))
    page = (Path(__file__).parents[2] / "docs" / "requirements.md").read_text()
    said = f"{gpu} bytes less of GPU memory, {host} of host memory and {disk} of disk"
    assert f"With Muon, each parameter takes up to {said}" in " ".join(page.split())
