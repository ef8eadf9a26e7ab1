from __future__ import annotations

import dataclasses

import pytest

from distributed_training.protocol import lines
from distributed_training.protocol.types import StepReport

pytestmark = pytest.mark.timeout(10)

REPORT = StepReport(
    outer_step=56,
    inner_step=84,
    loss=3.401,
    learning_rate=2.1e-5,
    tokens=524288,
    samples=512,
    seconds=15.2,
    data_wait_seconds=0.5,
    micro_batches=64,
    gpu_memory_gb=18.449,
)


def test_step_line_is_the_operators_line() -> None:
    assert lines.step_line(REPORT) == (
        "Outer Step: 56 | Inner Step: 84 | LR: 0.00002100 | Loss: 3.40 | Step Time: 15.2s | "
        "GPU Mem: 18.45GB"
    )


def test_the_throughput_line_names_only_measured_values() -> None:
    line = lines.throughput_line(REPORT)
    assert "34493 tokens/s" in line and "MFU" not in line and "GPU Util" not in line
    full = dataclasses.replace(REPORT, mfu=0.551, gpu_utilization=97.0, grad_norm=0.5)
    assert "MFU: 55.1%" in lines.throughput_line(full)


def test_lines_operators_search_for() -> None:
    assert lines.pushed("12.3", "llama-4b-ws-4-227") == (
        "Successfully pushed new model state with tag 12.3 to bucket: llama-4b-ws-4-227"
    )
    assert lines.UPLOAD_BLOCKED % (15, 50) == (
        "⚠️  UPLOAD BLOCKED: inner_step (15) < minimum (50). Validators will reject this! "
        "Waiting for more training steps..."
    )
    assert lines.SAVING_STATE % 56 == "💾 Saving model state locally for epoch 56"
    assert lines.ALL_REDUCE_DONE == "AllReduce Operation Finished Succesfully"
    assert lines.all_reduce_failed(3) == "All Reduce Failed At Checkpoint 3"


def test_warnings_as_operators_know_them() -> None:
    assert lines.step_warnings(REPORT) == []
    bad = dataclasses.replace(REPORT, seconds=245.7, gpu_memory_gb=0.05)
    assert lines.step_warnings(bad) == [
        "⚠️  SLOW STEP: 245.7s (expected 10-30s) - Check GPU usage!",
        "⚠️  LOW GPU MEMORY: Model may be on CPU!",
    ]
    hungry = dataclasses.replace(REPORT, seconds=90.0, data_wait_seconds=70.0)
    (line,) = lines.step_warnings(hungry)
    assert line.endswith("Check GPU usage! 70.0s of it were spent waiting for data")
