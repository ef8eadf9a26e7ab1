"""Follow whether a miner's work counts: gather the facts of the verdict, report it on a change.

Validators judge a miner's uploads and write weights to the chain. The chain turns them into
*incentive*, the miner's share of the network's payments (0 to 1), and into *emission* per tempo.
The incentive follows hours behind the cause, so :mod:`distributed_training.telemetry.verdict` looks
first at what would make the next score zero.

:class:`Income` subscribes to the event stream. At each look it writes ``facts.json``, from which
others make the same verdict. It logs a line that begins with ``Income:`` when the verdict changes
and once an hour, writes an ``income`` event, and gives the metrics their figures.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from distributed_training.chain.base import Chain, ChainUnavailable, Neuron, find
from distributed_training.common.backoff import Clocks, Throttle
from distributed_training.common.files import write_state
from distributed_training.protocol.types import Base
from distributed_training.telemetry.verdict import (
    FACTS_FILE,
    OFFLINE_AFTER,
    Disk,
    Fact,
    Facts,
    Judgement,
    Place,
    Standing,
    Upload,
    Verdict,
    judge,
)

from . import events as ev
from .events import MinerState, Mode

log = logging.getLogger(__name__)

# In seconds: between two looks, as the metrics file is written; between two events and two lines
# while the verdict stays.
_LOOK_EVERY, _RECORD_EVERY, _LOG_EVERY = 15.0, 300.0, 3600.0
_LOOKS = 20  # in a round period, at the least
_MISSING_FOR = 300.0  # seconds in which a chain endpoint may leave this hotkey out
_KEPT_UPLOADS = 3  # outer steps


def standing(neurons: Sequence[Neuron], hotkey: str) -> Standing | None:
    """Return where ``hotkey`` stands; None if the chain does not show it."""
    me = find(neurons, hotkey)
    if me is None:
        return None
    # A miner with much stake has a permit too.
    miners = [n for n in neurons if not n.validator_permit or n is me]
    return Standing(
        incentive=me.incentive,
        emission=me.emission,
        rank=1 + sum(n.incentive > me.incentive for n in miners),
        miners=len(miners),
        weights_block=max((n.last_update for n in neurons if n.validator_permit), default=0),
    )


def with_uploads(rules: Facts, folder: Path) -> Facts:
    """Return ``rules`` with what an earlier process of this run folder knew of its uploads."""
    try:
        known = Facts.from_json((folder / FACTS_FILE).read_bytes())
    except OSError:
        return rules
    names = ("uploads", "missed", "missed_at", "missed_cause")
    return replace(rules, **{name: getattr(known, name) for name in names})


class Income:
    """Follow the verdict on one miner.

    ``rules``: facts of the network's file, and the uploads that the start found. ``measured``:
    further facts by name, asked at each look. ``needed``: bytes of disk for an upload, a
    checkpoint and what stays free. ``folder``: the run folder.
    """

    def __init__(
        self,
        *,
        hotkey: str,
        chain: Chain,
        rules: Facts,
        measured: Callable[[], Mapping[str, Any]],
        record: Callable[..., None],
        folder: Path,
        needed: int = 0,
        clocks: Clocks = Clocks(),
    ) -> None:
        self._hotkey = hotkey
        self._chain = chain
        self._measured = measured
        self._record = record
        self._folder = folder
        self._needed = needed
        self._clocks = clocks
        # All moments in here are steady, since the other clock may be set.
        self._began = self._seen_at = clocks.steady()
        self._facts = rules
        self._uploads = [
            replace(u, at=self._steady(u.at), fate_at=self._steady(u.fate_at))
            for u in rules.uploads
        ]
        #: Whether an upload of this run folder was ever begun: until then it can miss no close.
        self.joined = bool(rules.uploads)
        self._noted = -1  # the outer step of whose close it is known why nothing was sent
        self._heard = -1  # the outer step of the last close that it could answer
        self._silent = ""  # who did not answer since the last outer step
        self._step: tuple[int, float] | None = None
        self._mode, self._mode_since = Mode.TRAINING, self._began
        self._place: tuple[Place, float] | None = None
        self._other_version = Fact("", 0.0)
        self._behind_since: float | None = None
        self._look, self._record_again, self._log_again = (
            Throttle(every, clock=clocks.steady)
            for every in (
                min(_LOOK_EVERY, (rules.round_seconds or math.inf) / _LOOKS),
                _RECORD_EVERY,
                _LOG_EVERY,
            )
        )
        self._standing: Standing | None = None
        self._judgement = Judgement(Verdict.UNKNOWN, "", earns=None)

    def on_event(self, event: ev.Event, state: MinerState) -> None:
        now = self._clocks.steady()
        if state.mode is not self._mode:
            self._mode, self._mode_since = state.mode, now
        match event:
            case ev.InnerStepDone(report=report):
                self._step = report.inner_step, now
                self._facts = replace(self._facts, step_seconds=report.seconds)
            case ev.HeadSeen(outer_step=seen):
                known = self._place[0] if self._place else None
                self._place = known if known and known.outer_step == seen else Place(seen), now
                # The state is that before the event: right after a round ours may be ahead.
                if seen <= state.outer_step:
                    self._behind_since = None
                elif self._behind_since is None:
                    self._behind_since = now
            case ev.OuterStepEnded(committed=True):
                self._behind_since = None
                self._settle(state, now)
            case ev.NetworkCompared(problem=problem, outdated=outdated):
                self._other_version = Fact(problem, now)
                self._facts = replace(self._facts, outdated=outdated)
            case ev.ChainForked(cause=cause):
                self._facts = replace(self._facts, forked=cause)
            case ev.UploadWritten(close=close):
                tag = f"{close.outer_step}.{close.serial}"
                self._facts = replace(self._facts, sending=tag)
            case ev.CloseReached(close=close):
                self._heard = close.outer_step
            case ev.UploadSkipped(problem=problem, kind=kind):
                head = "no room: " if kind == "disk" else ""
                self._miss(state.outer_step, f"{head}{problem}")
            case ev.UploadEnded(outer_step=outer_step, serial=0):  # progress, which nobody judges
                self._sent(f"{outer_step}.0")
            case ev.UploadEnded(outer_step=outer_step, serial=serial, cause=problem):
                self._sent(f"{outer_step}.{serial}")
                self.joined = True
                if problem:
                    head = "" if problem.startswith(("void", "late")) else "not sent: "
                    self._miss(outer_step, head + problem)
                else:
                    self._add(Upload(outer_step, now, f"{outer_step}.{serial}"))
                    self._facts = replace(self._facts, missed=0, missed_cause="")
        if isinstance(event, ev.Tick) and self._look():
            self._report(self.gather(state))

    def _add(self, upload: Upload) -> None:
        others = [each for each in self._uploads if each.outer_step != upload.outer_step]
        self._uploads = sorted([*others, upload], key=lambda u: u.outer_step)[-_KEPT_UPLOADS:]

    def _sent(self, tag: str) -> None:
        if self._facts.sending == tag:
            self._facts = replace(self._facts, sending="")

    def _miss(self, outer_step: int, cause: str) -> None:
        """Note why nothing was sent for a close; none is missed before the first upload."""
        if outer_step != self._noted:
            self._noted, missed = outer_step, self._facts.missed + self.joined
            self._facts = replace(
                self._facts, missed=missed, missed_at=self._clocks.unix(), missed_cause=cause
            )

    def _settle(self, state: MinerState, now: float) -> None:
        """Note what the manifest that was just applied says of the upload before it."""
        update, silent = state.update, self._silent
        self._silent = ""
        if update is None:
            return
        if update.base is Base.KEPT and not update.cause:  # nothing was sent
            why = "not sent: the upload was not written before the outer step was over"
            if silent:
                why = f"silent: the {silent} did not answer at the close"
            elif self._heard != state.outer_step:
                why = "not ready: it did not hold the weights of that outer step at the close"
                if now - self._began < (self._facts.round_seconds or 0.0):
                    why = "not running: the close came while this miner was not there"
            if self.joined:
                self._miss(state.outer_step, why)
            return
        self.joined = True
        known = [each for each in self._uploads if each.outer_step == state.outer_step]
        upload = known[0] if known else Upload(state.outer_step, now)
        fate = update.base.value
        self._add(replace(upload, fate=fate, fate_at=now, cause=update.cause))

    def gather(self, state: MinerState) -> Facts:
        """Return the facts as they are known now."""
        now, chain = self._clocks.steady(), self._chain
        block = registered = paid = disk = None
        try:
            answered = self._unix(now - chain.age().total_seconds())
            self._standing = standing(chain.neurons(), self._hotkey)
            block = Fact(chain.block(), answered)
            if self._standing is not None:
                self._seen_at, paid = now, Fact(self._standing, answered)
            if self._standing is not None or now - self._seen_at > _MISSING_FOR:
                registered = Fact(self._standing is not None, answered)
        except ChainUnavailable:  # it has not answered once
            pass
        try:
            usage = shutil.disk_usage(self._folder)
            disk = Fact(Disk(usage.free, usage.total, self._needed), self._unix(now))
        except OSError:
            pass
        measured = self._measured()
        if measured.get("store_silent_since") is None:  # the next look would have changed it
            self._other_version = replace(self._other_version, at=now)
        self._facts = replace(
            self._facts,
            looked=self._unix(now),
            started=self._unix(self._began),
            mode=state.mode.value,
            mode_since=self._unix(self._mode_since),
            outer_step=state.outer_step,
            step=self._step and Fact(self._step[0], self._unix(self._step[1])),
            uploads=tuple(
                replace(u, at=self._unix(u.at), fate_at=self._unix(u.fate_at))
                for u in self._uploads
            ),
            block=block,
            registered=registered,
            standing=paid,
            place=self._place and Fact(self._place[0], self._unix(self._place[1])),
            behind_since=None if self._behind_since is None else self._unix(self._behind_since),
            other_version=replace(self._other_version, at=self._unix(self._other_version.at)),
            disk=disk,
            **measured,
        )
        if block is None or self._unix(now) - block.at > OFFLINE_AFTER:
            self._silent = self._silent or ("chain" if self._facts.pays else "registry")
        if self._facts.store_silent_since is not None:
            self._silent = self._silent or "store"
        return self._facts

    def _report(self, facts: Facts) -> None:
        write_state(
            self._folder / FACTS_FILE,
            facts,
            durable=False,
            lost="dashboard and dt-status show older figures",
        )
        found, before = judge(facts, self._clocks.unix()), self._judgement
        changed = (found.verdict, found.bad) != (before.verdict, before.bad)
        self._judgement = found
        if self._log_again() or changed:
            level = logging.WARNING if found.bad else logging.INFO
            log.log(level, "Income: %s: %s", found.verdict, found.words)
        if self._record_again() or changed:
            figures: dict[str, Any] = asdict(self._standing) if self._standing else {}
            told = {"verdict": found.verdict.value, "words": found.words, "bad": found.bad}
            self._record("income", **told, **figures)

    def _unix(self, moment: float) -> float:
        return moment - self._clocks.steady() + self._clocks.unix()

    def _steady(self, moment: float) -> float:
        return moment - self._clocks.unix() + self._clocks.steady()

    @property
    def verdict(self) -> str:
        """The last verdict, in words."""
        found = self._judgement
        return f"{found.verdict}: {found.words}" if found.words else str(found.verdict)

    def gauges(self) -> Mapping[str, Callable[[], float | None]]:
        """Return what measures each metric of this subject."""

        def of_standing(name: str) -> Callable[[], float | None]:
            return lambda: getattr(self._standing, name, None)

        return {
            "incentive": of_standing("incentive"),
            "emission": of_standing("emission"),
            "incentive_rank": of_standing("rank"),
            "weights_block": of_standing("weights_block"),
            "earning": lambda: self._judgement.earns,
        }
