"""Hold one rank's weights from outer step to outer step, whoever trains them in between.

:class:`~.trainer.Trainer` trains them, or a script that joined (:mod:`.script_weights`). Between
two inner steps both do the same: epoch start, counters, copies of a boundary, uploads and updates.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    frozen = FrozenTensors({})  # no upload may follow after one of these has changed

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
        """The tokens of all ranks since the epoch start, which an upload of now names."""

    @property
    def moments(self) -> float:
        """Tensors of the inner optimizer that a checkpoint has per parameter, on average."""
        return 0

    @abstractmethod
    def drop_step(self) -> None:
        """Forget every copy of weights that were changed, and gradients of the weights before."""

    def pause(self, seconds: float) -> None:
        """Leave ``seconds`` out of the inner step's time: there was nothing to train."""
        del seconds  # a class that trains may measure it

    def slow_down(self) -> None:  # noqa: B027 - a script's learning rate is its own
        """Train more carefully for a while: the last checkpoint was loaded after NaN or Inf."""

    # --- weights -------------------------------------------------------------------------------

    def load_weights(self, path: Path | None) -> None:
        """Load rank 0's safetensors file into all shards.

        The inner optimizer stays. Raises ValueError on all ranks alike when the file is not this
        model's; nothing changes then.
        """
        shared = self.stream.from_rank_0(path)
        assert shared is not None
        sharding.load_file(self.shards, shared, self.stream)
        self.drop_step()

    def load_global(self, weights_path: Path | None, outer_step: int) -> None:
        """Load weights and epoch start from rank 0's file. Raises what :meth:`load_weights` does.

        The validator has signed them, so their loss is not measured.
        """
        self.load_weights(weights_path)
        self.begin_epoch(outer_step)

    def begin_epoch(self, outer_step: int) -> None:
        """Make the present weights the epoch start; inner steps count from 0 again."""
        self.outer.begin_epoch()
        self.outer_step, self.inner_step = outer_step, 0
        self.drop_step()

    def follow_schedule(self, outer_step: int, network_steps: int) -> None:
        """Go to the network's place in the schedule, so that all of its miners have one rate.

        ``network_steps``: inner steps that the network has taken before ``outer_step``, 0 if its
        state does not say. Nothing happens if ``outer_step`` is not this member's.
        """
        if network_steps and outer_step == self.outer_step:
            self.total_inner_steps = network_steps + self.inner_step

    # --- what survives a restart ---------------------------------------------------------------

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state.

        JSON-able values are of all ranks alike. Lists of tensors are this rank's rows of every
        parameter, single tensors are only this rank's, None stands for a missing tensor.

        The tensors are not copies. The next step overwrites the weights and the inner optimizer's
        rows, so :attr:`copier` copies these; no other tensor is ever changed in place.
        """

    @property
    def _progress(self) -> dict[str, int]:
        """Return what a state says of the place in training."""
        return {name: getattr(self, name) for name in _PROGRESS}

    def _load_progress(self, state: Mapping[str, Any]) -> None:
        for name in _PROGRESS:
            setattr(self, name, int(state[name]))

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore a :meth:`state_dict`, with this rank's rows. Collective.

        Returns False, on all ranks alike, if the micro-batches of an unfinished step were dropped.
        """

    def boundary_copies(self, names: Collection[str] | None = None) -> BoundaryCopies:
        """Copy weights and moments of this step boundary, when no round is on. Collective.

        ``names``: see :meth:`~.copies.BoundaryCopier.copy_boundary`. Most are copied during the
        next micro-batches, so code that changes weights or moments calls ``copier.finish`` first.
        Raises RankFailedError on all ranks alike when one of them has no memory for its copies.
        """
        # Drop what a failed round has left, since it would be in host memory next to the copies.
        self.roll_back_outer_step()
        # Fail on all ranks, since a rank that raised without the others would leave them in the
        # next collective.
        return self.stream.run_on_all(lambda: self.copier.copy_boundary(names))

    # --- outer step --------------------------------------------------------------------------

    @property
    def dropped(self) -> str:
        """The training that the last outer step dropped, in words; empty if it dropped none."""
        return self.outer.dropped

    def write_upload(
        self, path: Path | None = None, header: Header | None = None, *, sign: Sign | None = None
    ) -> UploadHandle:
        """Write this step boundary's upload to rank 0's ``path``, in the background. Collective.

        Only rank 0 gives arguments; the header's ``outer_step``, ``start``, ``inner_steps`` and
        ``tokens`` are filled in here. A file at ``path`` is replaced. Training pauses for vectors
        and narrow matrices, and until :meth:`boundary_copies` returns. Raises on all ranks alike
        OSError if there is no room for the file, and RankFailedError when a rank has no memory;
        later failures are in the handle. Raises FrozenTensorError if training has changed a frozen
        tensor.
        """
        started = time.perf_counter()
        problem = None
        if changed := self.frozen.find_changed():
            problem = (
                f"{changed} is not trained in this network and has changed here, so what was "
                "trained counts from another model and nothing is uploaded: let no optimizer move "
                "it and no BatchNorm train, and start again"
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
        """Compute what follows from ``update``, without changing weights.

        Collective; rank 0's ``update`` counts.

        With whole weights it may lead to any outer step. Raises OuterStepError on all ranks, also
        if the resulting weights have another digest; nothing changes then.
        :meth:`commit_outer_step` or :meth:`roll_back_outer_step` follows.
        """
        # Wait for copies of an upload or a checkpoint, since their host memory is needed now.
        self.copier.wait()
        self.outer.prepare_update(update, inner_step=self.inner_step)

    def commit_outer_step(self) -> None:
        """Replace weights, epoch start, residual and progress together.

        Inner steps taken since the upload belong to the new outer step.
        """
        self.outer_step, before = self.outer.commit()
        self.inner_step -= before
        self.drop_step()

    def roll_back_outer_step(self) -> None:
        """Forget the outer step that was prepared; weights and counters stay. Local."""
        self.outer.roll_back()
