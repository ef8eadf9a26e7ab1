"""Hold one rank's weights from outer step to outer step, whoever trains them in between.

Either :class:`~.trainer.Trainer` trains them, or a script that joined (:mod:`.script_weights`). The
work between two inner steps is the same for both: epoch start, counters, boundary copies, uploads
and updates.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from distributed_training.config.settings import TrainingSettings
from distributed_training.protocol.types import Schema, Sign, Update
from distributed_training.protocol.update_file import Header

from . import sharding
from .collectives import ParameterShard, RowStream
from .copies import BoundaryCopier, BoundaryCopies, Stepped
from .frozen import FrozenTensorError, FrozenTensors
from .outer_rule import outer_rule_of
from .outer_step import OuterStep, UploadHandle

log = logging.getLogger(__name__)

_PROGRESS = ("outer_step", "inner_step", "total_inner_steps")


class HeldWeights(ABC):
    """One rank's weights and counters. All ranks call the same methods in the same order.

    ``shards``: this rank's rows of every trained parameter, in state-dict order. ``outer`` and
    ``copier`` work on the same rows; ``steps`` counts the steps that change them.
    """

    micro_batch_size: int  # sequences
    frozen = FrozenTensors({})  # if one of these changes, nothing is uploaded any more

    def __init__(
        self,
        *,
        shards: Sequence[ParameterShard],
        stream: RowStream,
        settings: TrainingSettings,
        steps: Stepped,
    ) -> None:
        self.shards, self.stream, self.device = shards, stream, shards[0].local.device
        self.schema: Schema = [(shard.name, shard.shape) for shard in shards]
        self.outer = OuterStep(
            shards=shards,
            stream=stream,
            rule=outer_rule_of(settings),
            drop_overlap=settings.late_overlap == "dropped",
        )
        self.copier = BoundaryCopier(shards, steps)
        self.outer_step = self.inner_step = self.total_inner_steps = 0

    @property
    @abstractmethod
    def tokens(self) -> int:
        """The tokens of all ranks since the epoch start, which an upload would state now."""

    @property
    def moments(self) -> float:
        """The average number of tensors per parameter that the optimizer adds to a checkpoint."""
        return 0

    @abstractmethod
    def drop_step(self) -> None:
        """Forget the gathered copies of changed weights, and the gradients of the old weights."""

    def pause(self, seconds: float) -> None:
        """Exclude ``seconds`` from the inner step's time: there was nothing to train on."""
        del seconds  # a subclass that measures steps overrides this

    def slow_down(self) -> None:  # noqa: B027 - a script controls its own learning rate
        """Train more carefully for a while: the last checkpoint was loaded after NaN or Inf."""

    # --- weights -------------------------------------------------------------------------------

    def load_weights(self, path: Path | None) -> None:
        """Load rank 0's safetensors file into all shards.

        The inner optimizer keeps its state. Raises ValueError on all ranks alike, without changing
        anything, if the file does not belong to this model.
        """
        self.copier.finish()
        shared = self.stream.from_rank_0(path)
        assert shared is not None
        sharding.load_file(self.shards, shared, self.stream)
        self.drop_step()

    def load_global(self, weights_path: Path | None, outer_step: int) -> None:
        """Load weights and epoch start from rank 0's file. Raises like :meth:`load_weights`.

        The validator has signed these weights, so their loss is not measured.
        """
        self.load_weights(weights_path)
        self.begin_epoch(outer_step)

    def begin_epoch(self, outer_step: int) -> None:
        """Make the current weights the epoch start; inner steps count from 0 again."""
        self.outer.begin_epoch()
        self.outer_step, self.inner_step = outer_step, 0
        self.drop_step()

    def follow_schedule(self, outer_step: int, network_steps: int) -> None:
        """Move to the network's place in the schedule, so that all of its miners use the same rate.

        ``network_steps``: how many inner steps the network took before ``outer_step``, or 0 if its
        state does not say. Nothing happens if this member is not at ``outer_step``.
        """
        if network_steps and outer_step == self.outer_step:
            self.total_inner_steps = network_steps + self.inner_step

    # --- what survives a restart ---------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state.

        JSON-able values are the same on all ranks. A list of tensors holds this rank's rows of
        every parameter. A single tensor belongs only to this rank. None stands for a missing
        tensor.

        The tensors are not copies. The next step overwrites the weights and the inner optimizer's
        rows, so :attr:`copier` copies these; no other tensor is ever changed in place.
        """
        return {
            **{name: getattr(self, name) for name in _PROGRESS},
            "weights": [shard.local for shard in self.shards],
            **self.outer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore a :meth:`state_dict` that has this rank's rows. Collective.

        Returns False, on all ranks alike, if micro-batches of an unfinished step were dropped.
        """
        self.copier.finish()
        for shard, rows in zip(self.shards, state["weights"], strict=True):
            shard.local.copy_(rows)
        self.outer.load_state_dict(state)
        for name in _PROGRESS:
            setattr(self, name, int(state[name]))
        self.drop_step()
        return True

    def boundary_copies(self, names: Collection[str] | None = None) -> BoundaryCopies:
        """Copy weights and moments at this step boundary, while no round is running. Collective.

        ``names``: see :meth:`~.copies.BoundaryCopier.copy_boundary`. Most values are copied during
        the next micro-batches, so code that changes weights or moments calls ``copier.finish``
        first. Raises RankFailedError on all ranks alike if one of them has no memory for its
        copies.
        """
        # Drop what a failed round has left, since it would take host memory next to the copies.
        self.roll_back_outer_step()
        # Fail on all ranks: if one rank raised without the others, they would hang in the next
        # collective.
        return self.stream.run_on_all(lambda: self.copier.copy_boundary(names))

    # --- outer step --------------------------------------------------------------------------

    @property
    def dropped(self) -> str:
        """A description of the training that the last outer step dropped; empty if none was."""
        return self.outer.dropped

    def write_upload(
        self, path: Path | None = None, header: Header | None = None, *, sign: Sign | None = None
    ) -> UploadHandle:
        """Write this step boundary's upload to rank 0's ``path``, in the background. Collective.

        Only rank 0 passes arguments; the header's ``outer_step``, ``start``, ``inner_steps`` and
        ``tokens`` are filled in here. A file at ``path`` is replaced. Training pauses while vectors
        and narrow matrices are gathered, and until :meth:`boundary_copies` returns. Raises on all
        ranks alike: OSError if there is no room for the file, RankFailedError if a rank runs out of
        memory, and FrozenTensorError if training has changed a frozen tensor. The handle has
        later failures.
        """
        started = time.perf_counter()
        problem = None
        if changed := self.frozen.find_changed():
            problem = (
                f"{changed} is not trained in this network but has changed here, so this training "
                "is of another model and nothing is uploaded: keep it out of the optimizer, put "
                "BatchNorm in eval mode, and start again"
            )
        self.stream.raise_if_any(problem, FrozenTensorError)
        if header is not None:
            header = replace(
                header,
                outer_step=self.outer_step,
                inner_steps=self.inner_step,
                tokens=self.tokens,
            )
        copies = self.boundary_copies(())
        handle = self.outer.write_upload(header, path, sign, copies)
        handle.hold_seconds = time.perf_counter() - started
        return handle

    def prepare_update(self, update: Update | None) -> None:
        """Compute the result of ``update`` without changing weights. Collective.

        Only rank 0's ``update`` is used. If it has whole weights, it may lead to any outer step.
        The caller then calls :meth:`commit_outer_step` or :meth:`roll_back_outer_step`. Raises
        OuterStepError on all ranks, without changing anything, if this fails or if the resulting
        weights have another digest.
        """
        # Wait until an upload or a checkpoint has written its copies: their host memory is needed.
        self.copier.wait()
        self.outer.prepare_update(update, inner_step=self.inner_step)

    def commit_outer_step(self) -> None:
        """Replace weights, epoch start, residual and progress together.

        Inner steps that were taken after the upload belong to the new outer step.
        """
        self.copier.finish()
        self.outer_step, before = self.outer.commit()
        self.inner_step -= before
        self.drop_step()

    def roll_back_outer_step(self) -> None:
        """Forget the prepared outer step; weights and counters do not change. Not collective."""
        self.outer.roll_back()
