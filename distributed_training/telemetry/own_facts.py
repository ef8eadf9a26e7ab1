"""Gather the facts of a running miner from the events that it records, and report its verdict.

Rank 0 has an :class:`OwnFacts`. All events pass through it into ``events.jsonl``, so this is the
one place that knows what became of each close: merged, refused, not merged, missed, or not judged
yet. At each look it writes ``facts.json``, from which others make the same verdict. It logs a line
that begins with ``Verdict:`` when the verdict changes and once an hour, and writes an event.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed_training.common.backoff import Clocks, Throttle
from distributed_training.common.files import write_state
from distributed_training.telemetry.facts import (
    FACTS_FILE,
    MISSED,
    OFFLINE_AFTER,
    TOO_EARLY,
    Fact,
    Facts,
    KnownUpload,
    measure_disk,
)
from distributed_training.telemetry.verdict import Judgement, Verdict, judge

log = logging.getLogger(__name__)

# Seconds between two looks, at which the metrics file is written, and between two events and two
# log lines while the verdict stays.
_LOOK_EVERY, _RECORD_EVERY, _LOG_EVERY = 15.0, 300.0, 3600.0
_LOOKS = 20  # looks in a round period, at least
_KEPT_UPLOADS = 3  # outer steps


class OwnFacts:
    """The facts of one miner, and the verdict on it.

    ``rules``: facts of the settings and the network's file. ``measured``: what it sees of its
    network, by the name of the fact, asked at each look. ``write``: writes an event. ``needed``:
    bytes of disk for an upload, a checkpoint and what stays free. ``folder``: the run folder, in
    which an earlier process left what became of its uploads.
    """

    def __init__(
        self,
        *,
        rules: Facts,
        measured: Callable[[], Mapping[str, Any]],
        write: Callable[..., None],
        folder: Path,
        needed: int = 0,
        clocks: Clocks = Clocks(),
    ) -> None:
        self._measured, self._write = measured, write
        self._folder, self._needed, self._clocks = folder, needed, clocks
        # All moments of this class are of the steady clock, since the other one may be set.
        now, known = clocks.steady(), Facts.read(folder).moved(-self._ahead())
        names = ("uploads", "missed", "missed_at", "missed_cause")
        kept = {name: getattr(known, name) for name in names}
        self._facts = replace(rules, started=now, mode_since=now, **kept)
        #: Whether an upload of this run folder was ever begun. Before that the miner can miss no
        #: close.
        self.joined = bool(known.uploads)
        self._noted = -1  # outer step for whose close it is known why nothing was sent
        self._heard = -1  # outer step of the last close that the miner could answer
        self._silent = ""  # what did not answer since the last outer step
        every = min(_LOOK_EVERY, (rules.round_seconds or math.inf) / _LOOKS)
        self._look, self._record_again, self._log_again = (
            Throttle(seconds, clock=clocks.steady) for seconds in (every, _RECORD_EVERY, _LOG_EVERY)
        )
        self._judgement = Judgement(Verdict.UNKNOWN, "")

    def _ahead(self) -> float:
        """Return the Unix time minus the steady one."""
        return self._clocks.unix() - self._clocks.steady()

    def _set(self, **facts: Any) -> None:
        self._facts = replace(self._facts, **facts)

    def record(self, kind: str, **fields: Any) -> None:
        """Write an event, and note what follows from it."""
        now = self._clocks.steady()
        match kind:
            case "step":
                self._set(step=Fact(fields["inner_step"], now), step_seconds=fields["seconds"])
            case "state":
                self._set(mode=fields["after"], mode_since=now)
            case "outer_step":
                self._set(outer_step=fields["outer_step"], behind_since=None)
            case "roll_back":
                self._set(outer_step=fields["outer_step"])
            case "close":
                self._heard = fields["outer_step"]
            case "fork":
                self._set(forked=fields["cause"])
            case "skipped":
                self._miss(fields["outer_step"], fields["cause"])
            case "publication":
                outer_step, _, serial = fields["revision"].partition(".")
                if serial != "0":  # progress, which nobody judges
                    self._sent(int(outer_step), fields["revision"], fields["reason"], now)
            case "round" if fields["ok"]:
                self._settle(fields["outer_step"], fields["fate"], fields["detail"], now)
        self._write(kind, **fields)

    def compared(self, problem: str) -> None:
        """Note how the network's file differs from ours."""
        self._set(other_version=Fact(problem, self._clocks.steady()))

    # --- what became of a close -------------------------------------------------------------------

    def _sent(self, outer_step: int, tag: str, problem: str, now: float) -> None:
        self.joined = True
        if problem:
            head = "" if problem.startswith(("void", "late")) else "not sent: "
            self._miss(outer_step, head + problem)
        else:
            self._keep(KnownUpload(outer_step, now, tag))
            self._set(missed=0, missed_cause="")

    def _keep(self, upload: KnownUpload) -> None:
        others = [one for one in self._facts.uploads if one.outer_step != upload.outer_step]
        found = sorted([*others, upload], key=lambda one: one.outer_step)
        self._set(uploads=tuple(found[-_KEPT_UPLOADS:]))

    def _miss(self, outer_step: int, cause: str) -> None:
        """Note why nothing was sent for a close; none is missed before the first upload."""
        if outer_step != self._noted:
            self._noted, missed = outer_step, self._facts.missed + self.joined
            self._set(missed=missed, missed_at=self._clocks.steady(), missed_cause=cause)

    def _settle(self, outer_step: int, fate: str, cause: str, now: float) -> None:
        """Note what the manifest that was just applied says of the upload before it."""
        silent, self._silent = self._silent, ""
        if fate == MISSED:
            why = "not sent: the upload was not written before the outer step was over"
            if silent:
                why = f"silent: the {silent} did not answer at the close"
            elif self._heard != outer_step:
                why = "not ready: it did not hold the weights of that outer step at the close"
                if now - (self._facts.started or 0.0) < (self._facts.round_seconds or 0.0):
                    why = "not running: the close came while this miner was not there"
            self._miss(outer_step, why)
        elif fate != TOO_EARLY:
            self.joined = True
            known = [one for one in self._facts.uploads if one.outer_step == outer_step]
            upload = known[0] if known else KnownUpload(outer_step, now)
            self._keep(replace(upload, fate=fate, fate_at=now, cause=cause))

    # --- the verdict ------------------------------------------------------------------------------

    def gather(self) -> Facts:
        """Return the facts as they are known now."""
        now, ahead, measured = self._clocks.steady(), self._ahead(), self._measured()
        known, old = self._facts, self._facts.other_version
        if measured.get("store_silent_since") is not None:
            self._silent = self._silent or "store"
        elif old is not None:  # the next look would have changed it
            self._set(other_version=Fact(old.value, now))
        if (at := measured.get("chain_at")) is None or now + ahead - at > OFFLINE_AFTER:
            self._silent = self._silent or ("chain" if known.pays else "registry")
        network = measured.get("network_step")
        behind = network is not None and network > (known.outer_step or 0)
        self._set(behind_since=(known.behind_since or now) if behind else None)
        disk = measure_disk(self._folder, self._needed, now + ahead)
        return replace(self._facts.moved(ahead), looked=now + ahead, disk=disk, **measured)

    def look(self) -> None:
        """Report the verdict, if it is time."""
        if not self._look():
            return
        facts = self.gather()
        lost = "dashboard and dt-status show older figures"
        write_state(self._folder / FACTS_FILE, facts, durable=False, lost=lost)
        found, before = judge(facts, self._clocks.unix()), self._judgement
        changed = (found.verdict, found.bad) != (before.verdict, before.bad)
        self._judgement = found
        if self._log_again() or changed:
            level = logging.WARNING if found.bad else logging.INFO
            log.log(level, "Verdict: %s", self.verdict)
        if self._record_again() or changed:
            paid = {"incentive": facts.incentive.value} if facts.pays and facts.incentive else {}
            verdict = found.verdict.value
            self._write("verdict", verdict=verdict, words=found.words, bad=found.bad, **paid)

    @property
    def verdict(self) -> str:
        """The last verdict, in words."""
        return ": ".join(filter(None, (self._judgement.verdict, self._judgement.words)))

    def counts(self) -> float | None:
        """Return 1.0 where the last upload that was judged counts, 0.0 where not; None: unknown."""
        known = self._judgement.counts
        return None if known is None else float(known)
