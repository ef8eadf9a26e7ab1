"""Report what the miner does in log lines, events and metrics."""

from __future__ import annotations

from distributed_training.telemetry.events import EventLog, read_events
from distributed_training.telemetry.logs import setup_logging
from distributed_training.telemetry.metrics import MetricsFile

__all__ = ["EventLog", "MetricsFile", "read_events", "setup_logging"]
