"""Keep the facts of a running miner, and report the verdict on it.

Rank 0 has an :class:`OwnFacts`. All events pass through it into ``events.jsonl``, and each event
updates its facts. At each check it adds what it measures and writes all facts to ``facts.json``,
from which other programs reach the same verdict. When the verdict changes, and otherwise once an
hour, it logs a line that begins with ``Verdict:``. It also records the verdict in events.
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
    OFFLINE_AFTER,
    Fact,
    Facts,
    fold,
    measure_disk,
)
from distributed_training.telemetry.verdict import Judgement, Verdict, judge

log = logging.getLogger(__name__)

_LOOK_EVERY = 15.0  # seconds between two checks
# Seconds between two events, and between two log lines, while the verdict stays the same.
_RECORD_EVERY, _LOG_EVERY = 300.0, 3600.0
_LOOKS = 20  # minimum number of checks in a round period


class OwnFacts:
    """The facts of one miner, and the verdict on it.

    Args:
        rules: Facts from the settings and from the network's file.
        measured: Returns what the miner sees of its network, keyed by the name of the fact. It is
            called at each check.
        write: Writes an event.
        folder: The run folder, where an earlier process may have left the outcome of its uploads.
        needed: Bytes of disk that an upload, a checkpoint and the reserve take.
        clocks: The steady clock and the Unix time.
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
        # All times in this class are from the steady clock, because the Unix time may be set.
        now, known = clocks.steady(), Facts.read(folder).moved(-self._ahead())
        self._facts = replace(
            rules,
            started=now,
            mode_since=now,
            uploads=known.uploads,
            missed=known.missed,
            missed_at=known.missed_at,
            missed_cause=known.missed_cause,
            joined=known.joined or bool(known.uploads),
        )
        every = min(_LOOK_EVERY, (rules.round_seconds or math.inf) / _LOOKS)
        self._look, self._record_again, self._log_again = (
            Throttle(seconds, clock=clocks.steady) for seconds in (every, _RECORD_EVERY, _LOG_EVERY)
        )
        self._judgement = Judgement(Verdict.UNKNOWN, "")

    def _ahead(self) -> float:
        """Return how many seconds the Unix time is ahead of the steady clock."""
        return self._clocks.unix() - self._clocks.steady()

    def record(self, kind: str, **fields: Any) -> None:
        """Write an event, and update the facts with it."""
        self._facts = fold(self._facts, {"kind": kind, **fields}, self._clocks.steady())
        self._write(kind, **fields)

    def compared(self, problem: str) -> None:
        """Note how the network's file differs from ours."""
        differs = Fact(problem, self._clocks.steady())
        self._facts = replace(self._facts, other_version=differs)

    @property
    def joined(self) -> bool:
        """Return whether an upload of this run folder was ever begun."""
        return self._facts.joined

    # --- the verdict ------------------------------------------------------------------------------

    def gather(self) -> Facts:
        """Return the facts as they are known now."""
        now, ahead, measured = self._clocks.steady(), self._ahead(), self._measured()
        known, at = self._facts, measured.get("chain_at")
        silent, other = known.silent, known.other_version
        if measured.get("store_silent_since") is not None:
            silent = silent or "store"
        elif other is not None:  # the store answers, so we would have noticed any change
            other = Fact(other.value, now)
        if at is None or now + ahead - at > OFFLINE_AFTER:
            silent = silent or ("chain" if known.pays else "registry")
        behind = (measured.get("network_step") or 0) > (known.outer_step or 0)
        since = (known.behind_since or now) if behind else None
        self._facts = replace(known, silent=silent, other_version=other, behind_since=since)
        disk = measure_disk(self._folder, self._needed, now + ahead)
        return replace(self._facts.moved(ahead), looked=now + ahead, disk=disk, **measured)

    def look(self) -> None:
        """Report the verdict if a report is due."""
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
        """Return 1.0 if the last judged upload counts, 0.0 if it does not; None if not known."""
        known = self._judgement.counts
        return None if known is None else float(known)
