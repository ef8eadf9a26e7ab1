"""The loop every rank runs: take the boundary's command, carry it out, report its result.

One iteration is one micro-batch boundary. All ranks construct the loop alike, but only
rank 0 has the controller, which gives commands and takes events. The loop knows no exchange: each
rank's part of a round is in :class:`~.rounds.RoundRank`. No network call happens here, because
uploads and downloads run in threads of rank 0 and come back as events.
"""

from __future__ import annotations

import gc
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distributed_training.protocol.types import Progress

from . import events as ev
from .controller import Controller
from .events import Action, Command, DataPart, LocalPart
from .ranks import RankChannel
from .rounds import RoundRank

if TYPE_CHECKING:  # heavy; a start that cannot succeed must say so before
    from distributed_training.data.pipeline import DataPipeline
    from distributed_training.training.checkpoint import Checkpointer
    from distributed_training.training.held_weights import HeldWeights
    from distributed_training.training.trainer import Trainer

log = logging.getLogger(__name__)

#: Commands that leave nothing to train: a round, or a wait for something. They are no step's time;
#: a checkpoint and a wait for data are.
PAUSES = frozenset({Action.IDLE, Action.OUTER_STEP, Action.ROLL_BACK})


#: Inner steps after which Python's garbage is collected, at the latest. A step of 256 micro-batches
#: leaves some thousand small closures, and no tensor.
GARBAGE_STEPS = 25
#: New objects after which it is collected whatever ranks do: rank 0's threads make some in a pause.
GARBAGE_OBJECTS = 500_000


class Garbage:
    """Python's collector, which runs where all ranks let it, and nowhere else.

    By itself it begins wherever enough was allocated, and all ranks then wait in a collective for
    the one. What was made before the loop stays, so it is looked at no more.
    """

    def __init__(self) -> None:
        gc.disable()
        gc.collect()
        gc.freeze()
        self._outer_step = self._inner_step = 0

    def follow(self, outer_step: int, inner_step: int) -> None:
        """Collect after an outer step, after some inner steps, or where there is much.

        ``inner_step``: in total.
        """
        due = outer_step != self._outer_step or inner_step >= self._inner_step + GARBAGE_STEPS
        # The number is counted by the interpreter, also while the collector is off.
        if due or gc.get_count()[0] > GARBAGE_OBJECTS:
            self._outer_step, self._inner_step = outer_step, inner_step
            gc.collect()


class RankLoop(ABC):
    """One rank's boundaries, whoever trains between them.

    ``data``: None where that is not this program's. ``round_rank`` carries out what is of a round.
    ``controller`` is None on all ranks but 0. ``alive``: called at each boundary.
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
        self._requested: set[int] = set()  # blocks this rank has not reported as ready

    def boundary(self) -> Command:
        """Take the boundary's command, carry it out, and report what it came to."""
        began = time.perf_counter()
        self._alive()
        # The other ranks wait here for rank 0, which takes 0.2 s at most while nothing is due.
        command = self._ranks.broadcast(self._next_command())
        # First: a block begins with the micro-batch of the same boundary.
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
        """Return the event that follows, where one does.

        An error not answered with an event ends the miner on all ranks.
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
                # First: the checkpoint waits for the copies it holds.
                self._round_rank.give_up()
                self._save_last(command.local)
                # A thread writes it, and threads do not outlive the process.
                self._checkpointer.wait()
                return ev.Stopped(command.exit_status)
        return self._round_rank.carry_out(command, self._progress(command.local))

    @abstractmethod
    def _micro_batch(self) -> ev.Event | None:
        """Train on a micro-batch, or have it trained on."""

    def _follow_data(self, part: DataPart) -> None:
        """Prefetch, begin a block, and tell rank 0 which of those requested are ready here."""
        if self._data is None:
            return
        if part.request:
            self._data.request(part.request)
            self._requested.add(part.request)
        if part.begin:
            self._data.begin(part.begin, part.sequences, part.start)
        # At each boundary: a worker that died idle would be missed only when its block is due.
        self._data.gather_blocks()
        for block in tuple(self._requested):
            sequences = self._data.ready(block)
            if sequences is not None:
                self._ranks.report_ready(block, sequences)
                self._requested.discard(block)

    def _progress(self, local: LocalPart) -> Progress:
        return Progress(
            outer_step=self._weights.outer_step,
            inner_step=self._weights.inner_step,
            total_inner_steps=self._weights.total_inner_steps,
        )

    def _save_checkpoint(self, local: LocalPart) -> None:
        position = {} if self._data is None else self._data.state_dict()
        self._checkpointer.save({"data": position, **local.kept}, self._progress(local))

    def _save_last(self, local: LocalPart) -> None:
        """Save the checkpoint of a stop."""
        self._save_checkpoint(local)


class MinerLoop(RankLoop):
    """Run boundaries until STOP, and train in them. For the arguments see :class:`RankLoop`."""

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
                "No checkpoint of this stop: the last %d inner steps gave NaN or Inf, "
                "so these weights may be the cause; a start continues from the "
                "checkpoint before",
                skipped,
            )

    # --- inner steps ---------------------------------------------------------------------------

    def _micro_batch(self) -> ev.Event:
        batch = self._text.next()
        if batch is None:
            # All ranks serve equally many sequences, so all of them are at the end now.
            return ev.MicroBatchEnded(trained=False)
        report = self._trainer.add_micro_batch(batch, data_wait_seconds=self._text.wait_seconds)
        if report is None:
            return ev.MicroBatchEnded()
        return ev.InnerStepDone(report, diverged=self._trainer.wants_roll_back)
