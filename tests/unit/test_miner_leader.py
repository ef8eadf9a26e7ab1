"""The leader: events in, orders out, with every neighbour in memory."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from distributed_training.miner.leader import Leader
from distributed_training.miner.orders import ControlChannel, DataOrder, Order, OrderKind
from distributed_training.miner.state import (
    AllReduceCalled,
    GlobalEpochSeen,
    GlobalFetched,
    GlobalFetchFailed,
    InnerStepEnded,
    MinerState,
    Mode,
    OuterStepEnded,
    PseudoGradientWritten,
    RolledBack,
    StopRequested,
    Timing,
    WeightsCompared,
)
from distributed_training.protocol.types import (
    AllReduceError,
    AllReduceFault,
    AllReduceResult,
    PublicationReport,
    RoundRequest,
)

pytestmark = pytest.mark.timeout(30)

RESULT = AllReduceResult(("a", "b"), (), 0.1, 0.2, 0.3)


class Swarm:
    buffers: tuple[object, ...] = ()

    def __init__(self) -> None:
        self.outcome: AllReduceResult | Exception = RESULT
        self.release = threading.Event()
        self.cancelled = False
        self.event: threading.Event | None = None  # the round's own

    def average(
        self,
        request: RoundRequest,
        *,
        weight: float = 1.0,
        cancelled: threading.Event | None = None,
    ) -> AllReduceResult:
        self.event = cancelled
        assert self.release.wait(10)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def cancel(self) -> None:
        self.cancelled = True


class Publisher:
    def __init__(self) -> None:
        self.paused = False
        self.waiting: list[PublicationReport] = []

    busy = True

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def reports(self) -> list[PublicationReport]:
        reports, self.waiting = self.waiting, []
        return reports


class Watch:
    def __init__(self) -> None:
        self.fetched: list[int] = []
        self.compared = 0

    def compare_soon(self) -> None:
        self.compared += 1

    def fetch(self, outer_step: int) -> None:
        self.fetched.append(outer_step)

    def compare_weights(self, outer_step: int) -> None: ...


class Blocks:
    def __init__(self) -> None:
        self.begin = (0, 0)
        self.request = 0
        self.available = True

    def on_boundary(self, *, may_begin: bool) -> DataOrder:
        begin = self.begin if may_begin else (0, 0)
        if may_begin:
            self.begin = (0, 0)
        request, self.request = self.request, 0
        return DataOrder(request, *begin)


class Rig:
    def __init__(self, mode: Mode = Mode.TRAINING) -> None:
        self.now = 1000.0
        self.swarm, self.publisher, self.watch, self.blocks = (
            Swarm(),
            Publisher(),
            Watch(),
            Blocks(),
        )
        self.reports: list[PublicationReport] = []
        self.recorded: list[str] = []
        self.leader = Leader(
            state=MinerState(mode=mode, outer_step=4),
            timing=Timing(reload_seconds=60),
            channel=ControlChannel(rank=0, world_size=1, group=None, store=None),
            swarm=self.swarm,
            publisher=self.publisher,
            global_watch=self.watch,
            blocks=self.blocks,
            chain_block=lambda: 777,
            record=lambda kind, **fields: self.recorded.append(kind),
            clock=lambda: self.now,
            idle_wait=timedelta(milliseconds=20),
        )
        self.leader.on_publication = self.reports.append

    def order(self) -> Order:
        return self.leader.next_order()

    def order_other_than_idle(self) -> Order:
        for _ in range(500):
            order = self.order()
            if order.kind is not OrderKind.IDLE:
                return order
        raise AssertionError("only IDLE")


def call() -> AllReduceCalled:
    return AllReduceCalled(RoundRequest(caller="5V", received_at=1e9), 1000.0)


def test_it_trains_when_nothing_happens() -> None:
    assert Rig().order().kind is OrderKind.CONTINUE


def test_it_idles_without_data_and_begins_when_a_block_is_ready() -> None:
    rig = Rig()
    rig.blocks.available = False
    rig.blocks.request = 555
    assert rig.order() == Order(OrderKind.IDLE, 1, 555), "1: for data"
    rig.blocks.begin = (555, 64)
    assert rig.order() == Order(OrderKind.CONTINUE, 0, 0, 555, 64)


def test_a_ready_block_is_kept_while_an_order_goes_first() -> None:
    rig = Rig()
    rig.blocks.begin = (555, 64)
    rig.leader.post(InnerStepEnded(10, checkpoint_due=True))
    assert rig.order().kind is OrderKind.CHECKPOINT
    assert rig.order() == Order(OrderKind.CONTINUE, 0, 0, 555, 64)


def test_a_whole_round() -> None:
    rig = Rig()
    rig.leader.post(call())
    assert rig.order().kind is OrderKind.AVERAGE
    assert rig.publisher.paused
    assert rig.leader.in_round()
    rig.leader.post(PseudoGradientWritten(0.5))
    assert rig.order().kind is OrderKind.IDLE  # the swarm works in its own thread
    rig.swarm.release.set()
    assert rig.order_other_than_idle().kind is OrderKind.OUTER_STEP
    assert rig.leader.averaged is RESULT
    rig.leader.post(OuterStepEnded(True, 5, 1001.0))
    assert rig.order().kind is OrderKind.CHECKPOINT
    assert rig.order().kind is OrderKind.CONTINUE
    assert not rig.publisher.paused
    assert rig.leader.state.outer_step == 5


@pytest.mark.parametrize(
    "error",
    [AllReduceError(AllReduceFault.NO_GROUP), RuntimeError("hivemind fell over")],
    ids=["known", "unknown"],
)
def test_a_failed_round_costs_time_only(error: Exception) -> None:
    rig = Rig()
    failed: list[AllReduceFault] = []
    rig.leader.on_round_failed = lambda fault, detail: failed.append(fault)
    rig.swarm.outcome = error
    rig.swarm.release.set()
    rig.leader.post(call())
    rig.order()
    rig.leader.post(PseudoGradientWritten(0.5))
    assert rig.order_other_than_idle().kind is OrderKind.CONTINUE
    assert len(failed) == 1, "whoever keeps the books of rounds is told, once"
    assert rig.leader.state.outer_step == 4
    assert not rig.publisher.paused


def test_stop_in_a_round_cancels_it_and_drops_what_was_pending() -> None:
    rig = Rig()
    rig.leader.post(call())
    rig.leader.post(StopRequested("SIGTERM", 0))
    order = rig.order()
    assert (order.kind, order.arg) == (OrderKind.STOP, 0)
    assert rig.swarm.cancelled
    rig.swarm.release.set()


def test_a_stop_reaches_a_round_whose_thread_has_not_come_to_the_swarm_yet() -> None:
    rig = Rig()
    for number in range(2):
        rig.leader.post(call())
        rig.order()
        rig.leader.post(PseudoGradientWritten(0.5))
        if number == 0:
            rig.swarm.outcome = AllReduceError(AllReduceFault.NO_GROUP)
            rig.swarm.release.set()
            rig.order_other_than_idle()
            rig.swarm.release.clear()
    rig.leader.post(StopRequested("SIGTERM", 0))
    rig.order_other_than_idle()
    deadline = time.monotonic() + 10
    while not (rig.swarm.event and rig.swarm.event.is_set()):
        assert time.monotonic() < deadline
    rig.swarm.release.set()


def test_a_rebase_after_a_roll_back_to_another_epoch_is_a_load() -> None:
    rig = Rig()
    rig.leader.post(WeightsCompared(4, same=False))
    rig.order()
    rig.leader.post(GlobalFetched(4, Path("epoch-4")))
    rig.leader.post(RolledBack(3))
    order = rig.order_other_than_idle()
    assert (order.kind, order.arg) == (OrderKind.LOAD, 4)


def test_a_snapshot_carries_the_chain_block() -> None:
    rig = Rig()
    rig.leader.post(InnerStepEnded(50, snapshot_due=True))
    assert rig.order() == Order(OrderKind.SNAPSHOT, 777)


def test_epochs_apart_are_fetched_and_a_failed_fetch_lets_training_go_on() -> None:
    rig = Rig()
    rig.leader.post(GlobalEpochSeen(6, 1000.0))
    assert rig.order().kind is OrderKind.CONTINUE  # also while it is fetched
    assert rig.watch.fetched == [6]
    rig.leader.post(GlobalFetchFailed("404", 1001.0))
    assert rig.order().kind is OrderKind.CONTINUE
    assert rig.leader.state.mode is Mode.AWAITING_GLOBAL


def test_deadlines_are_looked_at_once_per_tick() -> None:
    rig = Rig(Mode.AWAITING_GLOBAL)
    rig.order()
    assert rig.leader.state.mode is Mode.TRAINING
    assert rig.watch.compared == 1
    assert "state" in rig.recorded


def test_a_snapshot_that_a_round_overtakes_is_told_to_the_schedule() -> None:
    rig = Rig()
    dropped: list[str] = []
    rig.leader.on_snapshot_dropped = lambda: dropped.append("snapshot")
    rig.leader.post(call())
    rig.leader.post(InnerStepEnded(50, snapshot_due=True))
    assert rig.order().kind is OrderKind.AVERAGE
    assert dropped == ["snapshot"]


def test_a_call_while_loading_does_not_count_as_a_running_round() -> None:
    rig = Rig(Mode.LOADING)
    ignored: list[str] = []
    rig.leader.on_call_ignored = lambda: ignored.append("call")
    rig.leader.post(call())
    assert rig.order().kind is OrderKind.IDLE
    assert ignored == ["call"]


def test_a_second_call_in_a_round_leaves_the_round_running() -> None:
    rig = Rig()
    ignored: list[str] = []
    rig.leader.on_call_ignored = lambda: ignored.append("call")
    rig.leader.post(call())
    rig.leader.post(call())
    assert rig.order().kind is OrderKind.AVERAGE
    assert rig.leader.in_round() and not ignored


def test_orders_survive_the_wire() -> None:
    order = Order(OrderKind.CONTINUE, 3, 5, 7, 9)
    assert Order.unpack(order.pack()) == order
