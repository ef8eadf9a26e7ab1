"""Rank 0's side of the loop: one queue of events in, one order per boundary out.

Threads and processes of rank 0 (signed HTTP server, swarm, publisher, watch of the global bucket,
signals) only ever post events. The leader drains them at each boundary, asks the pure
:func:`~.state.transition` what follows, carries out what concerns rank 0 alone and returns the
order that all ranks obey.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from distributed_training.miner import state as st
from distributed_training.miner.orders import ControlChannel, DataOrder, Order, OrderKind
from distributed_training.miner.state import Do, MinerState, Mode, Timing, trains, transition
from distributed_training.protocol import lines
from distributed_training.protocol.types import (
    AllReduceError,
    AllReduceFault,
    AllReduceResult,
    PublicationReport,
    RoundRequest,
)

log = logging.getLogger(__name__)

_KINDS = {
    Do.AVERAGE: OrderKind.AVERAGE,
    Do.OUTER_STEP: OrderKind.OUTER_STEP,
    Do.LOAD: OrderKind.LOAD,
    Do.REBASE: OrderKind.REBASE,
    Do.SNAPSHOT: OrderKind.SNAPSHOT,
    Do.PREVIEW: OrderKind.PREVIEW,
    Do.CHECKPOINT: OrderKind.CHECKPOINT,
    Do.ROLL_BACK: OrderKind.ROLL_BACK,
    Do.STOP: OrderKind.STOP,
}


class SwarmLike(Protocol):
    @property
    def buffers(self) -> Sequence[Any]: ...
    def average(
        self,
        request: RoundRequest,
        *,
        weight: float = 1.0,
        cancelled: threading.Event | None = None,
    ) -> AllReduceResult: ...
    def cancel(self) -> None: ...


class PublisherLike(Protocol):
    @property
    def busy(self) -> bool: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def reports(self) -> list[PublicationReport]: ...


class GlobalWatchLike(Protocol):
    def compare_soon(self) -> None: ...
    def fetch(self, outer_step: int) -> None: ...
    def compare_weights(self, outer_step: int) -> None: ...


class BlocksLike(Protocol):
    """Which blocks to prefetch and train on; see :class:`~.blocks.BlockFeed`."""

    def on_boundary(self, *, may_begin: bool) -> DataOrder:
        """What to prefetch, and what to train on from here; ``may_begin`` False: the former."""

    @property
    def available(self) -> bool:
        """Whether the block that training is on has micro-batches left."""


class Leader:
    """Decides what all ranks do next.

    ``idle_wait`` is how long a boundary may wait for an event when there is nothing to train on;
    the other ranks sit in the broadcast for that long. ``tick`` is how often deadlines are looked
    at. All network objects are rank 0's own.
    """

    def __init__(
        self,
        *,
        state: MinerState,
        timing: Timing,
        channel: ControlChannel,
        swarm: SwarmLike,
        publisher: PublisherLike,
        global_watch: GlobalWatchLike,
        blocks: BlocksLike,
        chain_block: Callable[[], int],
        record: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
        idle_wait: timedelta = timedelta(milliseconds=200),
        tick: timedelta = timedelta(seconds=1),
    ) -> None:
        self.state = state
        self.averaged: AllReduceResult | None = None
        self.fetched: Path | None = None
        self._timing = timing
        self._channel = channel
        self._swarm = swarm
        self._publisher = publisher
        self._global_watch = global_watch
        self._blocks = blocks
        self._chain_block = chain_block
        self.on_publication: Callable[[PublicationReport], None] = lambda report: None
        self.on_snapshot_dropped: Callable[[], None] = lambda: None
        self.on_call_ignored: Callable[[], None] = lambda: None
        self.on_round_failed: Callable[[AllReduceFault, str], None] = lambda fault, detail: None
        self._record = record
        self._clock = clock
        self._idle_wait = idle_wait.total_seconds()
        self._tick = tick.total_seconds()
        self._last_tick = -math.inf
        self._events: queue.SimpleQueue[st.Event] = queue.SimpleQueue()
        self._pending: deque[Do] = deque()
        self._averaging: threading.Thread | None = None
        self._cancelled = threading.Event()  # the round that thread is in

    # --- in ------------------------------------------------------------------------------------

    def post(self, event: st.Event) -> None:
        """From any thread: something happened. Returns at once."""
        self._events.put(event)

    def in_round(self) -> bool:
        """For the server's answer to a second AllReduce call."""
        return self.state.mode is Mode.AVERAGING

    # --- out -----------------------------------------------------------------------------------

    def next_order(self) -> Order:
        """The order of this boundary. Waits at most ``idle_wait`` when there is nothing to do."""
        self._drain()
        now = self._clock()
        if now - self._last_tick >= self._tick:
            self._last_tick = now
            self._handle(st.Tick(now))
            for report in self._publisher.reports():
                self.on_publication(report)
        may_train = trains(self.state.mode) and not self._pending
        data = self._blocks.on_boundary(may_begin=may_train)
        if self._pending:
            do = self._pending.popleft()
            if do is Do.REBASE and not self.state.rebase:
                do = Do.LOAD  # a roll-back to another epoch came between
            return Order(_KINDS[do], self._argument(do), data.request)
        if may_train and (data.begin or self._blocks.available):
            return Order(OrderKind.CONTINUE, 0, *data)
        if not data.request:
            self._wait_for_event()
        return Order(OrderKind.IDLE, int(may_train), data.request)

    def _argument(self, do: Do) -> int:
        match do:
            case Do.SNAPSHOT:
                return self._chain_block()
            case Do.LOAD | Do.REBASE:
                return self.state.fetch_target or 0
            case Do.STOP:
                return self.state.exit_status
            case _:
                return 0

    def _drain(self) -> None:
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return
            self._handle(event)

    def _wait_for_event(self) -> None:
        try:
            self._handle(self._events.get(timeout=self._idle_wait))
        except queue.Empty:
            return

    def _handle(self, event: st.Event) -> None:
        before = self.state
        self.state, orders = transition(before, event, self._timing)
        if self.state.mode is not before.mode:
            self._record("state", before=before.mode.value, after=self.state.mode.value)
        self._keep_payload(event)
        self._tell_what_was_dropped(event, orders)
        if (
            isinstance(event, st.AveragingEnded)
            and event.result is None
            and before.mode is Mode.AVERAGING
        ):
            self.on_round_failed(event.fault or AllReduceFault.LOCAL, event.detail)
        for do in orders:
            if do in _KINDS:
                self._queue(do)
            else:
                self._carry_out(do)

    def _tell_what_was_dropped(self, event: st.Event, orders: st.Orders) -> None:
        """Who waits for an order that will not come must know, or waits for ever."""
        match event:
            case st.InnerStepEnded(snapshot_due=True) if Do.SNAPSHOT not in orders:
                self.on_snapshot_dropped()
            case st.AllReduceCalled() if Do.AVERAGE not in orders and not self.in_round():
                log.warning("An AllReduce call is ignored: this miner is %s", self.state.mode.value)
                self.on_call_ignored()
            case _:
                return

    def _queue(self, do: Do) -> None:
        if do is Do.STOP:
            if Do.SNAPSHOT in self._pending:
                self.on_snapshot_dropped()
            self._pending.clear()  # nothing that was wanted before matters now
        self._pending.append(do)

    def _keep_payload(self, event: st.Event) -> None:
        match event:
            case st.AveragingEnded(result=result, fault=fault, detail=detail):
                self.averaged = result
                if fault is not None:
                    log.warning(
                        "All Reduce Failed: %s%s", fault.value, f": {detail}" * bool(detail)
                    )
            case st.GlobalFetched(folder=folder):
                self.fetched = folder
            case st.GlobalFetchFailed(detail=detail):
                log.warning("The global state could not be fetched (%s). Training goes on.", detail)
            case _:
                return

    def _carry_out(self, do: Do) -> None:
        match do:
            case Do.START_AVERAGING:
                assert self.state.round is not None
                self._cancelled = cancelled = threading.Event()
                self._averaging = threading.Thread(
                    target=self._average,
                    args=(self.state.round, cancelled),
                    name="averaging",
                    daemon=True,
                )
                self._averaging.start()
            case Do.CANCEL_AVERAGING:
                self._cancelled.set()  # its thread may not have come to the swarm yet
                self._swarm.cancel()
            case Do.PAUSE_UPLOADS:
                if self._publisher.busy and self.in_round():
                    log.info("%s (it goes on afterwards)", lines.UPLOAD_CANCELLED)
                self._publisher.pause()
            case Do.RESUME_UPLOADS:
                self._publisher.resume()
            case Do.COMPARE_EPOCHS:
                self._global_watch.compare_soon()
            case Do.FETCH_GLOBAL:
                assert self.state.fetch_target is not None
                self._global_watch.fetch(self.state.fetch_target)
            case Do.COMPARE_WEIGHTS:
                self._global_watch.compare_weights(self.state.outer_step)
            case _:
                raise AssertionError(f"{do} is an order for all ranks")

    def _average(self, request: RoundRequest, cancelled: threading.Event) -> None:
        try:
            result = self._swarm.average(request, cancelled=cancelled)
        except AllReduceError as error:
            self.post(st.AveragingEnded(None, error.fault, error.detail))
        except Exception as error:  # a round must end whatever happens, or the miner waits for ever
            log.exception("The swarm failed in a way it should not")
            self.post(st.AveragingEnded(None, AllReduceFault.SWARM_DOWN, repr(error)))
        else:
            self.post(st.AveragingEnded(result))
