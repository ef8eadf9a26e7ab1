"""Choose the steps at which to take a snapshot for an upload.

Pure: no clock of its own, no I/O.

A validator scores only *fresh* uploads, and only those of the outer step that it judges at the
moment (protocol page, sections 3 and 7). For half a round period after a round it judges those of
the outer step that the round has just ended, then those of the present one:

    round k            half a period             round k+1          half a period
      |--- judged: k-1 ------|------ judged: k ------|------ judged: k ------|--- judged: k+1 ...
      |----------- training makes uploads of k ------|------ training makes uploads of k+1 ------

An upload counts while its newest listed block is no older than half a round period and its file no
older than the age limit. Its blocks end where its snapshot was taken, so a late snapshot counts for
longer. But the upload before it has to count until it is visible, and only one is sent at a time.
So three snapshots have a fixed place (:meth:`UploadSchedule._is_due`):

- the last one before a round, at its last inner step: it counts for half a period after the round;
- the one before, the last whose upload ends before that step: it counts until the other is visible;
- one that is visible when validators begin to judge this outer step, or when the last one stops
  counting.

Between them an upload begins at each regular step (``--neuron.upload_steps``) from which it ends
before the next of these has to begin. ``upload_steps`` bounds how often there is one, which costs
time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

from distributed_training.protocol import lines
from distributed_training.protocol.types import PublicationReport, StepReport

#: How long before a round or the age limit an upload should end at least, in seconds.
SLACK = 240.0
# Between the last snapshot and the expected call: steps vary, and an earlier call leaves none. Each
# whole step costs 1 % of the looks that find an upload. The check continues in the round.
_SPARE_STEPS = 0.5


@dataclass(frozen=True)
class Rounds:
    """The times of rounds, in seconds of the schedule's clock.

    Args:
        next_at: When the next round will be called; infinite if unknown.
        period: Time between two rounds; infinite if unknown.
        pause: How long a round keeps training and the uplink busy.
        half: How long validators accept a block list.

    Examples:
        >>> Rounds(next_at=9000.0, period=9000.0, pause=300.0, half=4500.0).half
        4500.0
    """

    next_at: float
    period: float
    pause: float
    half: float


_SMOOTHING = 0.3
_VARIES = 1 / 8  # of an upload's time, before a second one was seen
_SAFETY = 2.5  # times that variation: so much longer sending may take than it usually does
_STEPS_OF_A_BLOCK = 2.5  # of training, before the newest listed block's age was told
_TIMED_LEAST = 3  # steps, before what they take is warned of
_PAUSE_SHARE = 1 / 24  # of a period that a round takes, before one was seen


@dataclass(frozen=True)
class Decision:
    """The schedule's answer at the end of an inner step.

    Args:
        snapshot: Whether to take a snapshot at this step boundary.
        lines: Pairs ``(level, text)`` for the log.

    Examples:
        >>> Decision(snapshot=False, lines=(("info", "an upload is under way"),)).snapshot
        False
    """

    snapshot: bool
    lines: tuple[tuple[str, str], ...] = ()


@dataclass
class _Asked:
    """The decision about the snapshot under way, and the state before it.

    That state comes back if the snapshot was not taken.
    """

    at: float
    step: tuple[int, int]  # outer, inner
    block_time: float  # of its newest listed block
    before: tuple[int, int] | None
    steps_before: int
    interrupted: bool = False  # so it took longer than sending takes


class UploadSchedule:
    """Chooses the inner steps after which a miner of the hivemind kind uploads.

    Report each inner step and the end of each upload to it. All times are seconds of one clock.

    Args:
        upload_steps: Inner steps between two uploads.
        minimum_inner_step: First inner step of an outer step that may be uploaded, unless that
            would come too late for validators, who refuse only inner step 0.
        age_limit: The age from which validators ignore a file.
        published_at: Time of the upload that the bucket held at the start; None: there was none.

    Examples:
        >>> from distributed_training.protocol.types import StepReport
        >>> schedule = UploadSchedule(upload_steps=2, minimum_inner_step=1,
        ...                           age_limit=timedelta(seconds=4800))
        >>> report = lambda n: StepReport(outer_step=0, inner_step=n, loss=2.5, learning_rate=4e-4,
        ...     tokens=8192, samples=8, seconds=2.0, data_wait_seconds=0.0, micro_batches=4)
        >>> [schedule.step(report(n), now=2.0 * n).snapshot for n in (1, 2)]
        [False, True]
    """

    def __init__(
        self,
        *,
        upload_steps: int,
        minimum_inner_step: int,
        age_limit: timedelta,
        published_at: float | None = None,
    ) -> None:
        self._every = max(upload_steps, 1)
        self._minimum = minimum_inner_step
        self.age_limit = age_limit.total_seconds()
        self.step_seconds: float | None = None
        self.upload_seconds: float | None = None  # snapshot and upload, measured
        self._upload_varies: float | None = None  # by this many seconds, measured
        self.published_at = published_at  # of the newest gradients.pt in the bucket
        self._published_step: int | None = None  # its outer step
        self._block_time: float | None = None  # of its newest listed block, if it was listed here
        self._block_age: float | None = None
        self._next_round_at: float | None = None
        self._period: float | None = None
        self._half: float | None = None  # of the network's file; None: of the period
        self._pause: float | None = None  # that a round takes, measured
        self._asked: _Asked | None = None
        self._last: tuple[int, int] | None = None  # outer, inner step of the last snapshot
        self._steps_since = 0  # that snapshot, over rounds
        self._owed = False  # the next step asks, whatever the schedule says
        self._began: float | None = None  # the first step of this process
        self._steps = 0  # of this process
        self._step_before: tuple[int, float] | None = None  # its outer step and its end
        self._warned: set[str] = set()
        self.fitting_steps: int | None = None  # upload_steps with which uploads count, if fewer

    def expect_round(
        self, at: float | None, period: float | None = None, *, half: float | None = None
    ) -> None:
        """Set the time of the next round and the time between rounds.

        Args:
            at: When the next round is expected; None: unknown or overdue.
            period: Seconds between two rounds; None: unknown.
            half: Seconds for which validators accept a block list, by the network's file; None:
                half of ``period``, which calls may have shown to be another.
        """
        if at is not None or period is None:
            self._next_round_at = at
        self._period, self._half = period, half

    def repo_age(self, now: float) -> float | None:
        """Return the upload age in seconds; None if nothing was uploaded yet.

        Args:
            now: The present time.
        """
        return None if self.published_at is None else max(0.0, now - self.published_at)

    def repo_age_line(self, now: float) -> str:
        """Return the log line that compares the upload age with its limit.

        Args:
            now: The present time.
        """
        age = self.repo_age(now)
        if age is None:
            return f"Repo age: nothing uploaded yet (limit {self.age_limit:.0f}s)"
        return f"Repo age: {age:.0f}s of {self.age_limit:.0f}s"

    def step(self, report: StepReport, now: float, *, block_age: float | None = None) -> Decision:
        """Decide after an inner step whether it should end with a snapshot.

        Args:
            report: The inner step.
            now: The present time.
            block_age: Seconds since the chain was at the newest block that would be listed; None:
                unknown.
        """
        # The first step of a process also compiles and fills caches.
        self.step_seconds = _mean(self.step_seconds if self._steps > 1 else None, report.seconds)
        self._steps += 1
        self._block_age = block_age
        self._steps_since += 1
        if self._began is None:
            self._began = now
        if self._step_before is not None and self._step_before[0] < report.outer_step:
            gap = now - self._step_before[1] - report.seconds
            self._pause = _mean(self._pause, max(0.0, gap))
            self.interrupt()
            # Once more in each outer step: its pace may be another.
            self._warned -= {"first"}
        self._step_before = (report.outer_step, now)
        said = self._warnings(now)
        inner, minimum = report.inner_step, self._lowered_minimum(now)
        regular = inner % self._every == 0
        if inner < minimum and not self._is_last_in_time(now):
            if regular:
                said.append(("warning", lines.upload_blocked(inner, minimum)))
            return Decision(False, tuple(said))
        if report.skipped:
            return Decision(False, tuple(said))
        if self._asked is not None:
            if regular:
                said.append(("info", lines.UPLOAD_IN_PROGRESS))
            return Decision(False, tuple(said))
        due = self._owed or self._is_due(report, now, regular=regular)
        if due:
            place = (report.outer_step, inner)
            made = now - self._age_of_blocks()
            self._asked = _Asked(now, place, made, self._last, self._steps_since)
            self._last, self._steps_since, self._owed = place, 0, False
        return Decision(due, tuple(said))

    def published(self, report: PublicationReport) -> None:
        """Record the end of an upload.

        Only the end of the upload under way lets the next one begin.

        Args:
            report: The upload's result.
        """
        asked, place = self._asked, (report.revision.outer_step, report.revision.inner_step)
        ours = asked is not None and place == asked.step  # else: what a start found in the journal
        if report.ok:
            at = report.finished_at - (report.age_seconds or 0.0)
            self.published_at = max(self.published_at or -math.inf, at)
            self._warned = {name for name in self._warned if not name.startswith("age")}
        # The report of a snapshot that the journal kept must not free the way for two at once.
        if asked is None or not ours:
            return
        if report.ok:
            self._block_time, self._published_step = asked.block_time, asked.step[0]
            if not asked.interrupted:
                took = max(report.finished_at - asked.at, report.seconds)
                if self.upload_seconds is not None:
                    off = abs(took - self.upload_seconds)
                    self._upload_varies = _mean(self._variation(), off)
                self.upload_seconds = _mean(self.upload_seconds, took)
        self._asked = None

    def next_at(self, now: float) -> float | None:
        """Return about when the next upload begins; None while one is under way, or if unknown.

        Args:
            now: The present time.
        """
        if self._asked is not None or self.step_seconds is None:
            return None
        return now + max(1, self._every - self._steps_since) * self.step_seconds

    def counts(self, outer_step: int, now: float) -> bool:
        """Return whether the last upload is of an outer step and validators still score it.

        Args:
            outer_step: The outer step.
            now: The present time.
        """
        return now < self._counts_until(self._rounds(now), outer_step)

    def interrupt(self) -> None:
        """Record a pause of uploads: the one under way does not measure the time of sending."""
        if self._asked is not None:
            self._asked.interrupted = True

    def cancelled(self, *, again: bool = False) -> None:
        """Undo a decision for a snapshot that was not taken or not submitted.

        Args:
            again: Whether the next step is to ask for one.
        """
        if self._asked is not None:
            self._last = self._asked.before
            self._steps_since += self._asked.steps_before
            self._owed = again
        self._asked = None

    # --- measured times ---------------------------------------------------------------------------

    def _variation(self) -> float:
        if self._upload_varies is None:
            return _VARIES * (self.upload_seconds or 0.0)
        return self._upload_varies

    def _age_of_blocks(self) -> float:
        if self._block_age is not None:
            return self._block_age
        return _STEPS_OF_A_BLOCK * (self.step_seconds or 0.0)

    def _rounds(self, now: float) -> Rounds:
        if self._period is None:
            return Rounds(math.inf, math.inf, 0.0, math.inf)
        at = math.inf if self._next_round_at is None else self._next_round_at
        if at <= now:
            # Validators finish what they are at first. Long after, they may be gone.
            at = now + (self.step_seconds or 0.0) if now - at < self._period / 8 else math.inf
        pause = self._period * _PAUSE_SHARE if self._pause is None else self._pause
        half = self._period / 2 if self._half is None else self._half
        return Rounds(at, self._period, min(pause, self._period / 4), half)

    def _margin(self) -> float:
        """Return the time by which sending may take longer than it took so far."""
        return min(SLACK, _SAFETY * self._variation())

    def _lowered_minimum(self, now: float) -> int:
        """Return the lowest inner step to upload, at least 1: validators refuse step 0."""
        rounds, step = self._rounds(now), self.step_seconds or 0.0
        if rounds.period == math.inf or step <= 0:
            return self._minimum
        room = rounds.half - rounds.pause - (self.upload_seconds or 0.0) - self._margin()
        return min(self._minimum, max(1, math.floor(room / step)))

    def _is_last_in_time(self, now: float) -> bool:
        """Return whether the last upload would be too old before one from the next step ends."""
        if self._published_step is None or self.published_at is None or self._period is None:
            return False
        sending = (self.upload_seconds or 0.0) + self._margin()
        left = self.published_at + self.age_limit - sending - now
        return 0.0 <= left < (self.step_seconds or 0.0)

    def _counts_until(self, rounds: Rounds, outer_step: int) -> float:
        """Return the time at which the last upload of this outer step stops counting."""
        fresh = self.age_limit - SLACK
        if self.published_at is None:
            # The bucket is empty. Without a round in sight it is treated as one that was fresh when
            # this process began to train.
            since = -math.inf if self._period is not None else self._began or 0.0
            return since + fresh
        step_began = rounds.next_at - rounds.period if rounds.next_at < math.inf else -math.inf
        known = self._published_step
        if known not in (None, outer_step) or (known is None and self.published_at < step_began):
            return -math.inf
        listed = self.published_at if self._block_time is None else self._block_time
        return min(self.published_at + fresh, listed + rounds.half)

    # --- decisions --------------------------------------------------------------------------------

    def _is_due(self, report: StepReport, now: float, *, regular: bool) -> bool:
        """Return whether to take a snapshot now, by the rules of the module's docstring."""
        if self._last is not None and self._steps_since < self._every:
            return False  # upload_steps bounds the frequency, whatever presses
        if regular and self.upload_seconds is None:
            return True  # how long sending takes is not known yet
        rounds, step = self._rounds(now), max(self.step_seconds or 0.0, 0.01)
        usual, margin = self.upload_seconds or 0.0, self._margin()
        sending = usual + margin
        apart = max(sending, self._every * step)
        enough = (
            regular
            or self._last is not None
            or self.published_at is None
            # After a restart: at least those of this outer step.
            or max(report.inner_step, self._steps_since) >= self._every
        )
        left = rounds.next_at - _SPARE_STEPS * step - now  # until the last snapshot
        if left < step:
            return enough
        if left < apart + step:  # the one before: a little late is better than not at all
            return enough and left >= usual + margin / 2
        if left < 2 * apart:
            return False  # it would delay that one
        counts_until = self._counts_until(rounds, report.outer_step)
        if rounds.next_at < math.inf:
            counts_until = max(counts_until, rounds.next_at - rounds.half)  # not judged before
        to_spare = counts_until - sending - now
        if to_spare < step or (left < 2 * apart + step and counts_until < now + left):
            return enough
        if rounds.next_at == math.inf:
            return regular
        # It may be the last but two, if it counts until the last but one is visible.
        long = rounds.half - self._age_of_blocks() > left
        return regular and to_spare >= apart and (left >= 3 * apart or long)

    def _warnings(self, now: float) -> list[tuple[str, str]]:
        """Describe what costs this miner its scores: its pace, and the age of its upload."""
        upload, step = self.upload_seconds or 0.0, self.step_seconds or 0.0
        said: list[tuple[str, str]] = []
        rounds, minimum = self._rounds(now), self._lowered_minimum(now)
        timed = self._steps >= _TIMED_LEAST
        limit, what = self.age_limit - SLACK, "the age limit"
        consequence = "count this bucket as stale"
        if rounds.half - self._margin() < limit:
            limit, what = rounds.half - self._margin(), "half the time between two rounds"
            consequence = "reset them for their old blocks"
        self.fitting_steps = None
        if timed and self._every * step + upload > limit:
            fitting = int((limit - upload) / step)
            fitting = min(fitting, max(self._minimum, 1))  # so that each round has its upload
            remedy = "make steps or uploads faster"
            if fitting >= 1:
                self.fitting_steps = fitting
                remedy = (
                    f"give --neuron.upload_steps {fitting} or less (in miner.toml, under [neuron]: "
                    f"upload_steps = {fitting}) and start again"
                )
            # The figures are others each time, and what to do is not.
            said += self._once(
                f"period {remedy}",
                f"⚠️  Uploads will score 0: {self._every} steps of {step:.1f}s and an upload of "
                f"{upload:.1f}s take {self._every * step + upload:.1f}s, longer than "
                f"{what} allows ({limit:.1f}s), so validators {consequence}: {remedy}",
            )
        if timed and minimum < self._minimum:
            said += self._once(
                f"minimum {minimum.bit_length()}",  # a minimum of half as much is news
                f"⚠️  The first upload of an outer step is at inner step {minimum}, not "
                f"{self._minimum} (round.minimum_valid_inner_step): {self._minimum} steps of "
                f"{step:.1f}s and an upload of {upload:.1f}s would end "
                f"after validators begin to judge it, half a period ({rounds.half:.0f}s) after the "
                "round. They refuse only inner step 0",
            )
        elif timed and minimum * step + upload > self.age_limit - SLACK:
            said += self._once(
                "first",
                f"⚠️  Step {minimum}, before which nothing is uploaded, ends "
                f"{minimum * step + upload:.0f}s after a round, too late for the age "
                f"limit of {self.age_limit:.0f}s: make steps faster or lower "
                "round.minimum_valid_inner_step",
            )
        age = self.repo_age(now)
        if age is not None and age > self.age_limit - SLACK - upload:
            why = "an upload is under way" if self._asked else "no step could be uploaded since"
            said += self._once(
                f"age-{math.floor(age / 300)}",
                f"⚠️  Repo age is {age:.0f}s, the limit {self.age_limit:.0f}s ({why}; an upload "
                f"takes {upload:.0f}s): validators will soon score this miner 0",
            )
        return said

    def _once(self, name: str, text: str) -> list[tuple[str, str]]:
        if name in self._warned:
            return []
        self._warned.add(name)
        return [("warning", text)]


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTHING * (new - old)
