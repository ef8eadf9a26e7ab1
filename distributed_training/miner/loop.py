"""The loop every rank runs: take the next order, carry it out, report.

One iteration is one micro-batch boundary. Rank 0 passes a :class:`RankZero`, which decides; the
other ranks pass None and obey. No network call happens here: what takes long (averaging, uploads,
downloads) runs in threads and processes of rank 0 and comes back as events.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from distributed_training.miner.orders import ControlChannel, Order, OrderKind
from distributed_training.protocol.types import AllReduceError, AllReduceFault, Progress, StepReport

log = logging.getLogger(__name__)


class SnapshotLike(Protocol):
    """A snapshot being written in the background by this rank."""

    error: BaseException | None
    hold_seconds: float

    def done(self) -> bool: ...


class TrainerLike(Protocol):
    """What the loop needs of ``training.Trainer``; all ranks call in the same order."""

    @property
    def outer_step(self) -> int: ...
    @property
    def inner_step(self) -> int: ...
    @property
    def total_inner_steps(self) -> int: ...
    @property
    def skipped_in_a_row(self) -> int: ...
    def add_micro_batch(
        self, batch: torch.Tensor, *, data_wait_seconds: float, domain: int
    ) -> StepReport | None: ...
    def write_pseudo_gradient(self, buffers: Sequence[torch.Tensor] | None) -> float: ...
    def anticipate_outer_step(self) -> None: ...
    def prepare_outer_step(self, averaged: Sequence[torch.Tensor] | None) -> None: ...
    def commit_outer_step(self) -> None: ...
    def roll_back_outer_step(self) -> None: ...
    def load_global(
        self, weights: Path | None, outer_optimizer: Path | None, outer_step: int
    ) -> None: ...
    def rebase(self, weights: Path | None, outer_optimizer: Path | None) -> None: ...
    def snapshot(
        self, folder: Path, *, progress: Progress, block: int, last_loss: float
    ) -> Any: ...
    @property
    def preview_micro_batches(self) -> int: ...
    def hold_back(self, sequences: torch.Tensor | None) -> None: ...
    def preview(self, handle: Any) -> float | None: ...


class DataLike(Protocol):
    """What the loop needs of ``data.DataPipeline``; one per rank."""

    def request(self, block: int) -> None: ...
    def ready(self, block: int) -> int | None: ...
    def begin(self, block: int, sequences: int, start: int = 0) -> None: ...
    def next(self) -> torch.Tensor | None: ...
    def held_back(self, micro_batches: int) -> torch.Tensor | None: ...
    @property
    def domain(self) -> int: ...
    def cursor(self) -> dict[str, Any]: ...


class CheckpointerLike(Protocol):
    def save(self, extra: dict[str, Any], progress: Progress) -> None: ...
    def wait(self) -> None: ...
    def roll_back(self) -> tuple[Progress, dict[str, Any]] | None: ...


class RankZero(Protocol):
    """What only rank 0 has: decisions, the swarm's buffers, and what is reported where."""

    @property
    def buffers(self) -> Sequence[torch.Tensor]: ...
    @property
    def global_folder(self) -> Path: ...
    def next_order(self) -> Order: ...
    def blocks(self) -> list[int]: ...
    def extra(self) -> dict[str, Any]: ...
    def micro_batch_done(self) -> None: ...
    def block_used_up(self) -> None: ...
    def step_done(self, report: StepReport) -> None: ...
    def pseudo_gradient_written(self, norm: float) -> None: ...
    def pseudo_gradient_failed(self, error: AllReduceError) -> None: ...
    def outer_step_done(self, *, committed: bool, outer_step: int, detail: str) -> None: ...
    def snapshot_taken(self, folder: Path, progress: Progress, handle: SnapshotLike) -> None: ...
    def snapshot_failed(self, problem: str) -> None: ...
    def previewed(self, delta: float | None, seconds: float) -> None: ...
    def loaded(self, outer_step: int) -> None: ...
    def load_failed(self, problem: str) -> None: ...
    def rolled_back(self, restored: tuple[Progress, dict[str, Any]] | None) -> None: ...
    def stopped(self, exit_status: int) -> None: ...


#: Named places at which a test may raise on one rank: called with (place, rank).
FaultHook = Callable[[str, int], None]


class MinerLoop:
    """All ranks construct it alike, but for ``rank_zero``, which the others leave None."""

    def __init__(
        self,
        *,
        channel: ControlChannel,
        trainer: TrainerLike,
        data: DataLike,
        checkpointer: CheckpointerLike,
        snapshots: Path,
        rank_zero: RankZero | None,
        fault_hook: FaultHook | None = None,
    ) -> None:
        self._channel = channel
        self._trainer = trainer
        self._data = data
        self._checkpointer = checkpointer
        self._snapshots = snapshots
        self._zero = rank_zero
        self._fault_hook = fault_hook
        self._handle: Any = None  # of the last snapshot
        self._holds_back = False
        self._requested: set[int] = set()
        self._last_loss = 0.0
        self._written = False  # a pseudo-gradient, and the wait for its average has not begun
        self._in_round = False  # until the outer step, or training that goes on without one
        self._starved = 0.0  # seconds without data since the last micro-batch
        self._trains = False  # a first micro-batch came: what a start takes is no step's time

    def run(self) -> int:
        """Until STOP. Returns the exit status; all ranks return the same."""
        while True:
            began = time.perf_counter()
            order = self._channel.exchange(self._zero.next_order() if self._zero else None)
            self._follow_data(order)
            match order.kind:
                case OrderKind.CONTINUE:
                    self._micro_batch()
                case OrderKind.IDLE:
                    if self._written:  # the swarm looks for a group now
                        self._trainer.anticipate_outer_step()
                        self._written = False
                    if order.arg and self._trains:
                        self._starved += time.perf_counter() - began
                case OrderKind.AVERAGE:
                    self._write_pseudo_gradient()
                case OrderKind.OUTER_STEP:
                    self._outer_step()
                case OrderKind.LOAD:
                    self._load(order.arg)
                case OrderKind.REBASE:
                    self._load(order.arg, rebase=True)
                case OrderKind.SNAPSHOT:
                    self._snapshot(block=order.arg)
                case OrderKind.PREVIEW:
                    self._preview()
                case OrderKind.CHECKPOINT:
                    self._checkpoint()
                case OrderKind.ROLL_BACK:
                    self._roll_back()
                case OrderKind.STOP:
                    self._stop(order.arg)
                    return order.arg

    # --- data ----------------------------------------------------------------------------------

    def _follow_data(self, order: Order) -> None:
        if order.request_block:
            self._data.request(order.request_block)
            self._requested.add(order.request_block)
        if order.begin_block:
            self._data.begin(order.begin_block, order.begin_sequences, order.begin_start)
            self._hold_back()
        for block in tuple(self._requested):
            sequences = self._data.ready(block)
            if sequences is not None:
                self._channel.report_ready(block, sequences)
                self._requested.discard(block)

    def _hold_back(self) -> None:
        if self._holds_back or not self._trainer.preview_micro_batches:
            return
        held = self._data.held_back(self._trainer.preview_micro_batches)
        self._holds_back = held is not None
        self._trainer.hold_back(held)

    def _micro_batch(self) -> None:
        if self._in_round:
            # There was no average: what was computed ahead is not held until the next round.
            self._trainer.roll_back_outer_step()
            self._written = self._in_round = False
        started = time.perf_counter()
        batch = self._data.next()
        waited = time.perf_counter() - started + self._starved
        if batch is None:
            # All ranks serve equally many sequences, so all of them are at the end now.
            if self._zero:
                self._zero.block_used_up()
            return
        self._starved, self._trains = 0.0, True
        report = self._trainer.add_micro_batch(
            batch, data_wait_seconds=waited, domain=self._data.domain
        )
        if self._zero:
            self._zero.micro_batch_done()
        if report is not None:
            self._last_loss = report.loss
            if self._zero:
                self._zero.step_done(report)

    # --- the round -----------------------------------------------------------------------------

    def _write_pseudo_gradient(self) -> None:
        try:
            norm = self._trainer.write_pseudo_gradient(self._zero.buffers if self._zero else None)
        except AllReduceError as error:  # raised on all ranks alike
            if self._zero:
                self._zero.pseudo_gradient_failed(error)
            return
        self._written = self._in_round = True
        if self._zero:
            self._zero.pseudo_gradient_written(norm)

    def _outer_step(self) -> None:
        """Prepare aside, vote, then commit everywhere or nowhere."""
        self._written = self._in_round = False
        detail = ""
        try:
            self._trainer.prepare_outer_step(self._zero.buffers if self._zero else None)
            self._fault("before_vote")
        except (AllReduceError, RuntimeError, ValueError, OSError) as error:
            detail = str(error) or type(error).__name__
            log.warning("Rank %d votes against the outer step: %s", self._channel.rank, detail)
        committed = self._channel.all_agree(not detail)
        if committed:
            self._trainer.commit_outer_step()
        else:
            self._trainer.roll_back_outer_step()
            detail = detail or AllReduceFault.LOCAL.value
        if self._zero:
            self._zero.outer_step_done(
                committed=committed, outer_step=self._trainer.outer_step, detail=detail
            )

    # --- state in and out ----------------------------------------------------------------------

    def _progress(self) -> Progress:
        return Progress(
            outer_step=self._trainer.outer_step,
            inner_step=self._trainer.inner_step,
            total_inner_steps=self._trainer.total_inner_steps,
            blocks=self._zero.blocks() if self._zero else [],
        )

    def _load(self, outer_step: int, *, rebase: bool = False) -> None:
        folder = self._zero.global_folder if self._zero else None
        weights = folder / "model.safetensors" if folder else None
        outer_optimizer = folder / "outer_optimizer.pt" if folder else None
        try:
            if rebase:
                self._trainer.rebase(weights, outer_optimizer)
            else:
                self._trainer.load_global(weights, outer_optimizer, outer_step)
        except ValueError as error:  # another model's, say; raised on all ranks alike
            if self._zero:
                self._zero.load_failed(str(error))
            return
        if self._zero:
            self._zero.loaded(outer_step)

    def _snapshot(self, *, block: int) -> None:
        progress = self._progress()
        # The block tells it from one of the same step that an uploader may still read: a miner that
        # went back to a checkpoint comes by again.
        folder = self._snapshots / f"{progress.outer_step}.{progress.inner_step}.{block}"
        try:
            handle = self._trainer.snapshot(
                folder, progress=progress, block=block, last_loss=self._last_loss
            )
        except OSError as error:  # a full disk, say; raised on all ranks alike
            if self._zero:
                self._zero.snapshot_failed(str(error))
            return
        self._handle = handle
        if self._zero:
            self._zero.snapshot_taken(folder, progress, handle)

    def _preview(self) -> None:
        started = time.perf_counter()
        delta = self._trainer.preview(self._handle)
        if self._zero:
            self._zero.previewed(delta, time.perf_counter() - started)

    def _checkpoint(self) -> None:
        extra: dict[str, Any] = {"data": self._data.cursor()}
        if self._zero:
            extra["rank_zero"] = self._zero.extra()
        self._checkpointer.save(extra, self._progress())

    def _roll_back(self) -> None:
        restored = self._checkpointer.roll_back()
        if self._zero:
            self._zero.rolled_back(restored)

    def _stop(self, exit_status: int) -> None:
        skipped = self._trainer.skipped_in_a_row
        if skipped < 2:
            self._checkpoint()
        else:
            log.warning(
                "No checkpoint of this stop: the last %d inner steps gave NaN or Inf, so these "
                "weights may be the cause; a start goes on from the checkpoint before",
                skipped,
            )
        if self._handle is not None:
            self._handle.cancel()
        self._checkpointer.wait()
        if self._zero:
            self._zero.stopped(exit_status)

    def _fault(self, place: str) -> None:
        if self._fault_hook is not None:
            self._fault_hook(place, self._channel.rank)
