"""Turn events into snapshots and uploads, and predict the round that they must not meet.

An upload begins at the end of an inner step that the upload schedule chooses. Four events follow
each other, and this subscriber answers the first three:

    InnerStepDone      schedule, disk and block list allow it               -> SnapshotWanted
    (the loop takes the snapshot: SnapshotTaken; its files are written beside training)
    Tick               the files of this rank are complete                  -> SnapshotComplete
    GradientChecked    the gradient was checked; the uploader gets it       -> SnapshotSubmitted
    Tick               the uploader has answered                            -> PublicationEnded

Uploads pause while a round needs the network link. The gradient check does not: an upload whose
direction and scale were not searched brings half of one that was. So a checked upload is never
replaced by an unchecked one of the same outer step while its blocks count.

:class:`RoundClock` predicts when the validator calls the next round. The upload schedule plans by
it; so do the server, the block list and the watch of the public address.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

from distributed_training.common.backoff import Throttle
from distributed_training.protocol import keys, lines
from distributed_training.protocol.scoring import SECONDS_PER_BLOCK
from distributed_training.protocol.types import StepReport
from distributed_training.store.s3 import IntegrityError
from distributed_training.store.snapshot_folder import read_config, upload_gate
from distributed_training.store.upload_schedule import UploadSchedule
from distributed_training.store.uploader import Uploader

from . import events as ev
from .block_list import BlockList
from .events import MinerState, Mode
from .state_machine import may_check, trains

log = logging.getLogger(__name__)

_STALE_LIST_EVERY = 60.0  # seconds between two lines about it


class Publishing:
    """Rank 0 only; subscribes to the event stream.

    ``disk_problem``: the line that says why a snapshot would not fit on the disk, or None.
    ``world_size``: ranks, each of which writes its part of a snapshot.
    """

    def __init__(
        self,
        *,
        schedule: UploadSchedule,
        round_clock: RoundClock,
        blocks: BlockList,
        publisher: Uploader,
        disk_problem: Callable[[], str | None],
        world_size: int,
        run: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._schedule = schedule
        self._round_clock = round_clock
        self._blocks = blocks
        self._publisher = publisher
        self._disk_problem = disk_problem
        self._world_size = world_size
        self._run = run
        self._clock = clock
        self._taken: ev.SnapshotTaken | None = None  # until it was previewed
        self._taken_at = 0.0
        self._check_wanted = False  # its files are complete
        self._published_checked = publisher.last_checked  # outer step; None: it was not checked
        self._stale_list_lines = Throttle(_STALE_LIST_EVERY, clock=clock)

    def see(self, event: ev.Event, state: MinerState) -> list[ev.Event]:
        match event:
            case ev.InnerStepDone(report=report, diverged=False):
                return [*self._completed(state), *self._wanted(report, state)]
            case ev.RoundFailed() if state.mode is Mode.AVERAGING:
                self._round_clock.round_ended(averaged=False)
            case ev.OuterStepEnded(committed=committed):
                self._round_clock.round_ended(averaged=committed)
            case ev.Loaded() if state.fetched is not None:
                self._round_clock.round_heard_of(_last_round(state.fetched))
            case ev.SnapshotTaken():
                self._taken, self._taken_at, self._check_wanted = event, self._clock(), False
            case ev.SnapshotFailed():
                self._schedule.cancelled()
            case ev.GradientChecked():
                return [self._submit(event)]
            case ev.Tick():
                ended = [ev.PublicationEnded(report) for report in self._publisher.reports()]
                return [*ended, *self._completed(state)]
            case ev.PublicationEnded(report=publication):
                if publication.ok:
                    outer_step = publication.revision.outer_step
                    self._published_checked = outer_step if publication.checked else None
                # The schedule counts on our clock; the report's is the wall's.
                self._schedule.published(replace(publication, finished_at=self._clock()))
            case ev.ModeChanged(before=before, after=after):
                self._give_way(before, after)
            case _:
                pass
        return []

    def _wanted(self, report: StepReport, state: MinerState) -> list[ev.Event]:
        """Decide whether the step that just ended is uploaded."""
        now = self._clock()
        rounds, age = self._round_clock, self._blocks.newest_age()
        self._schedule.expect_round(rounds.next_at(), rounds.seconds())
        # First of all: it learns the pace from every step, uploaded or not.
        decision = self._schedule.step(
            report, now, block_age=None if age is None else rounds.seconds(age)
        )
        for level, text in decision.lines:
            log.log(logging.WARNING if level == "warning" else logging.INFO, "%s", text)
        if not decision.snapshot:
            return []
        if not trains(state.mode):
            self._schedule.cancelled()
            return []
        if (problem := self._disk_problem()) is not None:
            return [ev.SnapshotFailed(problem, kind="disk")]
        if not self._blocks.blocks():
            problem = upload_gate(blocks=())
            assert problem is not None
            return [ev.SnapshotFailed(problem, kind="blocks")]
        if not self._blocks.list_is_recent():
            # Trained on earlier blocks alone since the last upload.
            self._schedule.cancelled(again=True)
            return [ev.SnapshotPutOff()] if self._stale_list_lines() else []
        return [ev.SnapshotWanted()]

    def _completed(self, state: MinerState) -> list[ev.Event]:
        """Report once that a snapshot waits for its gradient check.

        One that could not be written is given up.
        """
        if self._taken is None or self._check_wanted or not self._taken.handle.done():
            return []
        if (error := self._taken.handle.error) is not None:
            return [
                self._give_up(f"The snapshot could not be written, so it is not uploaded: {error}")
            ]
        # If not now, the next step or tick asks again: a round with its average goes first.
        self._check_wanted = may_check(state)
        return [ev.SnapshotComplete()] if self._check_wanted else []

    def _give_up(self, problem: str, kind: Literal["write", "unchecked"] = "write") -> ev.Event:
        assert self._taken is not None
        folder, revision = self._taken.handle.folder, self._taken.progress.revision(self._run)
        self._taken = None
        shutil.rmtree(folder, ignore_errors=True)  # a full disk needs the room
        return ev.SnapshotFailed(problem, revision, kind)

    def _submit(self, preview: ev.GradientChecked) -> ev.Event:
        assert self._taken is not None
        folder, revision = self._taken.handle.folder, self._taken.progress.revision(self._run)
        now = self._clock()
        if preview.delta is None:
            kept = self._published_checked == revision.outer_step
            if kept and self._schedule.counts(revision.outer_step, now):
                # A gradient that was not searched brings half of what it would replace.
                return self._give_up(lines.not_checked(revision), "unchecked")
        self._taken = None
        self._publisher.submit(folder, revision, self._world_size, preview_delta=preview.delta)
        return ev.SnapshotSubmitted(revision, preview, now - self._taken_at)

    def _give_way(self, before: Mode, after: Mode) -> None:
        if after is Mode.AVERAGING:
            self._round_clock.round_called()
            if self._publisher.busy:
                log.info("%s (it goes on afterwards)", lines.UPLOAD_CANCELLED)
            # Paused, not given up: the public miner sends all of it again after the round.
            self._publisher.pause()
            self._schedule.interrupt()
        # Not for a stop: what begins again now would only have to be given up.
        elif before is Mode.AVERAGING and after is not Mode.STOPPING:
            self._publisher.resume()
            self._schedule.interrupt()


def _last_round(folder: Path) -> int | None:
    """Return the block of the last round, if the global state in ``folder`` has it."""
    try:
        return read_config(folder / keys.CONFIG).last_allreduce_block
    except (OSError, IntegrityError):  # checked when it was fetched; a disk may fail since
        return None


# --- the next round -------------------------------------------------------------------------------

_MEASURABLE = 5  # blocks to pass before their pace counts
_WINDOW = 100  # blocks from one mark to the next; the pace is that since the one before the last
#: Blocks that two looks may count too many or too few: one has begun, one is not read.
_BLURRED = 1.5
_SILENT = timedelta(minutes=5)  # the chain, before its last known block tells nothing of now
_OVERDUE = 25  # blocks that a call may come late
_ALIKE = 0.1  # two periods that differ by less, relative to the longer one, are the same
_PLAUSIBLE = 4  # times the configured period, or a fraction of it; else calls were missed, or tries


class RoundClock:
    """Predicts the next round's call, as far as a miner can.

    The validator calls once ``blocks_per_allreduce`` blocks have passed since the last round
    (protocol page, section 2); a round that failed starts the period over. The number of blocks is
    a setting of the validator's. The clock starts from the configured number and learns from the
    calls it sees, once two of the last three came after nearly the same number of blocks. Blocks
    are turned into seconds by the pace this miner sees.

    ``last_allreduce_block``: from the global state, or None without one. A block that the chain has
    not reached (a wrong figure, a chain that was set back) counts as unknown.

    ``blocks_per_allreduce``: between two rounds until calls have shown another number.
    ``shortest_period``: blocks between two rounds at the least (default: the period itself).
    ``seconds_per_block`` is the network's, used until another pace was seen. ``chain_age``: time
    since the chain last answered.
    """

    def __init__(
        self,
        *,
        chain_block: Callable[[], int],
        blocks_per_allreduce: int,
        last_allreduce_block: int | None,
        shortest_period: int | None = None,
        seconds_per_block: float = SECONDS_PER_BLOCK,
        chain_age: Callable[[], timedelta] = timedelta,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._chain_block = chain_block
        self._chain_age = chain_age
        self._period = blocks_per_allreduce
        self._last = self._last_averaged = last_allreduce_block
        self._shortest = min(shortest_period or self._period, self._period)
        self._seconds_per_block = seconds_per_block
        self._clock = clock
        self._marks = deque([(chain_block(), clock())], maxlen=2)
        self._configured = self._usual = self._period
        self._missed = False
        self._gaps: deque[int] = deque(maxlen=3)  # blocks from a round's end to the next call

    def round_called(self) -> None:
        """Note a call of a round now: the blocks since the last one show the period."""
        self._missed = False
        if self._last is None:
            return
        gap = self._chain_block() - self._last  # below 0 is not plausible either
        if not self._configured / _PLAUSIBLE <= gap <= self._configured * _PLAUSIBLE:
            return
        self._gaps.append(gap)
        alike = [each for each in self._gaps if abs(each - gap) <= _ALIKE * max(each, gap)]
        if len(alike) < 2:
            return
        if abs(min(alike) - self._usual) > _ALIKE * self._usual:
            log.info(
                "Rounds are called after %d blocks, not %d: uploads are planned for that",
                min(alike),
                self._usual,
            )
            self._usual = min(alike)
        # One that came late tells nothing of the next: a snapshot that awaits it misses its round.
        self._period = min(self._usual, *alike)
        self._shortest = min(self._shortest, self._period)

    def round_ended(self, *, averaged: bool = True) -> None:
        """Note that a round ended now, ``averaged`` or failed: the period starts over."""
        self._last = self._chain_block()
        if averaged:
            self._last_averaged = self._last

    def round_heard_of(self, block: int | None) -> None:
        """Take the block of the last round, perhaps without this miner, from the global state.

        The validator writes that block once its own round is over, a while after ours.
        """
        now = self._chain_block()
        last = _passed(self._last, now) or 0
        if block is not None and last < block <= now:
            self._last = self._last_averaged = block
            self._missed |= block > last + _OVERDUE

    def missed(self) -> bool:
        """Return whether this miner missed a round.

        From any thread.

        One was held without it since it was called last, or should have been called minutes ago.
        """
        block = self._chain_block()
        last = _passed(self._last, block)
        return self._missed or (last is not None and block > last + self._period + _OVERDUE)

    def due(self) -> bool | None:
        """Return whether the validator may call a round now; None if unknown.

        From any thread.
        """
        block = self._chain_block()
        # Not since one that failed here: that may have been no round of the validator's.
        last = _passed(self._last_averaged, block)
        # A chain that is silent to us may well answer the validator.
        if last is None or self._chain_age() > _SILENT:
            return None
        # A tenth is for the difference of the two views of the chain.
        return block >= last + self._shortest - self._shortest // 10

    def half(self) -> int:
        """Return half the period in blocks; validators refuse a block list further behind."""
        return self._period // 2

    def seconds(self, blocks: int | None = None) -> float:
        """Return the seconds that so many blocks take; default: those between two rounds."""
        return (self._period if blocks is None else blocks) * self._seconds_per_block

    def next_at(self) -> float | None:
        """Return ``time.monotonic()`` of the next call; None if unknown or already due."""
        expected = self.expected_at()
        return expected if expected is not None and expected > self._clock() else None

    def expected_at(self) -> float | None:
        """Return ``time.monotonic()`` at the period's end, in the past too; None if unknown."""
        block, now = self._chain_block(), self._clock()
        last = _passed(self._last, block)
        if last is None:
            return None
        self._measure(block, now)
        return now + (last + self._period - block) * self._seconds_per_block

    def _measure(self, block: int, now: float) -> None:
        """Measure the pace, and keep the old one if the two readings allow it."""
        first_block, first_time = self._marks[0]
        passed, seconds = block - first_block, now - first_time
        pace = self._seconds_per_block
        # Another that the readings allow as well would be noise, times hundreds of blocks.
        if passed >= _MEASURABLE and abs(seconds - passed * pace) > _BLURRED * pace:
            self._seconds_per_block = seconds / passed
        if passed < 0:
            self._marks.clear()  # a chain that began again
        if not self._marks or block - self._marks[-1][0] >= _WINDOW:
            self._marks.append((block, now))


def _passed(last: int | None, block: int) -> int | None:
    """Return ``last``, or None if it lies in the future (a chain set back, a wrong figure)."""
    # By a future block calls would be refused, and a missed round hidden, until the chain is there.
    return None if last is None or last > block else last
