"""Run the loop of every rank: take the boundary's command, carry it out, report its result.

One iteration is one micro-batch boundary. All ranks build the loop in the same way, but only rank 0
has the controller: one queue of events in, one command per boundary out. The loop does not depend
on the exchange: each rank's part of a round is in :class:`~.rounds.RoundRank`. No network call
happens here, because uploads and downloads run in rank 0's threads, and their results come back as
events.

Rank 0's threads (the exchange, signals) only ever post events, and the loop posts the result of
each command. At each boundary the controller drains the queue. Every event first goes to the
subscribers, which report it. Then :func:`~.rounds.decide` returns the commands, tasks and further
events that result. The further events are handled at once. Tasks go to the exchange, which works in
its own threads. Commands wait for their boundary.
"""

from __future__ import annotations

import gc
import logging
import queue
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distributed_training.common.backoff import Throttle
from distributed_training.config.versions import Versions
from distributed_training.exchange.base import Exchange
from distributed_training.network import Network
from distributed_training.protocol.types import ExitStatus, Progress

from . import events as ev
from .blocks import Blocks
from .events import Action, Applied, Command, DataPart, LocalPart, MinerState, Mode, Rules, Send
from .ranks import RankChannel
from .rounds import RoundRank, decide

if TYPE_CHECKING:
    from distributed_training.data.pipeline import DataPipeline
    from distributed_training.training.checkpoint import Checkpointer
    from distributed_training.training.held_weights import HeldWeights
    from distributed_training.training.trainer import Trainer

log = logging.getLogger(__name__)

#: Called with each event and the state before the event is decided on.
Subscriber = Callable[[ev.Event, MinerState], None]

#: How long a boundary waits for an event when there is nothing to do. Meanwhile the other ranks
#: wait in the broadcast.
IDLE_WAIT = 0.2  # seconds
TICK = 1.0  # seconds between two ticks


class Controller:
    """Decides what all ranks do next.

    ``disk_problem``: returns why an upload does not fit on the disk, or None if it does fit.
    ``versions``: the versions of the network's file; None if it has none.
    """

    def __init__(
        self,
        *,
        state: MinerState,
        rules: Rules,
        events: queue.SimpleQueue[ev.Event],
        blocks: Blocks,
        exchange: Exchange,
        disk_problem: Callable[[], str | None] = lambda: None,
        versions: Versions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = state
        self.rules = rules
        self._events = events
        self._blocks = blocks
        self._exchange = exchange
        self._disk_problem = disk_problem
        self._versions = versions
        #: Set for a script, which is not restarted: called with the previous and the new version.
        self.adopt: Callable[[Network, Network], None] | None = None
        self._clock = clock
        self.idle_wait = IDLE_WAIT  # seconds
        self._tick_due = Throttle(TICK, clock=clock)
        self._pending: deque[Action] = deque()
        self._subscribers: list[Subscriber] = [blocks.on_event]

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call ``subscriber`` with every event from now on, after the earlier subscribers."""
        self._subscribers.append(subscriber)

    def post(self, event: ev.Event) -> None:
        """Queue an event, from any thread. Returns at once."""
        self._events.put(event)

    def next_command(self) -> Command:
        """Return this boundary's command. Waits ``idle_wait`` at most if there is nothing to do."""
        # Handle the tick first, because an inner step that ends after the grace is too late for its
        # close.
        if self._tick_due():
            self._handle_event(ev.Tick(self._clock()))
        # Drain even while commands wait, since a stop in the queue clears them.
        self.drain()
        for upload in (self.state.upload, self.state.progress):
            if upload is not None and (ended := upload.end_of_writing()) is not None:
                self._handle_event(ended)
        self._look_for_rules()
        # An update waits for the end of the current inner step, which it would drop. It does not
        # wait for data: if there is none, it is applied at once.
        first = self._pending[0] if self._pending else Action.TRAIN
        ends_step = first is Action.OUTER_STEP and self._blocks.in_step
        may_train = self.state.mode is not Mode.STOPPING and (first is Action.TRAIN or ends_step)
        data = self._blocks.on_boundary(may_begin=may_train)
        if may_train and (data.begin or self._blocks.available):
            return Command(Action.TRAIN, data=data)
        if not self._pending:
            # Do not wait if there is a request: the ranks begin to fetch only after the command.
            if not data.request:
                self._handle_next(self.idle_wait)
            return Command(Action.WAIT_FOR_DATA if may_train else Action.IDLE, data=data)
        # Fill in the arguments and rank 0's part only now that it is the command's turn.
        command = Command(self._pending.popleft())
        state, blocks = self.state, self._blocks
        match command.action:
            case Action.FOLLOW_SCHEDULE:
                assert state.place is not None
                command = replace(command, outer_step=state.place[0], inner_steps=state.place[1])
            case Action.WRITE_UPLOAD if (upload := state.to_write) is not None:
                taken = LocalPart(pages=blocks.pages(), close=upload.close)
                command = replace(command, local=taken)
            case Action.OUTER_STEP if state.update is not None:
                command = replace(command, local=LocalPart(update=state.update))
            case Action.WRITE_UPLOAD | Action.OUTER_STEP:
                command = Command(Action.IDLE)  # a roll-back has made it void
            case Action.CHECKPOINT | Action.STOP as action:
                kept = {"rank_zero": {"blocks": blocks.state_dict()}}
                local = LocalPart(kept=kept)
                status = state.exit_status if action is Action.STOP else 0
                command = replace(command, exit_status=status, local=local)
        return replace(command, data=DataPart(data.request))

    def _look_for_rules(self) -> None:
        """Order a stop if a newer version of the network's file is in force at this outer step.

        The launcher then restarts the ranks with that version. A script continues with it instead.
        """
        if self._versions is None or self._pending or self.state.mode is Mode.STOPPING:
            return
        before, wanted = self._versions.in_force, self._versions.at(self.state.outer_step)
        # The wanted version is older if training went back to an older checkpoint. That is no
        # reason to stop.
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
        """Handle every event that was posted so far."""
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
        if Action.WRITE_UPLOAD in follows and (problem := self._disk_problem()) is not None:
            follows = (ev.UploadSkipped(problem, "disk"),)
            if (upload := self.state.to_write) is not None and not upload.close.serial:
                follows = (ev.UploadEnded(upload.close, problem),)
        for each in follows:
            match each:
                case Send(close=close):
                    self._exchange.send(close)
                case Applied(outer_step=outer_step, wants_weights=wanted):
                    self._exchange.applied(outer_step, wants_weights=wanted)
                case Action():
                    if each is Action.STOP:
                        self._pending.clear()  # earlier commands no longer matter
                    self._pending.append(each)
                case _:
                    self._handle_event(each)


#: Commands during which nothing is trained: part of a round, or a wait. Their time is not counted
#: in any inner step, unlike the time of a checkpoint or of a wait for data.
PAUSES = frozenset({Action.IDLE, Action.OUTER_STEP, Action.ROLL_BACK})


#: Inner steps after which Python's garbage is collected, at the latest. A step of 256 micro-batches
#: leaves a few thousand small closures but no tensors.
GARBAGE_STEPS = 25
#: New objects after which garbage is collected in any case: rank 0's threads create objects even
#: during a pause.
GARBAGE_OBJECTS = 500_000


class Garbage:
    """Runs Python's garbage collector at boundaries only, as far as possible on all ranks at once.

    On its own the collector starts whenever a process has allocated enough, and the other ranks
    then wait for that rank in a collective. Objects created before the loop live until the end, so
    the collector no longer examines them.
    """

    def __init__(self) -> None:
        gc.disable()
        gc.collect()
        gc.freeze()
        self._outer_step = self._inner_step = 0

    def follow(self, outer_step: int, inner_step: int) -> None:
        """Collect after an outer step, after some inner steps, or if there is much garbage.

        ``inner_step``: the total number of inner steps.
        """
        due = outer_step != self._outer_step or inner_step >= self._inner_step + GARBAGE_STEPS
        # The interpreter keeps this count even while the collector is off.
        if due or gc.get_count()[0] > GARBAGE_OBJECTS:
            self._outer_step, self._inner_step = outer_step, inner_step
            gc.collect()


class RankLoop(ABC):
    """Carries out one rank's boundaries. The miner or a script trains between them.

    ``data``: None if a script brings its own data. ``round_rank`` carries out this rank's part of a
    round. ``controller`` is None on all ranks but 0. ``alive``: called at each boundary.
    """

    def __init__(
        self,
        *,
        ranks: RankChannel,
        weights: HeldWeights,
        data: DataPipeline | None,
        checkpointer: Checkpointer,
        round_rank: RoundRank,
        controller: Controller | None,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._ranks = ranks
        self._weights = weights
        self._data = data
        self._checkpointer = checkpointer
        self._round_rank = round_rank
        self._controller = controller
        self._alive = alive
        self._requested: set[int] = set()  # requested blocks not yet reported as ready

    def boundary(self) -> Command:
        """Take the boundary's command, carry it out, and report the result."""
        began = time.perf_counter()
        self._alive()
        # The other ranks wait here for rank 0, at most 0.2 s while there is nothing to do.
        command = self._ranks.broadcast(self._next_command())
        # Do this first, because a block begins with the micro-batch of the same boundary.
        self._follow_data(command.data)
        if command.action is Action.WAIT_FOR_DATA and self._data is not None:
            self._data.missed(time.perf_counter() - began)
        event = self._carry_out(command)
        if command.action in PAUSES:
            self._weights.pause(time.perf_counter() - began)
        if self._controller is not None and event is not None:
            self._controller.post(event)
        return command

    def _next_command(self) -> Command | None:
        return self._controller.next_command() if self._controller else None

    def _carry_out(self, command: Command) -> ev.Event | None:
        """Carry out the command. Return the resulting event, if there is one.

        An error that is not turned into an event ends the miner on all ranks.
        """
        match command.action:
            case Action.TRAIN:
                return self._micro_batch()
            case Action.IDLE | Action.WAIT_FOR_DATA:
                return None
            case Action.FOLLOW_SCHEDULE:
                self._weights.follow_schedule(command.outer_step, command.inner_steps)
                return None
            case Action.CHECKPOINT:
                self._save_checkpoint(command.local)
                saved, held = self._checkpointer.saved, self._checkpointer.hold_seconds
                return ev.CheckpointBegun(self._weights.outer_step, saved, held)
            case Action.STOP:
                # Do this first, because the checkpoint would wait for an unfinished upload.
                self._round_rank.give_up()
                self._save_last(command.local)
                # A thread writes the checkpoint, and threads do not outlive the process.
                self._checkpointer.wait()
                return ev.Stopped(command.exit_status)
            case Action.OUTER_STEP:
                return self._round_rank.apply_update(command.local)
        return self._round_rank.write_upload(command.local, self._progress())

    @abstractmethod
    def _micro_batch(self) -> ev.Event | None:
        """Train on a micro-batch, or let the script do it."""

    def _follow_data(self, part: DataPart) -> None:
        """Prefetch or begin a block, and tell rank 0 which requested blocks are ready here."""
        if self._data is None:
            return
        if part.request:
            self._data.request(part.request)
            self._requested.add(part.request)
        if part.begin:
            self._data.begin(part.begin, part.sequences, part.start)
        # Do this at each boundary: otherwise the death of an idle worker would be noticed only when
        # its block is due.
        self._data.gather_blocks()
        for block in tuple(self._requested):
            sequences = self._data.ready(block)
            if sequences is not None:
                self._ranks.report_ready(block, sequences)
                self._requested.discard(block)

    def _progress(self) -> Progress:
        return Progress(
            outer_step=self._weights.outer_step,
            inner_step=self._weights.inner_step,
            total_inner_steps=self._weights.total_inner_steps,
        )

    def _save_checkpoint(self, local: LocalPart) -> None:
        position = {} if self._data is None else self._data.state_dict()
        self._checkpointer.save({"data": position, **local.kept}, self._progress())

    def _save_last(self, local: LocalPart) -> None:
        """Save the checkpoint at a stop."""
        self._save_checkpoint(local)


class MinerLoop(RankLoop):
    """Runs boundaries until STOP, and trains at them. For the arguments see :class:`RankLoop`."""

    def __init__(self, *, trainer: Trainer, data: DataPipeline, **given: Any) -> None:
        super().__init__(weights=trainer, data=data, **given)
        self._trainer, self._text = trainer, data

    def run(self) -> int:
        """Run until STOP; return the exit status, the same on all ranks."""
        garbage = Garbage()
        while True:
            command = self.boundary()
            garbage.follow(self._trainer.outer_step, self._trainer.total_inner_steps)
            if command.action is Action.STOP:
                return command.exit_status

    def _carry_out(self, command: Command) -> ev.Event | None:
        if command.action is Action.ROLL_BACK:
            return ev.RolledBack(*(self._checkpointer.roll_back() or (None,)))
        return super()._carry_out(command)

    def _save_last(self, local: LocalPart) -> None:
        skipped = self._trainer.skipped_in_a_row
        if skipped < 2:
            self._save_checkpoint(local)
        else:
            log.warning(
                "No checkpoint is saved at this stop: the last %d inner steps gave NaN or Inf, "
                "so the weights may be the cause; the next start continues from the "
                "previous checkpoint",
                skipped,
            )

    # --- inner steps ---------------------------------------------------------------------------

    def _micro_batch(self) -> ev.Event:
        batch = self._text.next()
        if batch is None:
            # All ranks serve the same number of sequences, so all have reached the end now.
            return ev.MicroBatchEnded(trained=False)
        report = self._trainer.add_micro_batch(batch, data_wait_seconds=self._text.wait_seconds)
        if report is None:
            return ev.MicroBatchEnded()
        return ev.InnerStepDone(report, diverged=self._trainer.wants_roll_back)
