"""Counters and gauges of this process, for monitoring, and the catalogue of their names.

A *counter* only grows, and rates are computed from it. A *gauge* is the latest measurement. A gauge
that could not be measured is absent rather than 0, so that a graph shows a gap and an alert on
``absent()`` works. Graphs, alerts and the page rely on the names in the catalogue, each of which
gets the prefix ``dt_``. Times are Unix timestamps, so that an age continues to grow when the miner
hangs. A plug-in adds a metric with :func:`register_metric`.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from distributed_training.common.backoff import Throttle
from distributed_training.common.files import write_bytes
from distributed_training.common.kinds import Kinds
from distributed_training.protocol.types import StepReport


class MetricSpec(NamedTuple):
    """Describes a metric and how to read it; see :func:`register_metric`."""

    about: str
    step: Callable[[StepReport], float | None] | None = None
    measure: Callable[[], float | None] | None = None


#: The catalogue. Graphs, alerts and the page rely on its names.
METRICS: Kinds[MetricSpec] = Kinds("metric")


def register_metric(
    name: str,
    about: str,
    *,
    step: Callable[[StepReport], float | None] | None = None,
    measure: Callable[[], float | None] | None = None,
) -> None:
    """Add a metric to the catalogue, so that the metrics file, the page and the trackers show it.

    Args:
        name: The name with its unit, without ``dt_``. A name that ends with ``_total`` makes it a
            counter, any other a gauge.
        about: The help text for Prometheus.
        step: Reads the value from the report of an inner step; for a counter: its increase.
        measure: Measures a gauge each time the metrics file is written. Without ``step`` and
            ``measure``, the code that knows the value sets it.

    If the function returns None, the value could not be measured and the metric is absent. If it
    raises an error or returns something other than a number, the metric is absent too, and a
    warning is logged. Raises ValueError if the name is taken or invalid.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or (measure and name.endswith("_total")):
        raise ValueError(f"{name!r} is not a valid name for such a metric")
    METRICS.register(name, MetricSpec(about, step, measure))


# Metrics of an inner step: each with the field of the report that it shows.
for _name, _field, _about in (
    ("train_outer_step", "outer_step", "outer steps taken"),
    ("train_inner_step", "inner_step", "inner steps since the outer step"),
    ("train_loss", "loss", "mean cross-entropy, nats per token"),
    ("train_learning_rate", "learning_rate", "learning rate"),
    ("train_learning_rate_share", "learning_rate_share", "share of training.learning_rate"),
    ("train_step_seconds", "seconds", "duration of the last inner step"),
    ("train_data_wait_seconds", "data_wait_seconds", "part of the step spent waiting for data"),
    ("train_tokens_per_second", "tokens_per_second", "tokens per second, all ranks"),
    ("train_samples_per_second", "samples_per_second", "sequences per second, all ranks"),
    ("train_grad_norm", "grad_norm", "norm of the gradient before clipping"),
    ("train_mfu", "mfu", "model FLOP utilization, 0 to 1"),
    ("gpu_memory_gb", "gpu_memory_gb", "peak use of rank 0's GPU, in GB"),
    ("gpu_utilization_percent", "gpu_utilization", "utilization of rank 0's GPU"),
    ("train_tokens_total", "tokens", "tokens trained on, all ranks"),
    ("train_steps_skipped_total", "skipped", "inner steps skipped for NaN or Inf"),
):
    register_metric(_name, _about, step=attrgetter(_field))
register_metric("train_steps_total", "inner steps", step=lambda report: not report.skipped)

# These figures are set by the code that knows them.
for _name, _about in {
    "start_timestamp_seconds": "when training began",
    "last_step_timestamp_seconds": "end of the last inner step",
    # figures of the start, set by the launcher
    "launcher_running": "1 while the launcher runs",
    "starts_refused_in_a_row": "refused starts since the last training",
    # uploads
    "last_publication_timestamp_seconds": "when the newest upload was complete",
    "publications_total": "uploads, successful or not",
    "publications_failed_total": "failed uploads",
    "uploads_refused_total": "uploads not written, by kind: disk (no room), steps (too few)",
    "uploaded_bytes_total": "bytes uploaded",
    "counts": "1 while the last upload that was judged counts, else 0",
    # rounds
    "rounds_total": "finished rounds, successful or not",
    "rounds_failed_total": "rounds without our upload or outer step",
    "rounds_failed_in_a_row": "failures since the last good round",
    "rounds_missed_total": "outer steps that were applied late, one after the other",
    "round_participation_ratio": "share of the last 20 rounds with this miner",
    "round_seconds": "duration of the last round",
    "next_round_timestamp_seconds": "time of the next close",
    # chain
    "chain_age_seconds": "time since the chain last answered",
    "registered": "0 while the hotkey is not registered",
    # figures of a validator's network
    "network_training": "1 while members answer and the last round was good, else 0",
    "network_gate": "1 while no half of the uploads passes the held-out text",
    "network_outer_step": "outer steps of the network",
    "network_members": "registered miners with an endpoint",
    "network_members_alive": "miners that answered the last sweep",
    "network_members_needed": "miners that a round needs",
    "network_members_scored": "miners with a score above 0",
    "network_next_round_timestamp_seconds": "when the next round is due",
    "network_tokens": "tokens in all outer steps",
    "network_tokens_per_second": "tokens per second in the last outer step",
    # programs
    "build_info": "1; its label is the version",
    "global_outer_step": "outer step of the network",
    # machine
    "clock_offset_seconds": "how far this machine's clock is ahead",
    "disk_free_bytes": "free space on the run folder's disk",
    "disk_needed_bytes": "disk for an upload, a checkpoint and the reserve",
    "memory_bytes": "resident memory of rank 0 and its processes",
    "memory_total_bytes": "memory limit of the machine or cgroup",
    # figures of each rank, by its number, which its GPU has too
    "rank_memory_bytes": "resident memory of the rank",
    "rank_gpu_memory_bytes": "memory in use on its GPU",
    "rank_gpu_utilization_percent": "utilization of its GPU",
    "rank_gpu_temperature_celsius": "temperature of its GPU",
    "rank_gpu_power_watts": "power of its GPU",
    "metrics_written_timestamp_seconds": "when these figures were written",
}.items():
    register_metric(_name, _about)

#: The chain package's counts since the process started. A count is absent until its first event.
CHAIN_COUNTS: Mapping[str, str] = {
    "chain_reads_total": "reads of the members; if it stands still, the chain does not answer",
    "chain_failures_total": "failed reads; grep 'The chain at' in the log for the cause",
    "chain_writes_total": "tried writes; if it rises, check that no second miner has the hotkey",
    "chain_writes_failed_total": "failed writes; grep -E 'not (written|set)' in the log",
}

log = logging.getLogger(__name__)

_PREFIX = "dt_"
_may_complain = Throttle(24 * 3600.0)
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_]")


class MetricsRegistry(Collector):
    """The values of all metrics, by name. Any thread may change them.

    Methods raise ValueError for a name that is not in the catalogue, and TypeError if it is a gauge
    instead of a counter or the reverse: a counter's name ends with ``_total``.
    """

    def __init__(self) -> None:
        # The key is a metric's name; the value is its label ("" if it has none) and its values,
        # keyed by the label's value.
        self._figures: dict[str, tuple[str, dict[str, float]]] = {}
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1.0) -> None:
        """Increase a counter; ``amount`` is finite and not negative."""
        _check(name, total=True)
        with self._lock:
            _, figures = self._figures.setdefault(name, ("", {}))
            figures[""] = figures.get("", 0.0) + amount

    def set(self, name: str, value: float | None) -> None:
        """Set the latest measurement. With None, NaN or Inf, the metric becomes absent."""
        self.labelled(name, "", {} if value is None else {"": value})

    def labelled(self, name: str, label: str, values: Mapping[str, float]) -> None:
        """Set the latest measurements of a metric, by the value of ``label``, such as ``rank``."""
        _check(name, total=False)
        with self._lock:
            known = {kind: value for kind, value in values.items() if math.isfinite(value)}
            self._figures[name] = (label, known)

    def totals(self, prefix: str, counts: Mapping[str, float]) -> None:
        """Set the counts that another package keeps.

        The count ``refused.rate`` becomes ``<prefix>_refused_total{kind="rate"}``, and a count
        ``name`` without a dot becomes ``<prefix>_<name>_total``.
        """
        with self._lock:
            for name, value in counts.items():
                what, _, kind = name.partition(".")
                full = f"{prefix}_{_NOT_IN_A_NAME.sub('_', what)}_total"
                _, kinds = self._figures.setdefault(full, ("kind", {}))
                kinds[_NOT_IN_A_NAME.sub("_", kind)] = float(value)

    def collect(self) -> Iterator[Metric]:
        """Yield each metric that has a value, for the Prometheus client."""
        with self._lock:
            known = self._figures.items()
            figures = {name: (label, dict(kinds)) for name, (label, kinds) in known if kinds}
        for name, (label, kinds) in figures.items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            about = METRICS[name].about if name in METRICS else CHAIN_COUNTS.get(name)
            about = about or name.removesuffix("_total").replace("_", " ")
            metric = family(_PREFIX + name, about, labels=[label] if any(kinds) else [])
            for kind, value in sorted(kinds.items()):
                metric.add_metric([kind] if any(kinds) else [], value)
            yield metric

    def text(self) -> str:
        """Return all metrics that have a value in Prometheus' text format, named ``dt_...``."""
        return generate_latest(self).decode()


def _check(name: str, *, total: bool) -> None:
    if name not in METRICS:
        raise ValueError(f"{name!r} is not in the catalogue of metrics")
    if name.endswith("_total") != total:
        raise TypeError(f"metric {name} is of the other kind")


class MetricsFile:
    """A file with the metrics, which Prometheus' textfile collector can read at any time.

    It is replaced at most once in ``every`` seconds. If the disk fails, the file is not written,
    but training continues.
    """

    def __init__(
        self, path: Path, *, every: float = 15.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.registry = MetricsRegistry()
        self._path = path
        self._due = Throttle(every, clock=clock)
        self._failing = False

    def write(self, update: Callable[[], None], *, at_once: bool = False) -> None:
        """Write the file if it is due, after calling ``update``."""
        if not self._due() and not at_once:
            return
        update()
        for name in METRICS:
            if (measure := METRICS[name].measure) is not None:
                self.registry.set(name, _read(name, measure))
        self.registry.set("metrics_written_timestamp_seconds", time.time())
        try:
            write_bytes(self._path, self.registry.text().encode(), durable=False)
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.warning("Metrics cannot be written to %s: %s", self._path, error.strerror)
            self._failing = True


def read_metrics(path: Path) -> dict[str, float]:
    """Return the values in a metrics file by ``dt_name``, or ``dt_name.KIND`` if it has a label.

    Values that are not finite are left out. The result is empty if there is no such file.
    """
    # Imported here, since programs that write metrics do not need it.
    from prometheus_client.parser import text_string_to_metric_families

    try:
        families = list(text_string_to_metric_families(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, LookupError):  # the parser indexes past the end of damaged lines
        return {}
    return {
        ".".join((sample.name, *sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
        if math.isfinite(sample.value)
    }


def record_step(registry: MetricsRegistry, report: StepReport) -> None:
    """Record the figures of an inner step. A metric becomes absent if the report lacks it."""
    for name in METRICS:
        if (step := METRICS[name].step) is None:
            continue
        value = _read(name, partial(step, report))
        if name.endswith("_total"):
            registry.add(name, value or 0)
        else:
            registry.set(name, value)


def _read(name: str, read: Callable[[], float | None]) -> float | None:
    """Return a metric's value, or None if it cannot be read."""
    try:
        value = read()
        if value is None:
            return None
        value = float(value)
        if name.endswith("_total") and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"a counter cannot grow by {value}")
        return value
    except Exception as error:  # noqa: BLE001 - a plug-in's error must not end training
        if _may_complain(name):
            log.warning("The metric dt_%s cannot be read (%r): it is left out", name, error)
        return None
