"""The loop every rank runs: take the boundary's command, carry it out, report its result.

One iteration is one micro-batch boundary. All ranks construct the loop alike, but for what rank 0
alone has: the controller, which gives commands and takes events. The loop knows no exchange: what
all ranks do of a round is :class:`RankRound`'s. No network call happens here: what takes long
(averaging, uploads, downloads) runs in threads and processes of rank 0 and comes back as events.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from distributed_training.protocol import keys
from distributed_training.protocol.types import (
    Progress,
    RankFailedError,
)
from distributed_training.training.local_evaluation import WeightsWorseThanGuess

from . import events as ev
from .controller import Controller
from .events import Action, Command, DataPart, LocalPart
from .ranks import Ranks

if TYPE_CHECKING:  # heavy; a start that cannot succeed must say so before
    from distributed_training.data.pipeline import DataPipeline
    from distributed_training.training.checkpoint import Checkpointer
    from distributed_training.training.trainer import Trainer

log = logging.getLogger(__name__)

#: Commands that leave nothing to train: a round, or a wait for something. They are no step's time;
#: a snapshot, a gradient check outside of a round, a checkpoint and a wait for data are.
PAUSES = frozenset(
    {
        Action.IDLE,
        Action.WRITE_PSEUDO_GRADIENT,
        Action.OUTER_STEP,
        Action.LOAD,
        Action.REBASE,
        Action.ROLL_BACK,
    }
)


def state_files(folder: Path | None) -> tuple[Path | None, Path | None]:
    """Return the weights and the outer momentum of a fetched state; None for those without one."""
    if folder is None:
        return None, None
    return folder / keys.MODEL, folder / keys.OUTER_OPTIMIZER


def not_loaded(error: RankFailedError) -> str:
    """Describe a rank's failure in a load of all ranks: the state may be sound."""
    return f"a rank could not load it: {error}"


class RankRound(Protocol):
    """One rank's part of rounds and uploads, by the network's exchange."""

    def carry_out(self, command: Command, progress: Progress, last_loss: float) -> ev.Event | None:
        """Carry out this boundary's part. Collective."""

    def give_up(self) -> None:
        """End the writing of an upload under way."""


class MinerLoop:
    """Run boundaries until STOP.

    ``exchange`` carries out what is of a round. ``controller`` is None on all ranks but 0.
    ``alive``: called at each boundary. ``follow_rules``: gets the text of another version of the
    network's file.
    """

    def __init__(
        self,
        *,
        ranks: Ranks,
        trainer: Trainer,
        data: DataPipeline,
        checkpointer: Checkpointer,
        exchange: RankRound,
        controller: Controller | None,
        alive: Callable[[], None],
        follow_rules: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._ranks = ranks
        self._trainer = trainer
        self._data = data
        self._checkpointer = checkpointer
        self._exchange = exchange
        self._controller = controller
        self._alive = alive
        self._follow_rules = follow_rules
        self._requested: set[int] = set()  # blocks this rank has not reported as ready
        self._holds_back = False
        self._wants_others = False  # than those that a restart finds on disk
        self._last_loss = 0.0

    def run(self) -> int:
        """Run until STOP; return the exit status, the same on all ranks."""
        while True:
            began = time.perf_counter()
            self._alive()
            # The other ranks wait here for rank 0, which takes 0.2 s at most while nothing is due.
            command = self._ranks.broadcast(
                self._controller.next_command() if self._controller else None
            )
            # First: a block begins with the micro-batch of the same boundary.
            self._follow_data(command.data)
            # An error not answered with an event ends the miner on all ranks.
            event: ev.Event | None = None  # where something follows from the command
            match command.action:
                case Action.TRAIN:
                    event = self._micro_batch()
                case Action.IDLE:
                    pass
                case Action.WAIT_FOR_DATA:
                    self._data.missed(time.perf_counter() - began)
                case Action.FOLLOW_SCHEDULE:
                    self._trainer.follow_schedule(command.outer_step, command.inner_steps)
                case Action.FOLLOW_RULES:
                    rules = {"text": command.local.rules} if self._controller else None
                    shared = self._ranks.share(f"rules-{command.outer_step}", rules)
                    self._follow_rules(shared["text"])
                case Action.LOAD | Action.REBASE:
                    event = self._load_global(command)
                case Action.CHECKPOINT:
                    self._save_checkpoint(command.local)
                    saved, held = self._checkpointer.saved, self._checkpointer.hold_seconds
                    event = ev.CheckpointBegun(self._trainer.outer_step, saved, held)
                case Action.ROLL_BACK:
                    event = ev.RolledBack(*(self._checkpointer.roll_back() or (None,)))
                case Action.STOP:
                    # First: the checkpoint waits for the copies it holds.
                    self._exchange.give_up()
                    skipped = self._trainer.skipped_in_a_row
                    if skipped < 2:
                        self._save_checkpoint(command.local)
                    else:
                        log.warning(
                            "No checkpoint of this stop: the last %d inner steps gave NaN or Inf, "
                            "so these weights may be the cause; a start goes on from the "
                            "checkpoint before",
                            skipped,
                        )
                    # A thread writes it, and threads do not outlive the process.
                    self._checkpointer.wait()
                    event = ev.Stopped(command.exit_status)
                case _:
                    progress = self._progress(command.local)
                    event = self._exchange.carry_out(command, progress, self._last_loss)
                    if isinstance(event, ev.OuterStepEnded) and event.committed:
                        self._hold_others_back()
            if command.action in PAUSES or command.in_pause:
                self._trainer.pause(time.perf_counter() - began)
            if self._controller is not None and event is not None:
                self._controller.post(event)
            if command.action is Action.STOP:
                return command.exit_status

    # --- inner steps ---------------------------------------------------------------------------

    def _follow_data(self, part: DataPart) -> None:
        """Prefetch, begin a block, and tell rank 0 which of those requested are ready here."""
        if part.request:
            self._data.request(part.request)
            self._requested.add(part.request)
        if part.begin:
            self._data.begin(part.begin, part.sequences, part.start)
            wanted = 0 if self._holds_back else self._trainer.preview_micro_batches
            # None where there are too few: those of the last outer step serve until then.
            held = self._data.load_held_out(wanted, others=self._wants_others) if wanted else None
            if held is not None:
                self._holds_back, self._wants_others = True, False
                self._trainer.hold_back(held)
        # At each boundary: a worker that died idle would be missed only when its block is due.
        self._data.gather_blocks()
        for block in tuple(self._requested):
            sequences = self._data.ready(block)
            if sequences is not None:
                self._ranks.report_ready(block, sequences)
                self._requested.discard(block)

    def _hold_others_back(self) -> None:
        """Choose other held-out data in a new outer step."""
        # Scales that were searched on the old sequences fit those better than any other.
        self._holds_back, self._wants_others = False, True

    def _micro_batch(self) -> ev.Event:
        batch = self._data.next()
        if batch is None:
            # All ranks serve equally many sequences, so all of them are at the end now.
            return ev.BlockUsedUp()
        report = self._trainer.add_micro_batch(batch, data_wait_seconds=self._data.wait_seconds)
        if report is None:
            return ev.MicroBatchTrained()
        self._last_loss = report.loss
        return ev.InnerStepDone(report, diverged=self._trainer.wants_roll_back)

    # --- the global state, snapshots and checkpoints -------------------------------------------

    def _load_global(self, command: Command) -> ev.Event:
        # On rank 0 alone: the others get their rows from it.
        weights, outer_optimizer = state_files(command.local.folder)
        sample = self._data.sample(self._trainer.measured_sequences)
        try:
            if command.action is Action.REBASE:
                self._trainer.rebase(weights, outer_optimizer, sample)
            else:
                self._trainer.load_global(weights, outer_optimizer, command.outer_step, sample)
        except RankFailedError as error:  # on all ranks alike; the state may be sound
            return ev.GlobalFetchFailed(not_loaded(error), time.monotonic())
        except ValueError as error:  # on all ranks alike: another model's, say
            awful = isinstance(error, WeightsWorseThanGuess)
            return ev.LoadFailed(str(error), time.monotonic(), awful)
        self._hold_others_back()
        return ev.Loaded(command.outer_step)

    def _progress(self, local: LocalPart) -> Progress:
        return Progress(
            outer_step=self._trainer.outer_step,
            inner_step=self._trainer.inner_step,
            total_inner_steps=self._trainer.total_inner_steps,
            blocks=list(local.blocks),
        )

    def _save_checkpoint(self, local: LocalPart) -> None:
        extra = {"data": self._data.state_dict(), **local.kept}
        self._checkpointer.save(extra, self._progress(local))
