"""Rank 0's side of the loop: one queue of events in, one command per boundary out.

Threads of rank 0 (the exchange, signals) only ever post events; so does the loop with the result of
each command. At each boundary the controller drains the queue. Every event first goes to the
subscribers, who may answer with events that follow at once (an upload is wanted at the step that
just ended); then :func:`~.rounds.decide` returns commands and tasks. Tasks go to the exchange,
which works in threads of its own, so the loop never waits for a network. Commands wait for their
boundary.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from distributed_training.common.backoff import Throttle
from distributed_training.config.versions import Versions
from distributed_training.exchange.base import Close, Exchange, upload_path
from distributed_training.network import Network
from distributed_training.protocol.types import ExitStatus

from . import events as ev
from .blocks import Blocks
from .events import Action, Command, DataPart, LocalPart, MinerState, Mode, Rules, Task
from .rounds import decide

log = logging.getLogger(__name__)


#: Sees each event with the state it finds; what it returns is handled before anything else.
Subscriber = Callable[[ev.Event, MinerState], Iterable[ev.Event] | None]

#: How long a boundary waits for an event when there is nothing to do: the other ranks sit in the
#: broadcast for that long.
IDLE_WAIT = 0.2  # seconds


class Controller:
    """Decides what all ranks do next.

    ``uploads``: the folder of uploads. ``versions``: of the network's file, None where it has none.
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
        versions: Versions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = state
        self._rules = rules
        self._events = events
        self._blocks = blocks
        self._exchange = exchange
        self._uploads = uploads
        self._versions = versions
        #: Of a script, which continues: gets the version before, and the one that holds now.
        self.adopt: Callable[[Network, Network], None] | None = None
        self._clock = clock
        self.idle_wait = IDLE_WAIT  # seconds
        self._tick_due = Throttle(rules.tick_seconds, clock=clock)
        self._pending: deque[Action] = deque()
        # First: whoever decides on an upload reads its pages as they are after the event.
        self._subscribers: list[Subscriber] = [blocks.on_event]

    def subscribe(self, subscriber: Subscriber) -> None:
        """Show it every event from now on, after those that subscribed before."""
        self._subscribers.append(subscriber)

    def post(self, event: ev.Event) -> None:
        """Queue an event, from any thread. Returns at once."""
        self._events.put(event)

    def next_command(self) -> Command:
        """Return the command of this boundary. Waits at most ``idle_wait`` without any work."""
        # Also while commands wait: a stop that is in the queue clears them.
        self.drain()
        if self._tick_due():
            self._handle_event(ev.Tick(self._clock()))
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
            case Action.WRITE_PROGRESS:
                none = Close(state.outer_step, 0, 0.0, 0.0)
                command = replace(command, local=LocalPart(pages=blocks.pages(), close=none))
            case Action.OUTER_STEP if state.update is not None:
                command = replace(command, local=LocalPart(update=state.update))
            case Action.WRITE_UPLOAD | Action.OUTER_STEP:
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
            # Before the event itself is decided on: an upload belongs to the boundary of its step,
            # and the checkpoint of that boundary shares its copies.
            for follows in subscriber(event, self.state) or ():
                self._handle_event(follows)
        self.state, actions = decide(self.state, event, self._rules)
        for action in actions:
            if isinstance(action, Task):
                self._start_task(action)
                continue
            if action is Action.STOP:
                self._pending.clear()  # nothing that was wanted before matters now
            self._pending.append(action)

    def _start_task(self, task: Task) -> None:
        state, close = self.state, Close(self.state.outer_step, 0, 0.0, 0.0)
        match task:
            case Task.SEND_UPLOAD | Task.SEND_PROGRESS:
                if task is Task.SEND_UPLOAD and state.upload is not None:
                    close = state.upload.close
                self._exchange.send(close, upload_path(self._uploads, close))
            case Task.REPORT_APPLIED | Task.FETCH_WEIGHTS:
                wanted = task is Task.FETCH_WEIGHTS
                self._exchange.applied(state.outer_step, wants_weights=wanted)
