"""Turn events into snapshots and uploads.

An upload begins at the end of an inner step that the upload schedule chooses. Four events follow
each other, and this subscriber answers the first three:

    InnerStepDone      schedule, disk and block list allow it               -> SnapshotWanted
    (the loop takes the snapshot: SnapshotTaken; its files are written beside training)
    Tick               the files of this rank are complete                  -> SnapshotComplete
    Previewed          the gradient was checked; the uploader gets it       -> SnapshotSubmitted
    Tick               the uploader has answered                            -> PublicationEnded

Uploads pause while a round needs the network link. The gradient check does not: an upload whose
direction and scale were not searched brings half of one that was. So a checked upload is never
replaced by an unchecked one of the same outer step while its blocks count.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from distributed_training.common.backoff import Throttle
from distributed_training.protocol import keys, lines
from distributed_training.protocol.types import StepReport
from distributed_training.store.s3 import IntegrityError
from distributed_training.store.snapshot_folder import read_config, upload_gate
from distributed_training.store.upload_schedule import UploadSchedule
from distributed_training.store.uploader import Uploader

from . import state_machine as ev
from .block_list import BlockList
from .round_clock import RoundClock
from .state_machine import MinerState, Mode, may_check, trains

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
            case ev.Previewed():
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

    def _submit(self, preview: ev.Previewed) -> ev.Event:
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
