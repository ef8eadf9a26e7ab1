"""Test which commands the controller gives for which events, with stand-ins for all other parts."""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from distributed_training.exchange.base import Close
from distributed_training.miner import events as ev
from distributed_training.miner.events import Action, Command, DataPart, MinerState, Mode, Rules
from distributed_training.miner.loop import Controller
from distributed_training.protocol.types import Base, ExitStatus, Progress, Update
from tests.tools.miner_parts import step_report

pytestmark = pytest.mark.timeout(30)

RULES = Rules(checkpoint_steps=10)
UPDATE = Update(5, Path("u"), Base.KEPT, None, "ab", 500)
CLOSE = Close(4, 1, 0.0, 60.0)
REACHED = ev.CloseReached(CLOSE)


class Blocks:
    def __init__(self) -> None:
        self.begin = (0, 0)
        self.request = 0
        self.available = True
        self.in_step = False

    def on_event(self, event: ev.Event, state: MinerState) -> None: ...

    def pages(self) -> tuple[int, int]:
        return 5, 54

    def state_dict(self) -> dict[str, Any]:
        return {"next": 60}

    def on_boundary(self, *, may_begin: bool) -> DataPart:
        begin = self.begin if may_begin else (0, 0)
        if may_begin:
            self.begin = (0, 0)
        request, self.request = self.request, 0
        return DataPart(request, *begin)


class Rig:
    def __init__(
        self,
        mode: Mode = Mode.TRAINING,
        *,
        unsaved_steps: int = 0,
        versions: Any = None,
        disk_problem: str | None = None,
    ) -> None:
        self.now = 1000.0
        self.exchange = Mock()
        self.blocks: Any = Blocks()
        self.seen: list[ev.Event] = []
        events: queue.SimpleQueue[ev.Event] = queue.SimpleQueue()
        self.controller = Controller(
            state=MinerState(mode=mode, outer_step=4, unsaved_steps=unsaved_steps),
            rules=RULES,
            events=events,
            blocks=self.blocks,
            exchange=self.exchange,
            versions=versions,
            disk_problem=lambda: disk_problem,
            clock=lambda: self.now,
        )
        self.controller.subscribe(lambda event, state: self.seen.append(event))

    def command(self, *events: ev.Event) -> Command:
        """Return the command of the boundary after ``events``."""
        for event in events:
            self.controller.post(event)
        return self.controller.next_command()

    def action(self, *events: ev.Event) -> Action:
        return self.command(*events).action


def step(inner_step: int) -> ev.InnerStepDone:
    return ev.InnerStepDone(step_report(inner_step, outer_step=4))


def test_training_waits_without_data_and_begins_when_a_block_is_ready() -> None:
    rig = Rig()
    rig.blocks.available = False
    rig.blocks.request = 555
    assert rig.command() == Command(Action.WAIT_FOR_DATA, data=DataPart(555))
    rig.blocks.begin = (555, 64)
    assert rig.command() == Command(Action.TRAIN, data=DataPart(0, 555, 64))


def test_a_ready_block_is_kept_while_an_order_goes_first() -> None:
    rig = Rig(unsaved_steps=9)
    rig.blocks.begin = (555, 64)
    assert rig.action(step(10)) is Action.CHECKPOINT
    assert rig.command() == Command(Action.TRAIN, data=DataPart(0, 555, 64))


def test_a_whole_round() -> None:
    rig = Rig()
    command = rig.command(REACHED)
    assert (command.action, command.local.close) == (Action.WRITE_UPLOAD, CLOSE)
    assert command.local.pages == (5, 54)
    assert rig.action() is Action.CHECKPOINT
    written: Any = Mock(done=lambda: True, error=None)
    saved = [ev.UploadBegun(CLOSE, written, Progress(4)), ev.CheckpointBegun(4, lambda: True)]
    assert rig.action(*saved) is Action.TRAIN  # another thread sends the upload
    rig.exchange.send.assert_called_once_with(CLOSE)
    assert rig.action(ev.UploadEnded(Close(4, 1))) is Action.TRAIN
    assert rig.action(ev.UpdateReady(UPDATE, 1000.0)) is Action.OUTER_STEP
    command = rig.command(ev.OuterStepEnded(True, 5))
    assert command == Command(Action.FOLLOW_SCHEDULE, outer_step=5, inner_steps=500)
    rig.exchange.applied.assert_called_once_with(5, wants_weights=False)
    assert rig.action() is Action.TRAIN
    assert rig.controller.state.outer_step == 5


@pytest.mark.parametrize(
    ("in_step", "available", "begin", "first"),
    [
        (True, True, (0, 0), Action.TRAIN),
        (True, False, (555, 64), Action.TRAIN),
        (True, False, (0, 0), Action.OUTER_STEP),
        (False, True, (0, 0), Action.OUTER_STEP),
    ],
    ids=["under way", "under way in the next block", "no data", "none under way"],
)
def test_an_update_waits_for_the_inner_step_under_way_and_for_nothing_else(
    in_step: bool, available: bool, begin: tuple[int, int], first: Action
) -> None:
    """An update applied between two micro-batches would drop the micro-batches before it."""
    rig = Rig()
    rig.blocks.in_step, rig.blocks.available, rig.blocks.begin = in_step, available, begin
    assert rig.action(ev.UpdateReady(UPDATE, 1000.0)) is first
    rig.blocks.in_step = False
    if first is Action.TRAIN:
        command = rig.command(step(7))
        assert (command.action, command.local.update) == (Action.OUTER_STEP, UPDATE)
    rig.blocks.available = True
    assert rig.action() is Action.TRAIN


def test_a_stop_drops_pending_work() -> None:
    rig = Rig()
    command = rig.command(
        REACHED, ev.UpdateReady(UPDATE, 1000.0), ev.StopRequested("deregistered", 3)
    )
    assert (command.action, command.exit_status) == (Action.STOP, 3)
    assert command.local.kept == {"rank_zero": {"blocks": {"next": 60}}}
    assert rig.action() is Action.IDLE, "nothing follows"


def test_deadlines_are_looked_at_once_per_tick() -> None:
    rig = Rig(Mode.UPDATE_FAILED)
    rig.action()
    assert rig.controller.state.mode is Mode.TRAINING
    rig.exchange.applied.assert_called_once_with(4, wants_weights=False)
    for _ in range(3):
        rig.action()
    assert rig.seen == [ev.Tick(1000.0)]
    rig.now += 1
    rig.action()
    assert rig.seen[1:] == [ev.Tick(1001.0)]


def test_nothing_is_written_on_a_full_disk() -> None:
    rig = Rig(disk_problem="it is full")
    assert rig.action(REACHED) is Action.TRAIN
    assert ev.UploadSkipped("it is full", "disk") in rig.seen
    rig = Rig(disk_problem="it is full")
    rig.controller.rules = replace(RULES, progress_steps=1)
    assert rig.action(step(1)) is Action.TRAIN
    assert ev.UploadEnded(Close(4, 0), "it is full") in rig.seen
    assert rig.controller.state.progress is None


@pytest.mark.parametrize("script", [False, True])
def test_a_newer_version_ends_a_miner_at_its_outer_step_and_no_script(script: bool) -> None:
    def network(number: int, step: int) -> Any:
        return SimpleNamespace(head=SimpleNamespace(version=number, from_outer_step=step))

    first, second = network(1, 0), network(2, 5)
    versions = SimpleNamespace(in_force=first, at=lambda step: second if step >= 5 else first)
    rig, adopted = Rig(versions=versions), list[Any]()
    if script:
        rig.controller.adopt = lambda before, now: adopted.append((before, now))
    assert rig.command().action is not Action.STOP
    rig.controller.state = replace(rig.controller.state, outer_step=5)
    command = rig.command()
    if script:
        assert command.action is not Action.STOP and rig.command().action is not Action.STOP
        assert adopted == [(first, second)]
        return
    assert (command.action, command.exit_status) == (Action.STOP, ExitStatus.AGAIN)
    assert "version 2" in rig.controller.state.stop_reason
    # After a roll-back to before that outer step, a restart would not help.
    behind = Rig(versions=SimpleNamespace(in_force=second, at=versions.at))
    assert behind.command().action is not Action.STOP


def test_an_update_that_a_roll_back_has_overtaken_is_not_applied() -> None:
    rig = Rig()
    rig.controller.post(ev.UpdateReady(UPDATE, 1000.0))
    assert rig.action(ev.RolledBack(Progress(outer_step=3))) is Action.IDLE
    # The exchange posts it again, after the update of outer step 4.
    rig.exchange.applied.assert_called_once_with(3, wants_weights=False)
