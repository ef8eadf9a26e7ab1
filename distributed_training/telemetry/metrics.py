"""Counters and gauges of this process, for monitoring.

A *counter* only grows: rates are made of it. A *gauge* is the latest measurement; one that could
not be measured is absent rather than 0: a graph shows a gap, an alert on ``absent()`` works.
The text format is the Prometheus client's.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from distributed_training.common.files import write_bytes
from distributed_training.protocol.types import StepReport

from .catalogue import CHAIN_COUNTS, METRICS

log = logging.getLogger(__name__)

_PREFIX = "dt_"
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_]")


def unix_time(moment: float | None) -> float | None:
    """Unix seconds of a ``time.monotonic()`` moment, for a metric that is a timestamp."""
    return None if moment is None else moment - time.monotonic() + time.time()


class Registry(Collector):
    """The figures of all metrics, by name. Any thread may change them.

    Methods raise ValueError for a name that is not in the catalogue, TypeError for one of the other
    kind: a counter's ends with ``_total``.
    """

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        # Those with a label: its name, and the figures by its value ("": without the label).
        self._labelled: dict[str, tuple[str, dict[str, float]]] = {}
        self._lock = threading.Lock()
        self._client = CollectorRegistry(auto_describe=False)
        self._client.register(self)

    def add(self, name: str, amount: float = 1.0) -> None:
        """A counter grows. Raises ValueError also for a negative or non-finite amount."""
        _check(name, total=True)
        if not (math.isfinite(amount) and amount >= 0):
            raise ValueError(f"counter {name} cannot grow by {amount}")
        with self._lock:
            self._values[name] = self._values.get(name, 0.0) + amount

    def set(self, name: str, value: float | None) -> None:
        """The latest measurement; None, NaN and Inf mean "could not be measured": it is absent."""
        _check(name, total=False)
        with self._lock:
            self._values.pop(name, None)
            if value is not None and math.isfinite(value):
                self._values[name] = value

    def labelled(self, name: str, label: str, values: Mapping[str, float]) -> None:
        """Measurements that differ by ``label`` only (``rank``): the latest of all of them."""
        _check(name, total=False)
        with self._lock:
            self._labelled[name] = (label, dict(values))

    def totals(self, prefix: str, counts: Mapping[str, float]) -> None:
        """Counts that another room keeps: ``refused.rate`` becomes
        ``<prefix>_refused_total{kind="rate"}``, what has no dot ``<prefix>_<name>_total``."""
        with self._lock:
            for name, value in counts.items():
                what, _, kind = name.partition(".")
                full = f"{prefix}_{_NOT_IN_A_NAME.sub('_', what)}_total"
                _, kinds = self._labelled.setdefault(full, ("kind", {}))
                kinds[_NOT_IN_A_NAME.sub("_", kind)] = float(value)

    def values(self) -> dict[str, float]:
        """What the catalogue's metrics stand at, by name; those without a value are left out."""
        with self._lock:
            return dict(self._values)

    def collect(self) -> Iterator[Metric]:
        """What has a value, for the Prometheus client."""
        for name, value in self.values().items():
            yield _family(name, "", {"": value})
        with self._lock:
            labelled = {
                name: (label, dict(found)) for name, (label, found) in self._labelled.items()
            }
        for name, (label, values) in labelled.items():
            yield _family(name, label, values)

    def text(self) -> str:
        """Every metric that has a value, in Prometheus' text format; ``dt_`` before each name."""
        return generate_latest(self._client).decode()


def _check(name: str, *, total: bool) -> None:
    if name not in METRICS:
        raise ValueError(f"{name!r} is not in the catalogue of metrics")
    if name.endswith("_total") != total:
        raise TypeError(f"metric {name} is of the other kind")


def _family(name: str, label: str, values: Mapping[str, float]) -> Metric:
    """A counter if its name ends with ``_total``. Figures by the label's value, "" without one."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    about = {**METRICS, **CHAIN_COUNTS}.get(name, name.removesuffix("_total").replace("_", " "))
    family = kind(_PREFIX + name, about, labels=[label] if any(values) else [])
    for key, value in sorted(values.items()):
        family.add_metric([key] if any(values) else [], value)
    return family


class MetricsFile:
    """``path`` always holds the registry's latest text whole (Prometheus' textfile collector reads
    it). Written at most once in ``every`` seconds; a failing disk costs the file, not training."""

    def __init__(self, path: Path, *, every: float = 15.0) -> None:
        self.registry = Registry()
        self._path = path
        self._every = every
        self._written = -math.inf
        self._failing = False

    def write(self, now: float, update: Callable[[], None], *, at_once: bool = False) -> None:
        """``update`` is called first, if it is time. ``now``: of a monotonic clock."""
        if now - self._written < self._every and not at_once:
            return
        self._written = now
        update()
        self.registry.set("metrics_written_timestamp_seconds", time.time())
        try:
            write_bytes(self._path, self.registry.text().encode(), durable=False)
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.warning("Metrics cannot be written to %s: %s", self._path, error.strerror)
            self._failing = True


def record_step(registry: Registry, report: StepReport) -> None:
    """An inner step's figures; those the report does not have become absent."""
    gauges = {
        "train_outer_step": report.outer_step,
        "train_inner_step": report.inner_step,
        "train_loss": report.loss,
        "train_learning_rate": report.learning_rate,
        "train_step_seconds": report.seconds,
        "train_data_wait_seconds": report.data_wait_seconds,
        "train_tokens_per_second": report.tokens_per_second,
        "train_samples_per_second": report.samples_per_second,
        "train_grad_norm": report.grad_norm,
        "train_mfu": report.mfu,
        "gpu_memory_gb": report.gpu_memory_gb,
        "gpu_utilization_percent": report.gpu_utilization,
    }
    for name, value in gauges.items():
        registry.set(name, value)
    registry.add("train_tokens_total", report.tokens)
    registry.add("train_steps_total", 0 if report.skipped else 1)
    registry.add("train_steps_skipped_total", report.skipped)
