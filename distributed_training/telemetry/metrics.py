"""Counters and gauges of this process, for monitoring, and the catalogue of their names.

A *counter* only grows: rates are made of it. A *gauge* is the latest measurement; one that could
not be measured is absent rather than 0: a graph shows a gap, an alert on ``absent()`` works.
Graphs, alerts and the page rely on the catalogue's names (``dt_`` stands before each of them).
Moments are Unix timestamps, so that an age goes on growing when the miner stands still. The text
format is the Prometheus client's. A plug-in adds a metric with :func:`register_metric`.
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

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from distributed_training.common.backoff import Throttle
from distributed_training.common.files import write_bytes
from distributed_training.common.kinds import Kinds
from distributed_training.protocol.types import StepReport


class MetricSpec(NamedTuple):
    """A metric: what it is, and how it is read. See :func:`register_metric`."""

    about: str
    step: Callable[[StepReport], float | None] | None = None
    measure: Callable[[], float | None] | None = None


#: The catalogue. Its names are promised to graphs, alerts and the page.
METRICS: Kinds[MetricSpec] = Kinds("metric")


def register_metric(
    name: str,
    about: str,
    *,
    step: Callable[[StepReport], float | None] | None = None,
    measure: Callable[[], float | None] | None = None,
) -> None:
    """Add a metric to the catalogue; the metrics file, the page and the trackers show it then.

    Args:
        name: With its unit, without ``dt_``. One that ends with ``_total`` is a counter, any other
            a gauge.
        about: What it is, for whoever reads Prometheus' help.
        step: Reads it from the report of an inner step; of a counter: by how much it grows.
        measure: Measures a gauge each time the metrics file is written. Without ``step`` and
            ``measure`` it is set where it is known.

    None means "could not be measured": the metric is absent. So is one that raises, or gives no
    number, with a warning. Raises ValueError for a name that is taken, or that is none.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or (measure and name.endswith("_total")):
        raise ValueError(f"{name!r} is no name for such a metric")
    METRICS.register(name, MetricSpec(about, step, measure))


# torchtitan's figures under this project's prefix, by the report's field.
for _name, _field, _about in (
    ("train_outer_step", "outer_step", "outer step"),
    ("train_inner_step", "inner_step", "inner steps done in this outer step"),
    ("train_loss", "loss", "mean cross-entropy of the last inner step, nats per token"),
    ("train_learning_rate", "learning_rate", "learning rate of the last inner step"),
    (
        "train_learning_rate_share",
        "learning_rate_share",
        "the same as a share of training.learning_rate, 0 to 1",
    ),
    ("train_step_seconds", "seconds", "wall time of the last inner step"),
    ("train_data_wait_seconds", "data_wait_seconds", "of it, without data"),
    ("train_tokens_per_second", "tokens_per_second", "tokens per second, all ranks"),
    ("train_samples_per_second", "samples_per_second", "sequences per second, all ranks"),
    ("train_grad_norm", "grad_norm", "norm of the gradient before clipping"),
    ("train_mfu", "mfu", "model FLOP utilization, 0 to 1"),
    (
        "gpu_memory_gb",
        "gpu_memory_gb",
        "peak allocated on rank 0's GPU since the previous step, GB = 1e9 bytes",
    ),
    ("gpu_utilization_percent", "gpu_utilization", "utilization of rank 0's GPU by NVML"),
    ("train_tokens_total", "tokens", "tokens trained on, all ranks"),
    ("train_steps_skipped_total", "skipped", "inner steps with NaN or Inf, which were skipped"),
):
    register_metric(_name, _about, step=attrgetter(_field))
register_metric("train_steps_total", "inner steps", step=lambda report: not report.skipped)

# Each is set where it is known.
for _name, _about in {
    "start_timestamp_seconds": "when the miner began to train, after its last start",
    "last_step_timestamp_seconds": "when an inner step was last done; first, when training began",
    # start, by the launcher
    "launcher_running": "1 while the launcher is there, 0 without: by its dashboard",
    "starts_refused_in_a_row": "starts that the disk, a port, the driver, the chain, the store or "
    "another node refused since the miner trained last",
    # uploads
    "last_publication_timestamp_seconds": "when the newest gradient was uploaded",
    "publication_age_seconds": "age of the newest uploaded gradient, the repo age",
    "publication_age_limit_seconds": "age at which validators score it zero",
    "publication_seconds_left": "until then",
    "publications_total": "uploads, successful or not",
    "publications_failed_total": "of them, failed",
    "snapshots_refused_total": (
        "snapshots that were due and not uploaded, by kind: disk (no room), blocks (none was "
        "trained), list (all blocks too old), write (the files could not be written); unchecked: "
        "its gradient could not be checked, that of the upload it would replace was"
    ),
    "uploaded_bytes_total": "bytes uploaded to the bucket",
    "snapshot_ready_seconds": (
        "from the last snapshot until its gradient was checked and the uploader got its files"
    ),
    "preview_loss_change": "loss change by the last uploaded gradient, nats per token",
    "block_list_newest_block": "newest chain block whose data was trained on",
    "block_list_age_blocks": "how far the newest uploaded block is behind the chain",
    "block_list_limit_blocks": "blocks behind the chain at which an upload is too old",
    "block_list_blocks_left": "blocks until then, for the newest upload",
    # income, as the chain shows it
    "earning": "1 while the miner earns, 0 while it does not; absent: not known",
    "incentive": "share of what the network pays, 0 to 1",
    "emission": "that this gives per tempo, in the subnet's token",
    "incentive_rank": "place among the miners by incentive, 1 is the highest",
    "weights_block": "block at which a validator set weights last, 0 before the first ones",
    "last_call_timestamp_seconds": "when a validator was last answered",
    # rounds
    "rounds_total": "finished rounds, successful or not",
    "rounds_failed_total": "of them, without an outer step, or without our upload in it",
    "rounds_failed_in_a_row": "failed or missed rounds since the last one that worked",
    "rounds_missed_total": "outer steps of the network that were loaded instead",
    "round_participation_ratio": "share of the last 20 rounds that this miner had a share in",
    "round_seconds": "length of the last round: a pause, or from a close to its update",
    "next_round_timestamp_seconds": "when the next round is expected; in the past when overdue",
    "dht_peers": "other peers that the DHT node knows",
    # chain and server
    "chain_block": "newest chain block known",
    "chain_seconds_per_block": "from one block of the chain to the next, as seen lately",
    "chain_age_seconds": "since the chain was last heard of",
    "registered": "1 while the miner runs, 0 while it waits for its hotkey to be registered again",
    "server_connections": "open connections of the signed server",
    # a validator's, of its network
    "network_training": (
        "1 while members answer and the last round was good, else 0; absent once it is finished"
    ),
    "network_gate": "1 while no half of the uploads passes the held-out text, else 0",
    "network_outer_step": "outer step of the network",
    "network_held_out_loss": "loss on held-out text, nats per token, by the text's name",
    "network_members": "miners that are registered and have an endpoint",
    "network_members_alive": "of them, those that answered the last sweep at the outer step",
    "network_members_needed": "of them, those that a round takes",
    "network_members_scored": "of them, those with a score above 0",
    "network_member_score": "score of each, by uid",
    "network_member_upload_timestamp_seconds": "when the upload of each came, by uid",
    "network_rounds_total": "rounds that the validator led since its start, good or not",
    "network_rounds_failed_total": "of them, without an outer step",
    "network_rounds_failed_in_a_row": "failed rounds since the last good one",
    "network_round_seconds": "length of the last round, from the first sweep to its publication",
    "network_round_participants": "miners in the average of the last round",
    "network_last_outer_step_timestamp_seconds": "when the last outer step was published",
    "network_next_round_timestamp_seconds": "when the next round is due",
    "network_tokens": "tokens that all outer steps were trained on, as the uploads say",
    "network_tokens_per_second": "the same of the last outer step, by the time that it took",
    "network_uploads_judged_total": "uploads that the validator judged since its start",
    "network_uploads_reset_total": "of them, those that were reset",
    # programs
    "build_info": "1, with the version of this program as its label",
    "protocol_run": "run number of this program; peers of another one are not understood",
    "global_outer_step": "outer step of the global state in its bucket; ours should not be behind",
    "global_run": "run number of the global state in its bucket",
    # machine
    "clock_offset_seconds": "by which this machine's clock is ahead of the store's, or the chain's",
    "disk_free_bytes": "free where the run folder is",
    "disk_needed_bytes": "that a snapshot, a checkpoint and the reserve take",
    "memory_bytes": "resident memory of rank 0 and the processes it started",
    "memory_growth_bytes_per_hour": "slope of it over the last hours: a leak, if it stays",
    "memory_total_bytes": "that the miner may use: the machine's, or the limit of its cgroup",
    # of each rank, by number; its GPU has the same
    "rank_memory_bytes": "resident memory of the rank's process",
    "rank_gpu_memory_bytes": "used on its GPU, by all processes",
    "rank_gpu_utilization_percent": "share of the last moments in which its GPU ran a kernel",
    "rank_gpu_temperature_celsius": "temperature of its GPU",
    "rank_gpu_power_watts": "power its GPU draws",
    "metrics_written_timestamp_seconds": "when these figures were written",
}.items():
    register_metric(_name, _about)

#: Counts of the chain package since the process started; each is absent until the first.
CHAIN_COUNTS: Mapping[str, str] = {
    "chain_reads_total": (
        "times that the neurons were read; if it stands still, the chain does not answer "
        "(dt_chain_age_seconds says for how long) or dt_chain_neurons_failed_total rises"
    ),
    "chain_failures_total": (
        "times that a node of the chain could not be reached or read, so the next is asked; if it "
        "keeps rising, name a better node with --subtensor.chain_endpoint"
    ),
    "chain_connections_total": (
        "connections made to nodes of the chain; if it keeps rising, they break: check the line, "
        "or name another node with --subtensor.chain_endpoint"
    ),
    "chain_went_back_total": (
        "looks that showed a lower block than before; a few are reorganizations, many a node that "
        "lags: name another with --subtensor.chain_endpoint"
    ),
    "chain_neurons_failed_total": (
        "reads of the neurons that failed while others may have worked; those known last are used, "
        "so if it keeps rising name another node with --subtensor.chain_endpoint"
    ),
    "chain_commitments_failed_total": (
        "reads of the commitments that failed while others may have worked; those known last are "
        "used, so if it keeps rising name another node with --subtensor.chain_endpoint"
    ),
    "chain_commitments_skipped_total": (
        "commitments, at each read, that are not of this network's form; anybody with a uid may "
        "write such, and nothing needs to be done"
    ),
    "chain_writes_total": (
        "transactions tried (commitment, endpoint, weights); if a miner's rises long after its "
        "start, what it wrote was lost: check that no second miner uses the hotkey"
    ),
    "chain_writes_failed_total": (
        "of them, those that did not go through and are tried again; if it keeps rising, others "
        "cannot find this node: grep -E 'not (written|set)' in the log for the reason"
    ),
}

log = logging.getLogger(__name__)

_PREFIX = "dt_"
_may_complain = Throttle(24 * 3600.0)
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_]")


def unix_time(moment: float | None) -> float | None:
    """Return the Unix seconds of a ``time.monotonic()`` moment, for a timestamp metric."""
    # Monotonic moments mean nothing to another process, nor after a restart.
    return None if moment is None else moment - time.monotonic() + time.time()


class Registry(Collector):
    """The figures of all metrics, by name. Any thread may change them.

    Methods raise ValueError for a name that is not in the catalogue, TypeError for one of the other
    kind: a counter's ends with ``_total``.
    """

    def __init__(self) -> None:
        # By metric: its label ("": it has none), and the figures by the label's value ("" without).
        self._figures: dict[str, tuple[str, dict[str, float]]] = {}
        self._lock = threading.Lock()
        self._client = CollectorRegistry(auto_describe=False)
        self._client.register(self)

    def add(self, name: str, amount: float = 1.0) -> None:
        """Increase a counter. Raises ValueError also for a negative or non-finite amount."""
        _check(name, total=True)
        if not (math.isfinite(amount) and amount >= 0):
            raise ValueError(f"counter {name} cannot grow by {amount}")
        with self._lock:
            _, figures = self._figures.setdefault(name, ("", {}))
            figures[""] = figures.get("", 0.0) + amount

    def set(self, name: str, value: float | None) -> None:
        """Set the latest measurement; None, NaN and Inf mean "could not be measured": absent."""
        _check(name, total=False)
        with self._lock:
            # Removed first: a value that cannot be measured now must not stand there as if it were.
            self._figures.pop(name, None)
            if value is not None and math.isfinite(value):
                self._figures[name] = ("", {"": value})

    def labelled(self, name: str, label: str, values: Mapping[str, float]) -> None:
        """Set measurements that differ by ``label`` only (``rank``): the latest of all of them."""
        _check(name, total=False)
        with self._lock:
            self._figures[name] = (label, dict(values))

    def totals(self, prefix: str, counts: Mapping[str, float]) -> None:
        """Set counts that another package keeps.

        ``refused.rate`` becomes ``<prefix>_refused_total{kind="rate"}``, a name without a dot
        ``<prefix>_<name>_total``.
        """
        with self._lock:
            for name, value in counts.items():
                what, _, kind = name.partition(".")
                full = f"{prefix}_{_NOT_IN_A_NAME.sub('_', what)}_total"
                _, kinds = self._figures.setdefault(full, ("kind", {}))
                kinds[_NOT_IN_A_NAME.sub("_", kind)] = float(value)

    def values(self) -> dict[str, float]:
        """Return the values of the metrics without a label by name; without a value: left out."""
        with self._lock:
            return {name: kinds[""] for name, (label, kinds) in self._figures.items() if not label}

    def collect(self) -> Iterator[Metric]:
        """Yield each metric that has a value, for the Prometheus client."""
        with self._lock:
            figures = {name: (label, dict(kinds)) for name, (label, kinds) in self._figures.items()}
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
        return generate_latest(self._client).decode()


def _check(name: str, *, total: bool) -> None:
    if name not in METRICS:
        raise ValueError(f"{name!r} is not in the catalogue of metrics")
    if name.endswith("_total") != total:
        raise TypeError(f"metric {name} is of the other kind")


class MetricsFile:
    """A file that always holds the registry's latest text whole.

    Prometheus' textfile collector reads it. Written at most once in ``every`` seconds; a failing
    disk costs the file, not training.
    """

    def __init__(
        self, path: Path, *, every: float = 15.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.registry = Registry()
        self._path = path
        self._due = Throttle(every, clock=clock)
        self._failing = False

    def write(self, update: Callable[[], None], *, at_once: bool = False) -> None:
        """Write the file if it is due; ``update`` is called first then."""
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
    """Return a metrics file's figures by ``dt_name``, or ``dt_name.KIND`` by a label.

    Those that are not finite are left out; empty if there is no such file.
    """
    # Here: writers of metrics do not need it.
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


def record_step(registry: Registry, report: StepReport) -> None:
    """Record an inner step's figures; those the report does not have become absent."""
    for name in METRICS:
        if (step := METRICS[name].step) is None:
            continue
        value = _read(name, partial(step, report))
        if name.endswith("_total"):
            registry.add(name, value or 0)
        else:
            registry.set(name, value)


def _read(name: str, read: Callable[[], float | None]) -> float | None:
    """Return a metric's value; None, which makes it absent, if it cannot be read."""
    try:
        value = read()
        if value is None:
            return None
        value = float(value)
        if name.endswith("_total") and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"a counter cannot grow by {value}")
        return value
    except Exception as error:  # noqa: BLE001 - a plug-in's, which must not end training
        if _may_complain(name):
            log.warning("The metric dt_%s cannot be read (%r): it is left out", name, error)
        return None
