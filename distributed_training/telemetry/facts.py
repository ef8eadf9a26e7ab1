"""The facts about a miner that decide its verdict, and the file in which it writes its own.

A fact is true of one moment, and the network moves on, so a :class:`Fact` has its time. The miner
writes ``facts.json`` (:mod:`.own_facts`); each reader adds its own observations
(:func:`~.run_state.observe`) and asks :func:`~.verdict.judge`.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from distributed_training.common.files import json_line

FACTS_FILE = "facts.json"  # in the run folder

#: Seconds after which a silence counts: of registry or store, and of both.
SILENT_AFTER, OFFLINE_AFTER = 120.0, 60.0
#: What stopped a miner whose settings were refused.
SETTINGS = "its settings"
#: Reason of a stop that needs nobody, since torchrun starts all ranks again or says why.
TORCHRUN = "its ranks have ended; torchrun's log names the cause"
SCRIPT = "its script ended"  # the script that joined has ended
FINISHED = "finished"  # the network has finished
#: What became of a close, in the words of a ``round`` event. MISSED: nothing was sent.
MERGED, REFUSED, MISSED = "merged", "refused", "missed"  # or "not merged"
TOO_EARLY = "too early"  # cause at the close before a miner's first upload

_T = TypeVar("_T")


@dataclass(frozen=True)
class Fact(Generic[_T]):
    """A value and the Unix seconds at which it was true."""

    value: _T
    at: float


@dataclass(frozen=True)
class KnownUpload:
    """One complete upload of this miner.

    ``at``: Unix seconds, of its end. ``fate``: what became of it, once a manifest says so, at
    ``fate_at`` and for ``cause``.
    """

    outer_step: int
    at: float
    tag: str = ""
    fate: str = ""
    fate_at: float = 0.0
    cause: str = ""


@dataclass(frozen=True)
class Crash:
    """The last end of ranks or launcher that nobody asked for; ``at`` 0: there was none."""

    at: float = 0.0
    text: str = ""


@dataclass(frozen=True)
class Launch:
    """The launcher's state, and the content of ``launcher.json``; times in Unix seconds.

    ``stage``: of a start, since ``stage_at``; ``eta_seconds`` were left then. ``text``: why a start
    was refused, or how the miner ended. ``attempt``: the number of the start that was refused; the
    next is at ``next_try_at``. ``stopped_by``: ``signal SIGTERM``, ``finished``, or another cause
    of the end. ``at``: since when ``state`` holds. ``restarts``: after crashes, since the last
    start that somebody asked for.
    """

    state: str = "stopped"  # or starting, running, refused, stopping
    stage: str = ""
    stage_at: float = 0.0
    eta_seconds: float | None = None
    text: str = ""
    attempt: int = 0
    next_try_at: float | None = None
    stopped_by: str = ""
    at: float = 0.0
    pid: int = 0
    restarts: int = 0
    last_crash: Crash = Crash()

    @property
    def asked(self) -> bool:
        """Return whether somebody asked for the stop."""
        known = (FINISHED, TORCHRUN, SCRIPT)
        return self.stopped_by.startswith("signal") or self.stopped_by in known

    def seconds_left(self, now: float) -> float | None:
        """Return how long the present stage takes from ``now`` on; None: not known."""
        if self.eta_seconds is None or not self.stage_at:
            return None
        return max(0.0, self.stage_at + self.eta_seconds - now)


@dataclass(frozen=True)
class Disk:
    """Bytes of the run folder's disk. ``needed``: for upload, checkpoint and the reserve."""

    free: float
    total: float
    needed: float = 0.0


def measure_disk(folder: Path, needed: float, now: float) -> Fact[Disk] | None:
    """Return the room of the disk; None: it does not tell."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    # Some network disks report 0.
    return Fact(Disk(float(usage.free), float(usage.total), needed), now) if usage.total else None


@dataclass(frozen=True)
class Facts:
    """All facts that a verdict needs. None, empty: not known.

    Times are Unix seconds.
    """

    # --- the network's file
    pays: bool = False  # whether its chain pays; in a registry's network uploads only count
    round_seconds: float | None = None  # seconds from one close to the next
    # --- the miner, as it sees itself
    name: str = ""
    uid: int | None = None
    looked: float | None = None  # when the miner wrote these facts
    started: float | None = None  # when its ranks began to train
    mode: str = ""
    mode_since: float | None = None
    outer_step: int | None = None
    step: Fact[int] | None = None  # the last inner step
    step_seconds: float | None = None
    uploads: tuple[KnownUpload, ...] = ()  # the newest upload of each outer step, oldest first
    missed: int = 0  # closes in a row for which nothing was sent, since the first upload
    missed_at: float | None = None  # when the last of them was over
    missed_cause: str = ""
    # --- the network, as the miner sees it
    chain_at: float | None = None  # when its registry or chain answered last
    chain_trouble: str = ""
    registered: Fact[bool] | None = None
    incentive: Fact[float] | None = None  # this miner's share of what the chain pays, 0 to 1
    network_step: int | None = None  # outer step of the network
    behind_since: float | None = None  # since when the network is at a later outer step
    store_silent_since: float | None = None  # None if the store answers
    store_trouble: str = ""  # why the store does not answer
    other_version: Fact[str] | None = None  # how the network's file differs from ours
    forked: str = ""  # why there are two histories, or empty
    gate: int = 0  # closes in a row that the held-out text refused
    next_round: float | None = None  # the next close
    # --- what others see of the miner
    launch: Launch | None = None
    gone: Fact[bool] | None = None  # no process of it runs
    disk: Fact[Disk] | None = None

    def expected_round(self, now: float) -> float | None:
        """Return when the next round is expected: by the clock, where the chain is silent since."""
        due, period = self.next_round, self.round_seconds
        silent = self.chain_at is not None and now - self.chain_at > OFFLINE_AFTER
        silent |= self.store_silent_since is not None
        if due is None or due >= now or not period or not silent:
            return due
        return due + math.ceil((now - due) / max(1.0, period)) * period

    def missed_until(self, now: float) -> int:
        """Return how many closes passed in a row without an upload; those not heard of count."""
        due, period = self.next_round, self.round_seconds
        if due is None or not period:
            return self.missed
        sent = max((upload.at for upload in self.uploads if upload.tag), default=0.0)
        known = max(self.missed_at or 0.0, sent, self.started or 0.0)
        passed, before = (math.floor((at - due) / max(1.0, period)) + 1 for at in (now, known))
        return self.missed + max(0, passed - max(0, before))

    def moved(self, seconds: float) -> Facts:
        """Return these with the times that the miner noted ``seconds`` later: by another clock."""
        names = ("started", "mode_since", "missed_at", "behind_since", "step", "other_version")
        changed: dict[str, Any] = {}
        for name in names:
            match getattr(self, name):
                case float() | int() as at:
                    changed[name] = at + seconds
                case Fact(value=value, at=at):
                    changed[name] = Fact(value, at + seconds)
        uploads = (
            replace(each, at=each.at + seconds, fate_at=each.fate_at + seconds)
            for each in self.uploads
        )
        return replace(self, uploads=tuple(uploads), **changed)

    @classmethod
    def read(cls, folder: Path) -> Facts:
        """Return the facts of a run folder: none where there is no file, or a damaged one."""
        try:
            return cls.from_json((folder / FACTS_FILE).read_bytes())
        except OSError:
            return cls()

    @classmethod
    def from_json(cls, text: bytes) -> Facts:
        """Read the JSON object; leave out fields that are unknown or of another type."""
        return parse(cls, json_line(text) or {})


def parse(kind: type[_T], found: Mapping[str, Any]) -> _T:
    """Return the dataclass with the fields of ``found`` that fit; others stay at their defaults."""
    known = {}
    for name, adapter in _adapters(kind).items():  # type: ignore[arg-type]  # hashable
        if name in found:
            try:
                text = json.dumps(found[name], allow_nan=False)
                json.loads(text, parse_int=_whole)
                known[name] = adapter.validate_json(text, strict=True)
            except (ValidationError, ValueError):
                continue
    return kind(**known)


@functools.cache
def _adapters(kind: Any) -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(kind)
    return {field.name: TypeAdapter(hints[field.name]) for field in fields(kind)}


def _whole(digits: str) -> int:
    if len(digits) > 18:  # beyond any figure of ours, and beyond exact floats
        raise ValueError("no figure of a miner")
    return int(digits)
