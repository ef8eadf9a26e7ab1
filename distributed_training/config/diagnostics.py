"""Settings of the start check, the step warnings and the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from .flags import flag


@dataclass(frozen=True)
class DiagnosticsSettings:
    """Thresholds of the warnings and what the doctor wants to see."""

    slow_step: timedelta = flag(
        "diagnostics.slow_step",
        timedelta(seconds=60),
        "inner steps that take longer print SLOW STEP",
    )
    expected_step_min: timedelta = flag(
        "diagnostics.expected_step_min",
        timedelta(seconds=10),
        "lower end of the expected step time named by SLOW STEP",
    )
    expected_step_max: timedelta = flag(
        "diagnostics.expected_step_max",
        timedelta(seconds=30),
        "upper end of the expected step time named by SLOW STEP",
    )
    low_gpu_memory_gb: float = flag(
        "diagnostics.low_gpu_memory_gb",
        1.0,
        "less GPU memory in use than this (GB = 1e9 bytes) prints LOW GPU MEMORY",
    )
    minimum_disk_gb: float = flag(
        "diagnostics.minimum_disk_gb",
        10.0,
        "free disk in the run folder that the doctor wants beyond the checkpoints it computes",
    )
    measure: timedelta = flag(
        "diagnostics.measure",
        timedelta(seconds=10),
        "how long scripts/diagnose.py trains to estimate the step time; 0 leaves it out",
    )
    start_check: bool = flag(
        "diagnostics.start_check",
        True,
        "run the doctor's quick checks (no network) at start and refuse to start on a failure",
    )
