"""What an operator should know before and while training: GPU block, warnings, doctor.

Importing this package imports neither torch nor a driver; the functions that need them do.
"""

from __future__ import annotations

from distributed_training.diagnostics.checks import Check, check_disk, check_port, failed
from distributed_training.diagnostics.nvml import NvmlSampler, visible_gpu_count
from distributed_training.diagnostics.report import (
    CudaState,
    accumulation_steps,
    cuda_state,
    gpu_report_lines,
    step_warnings,
)

__all__ = [
    "Check",
    "CudaState",
    "NvmlSampler",
    "accumulation_steps",
    "check_disk",
    "check_port",
    "cuda_state",
    "failed",
    "gpu_report_lines",
    "step_warnings",
    "visible_gpu_count",
]
