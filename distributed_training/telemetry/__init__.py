"""Report what the miner does: log lines, events, metrics."""

from __future__ import annotations

from distributed_training.telemetry.events import EventLog, read_events
from distributed_training.telemetry.logs import mask, register_secret, setup_logging
from distributed_training.telemetry.metrics import (
    MetricsFile,
    MetricsRegistry,
    record_step,
    unix_time,
)

__all__ = [
    "EventLog",
    "MetricsFile",
    "MetricsRegistry",
    "mask",
    "read_events",
    "record_step",
    "register_secret",
    "setup_logging",
    "unix_time",
]
