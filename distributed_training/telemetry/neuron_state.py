"""Read the history of one neuron from the events in its run folder: steps, rounds and uploads.

The local subnet with its summary, ``dt-status`` and the page all use a :class:`NeuronState`, so
they agree about a neuron. It first reads what ``events.jsonl`` already contains, so the page shows
the history after a restart, and then follows the file while it grows. :func:`~.facts.fold` defines
how an event changes the current state.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque, namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distributed_training.config.schema import read_settings
from distributed_training.telemetry.events import EventFollower, finite
from distributed_training.telemetry.facts import DAMAGED, MERGED, TOO_EARLY, Facts, fold
from distributed_training.telemetry.metrics import read_metrics

_HISTORY_BYTES = 64 * 2**20  # bytes of events, about two weeks of inner steps
_STEPS = 100_000
_EVENTS = 10_000  # events of one kind; a run of weeks has fewer rounds and publications
_ROWS = 50  # rows of a table on the page
_POINTS = 1500  # points of a line on the page
_DAY, _HOUR = 86400.0, 3600.0
_FEW_DAYS = 4  # a history shorter than this is counted by the hour
_SHORTEST = 60.0  # seconds of training that are needed to estimate the tokens of a day

#: One inner step; values that were not measured are None. The fields are the page's columns.
Step = namedtuple(
    "Step",
    "time outer_step inner_step loss seconds data_wait_seconds between_seconds tokens_per_second "
    "mfu gpu_memory_gb gpu_utilization learning_rate grad_norm",
)
COLUMNS = Step._fields
_MEANS = frozenset(
    {"loss", "seconds", "data_wait_seconds", "between_seconds", "tokens_per_second", "mfu"}
)
#: The kinds of events that are kept unchanged.
_TABLES = (
    *("round", "publication", "problem", "held_out", "start", "stop", "verdict"),
    *("finished", "export", "network"),
    *("upload_scored", "starting", "refused"),
)


@dataclass
class JudgedUploads:
    """A validator's findings about one miner's uploads."""

    scored: int = 0
    passes: int = 0  # uploads that were scored or reset; a reset counts as a score of zero
    last_cause: str = ""  # name of the scoring Cause of the last reset
    last_reset: str = ""  # why, in words


class NeuronState:
    """The history of a neuron, read from its run ``folder``.

    ``name`` is the folder's name by default. Only :meth:`apply` changes the history. ``known`` are
    the facts that follow from the events.
    """

    def __init__(self, folder: Path, *, uid: int | None = None, name: str = "") -> None:
        self.folder, self.name = folder, name or folder.name
        self.known = Facts(uid=uid, mode="starting")
        self.starts = 0
        self.outer_steps: list[tuple[int, float]] = []  # (reached, time)
        self.steps: deque[Step] = deque(maxlen=_STEPS)
        # The tables are bounded, since a run that lasts for months, or a neuron that fails every
        # second, must not fill the page's memory.
        self.tables: dict[str, deque[dict[str, Any]]] = {k: deque(maxlen=_EVENTS) for k in _TABLES}
        # A validator's scores, by uid.
        self.scores: dict[int, dict[str, float]] = {}
        self.judged: dict[int, JudgedUploads] = {}
        self._taken = 0  # number of events so far
        self._step_ended: float | None = None  # end of the previous step of the same process
        self._follower = EventFollower(folder / "events.jsonl")

    @property
    def phase(self) -> str:
        """The miner's mode, or the current work of a validator."""
        return self.known.mode.replace("_", " ")

    @property
    def uid(self) -> int:
        """The uid; -1 until a start event names it."""
        return -1 if self.known.uid is None else self.known.uid

    @property
    def outer_step(self) -> int:
        return self.known.outer_step or 0

    @property
    def inner_step(self) -> int:
        return self.known.step.value if self.known.step else 0

    @property
    def losses(self) -> list[Step]:
        """The inner steps that have a loss, which skipped steps do not have."""
        return [step for step in self.steps if step.loss is not None]

    @property
    def uploads(self) -> list[str]:
        """The tags of the uploaded revisions, oldest first."""
        return [
            str(event.get("revision")) for event in self.tables["publication"] if event.get("ok")
        ]

    # --- events in --------------------------------------------------------------------------------

    def catch_up(self, *, at_most: int = _HISTORY_BYTES) -> NeuronState:
        """Apply the events in the last ``at_most`` bytes of the files; return this object."""
        for event in self._follower.history(at_most=at_most):
            self.apply(event)
        return self

    def poll(self) -> list[dict[str, Any]]:
        """Apply the new events; return them in the form that :meth:`apply` returns."""
        return [self.apply(event) for event in self._follower.poll()]

    def close(self) -> None:
        self._follower.close()

    def apply(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """Apply one event.

        Returns the event with the neuron's name, the event's number, the state after it, and for a
        step ``between_seconds``: the seconds between the previous step and this one, in which outer
        steps are taken and weights are loaded. Unknown kinds and fields, and fields of the wrong
        type, change nothing.
        """
        self._taken += 1
        follows = dict[str, Any]()
        # A line that is damaged or from another version must not end the program that reads it.
        with contextlib.suppress(*DAMAGED):
            if event["kind"] in self.tables:
                self.tables[event["kind"]].append(dict(event))
            self.known = fold(self.known, event, finite(event.get("time")) or 0.0)
            follows = self._note(event)
        named = {"neuron": self.name, "number": self._taken, "state": self.known.mode}
        return {**event, **follows, **named}

    def _note(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """Add an event to the history, and return the fields that are derived for it."""
        at, follows = finite(event.get("time")), dict[str, Any]()
        match event:
            case {"kind": "start" | "starting" | "refused" | "stop" as kind}:
                # The time during which no process ran is not a pause between two steps.
                self._step_ended, self.starts = None, self.starts + (kind == "start")
            case {"kind": "step"}:
                ended, self._step_ended = self._step_ended, at
                follows["between_seconds"] = None
                if ended is not None and at is not None:
                    pause = at - ended - (finite(event.get("seconds")) or 0.0)
                    follows["between_seconds"] = round(max(0.0, pause), 3)
                if event.get("skipped"):  # leave its loss out of the curve
                    follows["loss"] = None
                self.steps.append(Step(*(finite({**event, **follows}.get(c)) for c in COLUMNS)))
            case {"kind": "outer_step"}:
                self.outer_steps.append((self.outer_step, at or 0.0))
            case {"kind": "upload_scored", "uid": uid}:
                judged = self.judged.setdefault(int(uid), JudgedUploads())
                judged.passes += 1
                if event.get("ok"):
                    judged.scored += 1
                else:
                    judged.last_cause = str(event.get("cause") or "")
                    judged.last_reset = str(event.get("reason") or "no reason given")
            case {"kind": "scores", "scores": scores}:
                for uid, figures in scores.items():
                    known = {name: finite(figure) for name, figure in figures.items()}
                    self.scores[int(uid)] = {n: v for n, v in known.items() if v is not None}
        return follows

    # --- for the page -----------------------------------------------------------------------------

    def shown(self) -> dict[str, Any]:
        """Return what a dashboard shows of the history, as values that JSON supports."""
        return {
            "name": self.name,
            "title": self.title,
            "state": self.known.mode,
            "taken": self._taken,
            "columns": COLUMNS,
            "steps": thinned(list(self.steps)),
            "tables": {kind: list(rows)[-_ROWS:] for kind, rows in self.tables.items()},
            "marks": [{"time": at, "outer_step": n} for n, at in self.outer_steps[-_POINTS:]],
            "scores": {"scores": self.scores} if self.scores else None,
            "tokens_a_day": self.tokens_a_day(time.time()),
            "counts": self.counts(),
            "gauges": read_metrics(self.folder / "metrics.prom"),
            "judged": {uid: asdict(judged) for uid, judged in self.judged.items()},
        }

    @property
    def title(self) -> str:
        """The name that the settings of the last start give to the neuron."""
        return read_settings(self.folder).get("neuron.name") or self.name

    def tokens_a_day(self, now: float) -> float | None:
        """Return the tokens of the last day, or extrapolate them if the run is shorter.

        Time without training counts too, such as rounds, restarts and times when the miner hung.
        """
        tokens, first = 0.0, now
        for step in reversed(self.steps):
            if step.time is None or step.time < now - _DAY:
                first = min(first, now - _DAY)
                break
            seconds = step.seconds or 0.0
            tokens += (step.tokens_per_second or 0.0) * seconds
            first = min(first, step.time - seconds)
        return tokens * _DAY / (now - first) if tokens and now - first >= _SHORTEST else None

    def counts(self) -> dict[str, Any]:
        """Count the successful and failed uploads, and the rounds with and without this miner.

        Each row is about one hour, or about one day if the history is longer. It begins with the
        Unix time at which that period begins. ``seconds`` is the length of the period.
        """
        found = [
            (event, column + (not took_part(event)))  # an upload's event has no fate
            for kind, column in (("publication", 1), ("round", 3))
            for event in self.tables[kind]
            if finite(event.get("time")) is not None and event.get("fate") != TOO_EARLY
        ]
        times = [event["time"] for event, _ in found]
        few = not times or max(times) - min(times) < _FEW_DAYS * _DAY
        seconds = _HOUR if few else _DAY
        rows: dict[float, list[float]] = {}
        for event, column in found:
            begin = event["time"] // seconds * seconds
            rows.setdefault(begin, [begin, 0, 0, 0, 0])[column] += 1
        return {"seconds": seconds, "rows": [rows[begin] for begin in sorted(rows)][-_POINTS:]}


def thinned(rows: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    """Return at most ``_POINTS`` rows, each of which stands for several consecutive ``rows``.

    A column has the mean of these rows if a mean makes sense for it, and otherwise the last value.
    """
    size = max(1, math.ceil(len(rows) / _POINTS))
    thin = []
    for start in range(0, len(rows), size):
        bucket = rows[start : start + size]
        row = list(bucket[-1])
        for i, column in enumerate(COLUMNS) if len(bucket) > 1 else ():
            values = [value for values in bucket if (value := values[i]) is not None]
            if column in _MEANS and values:
                row[i] = sum(values) / len(values)
        thin.append(row)
    return thin


def took_part(event: Mapping[str, Any]) -> bool:
    """Return whether the update of a round contains this miner's contribution."""
    return bool(event.get("ok")) and event.get("fate") in (None, "", MERGED)
