"""Counters and gauges of this process, and the file that monitoring reads them from."""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from distributed_training.protocol.types import StepReport

log = logging.getLogger(__name__)

_LABEL = re.compile(r"[^A-Za-z0-9_]")
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
        self._totals: dict[tuple[str, str], float] = {}
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

    def totals(self, prefix: str, counts: Mapping[str, float]) -> None:
        """Counts that another room keeps: ``refused.rate`` becomes
        ``<prefix>_refused_total{kind="rate"}``, what has no dot ``<prefix>_<name>_total``."""
        with self._lock:
            for name, value in counts.items():
                what, _, kind = name.partition(".")
                label = f'{{kind="{_LABEL.sub("_", kind)}"}}' if kind else ""
                self._totals[f"{prefix}_{_LABEL.sub('_', what)}_total", label] = float(value)

    def text(self) -> str:
        """Every metric that has a value, in Prometheus' text format; ``dt_`` before each name."""
        with self._lock:
            metrics = list(self._metrics.values())
            totals = sorted(self._totals.items())
        lines = []
        for metric in metrics:
            if metric.value is not None:
                kind = type(metric).__name__.lower()
                lines.append(f"# HELP dt_{metric.name} {metric.help}")
                lines.append(f"# TYPE dt_{metric.name} {kind}")
                lines.append(f"dt_{metric.name} {metric.value:.17g}")
        said = ""
        for (name, label), value in totals:
            if name != said:
                lines.append(f"# TYPE dt_{name} counter")
                said = name
            lines.append(f"dt_{name}{label} {value:.17g}")
        return "\n".join(lines) + "\n"


class MetricsFile:
    """``path`` always holds the registry's latest text whole (Prometheus' textfile collector reads
    it). Written at most once in ``every`` seconds; a failing disk costs the file, not training."""

    def __init__(self, path: Path, *, every: float = 15.0) -> None:
        self.registry = Registry()
        self._path = path
        self._every = every
        self._written = -math.inf
        self._failing = False

    def write(self, now: float, update: Callable[[], None]) -> None:
        """``update`` is called first, if it is time. ``now``: of a monotonic clock."""
        if now - self._written < self._every:
            return
        self._written = now
        update()
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        try:
            temporary.write_text(self.registry.text(), encoding="utf-8")
            temporary.replace(self._path)
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.warning("Metrics cannot be written to %s: %s", self._path, error.strerror)
            self._failing = True


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
