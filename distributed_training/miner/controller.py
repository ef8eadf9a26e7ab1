"""Rank 0's side of the loop: one queue of events in, one command per boundary out.

Threads of rank 0 (the exchange, signals) only ever post events; so does the loop with the result of
each command. At each boundary the controller drains the queue. Every event first goes to the
subscribers, who report it; then :func:`~.rounds.decide` returns commands, tasks and events that
follow at once. Tasks go to the exchange, which works in threads of its own, so the loop never waits
for a network. Commands wait for their boundary.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from distributed_training.common.backoff import Throttle
from distributed_training.config.versions import Versions
from distributed_training.exchange.base import Exchange, upload_path
from distributed_training.network import Network
from distributed_training.protocol.types import ExitStatus

from . import events as ev
from .blocks import Blocks
from .events import Action, Command, DataPart, LocalPart, MinerState, Mode, Rules, Task
from .rounds import decide

log = logging.getLogger(__name__)


#: Sees each event with the state that it finds.
Subscriber = Callable[[ev.Event, MinerState], None]

#: How long a boundary waits for an event when there is nothing to do: the other ranks sit in the
#: broadcast for that long.
IDLE_WAIT = 0.2  # seconds


class Controller:
    """Decides what all ranks do next.

    ``uploads``: the folder of uploads. ``disk_problem``: returns why an upload does not fit on the
    disk, None: it does. ``versions``: of the network's file, None where it has none.
    """

    def __init__(
        self,
        *,
        state: MinerState,
        rules: Rules,
        events: queue.SimpleQueue[ev.Event],
        blocks: Blocks,
        exchange: Exchange,
        uploads: Path,
        disk_problem: Callable[[], str | None] = lambda: None,
        versions: Versions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = state
        self.rules = rules
        self._events = events
        self._blocks = blocks
        self._exchange = exchange
        self._uploads = uploads
        self._disk_problem = disk_problem
        self._versions = versions
        #: For a script, which continues: called with the version before and the one that holds now.
        self.adopt: Callable[[Network, Network], None] | None = None
        self._clock = clock
        self.idle_wait = IDLE_WAIT  # seconds
        self._tick_due = Throttle(rules.tick_seconds, clock=clock)
        self._pending: deque[Action] = deque()
        self._subscribers: list[Subscriber] = [blocks.on_event]

    def subscribe(self, subscriber: Subscriber) -> None:
        """Show it every event from now on, after those that subscribed before."""
        self._subscribers.append(subscriber)

    def post(self, event: ev.Event) -> None:
        """Queue an event, from any thread. Returns at once."""
        self._events.put(event)

    def next_command(self) -> Command:
        """Return the command of this boundary. Waits at most ``idle_wait`` without any work."""
        # First: an inner step that ended after the grace is uploaded for its close no more.
        if self._tick_due():
            self._handle_event(ev.Tick(self._clock()))
        # Also while commands wait: a stop that is in the queue clears them.
        self.drain()
        for upload in (self.state.upload, self.state.progress):
            if upload is not None and (ended := upload.end_of_writing()) is not None:
                self._handle_event(ended)
        self._look_for_rules()
        # An update waits for the inner step under way, which it would drop. It does not wait for
        # data: without any it is applied at once.
        first = self._pending[0] if self._pending else Action.TRAIN
        ends_step = first is Action.OUTER_STEP and self._blocks.in_step
        may_train = self.state.mode is not Mode.STOPPING and (first is Action.TRAIN or ends_step)
        data = self._blocks.on_boundary(may_begin=may_train)
        if may_train and (data.begin or self._blocks.available):
            return Command(Action.TRAIN, data=data)
        if not self._pending:
            # With a request at hand there is no wait: ranks begin to fetch only with the command.
            if not data.request:
                self._handle_next(self.idle_wait)
            return Command(Action.WAIT_FOR_DATA if may_train else Action.IDLE, data=data)
        # With what it needs and rank 0's own part, as they are at its turn.
        command = Command(self._pending.popleft())
        state, blocks = self.state, self._blocks
        match command.action:
            case Action.FOLLOW_SCHEDULE:
                assert state.place is not None
                command = replace(command, outer_step=state.place[0], inner_steps=state.place[1])
            case Action.WRITE_UPLOAD if state.upload is not None:
                taken = LocalPart(pages=blocks.pages(), close=state.upload.close)
                command = replace(command, local=taken)
            case Action.WRITE_PROGRESS if state.progress is not None:
                taken = LocalPart(pages=blocks.pages(), close=state.progress.close)
                command = replace(command, local=taken)
            case Action.OUTER_STEP if state.update is not None:
                command = replace(command, local=LocalPart(update=state.update))
            case Action.WRITE_UPLOAD | Action.WRITE_PROGRESS | Action.OUTER_STEP:
                command = Command(Action.IDLE)  # a roll-back came between
            case Action.CHECKPOINT | Action.STOP as action:
                kept = {"rank_zero": {"blocks": blocks.state_dict()}}
                local = LocalPart(kept=kept)
                status = state.exit_status if action is Action.STOP else 0
                command = replace(command, exit_status=status, local=local)
        return replace(command, data=DataPart(data.request))

    def _look_for_rules(self) -> None:
        """Order a stop where a newer version of the network's file holds at this outer step.

        The launcher then starts the ranks again, in its rules. A script continues instead.
        """
        if self._versions is None or self._pending or self.state.mode is Mode.STOPPING:
            return
        before, wanted = self._versions.in_force, self._versions.at(self.state.outer_step)
        # An older one holds where a checkpoint is behind the network, by whose step a start goes.
        if wanted.head.version <= before.head.version:
            return
        if self.adopt is not None:
            self._versions.in_force = wanted
            self.adopt(before, wanted)
            return
        why = (
            f"version {wanted.head.version} of the network's file holds from outer step "
            f"{wanted.head.from_outer_step}, so the miner starts again with it"
        )
        self._handle_event(ev.StopRequested(why, exit_status=ExitStatus.AGAIN))

    def drain(self) -> None:
        """Handle every event that was posted until now."""
        while self._handle_next(0.0):
            pass

    def _handle_next(self, seconds: float) -> bool:
        """Handle the next event. Return False if none comes within ``seconds``."""
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return False
        self._handle_event(event)
        return True

    def _handle_event(self, event: ev.Event) -> None:
        for subscriber in self._subscribers:
            subscriber(event, self.state)
        self.state, follows = decide(self.state, event, self.rules)
        writes = {Action.WRITE_UPLOAD, Action.WRITE_PROGRESS} & {*follows}
        if writes and (problem := self._disk_problem()) is not None:
            follows = (ev.UploadSkipped(problem, "disk"),)
            if Action.WRITE_PROGRESS in writes:
                follows = (ev.UploadEnded(self.state.outer_step, 0, problem),)
        for each in follows:
            match each:
                case Task():
                    self._start_task(each)
                case Action():
                    if each is Action.STOP:
                        self._pending.clear()  # nothing that was wanted before matters now
                    self._pending.append(each)
                case _:
                    self._handle_event(each)

    def _start_task(self, task: Task) -> None:
        state = self.state
        if task in (Task.REPORT_APPLIED, Task.FETCH_WEIGHTS):
            wanted = task is Task.FETCH_WEIGHTS
            self._exchange.applied(state.outer_step, wants_weights=wanted)
        elif (upload := state.upload if task is Task.SEND_UPLOAD else state.progress) is not None:
            self._exchange.send(upload.close, upload_path(self._uploads, upload.close))
