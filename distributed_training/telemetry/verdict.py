"""Judge a miner in one verdict: does its work count, and what is in the way if it does not.

Log, dashboard, metric, alert, ``dt-status`` and webhook all ask :func:`judge`, which is pure: from
:class:`Facts` and the time to a :class:`Judgement`. The miner writes its own facts to
``facts.json``; each reader adds its own observations.

A fact is true of one moment, and the network moves on. So a fact counts only during its life, and
anything that may have changed since then stays open: an upload counts, or does not, only where the
validator's code must find the same. Limits are those of the network's file, never learned ones.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from distributed_training.protocol.lines import counted
from distributed_training.protocol.network_report import span

FACTS_FILE = "facts.json"  # in the run folder

# --- lives, in seconds ----------------------------------------------------------------------------

#: The miner's own facts: it writes them every 15 s, and between two micro-batches.
LOOK_LIFE = 300.0
ASKED_LIFE = 1200.0  # the network's file, which is compared with ours at each look at the store
STANDING_LIFE = 7200.0  # the chain's figures of this miner
MACHINE_LIFE = 120.0  # disk, processes
FATE_ROUNDS = 2  # round periods: what a manifest says of an upload
#: Chain and store are silent for longer: offline.
OFFLINE_AFTER = 60.0
SILENT_AFTER = 120.0  # one of the two is
_LATE_ROUNDS = 3  # round periods in which a newcomer's first upload may be on its way
#: What stopped a miner whose settings were refused.
SETTINGS = "its settings"
#: Of a stop: nobody is asked to look after it, since torchrun starts all ranks again or says why.
TORCHRUN = "its ranks have ended; torchrun's log names the cause"
SCRIPT = "its script ended"  # that joined a network
#: How the stage of a start begins that waits until the chain shows its hotkey again.
UNREGISTERED = "not registered: "
_CLOCK_STEP = 5.0  # a fact of the future by more was written by another clock
_FIRST_STEP = 1800.0  # seconds, with its compilation; a load of weights holds the loop as well


class Verdict(StrEnum):
    """All verdicts, as an operator reads them."""

    # --- the process and its machine
    STARTING = "starting"
    CANNOT_START = "cannot start"
    STOPPED = "stopped"
    STUCK = "stuck"
    DISK_FULL = "disk full"
    OFFLINE = "offline"
    NETWORK_DOWN = "network down"
    REGISTRY_SILENT = "registry silent"
    STORE_SILENT = "store silent"
    UNKNOWN = "unknown"
    # --- the network
    NOT_REGISTERED = "not registered"
    OUTDATED = "network's file outdated"
    OTHER_VERSION = "other version"
    BEHIND = "behind"
    GATE = "gate"
    # --- the uploads
    REFUSED = "refused"
    NOT_MERGED = "not merged"
    MISSED = "missed a close"
    JOINING = "joining"
    NOT_JUDGED_YET = "not judged yet"
    COUNTS = "counts"
    # --- the pay, where a chain pays
    NOT_YET_PAID = "not yet paid"
    HARDLY_EARNING = "hardly earning"
    EARNING = "earning"


_T = TypeVar("_T")


@dataclass(frozen=True)
class Fact(Generic[_T]):
    """A value and the Unix seconds at which it was true."""

    value: _T
    at: float


@dataclass(frozen=True)
class Standing:
    """The chain's figures of one miner among the others.

    ``rank`` is 1 for the highest incentive of ``miners`` neurons without a validator's permit;
    equal ones share it. ``emission`` is per tempo, in the subnet's token. ``weights_block``: at
    which a validator last set weights, 0 for never.
    """

    incentive: float
    emission: float
    rank: int
    miners: int
    weights_block: int

    @property
    def least(self) -> float:
        """The incentive from which it is pay: a tenth of an equal share."""
        return 0.1 / max(1, self.miners)

    @property
    def words(self) -> str:
        # Four digits of nothing, and a rank among those who have nothing, say nothing.
        if self.incentive <= 0:
            return "incentive 0"
        amount = f"{self.incentive:.4f}" if self.incentive >= 0.00005 else f"{self.incentive:.1e}"
        words = f"incentive {amount}, rank {self.rank} of {self.miners} miners"
        # None by a registry.
        return words + (f", emission {self.emission:.4g} per tempo" if self.emission else "")


@dataclass(frozen=True)
class Place:
    """Where the network stands."""

    outer_step: int


@dataclass(frozen=True)
class Upload:
    """One complete upload of this miner.

    ``at``: Unix seconds, of its end. ``fate``: ``merged``, ``refused`` or ``kept``, once a manifest
    says so, at ``fate_at`` and for ``cause``.
    """

    outer_step: int
    at: float
    tag: str = ""
    fate: str = ""
    fate_at: float = 0.0
    cause: str = ""

    @property
    def word(self) -> str:
        """The fate as operators read it."""
        return {"kept": "not merged", "": "not judged yet"}.get(self.fate, self.fate)


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
        return self.stopped_by.startswith("signal") or self.stopped_by in (
            "finished",
            TORCHRUN,
            SCRIPT,
        )

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


@dataclass(frozen=True)
class Facts:
    """All facts that a verdict needs. None, empty: not known.

    Times are Unix seconds.
    """

    # --- the network's file
    pays: bool = True  # its chain pays; False: a registry's network, in which uploads count
    round_seconds: float | None = None  # from one close to the next
    # --- the miner, as it sees itself
    name: str = ""
    uid: int | None = None
    looked: float | None = None  # when it wrote these
    started: float | None = None  # when its ranks began to train
    mode: str = ""
    mode_since: float | None = None
    outer_step: int | None = None
    step: Fact[int] | None = None  # the last inner step
    step_seconds: float | None = None
    uploads: tuple[Upload, ...] = ()  # the newest of each outer step, oldest first
    missed: int = 0  # closes in a row for which nothing was sent, since the first upload
    missed_at: float = 0.0  # when the last of them was over
    missed_cause: str = ""
    sending: str = ""  # tag of the upload under way
    # --- the network, as the miner sees it
    block: Fact[int] | None = None  # the chain's; ``at``: its last answer
    registered: Fact[bool] | None = None
    standing: Fact[Standing] | None = None
    place: Fact[Place] | None = None
    behind_since: float | None = None  # since when the network is at a later outer step
    store_silent_since: float | None = None  # None: it answers
    store_trouble: str = ""  # why it does not answer
    chain_trouble: str = ""
    other_version: Fact[str] | None = None  # how the network's file differs from ours
    outdated: bool = False  # ours is the older one
    forked: str = ""  # there are two histories
    gate: int = 0  # closes in a row that the held-out text refused
    next_round: float | None = None  # the next close
    # --- what others see of the miner
    launch: Launch | None = None
    gone: Fact[bool] | None = None  # no process of it runs
    disk: Fact[Disk] | None = None

    def expected_round(self, now: float) -> float | None:
        """Return when the next round is expected: by the clock, where the chain is silent since."""
        due, period = self.next_round, self.round_seconds
        silent = self.block is not None and now - self.block.at > OFFLINE_AFTER
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
        known = max(self.missed_at, sent, self.started or 0.0)
        passed, before = (math.floor((at - due) / max(1.0, period)) + 1 for at in (now, known))
        return self.missed + max(0, passed - max(0, before))

    def to_json(self) -> str:
        """Return one JSON object, without numbers that are not finite."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(_finite(known), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Facts:
        """Read :meth:`to_json`'s text; leave out fields that are unknown or of another type."""
        try:
            found = json.loads(text, parse_int=_whole)
        except (ValueError, RecursionError):
            return cls()
        known = {}
        for name, adapter in _adapters().items() if isinstance(found, Mapping) else ():
            if name in found:
                try:
                    known[name] = adapter.validate_json(
                        json.dumps(found[name], allow_nan=False), strict=True
                    )
                except (ValidationError, ValueError):
                    continue
        return cls(**known)


@dataclass(frozen=True)
class Judgement:
    """The verdict, its cause, and the operator's next action.

    Attributes:
        cause: One sentence.
        remedy: Empty, or one command or setting.
        bad: Whether an operator must act.
        earns: Whether it earns now; None: not known.
        counts: Whether validators count the newest upload known to be complete; None: not known.
    """

    verdict: Verdict
    cause: str
    remedy: str = ""
    bad: bool = False
    earns: bool | None = False
    counts: bool | None = None

    @property
    def words(self) -> str:
        """Cause and remedy in one line."""
        return f"{self.cause}; {self.remedy}" if self.remedy else self.cause

    @property
    def level(self) -> str:
        """``good`` (green), ``wait`` (orange), ``bad`` (red) or ``idle`` (grey)."""
        if self.bad:
            return "bad"
        if self.verdict in (Verdict.STOPPED, Verdict.UNKNOWN):
            return "idle"
        return "good" if self.verdict in (Verdict.EARNING, Verdict.COUNTS) else "wait"


def judge(facts: Facts, now: float) -> Judgement:
    """Return the verdict at ``now``, in Unix seconds: the first thing in the way decides."""
    counts = _count(facts, now)
    known: dict[str, Any] = {}
    if (found := _of_process(facts, now)) is None:
        known = {"counts": counts.counts}
        found = _of_machine(facts, now) or _of_network(facts, now, counts)
    standing = _value(facts.standing, now, STANDING_LIFE)
    if not facts.pays or standing is None or standing.incentive <= 0 or found.verdict in _PAY:
        return replace(found, **known)
    cause = f"{found.cause}. Still paid for earlier scores: {standing.words}"
    waits = (
        found.verdict in (Verdict.NOT_JUDGED_YET, Verdict.GATE)
        and standing.incentive >= standing.least
    )
    return replace(found, **known, cause=cause, earns=waits or found.earns)


_PAY = (Verdict.EARNING, Verdict.HARDLY_EARNING, Verdict.NOT_YET_PAID)


def _value(fact: Fact[_T] | None, now: float, life: float) -> _T | None:
    """Return a fact's value, or None if it is older than its life, or of the future."""
    return fact.value if fact is not None and -_CLOCK_STEP <= now - fact.at <= life else None


# --- the process and its machine ------------------------------------------------------------------


_START_AGAIN = "start it again when it is to earn (under pm2: pm2 start app.config.js)"
_KILLED = "pm2 resurrect, or pm2 start app.config.js; dmesg -T tells whether memory ran out"
#: How a remedy begins, behind the last colon of our lines of one cause, consequence and remedy.
_REMEDY = re.compile(
    r"(ask|btcli|check|copy|correct|create|free|give|install|leave|lower|mkdir|mount|move|name|put|raise|"
    r"register|run|save|see|set|start|stop|update|use|wait|write)\b"
)


def _split(text: str) -> tuple[str, str]:
    """Return a line's cause and its remedy, which may be empty."""
    cause, _, remedy = text.rpartition(": ")
    return (cause, remedy) if cause and _REMEDY.match(remedy) else (text, "")


def _cannot_start(launch: Launch, when: str, then: str) -> Judgement:
    cause, remedy = _split(launch.text or "no cause given")
    remedy = f"{remedy}; {then}" if remedy else then
    return Judgement(Verdict.CANNOT_START, f"{cause}{when}", remedy, bad=True)


def _of_process(facts: Facts, now: float) -> Judgement | None:
    launch = facts.launch
    state = "" if launch is None else launch.state
    if launch is not None and state in ("stopped", "stopping"):
        if launch.stopped_by == SETTINGS and state == "stopped":
            return _cannot_start(launch, "", "then pm2 start app.config.js")
        how = ": ".join(filter(None, (launch.stopped_by, launch.text)))
        unasked = "the end of its log names the cause"
        unasked = _KILLED if launch.stopped_by.startswith("SIGKILL") else unasked
        cause = "it is stopping" if state == "stopping" else "it was stopped"
        return Judgement(
            Verdict.STOPPED,
            f"{cause} ({how})" if how else cause,
            _START_AGAIN if launch.asked else unasked,
            bad=not launch.asked,
        )
    if _value(facts.gone, now, MACHINE_LIFE):
        return Judgement(
            Verdict.STOPPED,
            "none of its processes runs, and nobody asked it to stop",
            "pm2 status, then the end of its log",
            bad=True,
        )
    if launch is not None and state == "refused":
        again = launch.next_try_at
        when = "" if again is None else f", next try in {span(max(0.0, again - now))}"
        tried = f" (attempt {launch.attempt}{when})" if launch.attempt else ""
        return _cannot_start(launch, tried, _RESTART)
    if launch is not None and state == "starting":
        if launch.stage.startswith(UNREGISTERED):
            cause, remedy = _split(launch.stage.removeprefix(UNREGISTERED).rpartition(" (")[0])
            return Judgement(Verdict.NOT_REGISTERED, cause, remedy, bad=True)
        if launch.attempt > 1:  # else the verdict would flip with each try
            return _cannot_start(launch, f" (attempt {launch.attempt + 1} is under way)", _RESTART)
        cause = f"it is not ready yet: {launch.stage or 'the ranks are being started'}"
        if (left := launch.seconds_left(now)) is not None:
            cause += f", {span(left)} left"
        if launch.attempt:
            cause += f" (attempt {launch.attempt + 1}; the one before was refused: {launch.text})"
        else:
            cause += "; then it trains by itself"
        return Judgement(Verdict.STARTING, cause, earns=None)
    return None


_RESTART = "after a change of .env or a setting: pm2 restart"


def _of_machine(facts: Facts, now: float) -> Judgement | None:
    disk = _value(facts.disk, now, MACHINE_LIFE)
    if disk is not None and disk.free < disk.needed:
        free, needed = disk.free / 1e9, disk.needed / 1e9
        return Judgement(
            Verdict.DISK_FULL,
            f"{free:.1f} GB are free; upload, checkpoint and reserve take {needed:.1f} GB, so "
            "nothing is uploaded or saved, and training ends when there is no room for its text",
            "free the disk of --neuron.run_folder",
            bad=True,
        )
    if facts.looked is None:
        return Judgement(Verdict.UNKNOWN, "the miner has written nothing yet", earns=None)
    silent = now - facts.looked
    if silent < -_CLOCK_STEP:
        cause = "what the miner wrote is of the future: this machine's clock was set back"
        return Judgement(Verdict.UNKNOWN, cause, earns=None)
    trains = facts.mode == "training"
    if silent > LOOK_LIFE:
        cause, remedy = f"the miner has written nothing for {span(silent)}", "the end of its log"
        if silent <= _FIRST_STEP and not (trains and facts.step is not None):
            cause += ", as while it compiles or loads weights"
            return Judgement(Verdict.UNKNOWN, cause, earns=None)
        return Judgement(Verdict.STUCK, cause, remedy, bad=True, earns=None)
    # Rounds and loads hold the loop: what comes after them has its own time.
    began, limit = [facts.started, facts.mode_since], _FIRST_STEP
    if facts.step is not None:
        began.append(facts.step.at)
        limit = max(120.0, 5 * (facts.step_seconds or 0.0))
    since = max((at for at in began if at is not None), default=now)
    if trains and now - since > limit:
        cause, remedy = f"no inner step for {span(now - since)}", "the end of its log tells why"
        return Judgement(Verdict.STUCK, cause, remedy, bad=True)
    return _of_link(facts, now)


def _of_link(facts: Facts, now: float) -> Judgement | None:
    """Say which of chain and store does not answer, and, if neither does, whose link it is."""
    chain = None if facts.block is None else facts.block.at
    store, looked = facts.store_silent_since, facts.looked
    # Until the miner's last look: later answers are not written yet.
    if chain is None or looked is None:
        return None
    if store is None or looked - max(chain, store) <= OFFLINE_AFTER:
        return _of_one(facts, now)
    name = "chain" if facts.pays else "registry"
    cause = f"{name} and store have not answered for {span(now - max(chain, store))}"
    if not facts.pays and _REFUSED in facts.chain_trouble + facts.store_trouble:
        cause += f" ({_REFUSED}: their machine answers, so this one's link works)"
        cause += _missed(facts, now)
        return Judgement(Verdict.NETWORK_DOWN, cause, _TELL, bad=True, earns=None)
    remedy = "check this machine's network; training continues, and uploads follow by themselves"
    cause += ": this machine's link" + _missed(facts, now)
    return Judgement(Verdict.OFFLINE, cause, remedy, bad=True, earns=None)


_REFUSED = "connection refused"
_TELL = "tell the founder, unless it is known; training continues, and uploads follow by themselves"


def _of_one(facts: Facts, now: float) -> Judgement | None:
    """Say that one of registry and store has not answered for long, so that no upload counts."""
    assert facts.block is not None and facts.looked is not None
    store = facts.store_silent_since
    name = "chain" if facts.pays else "registry"
    for who, verdict, since, why in (
        (name, Verdict.REGISTRY_SILENT, facts.block.at, facts.chain_trouble),
        ("store", Verdict.STORE_SILENT, now if store is None else store, facts.store_trouble),
    ):
        if facts.looked - since > SILENT_AFTER:
            cause = f"the {who} has not answered for {span(now - since)}"
            cause += (f" ({why})" if why else "") + _missed(facts, now)
            return Judgement(verdict, cause, _TELL, bad=True, earns=None)
    return None


def _missed(facts: Facts, now: float) -> str:
    passed = facts.missed_until(now)
    closes = counted(passed, "close has", "closes have")
    return (
        f"; {closes} passed without an upload of this miner" if passed else "; no close was missed"
    )


# --- whether uploads count ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Counts:
    """``counts``: None where it depends on what is not known."""

    counts: bool | None
    cause: str
    verdict: Verdict = Verdict.NOT_JUDGED_YET
    remedy: str = ""


_TEACH = "lower the learning rate, or read some of the text that this miner trains on: it may be "
_TEACH += "damaged, or unlike the network's; if this comes twice, ask the founder"
_AGAIN = "if this comes twice, ask the founder"
#: How the cause begins for which an upload does not count, and what the operator does about it;
#: empty: nothing, since what the upload held goes into the next one.
REMEDIES: Mapping[str, str] = {
    # --- the validator's causes
    "worse": _TEACH,
    "spoiler": _TEACH,
    "copy": "give each miner a hotkey and a --neuron.run_folder of its own; where it has them, ask "
    "the founder",
    "late": "free this machine's link to the store (dt-doctor measures it); if this comes twice, "
    "ask the founder for a longer round.grace",
    "damaged": "install the version that the network runs; if this comes twice, test this "
    "machine's memory and disk",
    "not-judged": "",
    "not judged": "",
    # --- of the network
    "void": "",
    "the network went back": "",
    # --- nothing was sent
    "blocked": "free this machine for more inner steps between two closes, or ask the founder for "
    "longer rounds",
    "no room": "free the disk of --neuron.run_folder",
    "not running": "let it run over the closes: pm2 startup and pm2 save start it with its machine",
    "silent": "tell the founder, if it lasts",
    "not ready": "see the line of the log on outer steps that are not taken over",
    "not sent": "run dt-doctor, which checks link, keys and disk",
}
_REFUSES = re.compile(r"the store refused this|does not accept|expelled|not registered")


def _remedy_of(cause: str) -> str:
    """Return what an operator does about an upload that does not count, or was not sent."""
    own = _split(cause)[1]
    found = next((name for name in REMEDIES if cause.startswith(name)), "")
    if found == "not sent" and _REFUSED in cause:
        return _TELL
    if found in ("", "not sent") and (own or _REFUSES.search(cause)):
        return own or "ask the founder why the store refuses this member; training continues"
    return REMEDIES.get(found, _AGAIN)


def _count(facts: Facts, now: float) -> _Counts:
    """Go by the last upload that a manifest names, as long as the next one may be awaited."""
    life = FATE_ROUNDS * (facts.round_seconds or math.inf)
    named = [upload for upload in facts.uploads if upload.fate and now - upload.fate_at <= life]
    if not named:
        ever = max((upload.fate_at for upload in facts.uploads if upload.fate), default=None)
        cause = "no manifest names an upload of this miner yet"
        if ever is not None:
            cause = f"no manifest has named an upload of this miner for {span(now - ever)}"
        return _Counts(None, cause, remedy="see on the registry's page whether the validator runs")
    last = named[-1]
    remedy = _remedy_of(last.cause)
    of = f"outer step {last.outer_step}" + (f" ({last.cause})" if last.cause else "")
    match last.fate:
        case "merged":
            return _Counts(True, f"the upload of {of} was merged")
        case "refused":
            cause = f"the validator refused the upload of {of}"
            return _Counts(False, cause, Verdict.REFUSED, remedy=remedy)
        case _ if last.cause.startswith("not sent"):
            cause = f"nothing was sent for the close of {of}"
            return _Counts(False, cause, Verdict.MISSED, remedy=remedy)
        case _ if last.cause.startswith("carried over"):  # accepted: it only was too short to tell
            return _Counts(True, f"the validator accepted the upload of {of}")
        case _:
            cause = f"the upload of {of} was not merged; what it held goes into the next"
            return _Counts(False, cause, Verdict.NOT_MERGED, remedy=remedy)


# --- the network and the pay ----------------------------------------------------------------------


def _of_network(facts: Facts, now: float, counts: _Counts) -> Judgement:
    if _value(facts.registered, now, STANDING_LIFE) is False:
        cause, remedy = "the chain does not show this hotkey", "register it again"
        if not facts.pays:
            cause = "the registry does not list this hotkey, so nothing that it sends counts"
            remedy = "ask the founder whether it was expelled; once it is listed again"
        return Judgement(
            Verdict.NOT_REGISTERED, cause, f"{remedy}, the miner continues by itself", bad=True
        )
    if facts.forked:
        return Judgement(Verdict.OTHER_VERSION, facts.forked, bad=True)
    if problem := _value(facts.other_version, now, ASKED_LIFE):
        verdict = Verdict.OUTDATED if facts.outdated else Verdict.OTHER_VERSION
        return Judgement(verdict, problem, bad=True)
    behind = 0.0 if facts.behind_since is None else now - facts.behind_since
    if behind > (facts.round_seconds or math.inf):
        return Judgement(
            Verdict.BEHIND,
            f"the network has been at a later outer step for {span(behind)}",
            "see the log's line on outer steps that are not taken over",
            bad=True,
        )
    if facts.gate:
        cause = f"no outer step after {counted(facts.gate, 'close')}: no half of the uploads"
        cause += " passes the held-out text; what they held goes into the next"
        return Judgement(Verdict.GATE, cause, "the registry's page says more")
    running = now - (facts.started if facts.started is not None else now)
    return _of_uploads(facts, counts, running) or _pay(facts, now, counts)


def _of_uploads(facts: Facts, counts: _Counts, running: float) -> Judgement | None:
    """Return the verdict where uploads do not count, or it is not known; None: they count."""
    late = running > _LATE_ROUNDS * (facts.round_seconds or math.inf)
    if facts.missed:
        last = "close" if facts.missed == 1 else f"{facts.missed} closes"
        cause = f"nothing was sent for the last {last}"
        remedy = _remedy_of(facts.missed_cause)
        cause += f" ({facts.missed_cause})" if facts.missed_cause else ""
        return Judgement(Verdict.MISSED, cause, remedy, bad=bool(remedy))
    if counts.counts is None and not facts.uploads:
        cause = f"nothing was uploaded in the {span(running)} since the start"
        cause += f" ({facts.missed_cause})" if facts.missed_cause else ""
        if late:
            remedy = _remedy_of(facts.missed_cause or "not sent")
            return Judgement(Verdict.JOINING, cause, remedy, bad=True)
        cause += ": that is normal before the first close at which it has enough inner steps"
        return Judgement(Verdict.JOINING, cause)
    newest, place = facts.uploads[-1].outer_step if facts.uploads else 0, facts.place
    # The update that says what became of it may be on its way.
    reached = min(place.value.outer_step, facts.outer_step or 0) if place is not None else math.inf
    if counts.counts is None and newest >= reached:
        # It gates, or waits for more uploads: nothing that a member could change.
        cause = f"the upload of outer step {newest} waits for the validator's next update"
        return Judgement(counts.verdict, cause)
    if counts.counts:
        return None
    remedy = counts.remedy if late or counts.counts is False else ""
    return Judgement(counts.verdict, counts.cause, remedy, bad=bool(remedy))


def _pay(facts: Facts, now: float, counts: _Counts) -> Judgement:
    """Return the verdict on a miner whose uploads count."""
    if not facts.pays:
        return Judgement(Verdict.COUNTS, counts.cause, earns=True)
    standing = _value(facts.standing, now, STANDING_LIFE)
    if standing is None:
        cause = f"{counts.cause}; what the chain pays for it is not known now"
        return Judgement(Verdict.UNKNOWN, cause, earns=None)
    if standing.incentive > 0:
        if standing.incentive < standing.least:
            cause = f"{standing.words}: below a tenth of an equal share ({standing.least:.1e})"
            return Judgement(Verdict.HARDLY_EARNING, cause)
        return Judgement(Verdict.EARNING, standing.words, earns=True)
    cause = "the newest upload is fine; validators pay for it hours later"
    return Judgement(Verdict.NOT_YET_PAID, cause)


@functools.cache
def _adapters() -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(Facts)
    return {field.name: TypeAdapter(hints[field.name]) for field in fields(Facts)}


def _whole(digits: str) -> int:
    if len(digits) > 18:  # beyond any figure of ours, and beyond exact floats
        raise ValueError("no figure of a miner")
    return int(digits)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
