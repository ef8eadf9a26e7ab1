"""The GPU block at start and the warnings after steps, as the operator documents print them."""

from __future__ import annotations

from dataclasses import dataclass

from distributed_training.config.settings import DiagnosticsSettings
from distributed_training.protocol.types import StepReport

_RULE = "=" * 80


@dataclass(frozen=True)
class CudaState:
    """The GPUs as torch sees them. Memory in GB = 1e9 bytes, of the current device."""

    available: bool
    count: int = 0
    current: int = 0
    name: str = ""
    total_gb: float = 0.0
    allocated_gb: float = 0.0


def cuda_state(device: int | None = None) -> CudaState:
    """Return the state now; call it after the model was placed. Imports torch."""
    import torch

    if not torch.cuda.is_available():
        return CudaState(available=False)
    current = torch.cuda.current_device() if device is None else device
    return CudaState(
        available=True,
        count=torch.cuda.device_count(),
        current=current,
        name=torch.cuda.get_device_name(current),
        total_gb=torch.cuda.get_device_properties(current).total_memory / 1e9,
        allocated_gb=torch.cuda.memory_allocated(current) / 1e9,
    )


def accumulation_steps(*, effective: int, micro_batch: int, world_size: int) -> int:
    """Return the micro-batches each rank adds up per inner step: 512 / 2 / 4 = 64.

    They are effective / micro-batch / world size, rounded up. Raises ValueError unless all are
    positive.
    """
    if min(effective, micro_batch, world_size) < 1:
        raise ValueError("effective batch, micro-batch and world size must be positive")
    return -(-effective // (micro_batch * world_size))


def gpu_report_lines(
    *,
    cuda: CudaState,
    model_device: str,
    micro_batch: int,
    effective: int,
    world_size: int,
    expect_gpu: bool = True,
) -> list[str]:
    """Return the block printed at start, one log line each; a ❌ at its begin marks a warning.

    ``model_device``: of the parameters, e.g. ``cuda:0``. ``micro_batch`` and ``effective`` count
    sequences; ``effective`` is over all ranks. ``expect_gpu``: False where the CPU was asked for
    (``--neuron.device cpu``).
    """
    lines = [_RULE, "🔍 GPU DIAGNOSTICS", _RULE]
    if cuda.available:
        lines += [
            "✓ CUDA available: True",
            f"✓ GPU count: {cuda.count}",
            f"✓ Current CUDA device: {cuda.current}",
            f"✓ Device name: {cuda.name}",
            f"✓ GPU total memory: {cuda.total_gb:.2f} GB",
            f"✓ GPU memory allocated: {cuda.allocated_gb:.2f} GB",
        ]
    elif expect_gpu:
        lines.append("❌ CUDA NOT AVAILABLE - Model will run on CPU (VERY SLOW!)")
    else:
        lines.append("✓ No GPU: training on the CPU, as --neuron.device cpu asks")
    lines.append(f"✓ Model device: {model_device}")
    if model_device.startswith("cuda"):
        lines.append(f"✅ Model correctly on GPU: {model_device}")
    elif expect_gpu:
        lines.append("❌ Model is on CPU! This will be EXTREMELY SLOW!")
    steps = accumulation_steps(effective=effective, micro_batch=micro_batch, world_size=world_size)
    return [
        *lines,
        f"✓ Batch size (per GPU): {micro_batch}",
        f"✓ Effective batch size (total): {effective}",
        f"✓ World size (GPUs): {world_size}",
        f"✓ Gradient accumulation steps: {steps}",
        _RULE,
    ]


_LOW_GPU_MEMORY = 1.0  # GB of 1e9 bytes in use


def step_warnings(
    report: StepReport, settings: DiagnosticsSettings, *, expect_gpu: bool = False
) -> list[str]:
    """Return the warnings that an inner step gives cause for.

    ``expect_gpu``: a GPU is there, so a step that used no GPU memory at all is a warning too.
    """
    lines = []
    if report.seconds > settings.slow_step.total_seconds():
        lines.append(f"⚠️  SLOW STEP: {report.seconds:.1f}s (expected 10-30s) - Check GPU usage!")
        if report.data_wait_seconds > report.seconds / 2:
            lines[-1] += f" {report.data_wait_seconds:.1f}s of it were spent waiting for data"
    memory = report.gpu_memory_gb
    if memory is None and expect_gpu:
        memory = 0.0
    if memory is not None and memory < _LOW_GPU_MEMORY:
        lines.append("⚠️  LOW GPU MEMORY: Model may be on CPU!")
    return lines
