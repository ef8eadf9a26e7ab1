"""Settings of the start check, the step warnings and the doctor."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from .flags import DAY, HOUR, SECOND, SETTINGS, flag
from .values import Duration


@dataclass(frozen=True, config=SETTINGS)
class DiagnosticsSettings:
    """Thresholds of the warnings and what the doctor wants to see."""

    slow_step: Duration = flag("diagnostics.slow_step", 60 * SECOND, ge=SECOND / 100, le=DAY)
    """inner steps that take longer print SLOW STEP"""
    expected_step_min: Duration = flag(
        "diagnostics.expected_step_min", 10 * SECOND, ge=0 * SECOND, le=DAY
    )
    """lower end of the expected step time named by SLOW STEP"""
    expected_step_max: Duration = flag(
        "diagnostics.expected_step_max", 30 * SECOND, ge=0 * SECOND, le=DAY
    )
    """upper end of the expected step time named by SLOW STEP"""
    low_gpu_memory_gb: float = flag("diagnostics.low_gpu_memory_gb", 1.0, ge=0, le=10_000)
    """less GPU memory in use than this (GB = 1e9 bytes) prints LOW GPU MEMORY"""
    minimum_disk_gb: float = flag("diagnostics.minimum_disk_gb", 10.0, ge=0, le=1e9)
    """free disk in the run folder that the doctor wants beyond the checkpoints it computes"""
    measure: Duration = flag("diagnostics.measure", 10 * SECOND, ge=0 * SECOND, le=HOUR)
    """how long the doctor trains to estimate the step time; 0 leaves it out"""
    start_check: bool = flag("diagnostics.start_check", True)
    """run the doctor's quick checks (no network) at start and refuse to start on a failure"""
