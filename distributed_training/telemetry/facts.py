"""The state of a miner: the facts that follow from its events, and the facts that it measures.

Only :func:`fold` decides what an event changes. A running miner folds its events as it writes them,
and keeps the result in ``facts.json`` (:mod:`.own_facts`); a reader folds the lines of
``events.jsonl`` (:mod:`.neuron_state`). A reader adds what only an observer can know
(:func:`~.run_state.observe`), and :func:`~.verdict.judge` judges the facts.

The network continues to change, so each :class:`Fact` records the time at which it was true.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field, ValidationError

from distributed_training.common.files import adapter_of, read_json_object
from distributed_training.protocol.types import ExitStatus
from distributed_training.telemetry.events import finite

FACTS_FILE = "facts.json"  # in the run folder

#: Seconds after which the silence of the registry or the store, or of both, is reported.
SILENT_AFTER, OFFLINE_AFTER = 120.0, 60.0
#: The ``stopped_by`` of a miner whose settings were refused.
SETTINGS = "its settings"
#: Causes of a stop after which the operator need not act.
TORCHRUN = "its ranks have ended; torchrun's log names the cause"  # torchrun restarts the ranks
SCRIPT = "its script ended"  # the script that joined has ended
FINISHED = "finished"  # the network has finished
#: The outcome of a close, in the words of a ``round`` event. MISSED: nothing was sent.
MERGED, REFUSED, MISSED = "merged", "refused", "missed"  # or "not merged"
TOO_EARLY = "too early"  # the outcome of a close before a miner's first upload
_KEPT_UPLOADS = 3  # outer steps

_T = TypeVar("_T")
#: A miner's figures. A damaged file may contain larger values, or NaN, which no text can show.
Count = Annotated[int, Field(gt=-(10**18), lt=10**18)]
Number = Annotated[float, Field(gt=-1e18, lt=1e18)]
#: Errors that :func:`fold` may raise for a line that is damaged or from another version.
DAMAGED = (AttributeError, LookupError, OverflowError, TypeError, ValueError)


@dataclass(frozen=True)
class Fact(Generic[_T]):
    """A value and the Unix seconds at which it was true."""

    value: _T
    at: Number


@dataclass(frozen=True)
class KnownUpload:
    """One complete upload of this miner.

    ``at``: when the upload ended, in Unix seconds. ``fate``: its outcome, once a manifest states
    it; ``fate_at`` and ``cause``: when and why.
    """

    outer_step: Count
    at: Number
    tag: str = ""
    fate: str = ""
    fate_at: Number = 0.0
    cause: str = ""


@dataclass(frozen=True)
class Crash:
    """The last unexpected end of the ranks or the launcher; ``at`` is 0 if there was none."""

    at: Number = 0.0
    text: str = ""


@dataclass(frozen=True)
class Launch:
    """The launcher's state, and the content of ``launcher.json``; times in Unix seconds.

    ``stage``: the stage of a start since ``stage_at``, with ``eta_seconds`` left at that time.
    ``text``: why a start was refused, or how the miner ended. ``attempt``: the number of the
    refused attempt to start; the next one is at ``next_try_at``. ``stopped_by``: ``signal
    SIGTERM``, ``finished``, or another cause of the end. ``at``: when ``state`` began.
    ``restarts``: the number of restarts after crashes since the last requested start.
    """

    state: str = "stopped"  # or starting, running, refused, stopping
    stage: str = ""
    stage_at: Number = 0.0
    eta_seconds: Number | None = None
    text: str = ""
    attempt: Count = 0
    next_try_at: Number | None = None
    stopped_by: str = ""
    at: Number = 0.0
    pid: Count = 0
    restarts: Count = 0
    last_crash: Crash = Crash()

    @property
    def asked(self) -> bool:
        """Return whether the stop was requested."""
        known = (FINISHED, TORCHRUN, SCRIPT)
        return self.stopped_by.startswith("signal") or self.stopped_by in known

    def seconds_left(self, now: float) -> float | None:
        """Return how many seconds the current stage still takes at ``now``; None if not known."""
        if self.eta_seconds is None or not self.stage_at:
            return None
        return max(0.0, self.stage_at + self.eta_seconds - now)


@dataclass(frozen=True)
class Disk:
    """Bytes on the run folder's disk. ``needed``: for an upload, a checkpoint and the reserve."""

    free: Number
    total: Number
    needed: Number = 0.0


def measure_disk(folder: Path, needed: float, now: float) -> Fact[Disk] | None:
    """Return the free space on the disk; None if its file system does not report it."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    # Some network disks report 0.
    return Fact(Disk(float(usage.free), float(usage.total), needed), now) if usage.total else None


@dataclass(frozen=True)
class Facts:
    """All facts that a verdict needs. None or an empty value means not known.

    Times are Unix seconds.
    """

    # --- the network's file
    pays: bool = False  # whether its chain pays; a network with a registry only counts uploads
    round_seconds: Number | None = None  # seconds from one close to the next
    # --- the miner, as it sees itself
    name: str = ""
    uid: Count | None = None
    looked: Number | None = None  # when the miner wrote these facts
    started: Number | None = None  # when its ranks began to train
    mode: str = ""
    mode_since: Number | None = None
    outer_step: Count | None = None
    step: Fact[Count] | None = None  # the last inner step
    step_seconds: Number | None = None
    uploads: tuple[KnownUpload, ...] = ()  # the newest upload of each outer step, oldest first
    missed: Count = 0  # consecutive closes for which nothing was sent, since the first upload
    missed_at: Number | None = None  # when the last missed close was over
    missed_cause: str = ""
    joined: bool = False  # whether an upload was ever begun; before that, no close can be missed
    noted: Count = -1  # the last outer step for which the cause of a missed close was recorded
    heard: Count = -1  # outer step of the last close for which the miner had the weights
    silent: str = ""  # the store, registry or chain, if it was silent since the last outer step
    # --- the network, as the miner sees it
    chain_at: Number | None = None  # when its registry or chain last answered
    chain_trouble: str = ""
    registered: Fact[bool] | None = None
    incentive: Fact[Number] | None = None  # this miner's share of what the chain pays, 0 to 1
    network_step: Count | None = None  # outer step of the network
    behind_since: Number | None = None  # since when the network is at a later outer step
    store_silent_since: Number | None = None  # None if the store answers
    store_trouble: str = ""  # why the store does not answer
    other_version: Fact[str] | None = None  # how the network's file differs from ours
    forked: str = ""  # why there are two histories, or empty
    gate: Count = 0  # consecutive closes that the check on the held-out text refused
    next_round: Number | None = None  # time of the next close
    # --- what others see of the miner
    launch: Launch | None = None
    gone: Fact[bool] | None = None  # whether none of its processes is running
    disk: Fact[Disk] | None = None

    def expected_round(self, now: float) -> float | None:
        """Return the time of the next round; extrapolate it if the network has not answered."""
        due, period = self.next_round, self.round_seconds
        silent = self.chain_at is not None and now - self.chain_at > OFFLINE_AFTER
        silent |= self.store_silent_since is not None
        if due is None or due >= now or not period or not silent:
            return due
        return due + math.ceil((now - due) / max(1.0, period)) * period

    def missed_until(self, now: float) -> int:
        """Count the consecutive closes without an upload, up to ``now``.

        This includes closes that the miner has not heard of, because the registry and the store
        were silent.
        """
        due, period = self.next_round, self.round_seconds
        if due is None or not period:
            return self.missed
        sent = max((upload.at for upload in self.uploads if upload.tag), default=0.0)
        known = max(self.missed_at or 0.0, sent, self.started or 0.0)
        passed, before = (math.floor((at - due) / max(1.0, period)) + 1 for at in (now, known))
        return self.missed + max(0, passed - max(0, before))

    def moved(self, seconds: float) -> Facts:
        """Return these facts with the miner's own times moved ``seconds`` ahead."""
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
        """Return the facts of a run folder; empty facts if the file is missing or damaged."""
        return parse(cls, read_json_object(folder / FACTS_FILE) or {})


def parse(kind: type[_T], found: Mapping[str, Any]) -> _T:
    """Return a ``kind`` with the valid fields of ``found``; all other fields have their defaults.

    A field may be invalid because another version wrote it, or because the disk is damaged.
    """
    adapter = adapter_of(kind)  # type: ignore[arg-type]  # a class is hashable
    while True:
        try:
            fitting: _T = adapter.validate_python(found)
            return fitting
        except ValidationError as error:
            wrong = {problem["loc"][0] for problem in error.errors()}
            found = {name: value for name, value in found.items() if name not in wrong}


# --- what follows from an event -------------------------------------------------------------------


def fold(facts: Facts, event: Mapping[str, Any], at: float) -> Facts:
    """Return the facts after ``event``, which was written at ``at``.

    ``at`` is in seconds, and all calls must use the same clock. An event of an unknown kind changes
    nothing. A line from another program may raise one of :data:`DAMAGED`.
    """
    mode, changed = _MODES.get(event["kind"], facts.mode), dict[str, Any]()
    outer_step = _whole(event.get("outer_step"), facts.outer_step)
    match event:
        case {"kind": "start"}:
            changed = {"uid": _whole(event.get("uid"), facts.uid), "outer_step": outer_step}
            if facts.step:  # a checkpoint may be older than the last step
                number = _whole(event.get("inner_step"), facts.step.value)
                changed["step"] = Fact(number, facts.step.at)
        case {"kind": "step"}:
            mode = "training" if mode == "starting" else mode
            step, seconds = Fact(_whole(event.get("inner_step"), 0), at), event.get("seconds")
            changed = {"outer_step": outer_step, "step": step, "step_seconds": finite(seconds)}
        case {"kind": "state", "after": str(mode)}:
            pass
        case {"kind": "outer_step"}:
            begun = facts.step and Fact(0, facts.step.at)
            changed = {"outer_step": outer_step, "step": begun, "behind_since": None}
        case {"kind": "roll_back"}:
            changed = {"outer_step": outer_step}
        case {"kind": "close", "outer_step": heard}:
            changed = {"heard": heard}
        case {"kind": "fork", "cause": str(cause)}:
            changed = {"forked": cause}
        case {"kind": "skipped", "cause": str(cause)}:
            changed = _missed(facts, outer_step, cause, at)
        case {"kind": "publication", "revision": str(tag), "reason": str(problem)}:
            of, _, serial = tag.partition(".")
            if serial != "0":  # an upload of progress, which is not judged
                changed = _sent(replace(facts, joined=True), int(of), tag, problem, at)
        case {"kind": "round", "ok": True, "fate": str(fate), "detail": str(cause)}:
            changed = _settled(facts, outer_step, fate, cause, at)
        case {"kind": "stop", "exit_status": ExitStatus.FINISHED}:
            mode = "finished"
    if mode != facts.mode:
        changed |= {"mode": mode, "mode_since": at}
    # replace() takes twice as long, and a page first reads 100,000 events.
    return Facts(**{**vars(facts), **changed}) if changed else facts


#: Kind of event -> the mode that it begins. The last three are events of a validator.
_MODES: Mapping[str, str] = {
    "start": "starting",
    "starting": "starting",
    "refused": "refused",
    "stop": "stopped",
    "finished": "finished",
    "held_out": "waiting",
    "scores": "waiting",
    "upload_scored": "scoring",
}


def _sent(facts: Facts, outer_step: int, tag: str, problem: str, at: float) -> dict[str, Any]:
    """Return the changes after an upload was sent, or failed because of ``problem``."""
    if problem:
        head = "" if problem.startswith(("void", "late")) else "not sent: "
        return {"joined": True, **_missed(facts, outer_step, head + problem, at)}
    kept = _kept(facts, KnownUpload(outer_step, at, tag))
    return {"joined": True, "uploads": kept, "missed": 0, "missed_cause": ""}


def _kept(facts: Facts, upload: KnownUpload) -> tuple[KnownUpload, ...]:
    others = [one for one in facts.uploads if one.outer_step != upload.outer_step]
    found = sorted([*others, upload], key=lambda one: one.outer_step)
    return tuple(found[-_KEPT_UPLOADS:])


def _missed(facts: Facts, outer_step: int | None, cause: str, at: float) -> dict[str, Any]:
    """Return the changes after a close for which nothing was sent.

    Before the miner's first upload, no close counts as missed.
    """
    if outer_step == facts.noted:
        return {}
    missed = facts.missed + facts.joined
    return {"noted": outer_step, "missed": missed, "missed_at": at, "missed_cause": cause}


def _settled(
    facts: Facts, outer_step: int | None, fate: str, cause: str, at: float
) -> dict[str, Any]:
    """Return the changes after a manifest was applied that decides the fate of an upload."""
    if outer_step is None or fate == TOO_EARLY:
        return {"silent": ""}
    if fate == MISSED:
        why = "not sent: the upload was not written before the outer step was over"
        if facts.silent:
            why = f"silent: the {facts.silent} did not answer at the close"
        elif facts.heard != outer_step:
            why = "not ready: it did not hold the weights of that outer step at the close"
            if at - (facts.started or 0.0) < (facts.round_seconds or 0.0):
                why = "not running: the close came while this miner was not there"
        return {"silent": "", **_missed(facts, outer_step, why, at)}
    known = [one for one in facts.uploads if one.outer_step == outer_step]
    upload = known[0] if known else KnownUpload(outer_step, at)
    upload = replace(upload, fate=fate, fate_at=at, cause=cause)
    return {"silent": "", "joined": True, "uploads": _kept(facts, upload)}


def _whole(value: object, otherwise: _T) -> int | _T:
    number = finite(value)
    return otherwise if number is None else int(number)
