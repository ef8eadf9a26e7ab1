"""Report how the network is doing: to the registry's page, the metrics file and the events.

All three are made from the same :class:`NetworkReport`, so they do not differ. A registry that is
slow or down delays the validator by at most two seconds, or at a stop twenty, and the next report
repeats everything.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil

from distributed_training import __version__
from distributed_training.chain.base import Chain, ChainError
from distributed_training.common.backoff import Throttle
from distributed_training.common.files import free_bytes
from distributed_training.protocol.network_report import (
    LONGEST_CAUSE,
    LONGEST_TEXT,
    MOST_CAUSES,
    MOST_DOMAINS,
    Answer,
    MemberReport,
    NetworkReport,
    RoundReport,
    judge_network,
    printable,
)
from distributed_training.telemetry import MetricsFile
from distributed_training.validator.errands import begun
from distributed_training.validator.standings import Standings

log = logging.getLogger(__name__)

EVERY = 300.0  # seconds between two reports if nothing happens
# Judging one upload, or reading an outer step's text, may take this long.
_LONGEST_SILENCE = 3 * EVERY
_PATIENCE = 2.0  # seconds to wait for the registry before the validator continues
_LAST_PATIENCE = 10.0  # seconds to wait for each of the last two reports at a stop


@dataclass(kw_only=True)
class RoundReporter:
    """Report on the network as the validator last described it.

    ``least``: the fewest miners that a round needs; ``round_seconds``: the longest time that a
    round and its publication take.
    """

    chain: Chain
    standings: Standings
    record: Callable[..., None]
    least: int
    round_seconds: float
    run_folder: Path

    def __post_init__(self) -> None:
        self.metrics = MetricsFile(self.run_folder / "metrics.prom")
        self.metrics.registry.labelled("build_info", "version", {__version__: 1.0})
        self._due = Throttle(EVERY)
        self._now: dict[str, Any] = {}
        self._sent: Future[None] | None = None

    def keep_up(self) -> None:
        """Write metrics, and report again if a report is due."""
        if self._due():
            self.report(**self._now)
        else:
            self.metrics.write(lambda: self._measure(self._make(**self._now)))

    def report(self, **now: Any) -> None:
        """Write events and metrics, and send the report; ``now``: see :meth:`_make`."""
        self._now = now
        self._due()
        report = self._make(**now)
        self.metrics.write(partial(self._measure, report), at_once=True)
        verdict = judge_network(report, time.time())
        self.record(
            "network",
            verdict=verdict.word,
            words=verdict.words,
            level=verdict.kind,
            next_report=report.next_report,
        )
        stopped = report.phase == "stopped"
        if self._sent is not None and stopped:
            wait([self._sent], timeout=_LAST_PATIENCE)
        if self._sent is None or self._sent.done():
            self._sent = begun(partial(self._send, report))
        wait([self._sent], timeout=_LAST_PATIENCE if stopped else _PATIENCE)

    def _send(self, report: NetworkReport) -> None:
        try:
            self.chain.report(report)
        except ChainError as error:
            log.info("The chain did not accept the report on the network (%s)", error)

    def _make(
        self,
        *,
        phase: Literal["starting", "waiting", "round", "finished", "stopped"],
        reason: str,
        losses: Mapping[str, float],
        closes_at: float | None,
        **more: Any,
    ) -> NetworkReport:
        """Return a report on the network's current state.

        ``losses``: the losses by domain; ``closes_at``: time of the next close, in seconds since
        the epoch; ``more``: further fields of the report.
        """
        now, standings = time.time(), self.standings
        members: list[MemberReport] = []
        for uid, entry in sorted(standings.present().items()):
            answer: Answer = "new"
            if entry.missed or entry.uploaded is not None:
                answer = "silent" if entry.missed else "alive"
            score = max(0.0, entry.published)
            told = not score and sum(bool(m.cause) for m in members) < MOST_CAUSES
            uploaded = None if entry.uploaded is None else max(0, round(now - entry.uploaded))
            cause = printable(entry.cause, LONGEST_CAUSE) if told else ""
            members.append(MemberReport(uid, answer, uploaded, round(score, 6), cause))
        rounds = tuple(
            RoundReport(
                past.outer_step,
                max(0, round(now - past.ended)),
                round(past.seconds, 1),
                tuple(past.participants[:64]),
                past.tokens,
                past.fault,
                printable(past.detail, LONGEST_TEXT),
            )
            for past in standings.rounds
        )
        good = [past for past in standings.rounds if not past.fault][-2:]
        speed = None
        if len(good) == 2 and good[1].ended > good[0].ended:
            speed = round(good[1].tokens / (good[1].ended - good[0].ended), 1)
        left = None if closes_at is None else max(0.0, closes_at - now)
        return NetworkReport(
            **more,
            phase=phase,
            losses={printable(name, 100): loss for name, loss in [*losses.items()][:MOST_DOMAINS]},
            next_report=_LONGEST_SILENCE + (self.round_seconds if phase == "round" else 0.0),
            next_round=left,
            least=self.least,
            good_rounds=standings.successful_rounds,
            failed_rounds=standings.failed_rounds,
            tokens_per_second=speed,
            reason=printable(reason, LONGEST_TEXT),
            rounds=rounds,
            members=tuple(members),
        )

    def _measure(self, report: NetworkReport) -> None:
        registry, now = self.metrics.registry, time.time()
        verdict = judge_network(report, now)
        left = report.next_round
        memory = disk = None
        # A process may end while its memory is being read.
        with suppress(OSError, psutil.Error):
            disk = free_bytes(self.run_folder)
            this = psutil.Process()
            memory = sum(p.memory_info().rss for p in (this, *this.children(recursive=True)))
        for name, value in {
            # A finished network has no value here, so that no alert fires.
            "network_training": None if verdict.kind == "idle" else float(verdict.kind == "good"),
            "network_gate": float(verdict.word == "gate"),
            "network_outer_step": report.outer_step,
            "network_members": len(report.members),
            "network_members_alive": report.alive,
            "network_members_needed": report.least,
            "network_members_scored": sum(member.score > 0 for member in report.members),
            "network_next_round_timestamp_seconds": None if left is None else now + left,
            "network_tokens": report.tokens,
            "network_tokens_per_second": report.tokens_per_second,
            "chain_age_seconds": self.chain.age().total_seconds(),
            "disk_free_bytes": disk,
            "memory_bytes": memory,
        }.items():
            registry.set(name, value)
        registry.totals("chain", self.chain.counters())
