"""Turn events into snapshots and uploads, which never meet a round.

An upload begins at the end of an inner step that the upload schedule chooses. Four events follow
each other, and :meth:`Uploads.on_event` answers the first three:

    InnerStepDone      schedule, disk and block list allow it               -> SnapshotWanted
    (the loop takes the snapshot: SnapshotTaken; its files are written during training)
    Tick               the files of this rank are complete                  -> SnapshotComplete
    GradientChecked    the gradient was checked; the uploader gets it       -> SnapshotSubmitted
    Tick               the uploader has answered                            -> PublicationEnded

Uploads pause while a round needs the network link. The gradient check does not: an upload whose
direction and scale were not searched earns about half of what a searched one earns. So a checked
upload is never replaced by an unchecked one of the same outer step while its blocks count.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from distributed_training.common.backoff import Repeats, Throttle
from distributed_training.protocol import keys, lines
from distributed_training.protocol.types import StepReport
from distributed_training.store.errors import IntegrityError
from distributed_training.store.snapshot_folder import NO_BLOCKS, read_config
from distributed_training.store.upload_schedule import UploadSchedule
from distributed_training.store.uploader import Uploader

from . import events as ev
from .block_list import BlockList
from .events import MinerState, Mode
from .round_clock import RoundClock
from .state_machine import may_check, trains

log = logging.getLogger(__name__)

_STALE_LIST_EVERY = 60.0  # seconds between two lines about it
_BUSY_EVERY = 120.0  # seconds, the same: an upload into a dead store takes an hour


class Uploads:
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
        uploader: Uploader,
        disk_problem: Callable[[], str | None],
        world_size: int,
        run: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._schedule = schedule
        self._round_clock = round_clock
        self._blocks = blocks
        self._uploader = uploader
        self._disk_problem = disk_problem
        self._world_size = world_size
        self._run = run
        self._clock = clock
        self._taken: ev.SnapshotTaken | None = None  # until its gradient was checked
        self._taken_at = 0.0
        self._check_wanted = False  # its files are complete
        self._uploaded_checked = uploader.last_checked  # outer step; None: it was not checked
        self._stale_list_lines = Throttle(_STALE_LIST_EVERY, clock=clock)
        self._busy_lines = Repeats(_BUSY_EVERY, clock=clock)

    def on_event(self, event: ev.Event, state: MinerState) -> list[ev.Event]:
        """Follow an upload from the inner step it begins with to the uploader's answer."""
        match event:
            case ev.InnerStepDone(report=report, diverged=False):
                return [*self._await_files(state), *self._choose_step(report, state)]
            case ev.SnapshotTaken():
                self._taken, self._taken_at, self._check_wanted = event, self._clock(), False
                if event.parts == "model":
                    # How long it takes says nothing of the next one.
                    self._schedule.interrupt()
            case ev.SnapshotFailed():
                self._schedule.cancelled()
            case ev.GradientChecked(delta=delta) if self._taken is not None:
                handle, revision = self._taken.handle, self._taken.progress.revision(self._run)
                now, outer_step = self._clock(), revision.outer_step
                replaces = self._uploaded_checked == outer_step
                if delta is None and replaces and self._schedule.counts(outer_step, now):
                    problem = (
                        f"{revision.tag} is not uploaded: its gradient could not be checked, and "
                        f"the bucket has a checked one of outer step {outer_step} that still "
                        "counts. Its blocks go into the next upload"
                    )
                    return [self._drop_snapshot(problem, "unchecked")]
                self._taken = None
                self._uploader.submit(
                    handle.folder, revision, self._world_size, preview_delta=delta
                )
                return [ev.SnapshotSubmitted(revision, event, now - self._taken_at)]
            case ev.Tick():
                ended = [ev.PublicationEnded(report) for report in self._uploader.reports()]
                return [*ended, *self._await_files(state)]
            case ev.PublicationEnded(report=upload):
                if upload.ok:
                    outer_step = upload.revision.outer_step
                    self._uploaded_checked = outer_step if upload.checked else None
                # The schedule counts on our clock; the report's is the wall's.
                self._schedule.published(replace(upload, finished_at=self._clock()))
            # --- rounds, which uploads give way to
            case ev.ModeChanged(after=Mode.AVERAGING):
                self._round_clock.round_called()
                if self._uploader.busy:
                    log.info("%s (it continues afterwards)", lines.UPLOAD_CANCELLED)
                # Paused, not given up: the public miner sends all of it again after the round.
                self._uploader.pause()
                self._schedule.interrupt()
            case ev.RoundFailed() if state.mode is Mode.AVERAGING:
                self._round_clock.round_ended(averaged=False)
            case ev.OuterStepEnded(committed=committed):
                self._round_clock.round_ended(averaged=committed)
            # Not for a stop: an upload that begins now would only have to be given up.
            case ev.ModeChanged(before=Mode.AVERAGING, after=after) if after is not Mode.STOPPING:
                self._uploader.resume()
                self._schedule.interrupt()
            case ev.Loaded() if state.fetched is not None:
                block = None
                # It was checked when it was fetched; a disk may fail since.
                with contextlib.suppress(OSError, IntegrityError):
                    block = read_config(state.fetched / keys.CONFIG).last_allreduce_block
                self._round_clock.round_heard_of(block)
        return []

    def _choose_step(self, report: StepReport, state: MinerState) -> list[ev.Event]:
        """Decide whether the inner step that just ended is uploaded."""
        now = self._clock()
        rounds, age = self._round_clock, self._blocks.newest_age()
        half = rounds.seconds(rounds.half())
        self._schedule.expect_round(rounds.next_at(), rounds.seconds(), half=half)
        # First of all: it learns the pace from every step, uploaded or not.
        decision = self._schedule.step(
            report, now, block_age=None if age is None else rounds.seconds(age)
        )
        for level, text in decision.lines:
            if text == lines.UPLOAD_IN_PROGRESS:
                if (again := self._busy_lines()) is None:
                    continue
                text = f"{text} ({self._uploader.describe()}){again}"
            log.log(logging.WARNING if level == "warning" else logging.INFO, "%s", text)
        if not decision.snapshot:
            return []
        if not trains(state.mode):
            self._schedule.cancelled()
            return []
        if (problem := self._disk_problem()) is not None:
            return [ev.SnapshotFailed(problem, kind="disk")]
        if not self._blocks.blocks():
            return [ev.SnapshotFailed(NO_BLOCKS, kind="blocks")]
        if not self._blocks.list_is_recent():
            # Trained only on earlier blocks since the last upload.
            self._schedule.cancelled(again=True)
            return [ev.SnapshotPutOff()] if self._stale_list_lines() else []
        return [ev.SnapshotWanted()]

    def _await_files(self, state: MinerState) -> list[ev.Event]:
        """Report once that a snapshot waits for its gradient check.

        One that could not be written is given up.
        """
        if self._taken is None or self._check_wanted or not self._taken.handle.done():
            return []
        if (error := self._taken.handle.error) is not None:
            what = "The snapshot could not be written, so it is not uploaded"
            return [self._drop_snapshot(f"{what}: {error}")]
        # If not now, the next step or tick asks again: a round with its average goes first.
        self._check_wanted = may_check(state)
        return [ev.SnapshotComplete()] if self._check_wanted else []

    def _drop_snapshot(
        self, problem: str, kind: Literal["write", "unchecked"] = "write"
    ) -> ev.Event:
        assert self._taken is not None
        folder, revision = self._taken.handle.folder, self._taken.progress.revision(self._run)
        self._taken = None
        shutil.rmtree(folder, ignore_errors=True)  # a full disk needs the room
        return ev.SnapshotFailed(problem, revision, kind)
