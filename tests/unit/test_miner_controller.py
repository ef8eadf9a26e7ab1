"""The controller: events in, commands out, with every neighbour in memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from distributed_training.miner import events as ev
from distributed_training.miner.controller import Controller
from distributed_training.miner.events import Action, Command, DataPart, MinerState, Mode, Rules
from distributed_training.miner.global_state import GlobalEpoch
from distributed_training.miner.round import Averaging, RoundTasks
from distributed_training.protocol.types import (
    AllReduceError,
    AllReduceFault,
    AllReduceResult,
    Base,
    ExitStatus,
    Progress,
    RoundRequest,
    Update,
)
from distributed_training.store.bucket_reader import refusal
from tests.tools.miner_parts import step_report

pytestmark = pytest.mark.timeout(30)

HIVEMIND = Rules(reload_seconds=60, checkpoint_steps=10)
RESULT = AllReduceResult(("a", "b"), (), 0.1, 0.2, 0.3)


class Swarm:
    def __init__(self) -> None:
        self.outcome: AllReduceResult | BaseException = RESULT
        self.release = threading.Event()
        self.cancelled = False
        self.event: threading.Event | None = None  # the round's own

    def average(self, request: RoundRequest, *, cancelled: threading.Event) -> AllReduceResult:
        self.event = cancelled
        assert self.release.wait(30)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    def cancel(self) -> None:
        self.cancelled = True


class Blocks:
    def __init__(self) -> None:
        self.begin = (0, 0)
        self.request = 0
        self.available = True
        self.in_step = False

    def on_event(self, event: ev.Event, state: MinerState) -> None: ...

    def chain_block(self) -> int:
        return 777

    def blocks(self) -> list[int]:
        return [554]

    def state_dict(self) -> dict[str, Any]:
        return {"blocks": [[554, 3]]}

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
        rules: Rules = HIVEMIND,
    ) -> None:
        self.now = 1000.0
        self.swarm: Any = Swarm()
        self.blocks: Any = Blocks()
        self.global_epoch: Any = Mock(spec=GlobalEpoch)
        self.seen: list[ev.Event] = []
        events: queue.SimpleQueue[ev.Event] = queue.SimpleQueue()
        self.controller = Controller(
            state=MinerState(mode=mode, outer_step=4, unsaved_steps=unsaved_steps),
            rules=rules,
            events=events,
            blocks=self.blocks,
            start_task=RoundTasks(Averaging(self.swarm, events.put), self.global_epoch).start,
            versions=versions,
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

    def action_other_than_idle(self) -> Action:
        for _ in range(500):
            action = self.action()
            if action is not Action.IDLE:
                return action
        raise AssertionError("only IDLE")


def call() -> ev.AllReduceCalled:
    return ev.AllReduceCalled(RoundRequest(caller="5V"), 1000.0)


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
    assert rig.action(call()) is Action.WRITE_PSEUDO_GRADIENT
    assert rig.controller.state.mode is Mode.AVERAGING
    assert rig.action(ev.PseudoGradientWritten(0.5)) is Action.IDLE  # the swarm has its own thread
    rig.swarm.release.set()
    assert rig.action_other_than_idle() is Action.OUTER_STEP
    assert rig.controller.state.averaged is RESULT
    assert rig.action(ev.OuterStepEnded(True, 5)) is Action.CHECKPOINT
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
    """Applied between two micro-batches it dropped those before."""
    rig = Rig(rules=replace(HIVEMIND, exchange="store"))
    rig.blocks.in_step, rig.blocks.available, rig.blocks.begin = in_step, available, begin
    update = Update(5, Path("u"), Base.KEPT, None, "ab", 500)
    assert rig.action(ev.UpdateReady(update, 1000.0)) is first
    rig.blocks.in_step = False
    if first is Action.TRAIN:
        command = rig.command(step(7))
        assert (command.action, command.local.update) == (Action.OUTER_STEP, update)
    rig.blocks.available = True
    assert rig.action() is Action.TRAIN


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (AllReduceError(AllReduceFault.NO_GROUP), AllReduceFault.NO_GROUP),
        (RuntimeError("hivemind fell over"), AllReduceFault.SWARM_DOWN),
        (SystemExit("a library ended its thread"), AllReduceFault.SWARM_DOWN),
    ],
    ids=["known", "unknown", "no Exception"],
)
def test_a_failed_round_costs_time_only(error: BaseException, fault: AllReduceFault) -> None:
    rig = Rig()
    rig.swarm.outcome = error
    rig.swarm.release.set()
    rig.action(call())
    rig.controller.post(ev.PseudoGradientWritten(0.5))
    assert rig.action_other_than_idle() is Action.TRAIN
    failed = [event for event in rig.seen if isinstance(event, ev.RoundFailed)]
    assert [event.fault for event in failed] == [fault], "the event is posted once"
    assert rig.controller.state.outer_step == 4


def test_stop_in_a_round_cancels_it_and_drops_pending_work() -> None:
    rig = Rig()
    command = rig.command(call(), ev.StopRequested("deregistered", 3))
    assert (command.action, command.exit_status) == (Action.STOP, 3)
    assert command.local.kept == {"rank_zero": {"blocks": {"blocks": [[554, 3]]}}}
    assert rig.swarm.cancelled
    assert rig.action() is Action.IDLE, "nothing follows"
    rig.swarm.release.set()


def test_the_fetched_state_comes_with_the_order_to_load_it(tmp_path: Path) -> None:
    rig = Rig()
    assert rig.action(ev.GlobalEpochSeen(6, 1000.0)) is Action.TRAIN  # also while it is fetched
    rig.global_epoch.fetch.assert_called_once_with(6)
    command = rig.command(ev.GlobalFetched(tmp_path))
    assert command == Command(Action.LOAD, outer_step=6)
    assert command.local.folder == tmp_path
    rig.action(ev.LoadFailed("another shape", 1001.0))
    assert "was refused: another shape" in str(refusal(tmp_path))


def test_a_rebase_after_a_roll_back_to_another_epoch_is_a_load() -> None:
    rig = Rig()
    rig.action(ev.WeightsCompared(4, same=False))
    rig.controller.post(ev.GlobalFetched(Path("epoch-4")))
    assert rig.command(ev.RolledBack(Progress(outer_step=3))) == Command(Action.LOAD, outer_step=4)


def test_deadlines_are_looked_at_once_per_tick() -> None:
    rig = Rig(Mode.AWAITING_GLOBAL)
    rig.action()
    assert rig.controller.state.mode is Mode.TRAINING
    rig.global_epoch.compare_soon.assert_called_once_with()
    for _ in range(3):
        rig.action()
    assert rig.seen == [
        ev.Tick(1000.0),
        ev.ModeChanged(Mode.AWAITING_GLOBAL, Mode.TRAINING),
    ]
    rig.now += 1
    rig.action()
    assert rig.seen[2:] == [ev.Tick(1001.0)]


def test_consequence_of_an_event_is_decided_before_other_events() -> None:
    """The snapshot of a step comes before its checkpoint and before a call behind it."""
    rig = Rig(unsaved_steps=9)

    def wants_snapshots(event: ev.Event, state: MinerState) -> Iterable[ev.Event]:
        return [ev.SnapshotWanted()] if isinstance(event, ev.InnerStepDone) else []

    rig.controller.subscribe(wants_snapshots)
    actions = [rig.action(step(50), call()), rig.action(), rig.action()]
    assert actions == [Action.SNAPSHOT, Action.CHECKPOINT, Action.WRITE_PSEUDO_GRADIENT]


@pytest.mark.parametrize(("key", "live"), [("training.learning_rate", True), ("data.rows", False)])
def test_another_version_is_followed_at_its_outer_step_or_by_a_restart(
    key: str, live: bool
) -> None:
    def network(number: int) -> Any:
        head = SimpleNamespace(version=number)
        text = {"network.toml": f"text {number}"}
        return SimpleNamespace(head=head, digest=str(number), values={key: number}, files=text)

    first, second = network(1), network(2)
    versions = SimpleNamespace(in_force=first, at=lambda step: second if step >= 5 else first)
    rig = Rig(versions=versions)
    assert rig.command().action is not Action.FOLLOW_RULES
    rig.controller.state = replace(rig.controller.state, outer_step=5)
    command = rig.command()
    if live:
        assert (command.action, command.outer_step) == (Action.FOLLOW_RULES, 2)
        assert command.local.rules == "text 2"
        assert rig.command().action is not Action.FOLLOW_RULES
        rig.controller.state = replace(rig.controller.state, outer_step=4)  # rolled back
        assert rig.command().local.rules == "text 1"
        return
    assert (command.action, command.exit_status) == (Action.STOP, ExitStatus.FAULT)
    behind = Rig(versions=SimpleNamespace(in_force=second, at=versions.at))
    behind.controller.post(ev.GlobalEpochSeen(outer_step=5, at=0.0))
    assert behind.command().action is not Action.STOP, "the next start would be in the same place"
    assert "takes a restart (data.rows)" in rig.controller.state.stop_reason
