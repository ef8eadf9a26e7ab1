"""Counters and gauges of this process, in one registry from which exporters read.

Nothing is exported yet; ``Registry.snapshot`` is what an exporter will take.
"""

from __future__ import annotations

import math
import re
import threading

from distributed_training.protocol.types import StepReport

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")  # also a valid Prometheus name


class Counter:
    """Only grows. Any thread may add."""

    def __init__(self, name: str, help: str) -> None:
        self.name = name
        self.help = help
        self._lock = threading.Lock()
        self._value = 0.0

    def add(self, amount: float = 1.0) -> None:
        """Raises ValueError for a negative or non-finite amount."""
        if not (math.isfinite(amount) and amount >= 0):
            raise ValueError(f"counter {self.name} cannot grow by {amount}")
        with self._lock:
            self._value += amount

    @property
    def value(self) -> float:
        return self._value


class Gauge:
    """The latest measurement, or absent: None means "could not be measured"."""

    def __init__(self, name: str, help: str) -> None:
        self.name = name
        self.help = help
        self._value: float | None = None

    def set(self, value: float | None) -> None:
        self._value = value if value is not None and math.isfinite(value) else None

    @property
    def value(self) -> float | None:
        return self._value


class Registry:
    """Owns every metric by name; asking again for a name gives the same object."""

    def __init__(self) -> None:
        self._metrics: dict[str, Counter | Gauge] = {}
        self._lock = threading.Lock()

    def counter(self, name: str, help: str) -> Counter:
        """Raises ValueError for a bad name, TypeError if ``name`` is a gauge."""
        metric = self._get(name, help, Counter)
        assert isinstance(metric, Counter)
        return metric

    def gauge(self, name: str, help: str) -> Gauge:
        """Raises ValueError for a bad name, TypeError if ``name`` is a counter."""
        metric = self._get(name, help, Gauge)
        assert isinstance(metric, Gauge)
        return metric

    def _get(self, name: str, help: str, kind: type[Counter] | type[Gauge]) -> Counter | Gauge:
        if not _NAME.match(name):
            raise ValueError(f"{name!r} is not a metric name")
        with self._lock:
            metric = self._metrics.setdefault(name, kind(name, help))
        if not isinstance(metric, kind):
            raise TypeError(f"metric {name} is a {type(metric).__name__.lower()}")
        return metric

    def snapshot(self) -> dict[str, float]:
        """Every metric that has a value."""
        with self._lock:
            metrics = list(self._metrics.values())
        return {m.name: m.value for m in metrics if m.value is not None}


def record_step(registry: Registry, report: StepReport) -> None:
    """An inner step's figures; those the report does not have become absent."""
    gauges = {
        "train_outer_step": ("outer step", report.outer_step),
        "train_inner_step": ("inner steps done in this outer step", report.inner_step),
        "train_loss": ("mean cross-entropy of the last inner step, nats", report.loss),
        "train_learning_rate": ("learning rate of the last inner step", report.learning_rate),
        "train_step_seconds": ("wall time of the last inner step", report.seconds),
        "train_data_wait_seconds": ("of it, waiting for data", report.data_wait_seconds),
        "train_tokens_per_second": ("all ranks", report.tokens_per_second),
        "train_samples_per_second": ("all ranks", report.samples_per_second),
        "train_grad_norm": ("before clipping", report.grad_norm),
        "train_mfu": ("model FLOP utilization, 0 to 1", report.mfu),
        "gpu_memory_gb": ("peak allocated, GB = 1e9 bytes", report.gpu_memory_gb),
        "gpu_utilization_percent": ("by NVML", report.gpu_utilization),
    }
    for name, (text, value) in gauges.items():
        registry.gauge(name, text).set(value)
    registry.counter("train_tokens_total", "tokens trained on, all ranks").add(report.tokens)
    registry.counter("train_steps_total", "inner steps").add(0 if report.skipped else 1)
    registry.counter("train_steps_skipped_total", "inner steps with NaN or Inf").add(report.skipped)
