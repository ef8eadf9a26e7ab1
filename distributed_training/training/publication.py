"""Prepare uploads as far as training takes part: the snapshot and the gradient check.

Both run on the training thread of every rank: a snapshot at an inner step's boundary, a gradient
check at any micro-batch's. A snapshot copies to host memory what must not change any more and hands
it to a thread (snapshot.py). A gradient check tries the gradient of a finished snapshot on held-out
data (local_evaluation.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from distributed_training.config.settings import TrainingSettings
from distributed_training.protocol import lines
from distributed_training.protocol.types import AllReduceError, AllReduceFault, Progress

from .collectives import RowStream
from .error_feedback import BoundaryCopies, Direction
from .inner_optimizer import CosineSchedule, InnerOptimizer
from .local_evaluation import Choice, Preview
from .outer_step import OuterStep
from .sharding import ShardedModel
from .snapshot import (
    Epoch,
    SnapshotHandle,
    SnapshotState,
    prepare_folder,
    publish_instead,
    write_snapshot,
)

log = logging.getLogger(__name__)

#: Covers rank 0's wait for the other ranks' parts of a snapshot.
PARTS_TIMEOUT = timedelta(minutes=10)


class Publication:
    """``model_config``: content of the ``config.json`` to publish."""

    def __init__(
        self,
        *,
        settings: TrainingSettings,
        model_config: Mapping[str, Any],
        sharded: ShardedModel,
        stream: RowStream,
        optimizer: InnerOptimizer,
        schedule: CosineSchedule,
        outer: OuterStep,
    ) -> None:
        self._settings = settings
        published: Any = sharded.model.config
        self._config = {**model_config, **published.to_dict()}
        self._sharded = sharded
        self._stream = stream
        self._optimizer = optimizer
        self._schedule = schedule
        self._outer = outer
        self._preview = Preview(
            sharded=sharded,
            stream=stream,
            feedback=outer.feedback,
            search=settings.step_length == "search",
        )
        self._held: Tensor | None = None
        self._others_held = False  # since the last preview

    @torch.no_grad()
    def snapshot(
        self,
        folder: Path,
        *,
        take_copies: Callable[[], BoundaryCopies],
        progress: Progress,
        block: int,
        last_loss: float,
        steps: int,
    ) -> SnapshotHandle:
        """Write everything an upload needs, of this step boundary, in the background.

        ``block`` is the chain's; rank 0's ``progress.blocks`` become the block list; ``steps``:
        inner steps in total. Training is held for the copy to host memory and the codes of vectors
        only (with DCT for all codes). Raises on all ranks alike OSError when ``folder`` cannot be
        made, RankFailedError when a rank has no memory; later failures are in the handle.
        """
        started = time.perf_counter()
        start = self._outer.epoch_start
        if start is None:
            raise AllReduceError(AllReduceFault.LOCAL, "no epoch-start weights are kept")
        copies = take_copies()
        problem = None
        if self._stream.rank == 0:
            try:
                prepare_folder(folder)
            except OSError as error:
                problem = f"{folder} cannot hold a snapshot: {error}"
        problem = cast("str | None", self._stream.from_rank_0(problem))  # no rank writes before
        if problem is not None:
            raise OSError(problem)
        metadata = {
            "block": int(block),
            "inner_step": int(progress.inner_step),
            "outer_step": int(progress.outer_step),
            "loss": float(last_loss),
        }
        config = self._config | {"block_list": progress.blocks, "inner_step": progress.inner_step}
        # Here and not in the thread: it is collective, and would meet training's collectives.
        directions = self._outer.feedback.directions(
            start,
            copies.weights,
            self._outer.learning_rate,
            second_moment=copies.exp_avg_sq,
        )
        state = self._state(directions, copies, steps, config, metadata)
        epoch = Epoch(self._outer.epoch_id, start, self._outer.learning_rate)
        handle = SnapshotHandle(folder, time.perf_counter() - started, epoch)
        handle.start(partial(write_snapshot, state, parts_timeout=PARTS_TIMEOUT))
        return handle

    def _state(
        self,
        directions: Sequence[Direction],
        copies: BoundaryCopies,
        steps: int,
        config: Mapping[str, Any],
        metadata: Mapping[str, Any],
    ) -> SnapshotState:
        shards, optimizer, layout = self._sharded.shards, self._optimizer, self._stream.layout
        rate = self._schedule.rate(steps)
        names = [item.name for item in shards]
        return SnapshotState(
            rank=layout.shard,
            world_size=layout.shards,
            writes=layout.rank < layout.shards,
            shards=shards,
            copies=copies,
            directions=directions,
            codec=self._outer.feedback.codec,
            config=config,
            gradients_metadata=metadata,
            mesh=self._sharded.mesh,
            steps=optimizer.step_count,
            param_group=optimizer.published_group(names, rate, self._schedule.peak),
            scheduler_state=self._schedule.published_state(steps),
        )

    def hold_back(self, sequences: Tensor | None) -> None:
        """Take int64 (n, sequence) of this rank as held-out data; None: it has none."""
        self._held = sequences
        self._others_held = True

    def preview(self, handle: SnapshotHandle, *, micro_batch: int, batches: int) -> float | None:
        """Return the loss with minus without the gradient of a finished snapshot, on held-out data.

        ``batches`` of ``micro_batch`` sequences are run on each rank. In nats per token; below 0 is
        good. None when no rank has held-out data. Collective, at a micro-batch boundary, in a round
        and after it too; rank 0 must have seen ``handle.done()``. Nothing of the training state
        changes.
        """
        if not self._stream.layout.on_node_0:  # rank 0 knows when its node's codes are made
            handle.join()
        wanted = batches * micro_batch
        usable = self._held is not None and len(self._held) >= wanted > 0
        epoch = handle.epoch
        # What one rank lacks is all ranks' problem, since each trial gathers weights.
        problem = float(not handle.codes or epoch is None)
        there, problems, others = self._stream.sum([float(usable), problem, self._others_held])
        if not there or problems:
            handle.forget()
            return None
        assert epoch is not None
        if others:  # on any rank; all of them forget, since measuring is collective
            self._preview.forget()
            self._others_held = False
        held = self._held if usable else None
        if held is None:
            # They count for nothing, but this rank must take part in every gather.
            held = torch.zeros((wanted, self._settings.sequence_length), dtype=torch.int64)
        choice = self._preview.choose(
            epoch_id=epoch.epoch_id,
            start=epoch.start,
            codes=handle.codes,
            learning_rate=epoch.learning_rate,
            held=held[:wanted].split(micro_batch),
            count=float(usable),
        )
        published = self._stream.rank != 0 or self._publish(handle, choice)
        handle.forget()
        return choice.delta if published else choice.plain_delta

    def _publish(self, handle: SnapshotHandle, choice: Choice) -> bool:
        """Rank 0: write what was chosen. False: what the snapshot wrote is uploaded."""
        first = next(iter(handle.contents))
        plain = f"error feedback {first}, scale 1"
        chosen = not choice.delta >= choice.plain_delta  # with NaN too
        if chosen:
            try:
                publish_instead(handle, choice.direction, choice.factor)
            except OSError as error:
                chosen = False
                log.warning(
                    "%s: the gradient is uploaded as it was written before, or not at all if its "
                    "files do not agree any more",
                    error,
                )
        if chosen:
            how = f"error feedback {choice.direction}, scale {choice.factor:.3g}"
            how += f"; {plain}: {choice.plain_delta:+.4f}; {choice.evaluations} tried"
            log.info("%s", lines.preview(choice.delta, how))
        else:
            log.info("%s", lines.preview(choice.plain_delta, plain))
        return chosen
