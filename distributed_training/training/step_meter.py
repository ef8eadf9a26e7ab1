"""What an inner step took, and its report.

A step's time is wall time: from the end of the step before to its own end. Whatever stands between
two micro-batches is in it (rank 0's orders, waiting for data, a snapshot's copy, a preview, a
checkpoint), since an hour has no more steps than that. Only pauses of a round are left out
(:meth:`StepMeter.pause`): then there is nothing to train. So is MFU.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from distributed_training.protocol.types import StepReport

from .plan import BatchPlan
from .throughput import DeviceGauge


class StepMeter:
    """Follows one step after the other. ``flops_per_token``: of the model, all ranks together."""

    def __init__(
        self,
        *,
        gauge: DeviceGauge,
        flops_per_token: float,
        world_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._gauge = gauge
        self._flops_per_token = flops_per_token
        self._world_size = world_size
        self._clock = clock
        self._began: float | None = None  # when the step before ended, or the first batch was taken
        self._paused = 0.0
        self._waited = 0.0

    def micro_batch(self, data_wait_seconds: float) -> None:
        """One begins; ``data_wait_seconds`` were spent waiting for it."""
        if self._began is None:
            self._began = self._clock() - data_wait_seconds
            self._paused = 0.0
        self._waited += data_wait_seconds

    def pause(self, seconds: float) -> None:
        """``seconds`` in which there was nothing to train are no step's."""
        self._paused += seconds

    def drop(self) -> None:
        """The step under way is given up; the next one begins with its first micro-batch."""
        self._began, self._paused, self._waited = None, 0.0, 0.0

    def finish(
        self,
        *,
        outer_step: int,
        inner_step: int,
        total_inner_steps: int,
        loss: float,
        learning_rate: float,
        grad_norm: float | None,
        plan: BatchPlan,
        sequence_length: int,
        note: str,
    ) -> StepReport:
        """The report of the step that ends now; the next one begins. ``grad_norm`` None: it was
        skipped."""
        now = self._clock()
        began = now if self._began is None else self._began
        seconds = max(now - began - self._paused, 1e-9)
        tokens = plan.effective * sequence_length
        flops = tokens * self._flops_per_token / self._world_size
        report = StepReport(
            outer_step=outer_step,
            inner_step=inner_step,
            loss=loss,
            learning_rate=learning_rate,
            tokens=tokens,
            samples=plan.effective,
            seconds=seconds,
            data_wait_seconds=self._waited,
            micro_batches=plan.micro_batches,
            grad_norm=grad_norm,
            gpu_memory_gb=self._gauge.memory_gb(),
            gpu_utilization=self._gauge.utilization(),
            mfu=self._gauge.mfu(flops / seconds),
            skipped=grad_norm is None,
            note=note,
            total_inner_steps=total_inner_steps,
        )
        self._began, self._paused, self._waited = now, 0.0, 0.0
        return report
