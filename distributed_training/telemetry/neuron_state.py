"""The state of one neuron, built from the events that it writes in its run folder.

The local subnet with its summary and the page ask a :class:`NeuronState`, so they agree about a
neuron. Only this module interprets ``events.jsonl``. It reads on while the file grows, and again
after a restart: the page begins with the past.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import deque, namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from distributed_training.config.schema import read_settings
from distributed_training.protocol.types import ExitStatus
from distributed_training.telemetry.events import EventFollower, finite
from distributed_training.telemetry.facts import MERGED, TOO_EARLY
from distributed_training.telemetry.metrics import read_metrics

_HISTORY_BYTES = 64 * 2**20  # bytes of events, about two weeks of inner steps
_STEPS = 100_000
_EVENTS = 10_000  # events of one kind; a run of weeks has fewer rounds and publications
_ROWS = 50  # rows of a table on the page
_POINTS = 1500  # points of a line on the page
_SILENT_SECONDS = 6.0  # without a sign of life, where the process cannot be seen
_DAY, _HOUR = 86400.0, 3600.0
_FEW_DAYS = 4  # up to this number, counts are by the hour
_SHORTEST = 60.0  # seconds of steps from which a day's tokens are estimated
_CLOCK_STEP = 60.0  # seconds by which the clock may have been set since a process began

_DAMAGED = (AttributeError, LookupError, OverflowError, TypeError, ValueError)

#: One inner step; what was not measured is None. The fields are the columns of the page's rows.
Step = namedtuple(
    "Step",
    "time outer_step inner_step loss seconds data_wait_seconds between_seconds tokens_per_second "
    "mfu gpu_memory_gb gpu_utilization learning_rate grad_norm",
)
COLUMNS = Step._fields
_MEANS = frozenset(
    {"loss", "seconds", "data_wait_seconds", "between_seconds", "tokens_per_second", "mfu"}
)
#: Kinds of events that are kept as they were written.
_TABLES = (
    *("round", "publication", "problem", "held_out", "start", "stop", "verdict"),
    *("finished", "export", "network"),
    *("upload_scored", "starting", "refused"),
)


@dataclass
class JudgedUploads:
    """The findings of a validator on one miner's uploads."""

    scored: int = 0
    passes: int = 0  # scored or reset; a reset counts as a score of zero
    last_cause: str = ""  # name of the scoring Cause of the last reset
    last_reset: str = ""  # why, in words


class NeuronState:
    """The state of a neuron, read from its run folder ``folder``, whose name it has by default.

    Only :meth:`apply` changes it. ``uid`` is -1 until a start event has it. ``phase`` is the
    miner's last mode, or the validator's present work.
    """

    def __init__(self, folder: Path, *, uid: int = -1, name: str = "") -> None:
        self.folder, self.name, self.uid = folder, name or folder.name, uid
        self.mode = "starting"
        self.starts = self.outer_step = self.inner_step = 0
        self.outer_steps: list[tuple[int, float]] = []  # (reached, time)
        self.steps: deque[Step] = deque(maxlen=_STEPS)
        # Bounded: a run of months, or a neuron that fails each second, must not fill the page's
        # memory.
        self.tables: dict[str, deque[dict[str, Any]]] = {k: deque(maxlen=_EVENTS) for k in _TABLES}
        # A validator's scores, by uid.
        self.scores: dict[int, dict[str, float]] = {}
        self.judged: dict[int, JudgedUploads] = {}
        self._taken = 0  # events; the page knows by it which of them the history held already
        self._step_ended: float | None = None  # end of the step before, if this run did it
        self._follower = EventFollower(folder / "events.jsonl")

    @property
    def phase(self) -> str:
        return self.mode.replace("_", " ")

    @property
    def losses(self) -> list[Step]:
        """The steps that have a loss and were not skipped."""
        return [step for step in self.steps if step.loss is not None]

    @property
    def uploads(self) -> list[str]:
        """Tags of the revisions that were uploaded, oldest first."""
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
        """Apply the new events, and return them as :meth:`apply` does."""
        return [self.apply(event) for event in self._follower.poll()]

    def close(self) -> None:
        self._follower.close()

    def apply(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """Apply one event.

        Returns it with the neuron's name, its number, the state after it, and derived fields:
        ``between_seconds`` of a step (outer steps and loads since the step before). Unknown kinds
        and fields, and fields of another type, change nothing.
        """
        self._taken += 1
        kind, follows = str(event.get("kind")), None
        if kind in self.tables:
            self.tables[kind].append(dict(event))
        # Lines of other versions and damaged ones: they must not end page, update or local subnet.
        if handler := getattr(self, f"_on_{kind}", None):
            with contextlib.suppress(*_DAMAGED):
                follows = handler(event)
        named = {"neuron": self.name, "number": self._taken, "state": self.mode}
        return {**event, **(follows or {}), **named}

    def _on_start(self, event: Mapping[str, Any]) -> None:
        self.starts += 1
        # None: the time between two processes is no pause between two steps.
        self.mode, self._step_ended = "starting", None
        self._reach(event)
        self.uid = _whole(event.get("uid"), self.uid)

    def _on_starting(self, event: Mapping[str, Any]) -> None:
        self.mode, self._step_ended = "starting", None

    def _on_refused(self, event: Mapping[str, Any]) -> None:
        self.mode, self._step_ended = "refused", None

    def _on_step(self, event: Mapping[str, Any]) -> dict[str, Any]:
        if self.mode == "starting":
            self.mode = "training"
        ended, before = finite(event.get("time")), self._step_ended
        self._step_ended = ended
        follows: dict[str, Any] = {"between_seconds": None}
        if before is not None and ended is not None:
            pause = ended - before - (finite(event.get("seconds")) or 0.0)
            follows["between_seconds"] = round(max(0.0, pause), 3)
        if event.get("skipped"):  # its loss is no point of the curve
            follows["loss"] = None
        self.steps.append(Step(*(finite({**event, **follows}.get(name)) for name in COLUMNS)))
        self._reach(event)
        return follows

    def _on_outer_step(self, event: Mapping[str, Any]) -> None:
        self._reach({"inner_step": 0, **event})
        self.outer_steps.append((self.outer_step, finite(event.get("time")) or 0.0))

    def _on_state(self, event: Mapping[str, Any]) -> None:
        self.mode = str(event["after"])

    def _on_stop(self, event: Mapping[str, Any]) -> None:
        ended = event.get("exit_status") == ExitStatus.FINISHED
        self.mode, self._step_ended = "finished" if ended else "stopped", None

    def _on_finished(self, event: Mapping[str, Any]) -> None:
        self.mode = "finished"  # the validator's, which stays

    def _on_held_out(self, event: Mapping[str, Any]) -> None:
        self.mode = "waiting"

    def _on_upload_scored(self, event: Mapping[str, Any]) -> None:
        self.mode = "scoring"
        judged = self.judged.setdefault(int(event["uid"]), JudgedUploads())
        judged.passes += 1
        if event.get("ok"):
            judged.scored += 1
            return
        judged.last_cause = str(event.get("cause") or "")
        judged.last_reset = str(event.get("reason") or "no reason given")

    def _on_scores(self, event: Mapping[str, Any]) -> None:
        self.mode = "waiting"
        for uid, figures in event["scores"].items():
            known = {name: finite(figure) for name, figure in figures.items()}
            self.scores[int(uid)] = {n: value for n, value in known.items() if value is not None}

    def _reach(self, event: Mapping[str, Any]) -> None:
        self.outer_step = _whole(event.get("outer_step"), self.outer_step)
        self.inner_step = _whole(event.get("inner_step"), self.inner_step)

    _on_load = _reach

    # --- facts for the page -----------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return what a dashboard shows first, as values that JSON can hold."""
        return {
            "name": self.name,
            "state": self.mode,
            "taken": self._taken,
            "columns": COLUMNS,
            "steps": thinned(list(self.steps)),
            "tables": {kind: list(rows)[-_ROWS:] for kind, rows in self.tables.items()},
            "marks": [{"time": at, "outer_step": n} for n, at in self.outer_steps[-_POINTS:]],
            "scores": {"scores": self.scores} if self.scores else None,
            **self.measured(),
        }

    def measured(self) -> dict[str, Any]:
        """Return the part of :meth:`facts` that changes without an event, or counts many."""
        now = time.time()
        return {
            "title": read_settings(self.folder).get("neuron.name") or self.name,
            "tokens_a_day": self.tokens_a_day(now),
            "counts": self.counts(),
            "gauges": read_metrics(self.folder / "metrics.prom"),
            "life": self.life(),
            "judged": {uid: asdict(judged) for uid, judged in self.judged.items()},
        }

    def tokens_a_day(self, now: float) -> float | None:
        """Return the tokens of the last day; for a younger run, extrapolate from its pace.

        Pauses count: rounds, restarts, a miner that stands still.
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
        """Return uploads that succeeded and failed, rounds taken and missed, by day or hour.

        ``rows`` begin with the Unix time at which the day or hour, of ``seconds``, begins.
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

    def life(self) -> dict[str, Any]:
        """Return when the neuron last wrote anything, and whether it is gone.

        ``gone``: launcher and ranks named in the run folder do not run on this machine, and nothing
        was written for some seconds (they may run where this process cannot see them: in another
        container). A neuron without such files, a validator, is never called gone.
        """
        launcher = ("instance.json", "launcher.json")
        named = [self.folder / name for name in launcher]
        named += self.folder.glob("pids/rank-*.json")
        written = [*named, *self.folder.glob("pids/rank-*.beat")]
        written += [self.folder / name for name in ("events.jsonl", "metrics.prom")]
        signs = []
        for path in written:
            with contextlib.suppress(OSError):
                signs.append(path.stat().st_mtime)
        last = max(signs, default=None)
        # A clock that was set back makes the last sign one of the future: not silent then.
        silent = last is not None and time.time() - last > _SILENT_SECONDS
        gone = silent and any(path.exists() for path in named)
        for path in named if gone else ():
            with contextlib.suppress(*_DAMAGED, OSError, psutil.Error):
                process = psutil.Process(int(json.loads(path.read_bytes())["pid"]))
                # A process that began after the file was written has the same pid only by chance.
                if process.create_time() <= path.stat().st_mtime + _CLOCK_STEP:
                    gone = False
        return {"last_sign": last, "gone": gone}


def thinned(rows: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    """Return at most ``_POINTS`` rows: means where they make sense, else each bucket's last."""
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
    """Return whether a round's update holds this miner's share of its outer step."""
    return bool(event.get("ok")) and event.get("fate") in (None, "", MERGED)


def _whole(value: object, otherwise: int) -> int:
    number = finite(value)
    return otherwise if number is None else int(number)
