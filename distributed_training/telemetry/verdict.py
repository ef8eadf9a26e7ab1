"""Give a verdict on a miner: whether its work counts, and if not, why.

Only :data:`TABLE` has the words, sentences and remedies. The log, the dashboard, the metric,
``dt-status``, the doctor and the webhook all call :func:`judge`, which is a pure function of
:class:`Facts` and the time. It returns the :class:`Judgement` of the first row that applies.

A fact is used only during its lifetime; afterwards it counts as unknown, because it may have
changed. The verdict says that an upload counts, or does not count, only if the validator must have
found the same. All limits come from the network's file, and none is learned.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TypeVar

from distributed_training.protocol.lines import counted
from distributed_training.protocol.network_report import span
from distributed_training.telemetry.facts import (
    MERGED,
    OFFLINE_AFTER,
    REFUSED,
    SETTINGS,
    SILENT_AFTER,
    Disk,
    Fact,
    Facts,
    KnownUpload,
    Launch,
)

# --- lifetimes of facts, in seconds ---------------------------------------------------------------

LOOK_LIFE = 300.0  # for the miner's own facts, which it writes every 15 s between micro-batches
ASKED_LIFE = 1200.0  # for a difference from the network's file, which is compared with ours often
CHAIN_LIFE = 7200.0  # for the figures that the registry or the chain has about this miner
MACHINE_LIFE = 120.0  # for facts about the disk and the processes
FATE_ROUNDS = 2  # round periods for which the fate of an upload is used
_LATE_ROUNDS = 3  # round periods that a newcomer's first upload may take
_CLOCK_STEP = 5.0  # a fact that is further in the future was written before the clock was set back
_FIRST_STEP = 1800.0  # the longest time for compilation, for loading weights and for a first step

NOT_RUNNING, MUST_ACT = 3, 1  # exit statuses of dt-status; 3 has the meaning of systemctl's
_T = TypeVar("_T")


class Verdict(StrEnum):
    """All verdicts, in the words that an operator reads."""

    STARTING = "starting"
    CANNOT_START = "cannot start"
    STOPPED = "stopped"
    STUCK = "stuck"
    DISK_FULL = "disk full"
    NO_CONNECTION = "no connection"
    UNKNOWN = "unknown"
    NOT_REGISTERED = "not registered"
    OTHER_VERSION = "other version"
    BEHIND = "behind"
    MISSED = "missed a close"
    REFUSED = "refused"
    WAITING = "waiting"
    COUNTS = "counts"
    EARNING = "earning"  # only if a chain pays


class Level(StrEnum):
    """The colour of a verdict; ``BAD`` means that the operator must act."""

    GOOD, WAIT, BAD, IDLE = "good", "wait", "bad", "idle"  # green, orange, red, grey


@dataclass(frozen=True)
class Judgement:
    """The verdict, its cause, and the operator's next action.

    Attributes:
        cause: One sentence.
        remedy: Empty, or one command or setting.
        counts: Whether the newest upload that a manifest names counts; None: not known.
        status: The exit status of ``dt-status``.
        alert: The trouble in :mod:`.notify` that this verdict reports; empty if there is none.
        row: The number of the row in the table that applied. Later rows were not checked.
    """

    verdict: Verdict
    cause: str
    remedy: str = ""
    level: Level = Level.WAIT
    counts: bool | None = None
    status: int = 0
    alert: str = ""
    row: int = 0

    @property
    def bad(self) -> bool:
        """Return whether the operator must act."""
        return self.level is Level.BAD

    @property
    def words(self) -> str:
        """The cause and the remedy in one line."""
        return f"{self.cause}; {self.remedy}" if self.remedy else self.cause


@dataclass(frozen=True)
class Row:
    """A row of the table; if ``holds`` returns a true value, the verdict is ``word``.

    ``cause`` and ``remedy`` are templates that are filled from a :class:`_Seen`. If the remedy of a
    red row is empty, the row becomes orange, because there is nothing to do.
    """

    word: Verdict
    holds: Callable[[_Seen], object]
    cause: str
    remedy: str = ""
    level: Level = Level.WAIT
    alert: str = ""


def judge(facts: Facts, now: float) -> Judgement:
    """Return the verdict at ``now`` (Unix seconds), which the first row that applies gives."""
    seen = _Seen(facts, now)
    number, row = next((n, row) for n, row in enumerate(TABLE) if row.holds(seen))
    cause, remedy = (text.format(s=seen) for text in (row.cause, row.remedy))
    nothing = row.level is Level.BAD and not remedy
    level = Level.WAIT if nothing else row.level
    status = {Level.BAD: MUST_ACT, Level.IDLE: NOT_RUNNING}.get(level, 0)
    if row.word is Verdict.STOPPED:
        status = NOT_RUNNING
    alert = "" if nothing else row.alert
    counts = None if row.alert in ("start", "stop") else seen.counts
    return Judgement(row.word, cause, remedy, level, counts, status, alert, number)


def hides(judgement: Judgement, alert: str) -> bool:
    """Return whether some rows with this alert were not checked, so that it may still apply."""
    return any(row.alert == alert for row in TABLE[judgement.row + 1 :])


# --- remedies -------------------------------------------------------------------------------------

_CONTINUES = "training continues, and uploads follow by themselves"
_TELL = f"tell the founder, who may not know it yet; {_CONTINUES}"
_TEACH = "read some of the text that this miner trains on: it may be damaged, or unlike the "
_TEACH += "network's; if this happens twice, ask the founder"
_AGAIN = "if this happens twice, ask the founder"
#: What the operator should do, keyed by the beginning of the cause for which an upload does not
#: count. The remedy is empty if the content of the upload goes into the next upload.
REMEDIES: Mapping[str, str] = {
    # --- the validator's causes
    "worse": _TEACH,
    "spoiler": _TEACH,
    "copy": "give each miner a hotkey and a --neuron.run_folder of its own; if it has them, ask "
    "the founder",
    "late": "free this machine's link to the store (dt-doctor measures it); if this happens twice, "
    "ask the founder for a longer round.grace",
    "damaged": "install the version that the network runs; if this happens twice, test this "
    "machine's memory and disk",
    "not-judged": "",
    "not judged": "",
    # --- the network's causes
    "void": "",
    "the network went back": "",
    # --- nothing was sent
    "blocked": "free this machine for more inner steps between two closes, or ask the founder for "
    "longer rounds",
    "no room": "free the disk of --neuron.run_folder",
    "not running": "let it run over the closes: pm2 startup and pm2 save start it with its machine",
    "silent": "tell the founder if this lasts",
    "not ready": "see the line of the log about outer steps that are not taken over",
    "not sent": "run dt-doctor, which checks link, keys and disk",
}
_CLOSED = "connection refused"
_REFUSES = re.compile(r"the store refused this|does not accept|expelled|not registered")
#: A remedy begins with one of these verbs, after the last colon of a line that also has a cause and
#: a consequence.
_REMEDY = re.compile(
    r"(ask|btcli|check|copy|correct|create|free|get|give|install|leave|lower|mkdir|mount|move|name|"
    r"put|raise|register|restart|run|save|see|set|start|stop|update|use|wait|write)\b"
)


def split(text: str) -> tuple[str, str]:
    """Return the cause and the remedy in a line; the remedy may be empty."""
    cause, _, remedy = text.rpartition(": ")
    return (cause, remedy) if cause and _REMEDY.match(remedy) else (text, "")


def remedy_of(cause: str) -> str:
    """Return the remedy for an upload that does not count or was not sent."""
    own = split(cause)[1]
    found = next((name for name in REMEDIES if cause.startswith(name)), "")
    if found == "not sent" and _CLOSED in cause:
        return _TELL
    if found in ("", "not sent") and (own or _REFUSES.search(cause)):
        return own or "ask the founder why the store refuses this member; training continues"
    return REMEDIES.get(found, _AGAIN)


# --- the facts at one moment ----------------------------------------------------------------------


class _Seconds(float):
    """A number of seconds that a template shows in words."""

    def __format__(self, spec: str) -> str:
        return span(self)


def _because(text: str) -> str:
    return f" ({text})" if text else ""


class _Seen:
    """The facts that are still valid at ``now``, in the form and the words that the table uses."""

    def __init__(self, facts: Facts, now: float) -> None:
        self.facts, self.now, looked = facts, now, facts.looked
        self.period = facts.round_seconds or math.inf
        self.chain = "chain" if facts.pays else "registry"
        self.launch = facts.launch or Launch("running")
        self.state = self.launch.state
        self.gone = self._value(facts.gone, MACHINE_LIFE)
        self.disk = self._value(facts.disk, MACHINE_LIFE) or Disk(0.0, 0.0)
        self.registered = self._value(facts.registered, CHAIN_LIFE)
        self.incentive = self._value(facts.incentive, CHAIN_LIFE) if facts.pays else None
        self.quiet = self._since(looked)  # how long the miner has written no facts
        self.behind = self._since(facts.behind_since)
        # Count the silence of the registry and the store up to the miner's last check, because
        # nobody has written down whether they answered later.
        silent = facts.store_silent_since
        known = looked is not None and facts.chain_at is not None
        self.chain_away = (looked or 0.0) - (facts.chain_at or 0.0) if known else 0.0
        self.store_away = (looked or 0.0) - silent if known and silent is not None else 0.0
        self.both = min(self.chain_away, self.store_away)
        self.silence = _Seconds(self.quiet + self.both)
        self.gate = counted(facts.gate, "close")
        self.late = self._since(facts.started) > _LATE_ROUNDS * self.period
        self._see_process(self.launch)
        self._see_steps()
        self._see_network()
        self._see_uploads()

    def _value(self, fact: Fact[_T] | None, life: float) -> _T | None:
        """Return a fact's value, or None if it is older than ``life`` or from the future."""
        if fact is None or not -_CLOCK_STEP <= self.now - fact.at <= life:
            return None
        return fact.value

    def _since(self, at: float | None) -> _Seconds:
        return _Seconds(0.0 if at is None else self.now - at)

    def _see_process(self, launch: Launch) -> None:
        """Describe how the start or the end went, and the free disk space."""
        ends = {"stopping": "it is stopping", "stopped": "it was stopped"}.get(self.state)
        how = ": ".join(filter(None, (launch.stopped_by, launch.text)))
        self.ended = f"{ends}{_because(how)}" if ends else ""
        self.refusal, remedy = split(launch.text or "no cause given")
        self.then = f"{remedy}; " if remedy else ""
        again, number = launch.next_try_at, launch.attempt
        when = "" if again is None else f", next try in {span(max(0.0, again - self.now))}"
        self.attempt = f" (attempt {number}{when})" if number else ""
        if self.state == "starting":
            self.attempt = f" (attempt {number + 1} is under way)"
        self.stage = launch.stage or "the ranks are being started"
        if (left := launch.seconds_left(self.now)) is not None:
            self.stage += f", {span(left)} left"
        then = "; then it trains by itself"
        if number:
            then = f" (attempt {number + 1}; the one before was refused: {launch.text})"
        self.stage += then
        free, needed = self.disk.free / 1e9, self.disk.needed / 1e9
        self.room = f"{free:.1f} GB are free; upload, checkpoint and reserve take {needed:.1f} GB"

    def _see_steps(self) -> None:
        """Find how long there has been no inner step, and how long a step may take."""
        facts, step = self.facts, self.facts.step
        self.trains = facts.mode in ("starting", "training")
        self.has_trained = self.trains and step is not None
        began = (facts.started, facts.mode_since, None if step is None else step.at)
        # Rounds and the loading of weights block the loop, so count from their end.
        self.still = self._since(max((at for at in began if at is not None), default=None))
        usual = facts.step_seconds or 0.0
        self.step_limit = _FIRST_STEP if step is None else max(120.0, 5 * usual)

    def _see_network(self) -> None:
        """Describe the state of the link, the registry, the store and the network's file."""
        facts = self.facts
        # A refused connection means that a machine answers, but no program listens on its port.
        refused = _CLOSED in facts.chain_trouble + facts.store_trouble
        self.their_fault = refused and not facts.pays
        self.chain_silence = span(self.quiet + self.chain_away) + _because(facts.chain_trouble)
        self.store_silence = span(self.quiet + self.store_away) + _because(facts.store_trouble)
        passed = facts.missed_until(self.now)  # including closes that the miner has not heard of
        closes = counted(passed, "close has", "closes have")
        self.unused = f"{closes} passed without an upload of this miner"
        if not passed:
            self.unused = "no close was missed"
        self.differs = facts.forked or self._value(facts.other_version, ASKED_LIFE)
        self.version, remedy = split(self.differs or "")
        self.version_remedy = remedy or "ask the founder which one holds"

    def _see_uploads(self) -> None:
        """Find the outcome of the last upload, or the reason why there is none."""
        facts, uploads = self.facts, self.facts.uploads
        life, named = FATE_ROUNDS * self.period, [one for one in uploads if one.fate]
        # The last upload that a manifest has named, unless that was too long ago.
        recent = [one for one in named if self.now - one.fate_at <= life]
        self.last = last = recent[-1] if recent else KnownUpload(0, 0.0)
        self.passed = MERGED if last.fate == MERGED else "accepted"
        # Whether that upload counts; None if that is not known. An upload that is carried over was
        # accepted, although it gained too little to be merged now.
        carried = last.fate != REFUSED and last.cause.startswith("carried over")
        self.counts = (last.fate == MERGED or carried) if last.fate else None
        self.of = f"outer step {last.outer_step}{_because(last.cause)}"
        self.remedy = remedy_of(last.cause)
        because = _because(facts.missed_cause)
        self.missed = ("close" if facts.missed == 1 else f"{facts.missed} closes") + because
        self.missed_remedy = remedy_of(facts.missed_cause or "not sent")
        self.running = f"{span(self._since(facts.started))} since the start{because}"
        self.newest = uploads[-1].outer_step if uploads else 0
        # Whether the update that decides about the newest upload may still be coming.
        network = facts.network_step
        self.awaited = network is not None and self.newest >= min(network, facts.outer_step or 0)
        ever = max((one.fate_at for one in named), default=None)
        self.unnamed = "yet" if ever is None else f"for {span(self.now - ever)}"


# --- the table ------------------------------------------------------------------------------------

V = Verdict
_good, _idle = partial(Row, level=Level.GOOD), partial(Row, level=Level.IDLE)
_bad = partial(Row, level=Level.BAD, alert="counts")

#: The first row that applies gives the verdict, and the last row always applies.
TABLE: tuple[Row, ...] = (
    # --- the process
    Row(V.STARTING, lambda s: s.state == "starting" and s.launch.attempt < 2,
        "it is not ready yet: {s.stage}"),
    # From the second refusal on, this row applies even during an attempt. Otherwise the verdict
    # would change with each attempt.
    _bad(V.CANNOT_START, lambda s: s.state in ("starting", "refused"), "{s.refusal}{s.attempt}",
         "{s.then}after a change of .env or a setting: pm2 restart", alert="start"),
    _bad(V.CANNOT_START, lambda s: s.state == "stopped" and s.launch.stopped_by == SETTINGS,
         "{s.refusal}", "{s.then}then pm2 start app.config.js", alert="start"),
    _idle(V.STOPPED, lambda s: s.ended and s.launch.asked, "{s.ended}",
          "start it again when it is to train (under pm2: pm2 start app.config.js)"),
    _bad(V.STOPPED, lambda s: s.ended and s.launch.stopped_by.startswith("SIGKILL"), "{s.ended}",
         "pm2 resurrect, or pm2 start app.config.js; dmesg -T shows whether memory ran out",
         alert="stop"),
    _bad(V.STOPPED, lambda s: s.ended, "{s.ended}", "the end of its log names the cause",
         alert="stop"),
    _bad(V.STOPPED, lambda s: s.gone, "none of its processes runs, and nobody asked it to stop",
         "pm2 status, then the end of its log", alert="stop"),
    # --- its machine
    _bad(V.DISK_FULL, lambda s: s.disk.free < s.disk.needed,
         "{s.room}, so nothing is uploaded or saved, and training ends when there is no room for "
         "more text", "free the disk of --neuron.run_folder", alert="disk"),
    _idle(V.UNKNOWN, lambda s: s.facts.looked is None and s.facts.launch is None,
          "no miner has written anything here yet"),
    Row(V.STARTING, lambda s: s.facts.looked is None, "the miner has written nothing yet"),
    Row(V.UNKNOWN, lambda s: s.quiet < -_CLOCK_STEP,
        "the miner's facts have times in the future, so this machine's clock was set back"),
    Row(V.STARTING, lambda s: LOOK_LIFE < s.quiet <= _FIRST_STEP and not s.has_trained,
        "the miner has written nothing for {s.quiet}, as while it compiles or loads weights"),
    _bad(V.STUCK, lambda s: s.quiet > LOOK_LIFE, "the miner has written nothing for {s.quiet}",
         "the end of its log tells why", alert="stuck"),
    _bad(V.STUCK, lambda s: s.trains and s.still > s.step_limit,
         "no inner step for {s.still}", "the end of its log tells why", alert="stuck"),
    # --- its link
    _bad(V.NO_CONNECTION, lambda s: s.both > OFFLINE_AFTER and s.their_fault,
         "{s.chain} and store have not answered for {s.silence} (connection refused: their machine "
         "answers, so this one's link works); {s.unused}", _TELL, alert="silent"),
    _bad(V.NO_CONNECTION, lambda s: s.both > OFFLINE_AFTER,
         "{s.chain} and store have not answered for {s.silence}: this machine's link; {s.unused}",
         f"check this machine's network; {_CONTINUES}", alert="silent"),
    _bad(V.NO_CONNECTION, lambda s: s.chain_away > SILENT_AFTER,
         "the {s.chain} has not answered for {s.chain_silence}; {s.unused}", _TELL, alert="silent"),
    _bad(V.NO_CONNECTION, lambda s: s.store_away > SILENT_AFTER,
         "the store has not answered for {s.store_silence}; {s.unused}", _TELL, alert="silent"),
    # --- the network
    _bad(V.NOT_REGISTERED, lambda s: s.registered is False and s.facts.pays,
         "the chain does not show this hotkey", "register it again, the miner continues by itself"),
    _bad(V.NOT_REGISTERED, lambda s: s.registered is False,
         "the registry does not list this hotkey, so nothing that it sends counts",
         "ask the founder whether it was expelled; once it is listed again, the miner continues by "
         "itself"),
    _bad(V.OTHER_VERSION, lambda s: s.differs, "{s.version}", "{s.version_remedy}"),
    _bad(V.BEHIND, lambda s: s.behind > s.period,
         "the network has been at a later outer step for {s.behind}", REMEDIES["not ready"]),
    Row(V.WAITING, lambda s: s.facts.gate,
        "no outer step after {s.gate}: no half of the uploads passes the held-out text; what they "
        "held goes into the next", "the registry's page says more"),
    # --- its uploads
    _bad(V.MISSED, lambda s: s.facts.missed, "nothing was sent for the last {s.missed}",
         "{s.missed_remedy}"),
    Row(V.WAITING, lambda s: not s.facts.uploads and not s.late,
        "nothing was uploaded in the {s.running}: that is normal before the first close at which "
        "it has enough inner steps"),
    _bad(V.MISSED, lambda s: not s.facts.uploads, "nothing was uploaded in the {s.running}",
         "{s.missed_remedy}"),
    # The validator may have refused outer steps, or may be waiting for more uploads. A member
    # cannot change that.
    Row(V.WAITING, lambda s: s.counts is None and s.awaited,
        "the upload of outer step {s.newest} waits for the validator's next update"),
    Row(V.WAITING, lambda s: s.counts is None and not s.late,
        "no manifest has named an upload of this miner {s.unnamed}"),
    _bad(V.WAITING, lambda s: s.counts is None,
         "no manifest has named an upload of this miner {s.unnamed}",
         "see on the registry's page whether the validator runs"),
    _bad(V.MISSED, lambda s: not s.counts and s.last.cause.startswith("not sent"),
         "nothing was sent for the close of {s.of}", "{s.remedy}"),
    _bad(V.REFUSED, lambda s: s.last.fate == REFUSED, "the validator refused the upload of {s.of}",
         "{s.remedy}"),
    Row(V.WAITING, lambda s: not s.counts and not s.remedy,
        "the upload of {s.of} was not merged; what it held goes into the next"),
    _bad(V.REFUSED, lambda s: not s.counts,
         "the upload of {s.of} was not merged; what it held goes into the next", "{s.remedy}"),
    _good(V.EARNING, lambda s: s.incentive,
          "the upload of {s.of} was {s.passed}, and the chain pays: incentive {s.incentive:.2g}"),
    _good(V.COUNTS, lambda s: s.facts.pays,
          "the upload of {s.of} was {s.passed}; validators pay for it hours later"),
    _good(V.COUNTS, lambda s: True, "the upload of {s.of} was {s.passed}"),
)  # fmt: skip
