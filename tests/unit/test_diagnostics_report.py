from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from distributed_training.config import ConfigError
from distributed_training.health.gpus import describe_cuda, gpu_report_lines
from distributed_training.telemetry.logs import level_name

pytestmark = pytest.mark.timeout(60)


def test_the_block_of_a_healthy_start(monkeypatch: pytest.MonkeyPatch) -> None:
    of_torch = {
        "is_available": True,
        "device_count": 4,
        "get_device_name": "NVIDIA A100-SXM4-80GB",
        "get_device_properties": SimpleNamespace(total_memory=80e9),
        "memory_allocated": 5e7,
    }
    for name, value in of_torch.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    cuda = describe_cuda(0)
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


@pytest.mark.parametrize("expected", [True, False])
def test_the_block_without_a_gpu(expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lines = gpu_report_lines(
        cuda=describe_cuda(0),
        model_device="cpu",
        micro_batch=2,
        effective=16,
        world_size=1,
        expect_gpu=expected,
    )
    if not expected:  # --neuron.device cpu was given, so GPUs are not mentioned
        (line,) = lines
        assert "Training on the CPU, as --neuron.device cpu asks: 1 rank" in line
        assert "GPU" not in line and "8 micro-batches" in line
        return
    assert [line for line in lines if "❌" in line] == [
        "❌ CUDA NOT AVAILABLE - Model will run on CPU (VERY SLOW!)",
        "❌ Model is on CPU! This will be EXTREMELY SLOW!",
    ]
    assert "✓ Model device: cpu" in lines
    assert not any("GPU memory" in line for line in lines)


def test_failed_checks_are_found_by_a_search_for_warnings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from distributed_training.miner.start import rank_device, report_device
    from tests.tools.settings import load_config

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
