"""Uploads: the steps that become snapshots, and snapshots that cannot be published."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from distributed_training.miner import events as ev
from distributed_training.miner.events import MinerState, Mode
from distributed_training.miner.round_clock import RoundClock
from distributed_training.miner.uploads import Uploads
from distributed_training.protocol.types import (
    AllReduceFault,
    AllReduceResult,
    Progress,
    PublicationReport,
    Revision,
)
from tests.tools.miner_parts import KeptUploads, step_report, upload_schedule

pytestmark = pytest.mark.timeout(30)

TRAINING = MinerState(mode=Mode.TRAINING, outer_step=3)


class Handle:
    hold_seconds = 0.1

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.error: BaseException | None = None
        self.complete = False

    def done(self) -> bool:
        return self.complete or self.error is not None


class Blocks:
    def __init__(self) -> None:
        self.trained, self.recent = [100], True

    def blocks(self) -> list[int]:
        return self.trained

    def newest_age(self) -> int | None:
        return 1 if self.trained else None

    def list_is_recent(self) -> bool:
        return self.recent


class Rig:
    """An upload every 10 inner steps from the tenth on.

    ``last_checked``: outer step of a checked upload before this start.
    """

    def __init__(self, folder: Path, last_checked: int | None = None) -> None:
        self.folder, self.now, self.block = folder, 1000.0, 50
        self.disk: str | None = None
        self.blocks: Any = Blocks()
        self.uploader: Any = KeptUploads(last_checked=last_checked)
        self.round_clock = RoundClock(
            chain_block=lambda: self.block,
            blocks_per_allreduce=100,
            last_allreduce_block=None,
            clock=lambda: self.now,
        )
        self.uploads = Uploads(
            schedule=upload_schedule(published_at=900.0),
            round_clock=self.round_clock,
            blocks=self.blocks,
            uploader=self.uploader,
            disk_problem=lambda: self.disk,
            world_size=2,
            run=5,
            clock=lambda: self.now,
        )

    def on_event(self, event: ev.Event, state: MinerState = TRAINING) -> list[ev.Event]:
        """Take an event as the controller does it: its consequences are seen too."""
        follows = self.uploads.on_event(event, state)
        for other in follows:
            self.on_event(other, state)
        return follows

    def steps(self, numbers: Iterable[int], state: MinerState = TRAINING) -> list[ev.Event]:
        found = []
        for number in numbers:
            self.now += 10
            found += self.on_event(ev.InnerStepDone(step_report(number, seconds=10.0)), state)
        return found

    def take(self, inner_step: int) -> Handle:
        handle: Any = Handle(self.folder / str(inner_step))
        self.on_event(ev.SnapshotTaken(handle, Progress(3, inner_step)))
        return handle


def test_a_publication_from_step_to_report(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert rig.steps(range(1, 11)) == [ev.SnapshotWanted()]
    handle = rig.take(10)
    assert rig.steps([11, 12]) == [], "its files are being written"
    handle.complete = True
    assert rig.steps([13, 14]) == [ev.SnapshotComplete()], "told once"
    preview = ev.GradientChecked(-0.1, 0.5)
    revision = Revision(5, 3, 10)
    assert rig.on_event(preview) == [ev.SnapshotSubmitted(revision, preview, 40.0)]
    given = {"tag": "5.3.10", "delta": -0.1, "paused": False}
    assert rig.uploader.submitted == [given | {"folder": f"{tmp_path}/10", "world_size": 2}]
    assert rig.steps(range(15, 25)) == [], "one after the other"
    report = PublicationReport(revision, True, 3.0, 1, "", finished_at=1.7e9)
    rig.uploader.answers.append(report)
    assert rig.on_event(ev.Tick(rig.now)) == [ev.PublicationEnded(report)]
    assert rig.steps(range(25, 31)) == [ev.SnapshotWanted()]


def test_an_upload_of_an_hour_is_a_line_in_two_minutes_with_how_far_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    rig = Rig(tmp_path)
    rig.steps(range(1, 11))
    rig.take(10)
    rig.steps(range(11, 371))
    said = [line for line in caplog.messages if "Previous upload still in progress" in line]
    assert len(said) == 18, "of 36 skipped uploads"
    assert "skipping new upload (3.10, 1.0 of 2.0 MB after 30 s)" in said[0]
    assert said[1].endswith("(1 more time since the last such line)")


def test_a_finished_snapshot_is_looked_for_in_a_round_until_it_has_its_average(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    rig.steps(range(1, 11))
    rig.take(10).complete = True
    result = AllReduceResult((), (), 0.0, 0.0, 0.0)
    averaged = MinerState(mode=Mode.AVERAGING, outer_step=3, averaged=result)
    assert rig.on_event(ev.Tick(rig.now), averaged) == []
    averaging = MinerState(mode=Mode.AVERAGING, outer_step=3)
    assert rig.on_event(ev.Tick(rig.now), averaging) == [ev.SnapshotComplete()]
    assert rig.on_event(ev.Tick(rig.now)) == [], "its order waits for the boundary"


@pytest.mark.parametrize(
    ("before", "later", "outer_step", "withheld"),
    [
        ([(-0.1, True)], 100.0, 3, True),
        ([(None, True)], 100.0, 3, False),  # that was not checked either
        ([(None, True), (-0.1, False)], 100.0, 3, False),  # the checked one did not get there
        ([(-0.1, True), (-0.1, False)], 100.0, 3, True),  # and so what was there is there
        ([(-0.1, True)], 100.0, 4, False),  # of another outer step
        ([(-0.1, True)], 1200.0, 3, False),  # its blocks do not count any more
    ],
)
def test_an_unchecked_gradient_replaces_no_checked_one_that_counts(
    before: list[tuple[float | None, bool]],
    later: float,
    outer_step: int,
    withheld: bool,
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    rig.on_event(ev.OuterStepEnded(True, 3))
    for number, (delta, ok) in enumerate(before):
        rig.steps(range(10 * number + 1, 10 * number + 11))
        handle = rig.take(10 * number + 10)
        handle.complete = True
        assert ev.SnapshotComplete() in rig.on_event(ev.Tick(rig.now)), "each of them"
        rig.on_event(ev.GradientChecked(delta, 0.5))
        revision = Revision(5, 3, 10 * number + 10)
        checked = delta is not None
        report = PublicationReport(revision, ok, 3.0, 1, "", finished_at=1.7e9, checked=checked)
        rig.on_event(ev.PublicationEnded(report))
    rig.now += later
    handle = Handle(tmp_path / "last")
    rig.on_event(ev.SnapshotTaken(handle, Progress(outer_step, 90)))
    (came,) = rig.on_event(ev.GradientChecked(None, 0.0))
    assert isinstance(came, ev.SnapshotFailed) == withheld
    assert len(rig.uploader.submitted) == len(before) + 1 - withheld
    assert handle.folder.exists() != withheld
    if isinstance(came, ev.SnapshotFailed):
        assert (came.revision, came.kind) == (Revision(5, outer_step, 90), "unchecked")
        assert "5.3.90 is not uploaded: its gradient could not be checked" in came.problem


@pytest.mark.parametrize(("last", "withheld"), [(3, True), (2, False), (None, False)])
def test_a_restart_knows_whether_the_upload_before_was_checked(
    last: int | None, withheld: bool, tmp_path: Path
) -> None:
    rig = Rig(tmp_path, last)
    rig.take(20)
    (came,) = rig.on_event(ev.GradientChecked(None, 0.0))
    assert isinstance(came, ev.SnapshotFailed) == withheld


@pytest.mark.parametrize("mode", [Mode.AVERAGING, Mode.LOADING])
def test_a_snapshot_that_a_round_or_a_load_overtakes_counts_as_not_asked_for(
    mode: Mode, tmp_path: Path
) -> None:
    rig = Rig(tmp_path)
    state = MinerState(mode=mode, outer_step=3)
    assert rig.steps(range(1, 11), state) == []
    assert rig.steps(range(11, 21)) == [ev.SnapshotWanted()]


@pytest.mark.parametrize(("kind", "words"), [("disk", "no room"), ("blocks", "list is empty")])
def test_obstacle_to_an_upload_is_logged_and_the_next_regular_step_asks_again(
    kind: str, words: str, tmp_path: Path
) -> None:
    rig = Rig(tmp_path)
    rig.disk, rig.blocks.trained = ("no room", [100]) if kind == "disk" else (None, [])
    (failed,) = rig.steps(range(1, 11))
    assert isinstance(failed, ev.SnapshotFailed) and failed.kind == kind
    assert words in failed.problem
    rig.disk, rig.blocks.trained = None, [100]
    assert rig.steps(range(11, 21)) == [ev.SnapshotWanted()]


def test_a_list_without_a_recent_block_is_waited_for(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.blocks.recent = False
    assert rig.steps(range(1, 13)) == [ev.SnapshotPutOff()], "once a minute"
    rig.blocks.recent = True
    assert rig.steps([13]) == [ev.SnapshotWanted()], "at the next step, not ten later"


def test_a_snapshot_that_could_not_be_written_is_given_up_and_leaves_the_disk(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    rig.steps(range(1, 11))
    handle = rig.take(10)
    handle.error = OSError(28, "No space left on device")
    (failed,) = rig.steps([11])
    assert isinstance(failed, ev.SnapshotFailed)
    assert failed.revision == Revision(5, 3, 10) and "No space left" in failed.problem
    assert not handle.folder.exists()
    assert rig.steps(range(12, 21)) == [ev.SnapshotWanted()]


def test_uploads_go_on_while_the_global_state_is_fetched(tmp_path: Path) -> None:
    """In a rebase they are of the present outer step, else of the one judged until half a round
    period after its end."""
    rig = Rig(tmp_path)
    fetching = MinerState(mode=Mode.FETCHING, outer_step=3, fetch_target=3)
    assert rig.steps(range(1, 11), fetching) == [ev.SnapshotWanted()]
    rig.take(10)
    preview = ev.GradientChecked(-0.1, 1.0)
    assert rig.on_event(preview, fetching) == [
        ev.SnapshotSubmitted(Revision(5, 3, 10), preview, 0.0)
    ]
    assert len(rig.uploader.submitted) == 1


def test_uploads_give_way_to_rounds_and_to_nothing_else(tmp_path: Path) -> None:
    for before in set(Mode) - {Mode.STOPPING}:
        for after in set(Mode) - {before}:
            rig = Rig(tmp_path)
            rig.uploader.paused = before is Mode.AVERAGING
            rig.on_event(ev.ModeChanged(before, after))
            if after is Mode.STOPPING:
                assert rig.uploader.paused == (before is Mode.AVERAGING)
            else:
                assert rig.uploader.paused == (after is Mode.AVERAGING)


def test_time_in_which_uploads_give_way_is_no_upload_time(tmp_path: Path) -> None:
    """Or one failed round would make the miner believe that its line is slow."""
    rig = Rig(tmp_path)
    schedule = rig.uploads._schedule

    def publish(first: int, pause: float) -> None:
        rig.steps(range(first, first + 10))
        rig.take(first + 9).complete = True
        rig.on_event(ev.GradientChecked(-0.1, 0.5))
        rig.now += 100
        if pause:
            rig.on_event(ev.ModeChanged(Mode.TRAINING, Mode.AVERAGING))
            rig.now += pause
            rig.on_event(ev.ModeChanged(Mode.AVERAGING, Mode.AWAITING_GLOBAL))
        report = PublicationReport(Revision(5, 3, first + 9), True, 100 + pause, 1, "", 1.7e9)
        rig.on_event(ev.PublicationEnded(report))

    publish(1, pause=0)
    assert schedule.upload_seconds == 100
    publish(11, pause=840)
    assert schedule.upload_seconds == 100


def test_each_round_starts_the_period_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.on_event(ev.OuterStepEnded(True, 4))
    assert rig.round_clock.next_at() == rig.now + 100 * 12
    rig.block += 50
    rig.now += 50 * 12
    rig.on_event(ev.RoundFailed(AllReduceFault.TIMEOUT))
    assert rig.round_clock.next_at() == rig.now + 50 * 12, "of a round that was given up before"
    rig.on_event(ev.RoundFailed(AllReduceFault.TIMEOUT), MinerState(Mode.AVERAGING, 4))
    assert rig.round_clock.next_at() == rig.now + 100 * 12
    assert rig.round_clock.due() is False, "only a successful one begins a time without calls"


def test_a_missed_round_is_known_once_its_state_is_loaded(tmp_path: Path) -> None:
    """Else the plan is blind until the next round this miner takes part in."""
    rig = Rig(tmp_path)
    rig.on_event(ev.OuterStepEnded(True, 4))
    rig.block += 130
    rig.now += 130 * 12
    assert rig.round_clock.next_at() is None
    extras = {"block_list": [], "inner_step": 0, "outer_step": 5, "last_allreduce_block": 152}
    (tmp_path / "config.json").write_text(json.dumps(extras))
    loading = MinerState(Mode.LOADING, 4, fetched=tmp_path)
    rig.on_event(ev.Loaded(5), loading)
    assert rig.round_clock.next_at() == rig.now + 72 * 12
    (tmp_path / "config.json").unlink()
    rig.on_event(ev.Loaded(5), loading)
    assert rig.round_clock.next_at() == rig.now + 72 * 12
