from __future__ import annotations

import dataclasses

import pytest
import torch

from distributed_training.config import ConfigError
from distributed_training.config.settings import DiagnosticsSettings
from distributed_training.health.gpus import (
    CudaState,
    accumulation_steps,
    gpu_report_lines,
    step_warnings,
)
from distributed_training.protocol.types import StepReport
from distributed_training.telemetry.logs import level_name

pytestmark = pytest.mark.timeout(60)

REPORT = StepReport(
    outer_step=56,
    inner_step=84,
    loss=3.4,
    learning_rate=2.1e-5,
    tokens=1,
    samples=1,
    seconds=15.2,
    data_wait_seconds=0,
    micro_batches=64,
    gpu_memory_gb=18.45,
)


def test_the_block_of_a_healthy_start() -> None:
    cuda = CudaState(True, 4, 0, "NVIDIA A100-SXM4-80GB", 80.0, 0.05)
    lines = gpu_report_lines(
        cuda=cuda, model_device="cuda:0", micro_batch=2, effective=512, world_size=4
    )
    assert lines == [
        "=" * 80,
        "🔍 GPU DIAGNOSTICS",
        "=" * 80,
        "✓ CUDA available: True",
        "✓ GPU count: 4",
        "✓ Current CUDA device: 0",
        "✓ Device name: NVIDIA A100-SXM4-80GB",
        "✓ GPU total memory: 80.00 GB",
        "✓ GPU memory allocated: 0.05 GB",
        "✓ Model device: cuda:0",
        "✅ Model correctly on GPU: cuda:0",
        "✓ Batch size (per GPU): 2",
        "✓ Effective batch size (total): 512",
        "✓ World size (GPUs): 4",
        "✓ Gradient accumulation steps: 64",
        "=" * 80,
    ]


def test_the_block_without_a_gpu() -> None:
    lines = gpu_report_lines(
        cuda=CudaState(False), model_device="cpu", micro_batch=2, effective=16, world_size=1
    )
    assert "❌ CUDA NOT AVAILABLE - Model will run on CPU (VERY SLOW!)" in lines
    assert "❌ Model is on CPU! This will be EXTREMELY SLOW!" in lines
    assert not any("GPU memory" in line for line in lines)


def test_a_cpu_that_was_asked_for_is_no_alarm() -> None:
    lines = gpu_report_lines(
        cuda=CudaState(False),
        model_device="cpu",
        micro_batch=2,
        effective=16,
        world_size=1,
        expect_gpu=False,
    )
    assert "✓ Model device: cpu" in lines and not any("❌" in line for line in lines)
    assert lines[3] == "✓ No GPU: training on the CPU, as --neuron.device cpu asks"


def test_what_is_wrong_is_found_by_a_search_for_warnings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from distributed_training.config import load_config
    from distributed_training.miner.start import rank_device, report_device

    config = load_config("miner", ["--neuron.device", "auto"], environ={}, dotenv=None, check=False)
    with caplog.at_level("INFO"):
        report_device(config, torch.device("cpu"), micro_batch=2, world_size=1)
    # By level_name: hivemind, which another test may have imported, renames WARNING to WARN.
    levels = {level_name(r) for r in caplog.records if "❌" in r.getMessage()}
    assert levels == {"WARNING"}
    assert {level_name(r) for r in caplog.records if "✓" in r.getMessage()} == {"INFO"}
    assert rank_device("cpu", 0) == torch.device("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"--neuron\.device cuda.*sees no GPU"):
            rank_device("cuda", 0)


@pytest.mark.parametrize(
    ("effective", "micro", "world", "steps"),
    [(512, 2, 4, 64), (512, 2, 1, 256), (1024, 2, 4, 128), (100, 3, 4, 9), (4, 8, 1, 1)],
)
def test_accumulation(effective: int, micro: int, world: int, steps: int) -> None:
    assert accumulation_steps(effective=effective, micro_batch=micro, world_size=world) == steps


def test_warnings_as_operators_know_them() -> None:
    settings = DiagnosticsSettings()
    assert step_warnings(REPORT, settings) == []
    bad = dataclasses.replace(REPORT, seconds=245.7, gpu_memory_gb=0.05)
    assert step_warnings(bad, settings) == [
        "⚠️  SLOW STEP: 245.7s (expected 10-30s) - Check GPU usage!",
        "⚠️  LOW GPU MEMORY: Model may be on CPU!",
    ]


def test_a_slow_step_that_waited_for_data_says_so() -> None:
    hungry = dataclasses.replace(REPORT, seconds=90.0, data_wait_seconds=70.0)
    (line,) = step_warnings(hungry, DiagnosticsSettings())
    assert line.endswith("Check GPU usage! 70.0s of it were spent waiting for data")
