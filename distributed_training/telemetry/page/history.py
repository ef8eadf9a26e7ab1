"""What the page knows of each neuron, from its events and metrics."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from distributed_training.telemetry.events import EventFollower

_HISTORY_BYTES = 64 * 2**20  # of events, about two weeks of inner steps
_STEPS = 100_000
_POINTS = 1500  # of a line on the page
_ROWS = 50  # of a table
_SILENT_SECONDS = 6.0  # without a sign of life, where the process cannot be seen
_CLOCK_STEP = 60.0  # by which the clock may have been set since a process began

#: A step's columns, in the order in which they are sent.
COLUMNS = (
    "time", "outer_step", "inner_step", "loss", "seconds", "data_wait_seconds", "between_seconds",
    "tokens_per_second", "mfu", "gpu_memory_gb", "gpu_utilization", "learning_rate", "grad_norm",
)  # fmt: skip
_MEANS = frozenset(
    {"loss", "seconds", "data_wait_seconds", "between_seconds", "tokens_per_second", "mfu"}
)
_TABLES = (*("round", "publication", "preview", "problem", "held_out", "start", "stop"),)


class Neuron:
    """One run folder. ``name`` is the folder's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self.steps: deque[tuple[float | None, ...]] = deque(maxlen=_STEPS)
        self.tables: dict[str, deque[dict[str, Any]]] = {k: deque(maxlen=_ROWS) for k in _TABLES}
        self.marks: deque[dict[str, Any]] = deque(maxlen=_POINTS)  # outer steps
        self.scores: dict[str, Any] | None = None
        self.state = ""
        self.taken = 0  # events; the page knows by it which of them the history held already
        self._step_ended: float | None = None  # of the step before, if this run did it
        self._follower = EventFollower(folder / "events.jsonl")
        for event in self._follower.history(at_most=_HISTORY_BYTES):
            self.apply(event)

    def poll(self) -> list[dict[str, Any]]:
        """New events, taken in, each with the neuron's name and its number."""
        return [
            {**self.apply(event), "neuron": self.name, "number": self.taken}
            for event in self._follower.poll()
        ]

    def apply(self, event: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take one event in; kinds that the page does not show change nothing. Returns it, a step
        with ``between_seconds``: rounds, snapshots and loads since the step before."""
        kind = str(event.get("kind"))
        self.taken += 1
        if kind == "step":
            event = {**event, "between_seconds": self._between(event)}
            self.steps.append(tuple(_number(event.get(column)) for column in COLUMNS))
        elif kind in ("start", "stop"):
            self.state = "running" if kind == "start" else "stopped"
            self._step_ended = None
        elif kind == "outer_step":
            self.marks.append({"time": event.get("time"), "outer_step": event.get("outer_step")})
        elif kind == "scores":
            self.scores = dict(event)
        elif kind == "state":
            self.state = str(event.get("after", ""))
        if kind in self.tables:
            self.tables[kind].append(dict(event))
        return event

    def _between(self, event: Mapping[str, Any]) -> float | None:
        before, ended = self._step_ended, _number(event.get("time"))
        self._step_ended = ended
        if before is None or ended is None:
            return None
        return round(max(0.0, ended - before - (_number(event.get("seconds")) or 0.0)), 3)

    def gauges(self) -> dict[str, float]:
        """The metrics as they were last written, ``name{kind}`` -> value; empty without a file."""
        try:
            text = (self.folder / "metrics.prom").read_text(encoding="utf-8")
            families = list(text_string_to_metric_families(text))
        except (OSError, ValueError):
            return {}
        return {
            ".".join((sample.name, *sample.labels.values())): sample.value
            for family in families
            for sample in family.samples
            if math.isfinite(sample.value)
        }

    def life(self) -> dict[str, Any]:
        """Return when the neuron last wrote anything, and whether it is gone.

        ``gone``: launcher and ranks named in the run folder do not run on this machine, and nothing
        was written for some seconds (they may run where this process cannot see them: in another
        container). A neuron without such files, a validator, is never called gone.
        """
        named = [self.folder / "instance.json", *self.folder.glob("pids/rank-*.json")]
        written = [*named, *self.folder.glob("pids/rank-*.beat")]
        written += [self.folder / name for name in ("events.jsonl", "metrics.prom")]
        signs = [moment for path in written if (moment := _written_at(path)) is not None]
        last = max(signs, default=None)
        silent = last is not None and time.time() - last > _SILENT_SECONDS
        gone = silent and any(p.exists() for p in named) and not any(map(_runs, named))
        return {"last_sign": last, "gone": gone}

    def facts(self) -> dict[str, Any]:
        """All that a page needs to begin with, as JSON can hold it."""
        return {
            "name": self.name,
            "state": self.state,
            "taken": self.taken,
            "columns": COLUMNS,
            "steps": thinned(list(self.steps)),
            "tables": {kind: list(rows) for kind, rows in self.tables.items()},
            "marks": list(self.marks),
            "scores": self.scores,
            "gauges": self.gauges(),
            "life": self.life(),
        }


def _written_at(path: Path) -> float | None:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return None


def _runs(path: Path) -> bool:
    """Whether the process whose pid the file holds still runs. One that began after the file was
    written has the same pid by chance."""
    written = _written_at(path)
    try:
        pid = int(json.loads(path.read_bytes())["pid"])
        return written is not None and psutil.Process(pid).create_time() <= written + _CLOCK_STEP
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return False


def thinned(steps: Sequence[tuple[float | None, ...]]) -> list[list[float | None]]:
    """At most ``_POINTS`` rows; means where a mean says something, else the last of each bucket."""
    size = max(1, math.ceil(len(steps) / _POINTS))
    if size == 1:
        return [list(step) for step in steps]
    return [_merged(steps[start : start + size]) for start in range(0, len(steps), size)]


def _merged(bucket: Sequence[tuple[float | None, ...]]) -> list[float | None]:
    row = list(bucket[-1])
    for i, column in enumerate(COLUMNS):
        values = [step[i] for step in bucket if step[i] is not None]
        if column in _MEANS and values:
            row[i] = sum(v for v in values if v is not None) / len(values)
    return row


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None
