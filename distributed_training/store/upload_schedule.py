"""When to take a snapshot for publication. Pure: no clock of its own, no I/O.

Three things pull: validators count a bucket as stale from an age on; a round closes soon and judges
what is published by then, while the round itself stops uploads; and uploads cost time (and, with
``--neuron.error_feedback upload``, direction), so ``--neuron.upload_steps`` bounds their frequency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

from distributed_training.protocol.types import PublicationReport, StepReport

from .gate import upload_due, upload_gate

_SMOOTHING = 0.3


@dataclass(frozen=True)
class Decision:
    """``snapshot``: take one at this step boundary. ``lines``: (level, text) for the log."""

    snapshot: bool
    lines: tuple[tuple[str, str], ...] = ()


class UploadSchedule:
    """Fed with each inner step and each publication report; times are of one clock,
    the caller's (a monotonic one, or setting the wall clock would move what is due).

    ``slack``: how long before a round or the age limit a publication should have ended.
    """

    def __init__(
        self,
        *,
        upload_steps: int,
        minimum_inner_step: int,
        age_limit: timedelta,
        slack: timedelta,
        published_at: float | None = None,
    ) -> None:
        self._every = max(upload_steps, 1)
        self._minimum = minimum_inner_step
        self._age_limit = age_limit.total_seconds()
        self._slack = slack.total_seconds()
        self.step_seconds: float | None = None
        self.upload_seconds: float | None = None  # snapshot and upload, measured
        self.published_at = published_at  # of the newest gradients.pt in the bucket
        self.next_round_at: float | None = None
        self._busy_since: float | None = None
        self._last: tuple[int, int] | None = None  # outer, inner step of the last snapshot
        self._steps_since = 0  # that snapshot, over rounds
        self._before: tuple[tuple[int, int] | None, int] = (
            None,
            0,
        )  # both, before it was asked for
        self._owed = False  # the next step asks, whatever the schedule says
        self._began: float | None = None  # the first step of this process
        self._warned: set[str] = set()

    def expect_round(self, at: float | None) -> None:
        """When the next round will be called, if known."""
        self.next_round_at = at

    def repo_age(self, now: float) -> float | None:
        """Seconds; None if nothing was published yet."""
        return None if self.published_at is None else max(0.0, now - self.published_at)

    @property
    def age_limit(self) -> float:
        """Seconds after which validators score a publication zero."""
        return self._age_limit

    def repo_age_line(self, now: float) -> str:
        age = self.repo_age(now)
        if age is None:
            return f"Repo age: nothing published yet (limit {self._age_limit:.0f}s)"
        return f"Repo age: {age:.0f}s of {self._age_limit:.0f}s"

    def finish_by(self, now: float) -> float | None:
        """The moment by which a new publication should have ended, None if nothing presses."""
        due = []
        if self._stale_at is not None:
            due.append(self._stale_at - self._slack)
        if self.next_round_at is not None and self.next_round_at > now:
            due.append(self.next_round_at - self._slack)
        return min(due) if due else None

    def step(self, report: StepReport, now: float) -> Decision:
        """After an inner step: whether it should end with a snapshot."""
        self.step_seconds = _mean(self.step_seconds, report.seconds)
        self._steps_since += 1
        if self._began is None:
            self._began = now
        lines = self._warnings(now)
        inner = report.inner_step
        regular = inner % self._every == 0
        if inner < self._minimum:
            blocked = upload_gate(inner_step=inner, minimum=self._minimum)
            if regular and blocked:
                lines.append(("warning", blocked))
            return Decision(False, tuple(lines))
        if report.skipped:
            return Decision(False, tuple(lines))
        if self._busy_since is not None:
            if regular:
                lines.append(("info", "Previous upload still in progress, skipping new upload"))
            return Decision(False, tuple(lines))
        due = upload_due(inner, upload_steps=self._every, minimum=self._minimum)
        early = self._last is not None and self._steps_since < self._every
        if due and (early or self._hold_back(now)):
            due = False
        if not due and self._enough_steps(inner) and self._last_chance(now):
            due = True
        due = due or self._owed
        if due:
            self._busy_since, self._owed = now, False
            self._before = self._last, self._steps_since
            self._last, self._steps_since = (report.outer_step, inner), 0
        return Decision(due, tuple(lines))

    def published(self, report: PublicationReport) -> None:
        """A publication ended, well or not. Only the one under way frees the way for the next."""
        if self._busy_since is not None and self._last is not None:
            last = (report.revision.outer_step, report.revision.inner_step)
            if last == self._last:  # not what a start found in the journal
                if report.ok:
                    took = max(report.finished_at - self._busy_since, report.seconds)
                    self.upload_seconds = _mean(self.upload_seconds, took)
                self._busy_since = None
        if report.ok:
            self.published_at = max(self.published_at or 0.0, report.finished_at)
            self._warned.clear()

    def cancelled(self, *, again: bool = False) -> None:
        """The snapshot asked for was not taken or not submitted, as if it had not been asked for;
        ``again``: the next step asks for one."""
        if self._busy_since is not None:
            self._last, steps = self._before
            self._steps_since += steps
            self._owed = again
        self._busy_since = None

    # --- inside ---------------------------------------------------------------------------------

    @property
    def _stale_at(self) -> float | None:
        """An empty bucket counts as one that was fresh when this process began to train."""
        since = self._began if self.published_at is None else self.published_at
        return None if since is None else since + self._age_limit

    def _enough_steps(self, inner_step: int) -> bool:
        """``upload_steps`` bounds the frequency, whatever presses."""
        if self._last is not None:
            return self._steps_since >= self._every
        # After a restart: at least those of this outer step.
        return self.published_at is None or max(inner_step, self._steps_since) >= self._every

    def _hold_back(self, now: float) -> bool:
        """An upload started now would still be under way when the one for the round must start."""
        if self.next_round_at is None or self.upload_seconds is None or self.step_seconds is None:
            return False
        if self.published_at is None:
            return False  # something old is better than nothing
        start_by = self.next_round_at - self._slack - self.upload_seconds
        if now + self.step_seconds > start_by:
            return False  # this is the one for the round
        fresh_until = self.published_at + self._age_limit - self._slack - self.upload_seconds
        return now + self.upload_seconds > start_by and start_by <= fresh_until

    def _last_chance(self, now: float) -> bool:
        """The next step would be too late for an upload to end in time."""
        finish = self.finish_by(now)
        if finish is None:
            return False
        upload = self.upload_seconds or 0.0
        start_by = finish - upload
        if now <= start_by:
            return start_by < now + (self.step_seconds or 0.0)
        # Too late for the round; but never too late to replace nothing, or what is soon stale.
        assert self._stale_at is not None
        return self.published_at is None or now > self._stale_at - self._slack - upload

    def _warnings(self, now: float) -> list[tuple[str, str]]:
        lines = []
        upload = self.upload_seconds or 0.0
        if self.step_seconds is not None:
            period = self._every * self.step_seconds + upload
            if period + self._slack > self._age_limit:
                fitting = int((self._age_limit - self._slack - upload) / self.step_seconds)
                # So that each round has its publication.
                fitting = min(fitting, max(self._minimum, 1))
                remedy = (
                    f"give --neuron.upload_steps {fitting} or less"
                    if fitting >= 1
                    else "make steps or uploads faster"
                )
                lines += self._once(
                    "period",
                    f"⚠️  {self._every} steps of {self.step_seconds:.0f}s and an upload of "
                    f"{upload:.0f}s take longer than the {self._age_limit:.0f}s after which "
                    f"validators count this bucket as stale: {remedy}",
                )
            first = self._minimum * self.step_seconds + upload
            if first + self._slack > self._age_limit:
                lines += self._once(
                    "first",
                    f"⚠️  Step {self._minimum}, before which nothing is published, takes "
                    f"{first:.0f}s from a round's end, too long for the age limit of "
                    f"{self._age_limit:.0f}s: make steps faster (see the throughput guide) or "
                    "lower --neuron.minimum_valid_inner_step",
                )
        age = self.repo_age(now)
        if age is not None and age > self._age_limit - self._slack - upload:
            why = (
                "an upload is under way"
                if self._busy_since is not None
                else ("no step could be published since")
            )
            lines += self._once(
                f"age-{math.floor(age / 300)}",
                f"⚠️  Repo age is {age:.0f}s, the limit {self._age_limit:.0f}s ({why}; an upload "
                f"takes {upload:.0f}s): validators will soon score this miner 0",
            )
        return lines

    def _once(self, name: str, text: str) -> list[tuple[str, str]]:
        if name in self._warned:
            return []
        self._warned.add(name)
        return [("warning", text)]


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTHING * (new - old)
