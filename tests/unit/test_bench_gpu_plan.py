"""bench/gpu.py --plan: what it counts, by hand and by what torch itself keeps."""

from __future__ import annotations

from typing import Any

import pytest

from bench.gpu_count import Trace, trace
from distributed_training.common.memory import Arrangement, ModelShape, device_memory
from distributed_training.training.memory_plan import named_config
from tests.tools.training_world import tiny

pytestmark = pytest.mark.timeout(120)


def counted(config: dict[str, Any], mode: str = "none", *, compiled: bool = False) -> Trace:
    return trace(config, 2, 32, mode, chunk=10**9, compiled=compiled)


def test_flops_are_those_counted_by_hand() -> None:
    hidden, keys, between, words, layers, rows = 32, 16, 48, 67, 2, 2 * 32
    found = counted(tiny())
    of_a_layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * between
    predicted = 2 * 31  # the last token of a sequence predicts nothing
    # A product has one forward and two backward; attention two, and five with its scores again.
    by_hand = {
        "product": 6 * (rows * layers * of_a_layer + predicted * hidden * words),
        "attention": 14 * layers * 2 * 32 * 32 * hidden,
        "fused": 0,
    }
    for kind, flops in by_hand.items():
        assert sum(k.flops for k in found.kernels if k.kind == kind) == flops, kind
    # As MFU has them: attention's scores once, and the token that predicts nothing.
    again, last = 2 * layers * 2 * 32 * 32 * hidden, 6 * 2 * hidden * words
    norms = 6 * rows * (2 * layers + 1) * hidden
    assert found.model_flops == sum(by_hand.values()) - again + last + norms
    every = counted(tiny(), "full")
    recomputed = sum(k.flops for k in every.kernels) - sum(k.flops for k in found.kernels)
    # But for the last product, whose result nothing in the backward needs.
    assert recomputed == layers * (
        2 * rows * (of_a_layer - hidden * between) + 4 * 2 * 32 * 32 * hidden
    )
    assert every.saved < found.saved / 3


@pytest.mark.slow
def test_the_memory_model_is_what_torch_keeps_for_the_backward() -> None:
    """Eagerly, and of blocks that are compiled for a budget."""
    config = named_config("1b")

    def saved(layers: int, mode: str, compiled: bool) -> float:
        wanted = config | {"num_hidden_layers": layers}
        return trace(wanted, 1, 1024, mode, chunk=10**9, compiled=compiled).saved

    for mode, compiled in (("none", False), ("budget", True)):
        how = Arrangement(1, micro_batch=1, sequence_length=1024, checkpointing=mode)
        shape = ModelShape.from_config(config)
        expected = device_memory(shape, how).activations / shape.layers
        kept = saved(2, mode, compiled) - saved(1, mode, compiled)
        assert kept == pytest.approx(expected, rel=0.03), mode
