"""Train one rank: model, inner steps, outer step.

All ranks call the same methods in the same order. Nothing here talks to a network beyond the
process group, and nothing waits for a device more than once per inner step.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distributed_training.config.settings import TrainingSettings
from distributed_training.protocol.keys import Parts
from distributed_training.protocol.types import (
    AllReduceError,
    AllReduceFault,
    Progress,
    StepReport,
)

from . import sharding
from .collectives import Layout, ParameterShard, RowStream, on_host, open_stream
from .compression import compression_of
from .epoch_starts import EpochStarts
from .error_feedback import ErrorFeedback
from .held_weights import HeldWeights
from .inner_optimizer import NEAR_THE_END, InnerOptimizer, Schedule
from .inner_state import describe_inner, write_optimizer_shard
from .local_evaluation import MEASURED, GradientCheck, Text, load_measured
from .memory_plan import plan_batch
from .micro_batches import KnownSize, MicroBatches, facts_of, measured_micro_batch
from .outer_rule import outer_rule_of
from .outer_step import OuterStep
from .sharding import build_sharded_model
from .snapshot import (
    PARTS,
    BoundaryCopier,
    Epoch,
    SnapshotHandle,
    SnapshotState,
    write_snapshot,
)
from .store_outer_step import StoreOuterStep
from .throughput import StepMeter, start_profiler

if TYPE_CHECKING:  # 80 modules that nothing else here needs
    from torch.distributed.checkpoint.stateful import Stateful

log = logging.getLogger(__name__)

#: Covers each collective of the host-memory streams: pseudo-gradient, average, votes.
STREAM_TIMEOUT = timedelta(minutes=10)

#: Inner steps in a row with NaN or Inf after which the last good checkpoint is loaded, and inner
#: steps at half the learning rate after that: the same data at the same rate would diverge again.
NAN_LIMIT, SLOW_STEPS = 3, 50
#: Outer steps that two states may be apart while their losses are alike. A miner that refuses a
#: state for its own better one takes the network's of a few rounds later: it is not left behind.
_NEAR = 2


def _outer_step_of(
    settings: TrainingSettings, exchange: str, shards: Sequence[ParameterShard], stream: RowStream
) -> OuterStep:
    kind: Callable[..., OuterStep] = OuterStep
    if exchange == "store":
        kind = partial(StoreOuterStep, drop_overlap=settings.late_overlap == "dropped")
    return kind(
        shards=shards,
        stream=stream,
        learning_rate=settings.outer_learning_rate,
        momentum=settings.outer_momentum,
        rule=outer_rule_of(settings, exchange),
    )


class Trainer(HeldWeights):
    """Trains one rank: model, inner optimizer, schedule, outer step, epoch start, error feedback.

    Ranks meet in the default process group; on GPUs initialise it with ``"cpu:gloo,cuda:nccl"``. A
    single rank needs none.

    Args:
        settings: The training settings of the network's file and of this miner.
        model_config: Content of a ``config.json``.
        device: Where this rank trains.
        layout: This rank's place among the ranks; None: it is the only one.
        utilization: Returns the utilization of this rank's GPU in percent, or None if unknown.
        say: Is called with one line of text for each thing that was decided, and why.
        run_folder: Remembers how many sequences the GPU holds, in ``micro-batch.json``; None:
            nothing is remembered.
        exchange: The network's, ``hivemind`` or ``store``.

    Raises:
        ConfigError: For settings that the model or the hardware cannot follow.

    Examples:
        ```python
        import torch

        from transformers import LlamaConfig

        from distributed_training.config.settings import TrainingSettings
        from distributed_training.training.trainer import Trainer

        model = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4,
        )
        settings = TrainingSettings(sequence_length=64, local_batch_size_train_effective=8)
        trainer = Trainer(
            settings=settings,
            model_config=model.to_dict() | {"architectures": ["LlamaForCausalLM"]},
            device=torch.device("cpu"),
        )
        trainer.load_weights(None)  # the initial ones
        trainer.begin_epoch(0)
        report = None
        while report is None:  # several micro-batches are one inner step
            batch = torch.randint(256, (trainer.micro_batch_size, 64))
            report = trainer.add_micro_batch(batch)
        print(report.loss)
        ```
    """

    def __init__(
        self,
        *,
        settings: TrainingSettings,
        model_config: Mapping[str, Any],
        device: torch.device,
        layout: Layout | None = None,
        utilization: Callable[[], float | None] | None = None,
        say: Callable[[str], None] = log.info,
        run_folder: Path | None = None,
        exchange: str = "hivemind",
    ) -> None:
        self.settings = settings
        layout = layout or Layout()
        self.rank, self.world_size = layout.rank, layout.world_size
        self._say = say if self.rank == 0 else log.debug

        wanted = settings.local_batch_size_train
        # The plan of memory needs a size before one can be measured.
        self.plan_micro_batches(1 if isinstance(wanted, str) else wanted)
        torch.manual_seed(settings.seed)
        self.sharded = build_sharded_model(
            settings,
            model_config,
            device=device,
            layout=layout,
            micro_batch=self.micro_batch_size,
            say=self._say,
        )
        published: Any = self.sharded.model.config
        self._published_config = {**model_config, **published.to_dict()}
        # After the model: all ranks must make their groups in one order.
        stream = open_stream(layout, STREAM_TIMEOUT)
        shards = self.sharded.shards
        self.schedule = Schedule.of(settings)
        self.optimizer = InnerOptimizer(
            shards,
            settings,
            offload=self.sharded.plan.offload_optimizer,
            embeddings=self.sharded.embeddings,
            matrices=self.sharded.matrices,
        )
        self._say(self.optimizer.line)
        self.feedback = ErrorFeedback(
            mode=settings.error_feedback,
            decay=settings.momentum_decay,
            compression=compression_of(settings),
            shards=shards,
            stream=stream,
        )
        super().__init__(
            shards=shards,
            schema=self.sharded.schema,
            tied=self.sharded.tied,
            stream=stream,
            outer=_outer_step_of(settings, exchange, shards, stream),
            copier=BoundaryCopier(shards, self.optimizer),
            device=device,
        )
        self.starts = EpochStarts(shards=shards, stream=stream)
        self._left_sketch: Tensor | None = None  # of the outer step that a round is to end
        self.gradient_check = GradientCheck(
            sharded=self.sharded,
            stream=stream,
            feedback=self.feedback,
            search=settings.step_length == "search",
            sequence_length=settings.sequence_length,
        )
        # After the optimizer: ``auto`` measures what is left of the device's memory.
        path = None if run_folder is None else run_folder / "micro-batch.json"
        known = KnownSize(path, facts_of(self.sharded, settings, layout.shards), stream)
        self.step = MicroBatches(
            sharded=self.sharded, stream=self.stream, known=known, say=self._say
        )

        self.skipped_in_a_row = 0
        self._written_at: int | None = None  # inner step of the round's pseudo-gradient
        self._warned_of_the_end = False
        self._meter = StepMeter(
            device,
            utilization=utilization,
            flops_per_token=self.sharded.flops_per_token / self.world_size,
        )
        self._profiler = None
        if settings.profile_steps:
            self._profiler = start_profiler(steps=settings.profile_steps, rank=self.rank)
        if isinstance(wanted, str):

            def end_step() -> None:
                # Norm and optimizer, before there are weights: the optimizer is as new after it.
                gradients = self.step.gradients()
                self._sum_over_ranks(gradients)
                self.optimizer.step(gradients, 0.0)
                self.optimizer.reset()

            self.plan_micro_batches(measured_micro_batch(self.step, settings, end_step=end_step))

    # --- batch arithmetic ----------------------------------------------------------------------

    def plan_micro_batches(self, size: int) -> None:
        """Plan micro-batches of another size from now on, at a step's boundary.

        Args:
            size: Sequences of a micro-batch.
        """
        self.micro_batch_size = size
        self.batch_plan = plan_batch(
            micro_batch=size,
            effective=self.settings.local_batch_size_train_effective,
            world_size=self.world_size,
        )
        if self.batch_plan.note:
            self._say(self.batch_plan.note)

    # --- weights -------------------------------------------------------------------------------

    def load_weights(self, path: Path | None) -> None:
        """Load rank 0's safetensors file, or the initial weights, into the shards of all ranks.

        Optimizer state and schedule stay. Collective.

        Args:
            path: Rank 0's file; None: initial weights from the seed. Other ranks' value is ignored.

        Raises:
            ValueError: On all ranks, if the file is not this model's. Nothing has changed.
        """
        self.copier.finish()
        sharding.load(self.sharded, path, self.stream, seed=self.settings.seed)
        self.drop_step()

    def load_checked_weights(
        self, path: Path | None, outer_step: int, sample: Tensor | None
    ) -> None:
        """Load weights as :meth:`load_weights`, but refuse those that are worse than a guess.

        Weights far worse than the epoch start of about the same outer step are refused too. Weights
        with which an earlier outer step of this miner began are accepted whatever their loss. In a
        store network nothing is measured: the weights are signed by the one who judges them.

        Args:
            path: Rank 0's file, as for :meth:`load_weights`.
            outer_step: The outer step that begins with these weights.
            sample: int64 ``(sequences, length)`` of this rank's text; None if it has none now.

        Raises:
            ValueError: As :meth:`load_weights`.
            WeightsWorseThanGuess: On all ranks. Nothing has changed.
        """
        if isinstance(self.outer, StoreOuterStep):  # signed by the one who judges them
            return self.load_weights(path)
        self.copier.finish()
        text = Text.of(
            sample,
            batches=MEASURED,
            micro_batch=self.micro_batch_size,
            length=self.settings.sequence_length,
        )
        there, others = self.stream.sum([text.counts, path is not None])
        load = partial(sharding.load, self.sharded, path, self.stream, seed=self.settings.seed)
        if there and others:
            # A network's first weights are no measure, those of long ago were of other losses.
            near = self.outer_step > 0 and abs(outer_step - self.outer_step) <= _NEAR
            own = self.outer.epoch_start if near else None
            back = outer_step < self.outer_step and outer_step in self.starts
            # One parameter at a time: a copy of all would take as much memory as the model.
            rows = (on_host(shard.local) for shard in self.sharded.shards)
            if load_measured(
                self.sharded,
                self.stream,
                load,
                text,
                own=own,
                earlier=self.starts.loss_before(outer_step, ours=self.outer_step),
                are_ours=partial(self.starts.are_ours, outer_step, rows) if back else None,
            ):
                self._say(
                    f"The network is at outer step {outer_step} again, with the weights that this "
                    "miner had then: they are taken over without a look at their loss"
                )
        else:
            if others:
                self._say(
                    "No text of this miner can be read now: the weights of another are taken over "
                    "without a look at their loss"
                )
            load()
        self.drop_step()

    @property
    def measured_sequences(self) -> int:
        """Sequences of each rank on which weights of another miner are measured."""
        return MEASURED * self.micro_batch_size

    def load_global(
        self,
        weights_path: Path | None,
        outer_optimizer: Path | None,
        outer_step: int,
        sample: Tensor | None = None,
    ) -> None:
        """Load weights, outer momentum and epoch start from rank 0's files. Collective.

        Args:
            weights_path: Rank 0's safetensors file; None: initial weights.
            outer_optimizer: Rank 0's ``outer_optimizer.pt``; None: no momentum.
            outer_step: The outer step that begins with these weights.
            sample: int64 ``(sequences, length)``, as for :meth:`load_checked_weights`.

        Raises:
            ValueError: On all ranks, if a file is not this model's.
            WeightsWorseThanGuess: As :meth:`load_checked_weights`.
            RankFailedError: On all ranks, when one has no memory. No error leaves anything changed.
        """
        self.outer.load_with_weights(
            outer_optimizer,
            load_weights=lambda: self.load_checked_weights(weights_path, outer_step, sample),
        )
        self.begin_epoch(outer_step)

    @torch.no_grad()
    def rebase(
        self,
        weights_path: Path | None,
        outer_optimizer: Path | None,
        sample: Tensor | None = None,
    ) -> None:
        """Load epoch start and outer momentum from rank 0's files; later training stays.

        The pseudo-gradient is the same afterwards; the inner step too. Raises as
        :meth:`load_global`.

        Args:
            weights_path: Rank 0's safetensors file; None: initial weights.
            outer_optimizer: Rank 0's ``outer_optimizer.pt``; None: no momentum.
            sample: int64 ``(sequences, length)``, as for :meth:`load_checked_weights`.
        """
        # First of all: the load overwrites the weights that it is measured from.
        trained = self.stream.run_on_all(self.outer.trained)
        self.outer.load_with_weights(
            outer_optimizer,
            load_weights=lambda: self.load_checked_weights(weights_path, self.outer_step, sample),
        )
        self.outer.begin_epoch()
        for item, rows in zip(self.sharded.shards, trained, strict=True):
            item.local.add_(rows.to(item.local.device))
        self.drop_step()

    def begin_epoch(self, outer_step: int) -> None:
        """Make the present weights the epoch start; inner steps count from 0 again.

        Args:
            outer_step: The outer step that begins.
        """
        super().begin_epoch(outer_step)
        self._written_at, self.starts.loss = None, None

    @property
    def tokens(self) -> int:
        return self.inner_step * self.batch_plan.effective * self.settings.sequence_length

    @property
    def moments(self) -> float:
        kept = sum(rows.numel() for rows in chain.from_iterable(self.optimizer.state.values()))
        return kept / max(1, sum(shard.local.numel() for shard in self.shards))

    def drop_step(self) -> None:
        """Forget an inner step that is not finished, and every gathered weight."""
        self.step.drop()
        self._meter.drop()

    def pause(self, seconds: float) -> None:
        """Leave a pause out of the inner step's time.

        Args:
            seconds: The time without anything to train.
        """
        self._meter.pause(seconds)

    # --- what survives a restart ---------------------------------------------------------------

    @property
    def components(self) -> tuple[Stateful, ...]:
        """Objects whose state a checkpoint holds next to the trainer's; no two share a key."""
        if isinstance(self.outer, StoreOuterStep):  # it has the error feedback too
            return self.sharded, self.optimizer, self.outer, self.starts
        return self.sharded, self.optimizer, self.outer, self.feedback, self.starts

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for a checkpoint (see :meth:`.HeldWeights.state_dict`)."""
        state = {
            "outer_step": self.outer_step,
            "inner_step": self.inner_step,
            "total_inner_steps": self.total_inner_steps,
            "schedule": self.schedule.state_dict(),
            "pending": self.step.pending(),  # so that no micro-batch is lost or trained twice
            # One for each, alike on all ranks: at another layout none is there to run again.
            # Named as in 0.2.0, which reads these checkpoints after an update was taken back.
            "domains": [0] * len(self.step.batches),
        }
        for component in self.components:
            state |= component.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore a :meth:`state_dict`, with this rank's rows. Collective.

        Args:
            state: The state, of any number of ranks.

        Returns:
            False, on all ranks, if micro-batches of an unfinished step were dropped.
        """
        self.copier.finish()
        self.drop_step()
        for component in self.components:
            component.load_state_dict(state)
        self.schedule.load_state_dict(state["schedule"])
        self.outer_step = int(state["outer_step"])
        self.inner_step, self._written_at = int(state["inner_step"]), None
        self.total_inner_steps = int(state["total_inner_steps"])
        if state["pending"] is None:
            return not state["domains"]
        # Run again, since their gradients were not stored, unless they fit no step of these flags.
        pending: Tensor = state["pending"]
        shape = (self.micro_batch_size, self.settings.sequence_length)
        if tuple(pending.shape[1:]) != shape or len(pending) >= self.batch_plan.micro_batches:
            self._say(
                f"{len(pending)} micro-batch(es) of the inner step under way are dropped: they are "
                f"of {tuple(pending.shape[1:])} tokens, the flags say {shape} and "
                f"{self.batch_plan.micro_batches} a step"
            )
            return False
        for batch in pending:
            self.add_micro_batch(batch)
        return True

    # --- inner step ----------------------------------------------------------------------------

    def add_micro_batch(
        self, batch: Tensor, *, data_wait_seconds: float = 0.0
    ) -> StepReport | None:
        """Train on one micro-batch; return the report of a finished inner step, else None.

        Args:
            batch: int64 ``(micro_batch_size, sequence_length)`` token ids, on the host.
            data_wait_seconds: Time for which this rank waited for the batch.

        Raises:
            ValueError: For another shape than that of the settings.
            torch.OutOfMemoryError: When no sequence fits, or other ranks are left in a collective.
        """
        expected = (self.micro_batch_size, self.settings.sequence_length)
        if tuple(batch.shape) != expected:
            raise ValueError(f"micro-batch of shape {tuple(batch.shape)}, expected {expected}")
        self._meter.micro_batch(data_wait_seconds)
        step, plan = self.step, self.batch_plan
        step.batches.append(batch)
        missing = [batch]  # from the sum of gradients
        while missing:
            started, failed = time.perf_counter(), False
            last_batch = len(missing) == 1 and len(step.batches) == plan.micro_batches
            # FSDP divides by the world size; a rank's share of the mean is therefore its own mean.
            tokens = plan.micro_batches * batch.shape[0] * (batch.shape[1] - 1)
            pieces = missing[0].to(self.device, non_blocking=True).split(step.at_once(len(batch)))
            try:
                for number, piece in enumerate(pieces, 1):
                    step.set_last(last_batch and number == len(pieces))
                    loss_sum = self.sharded.root(piece)
                    (loss_sum / tokens).backward()
                    # Added up on the device: ``float(loss_sum)`` would wait for all that is queued,
                    # at each micro-batch.
                    step.loss_sum += loss_sum.detach()
            except step.failures as error:  # out of memory, or of the compiler
                step.prepare_again(error, plan)  # raises where other ranks wait in a collective
                failed = True
            if failed:
                # Not before: the error holds the frames of the failed pass, and the loss its
                # activations. All of the step is run again: its pieces are of another size now.
                loss_sum = None
                step.discard(free=True)
                missing = list(step.batches)
            else:
                step.report_compiled(started)
                del missing[0]
        if len(step.batches) < plan.micro_batches:
            return None

        gradients = step.gradients()
        loss, norm = self._sum_over_ranks(gradients)
        rate = self.schedule.rate(self.total_inner_steps)
        # All ranks have the same two sums, so all of them apply the step or none does.
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            clip = self.settings.gradient_clip
            if clip and norm > clip:
                torch._foreach_mul_(gradients, clip / (norm + 1e-6))
            self.copier.finish()  # first: they are of the weights and moments before
            self.optimizer.step(gradients, rate)
            for item in self.sharded.shards:
                # None, not zero: FSDP adds to what is there, and the next step begins with nothing.
                item.dtensor.grad = None
            self.inner_step += 1
            self.total_inner_steps += 1
            self.skipped_in_a_row = 0
            if self.inner_step == 1:
                self.starts.loss = loss
            self._warn_near_the_end(rate)
        else:
            self.skipped_in_a_row += 1
            line = (
                "Inner step skipped: its loss or gradient is NaN or Inf "
                f"({self.skipped_in_a_row} in a row; at {NAN_LIMIT} the last good checkpoint is "
                "loaded)"
            )
            log.warning(line)
            step.notes.append(line)
        report = StepReport(
            outer_step=self.outer_step,
            inner_step=self.inner_step,
            total_inner_steps=self.total_inner_steps,
            loss=loss,
            grad_norm=norm if finite else None,
            skipped=not finite,
            learning_rate=rate,
            learning_rate_share=rate / self.schedule.peak,
            samples=plan.effective,
            micro_batches=plan.micro_batches,
            note="; ".join(step.notes),
            **self._meter.finish(plan.effective * self.settings.sequence_length),
        )
        if finite:
            # Weights that FSDP gathered were dropped by the last backward already.
            step.forget()
        else:
            self.drop_step()
        if self._profiler is not None:
            self._profiler.step()
        return report

    def _sum_over_ranks(self, gradients: Sequence[Tensor]) -> tuple[float, float]:
        """Return the mean loss and the gradient's norm over all ranks."""
        # float64: the square of a large float32 norm overflows, and ranks add up in any order.
        norms = torch._foreach_norm([g for g in gradients if g.numel()])
        square = torch.stack([n.double() for n in norms]).square().sum()
        # The only wait for the device in a step. Each further one would cost the time in which
        # the host queues kernels ahead; hence loss and norm are read together.
        sums = torch.stack([self.step.loss_sum.double(), square]).tolist()
        total_loss, total_square = self.stream.sum(sums)
        total_square /= self.stream.layout.replicas  # each copy has the same gradient
        predicted = self.batch_plan.effective * (self.settings.sequence_length - 1)
        return total_loss / predicted, total_square**0.5

    def _warn_near_the_end(self, rate: float) -> None:
        """Warn once per start that the schedule is where its rate is the lowest."""
        end = self.schedule.end
        if end is None or self.rank != 0 or self._warned_of_the_end:
            return
        if self.schedule.constant:
            self._warned_of_the_end = self.total_inner_steps >= end
            if self._warned_of_the_end:
                log.warning(
                    "Inner step %d is the end of the decay: the learning rate is 0, so nothing is "
                    "learned any more: the founder exports the model, or signs a file without "
                    "training.decay_from",
                    self.total_inner_steps,
                )
        elif self.total_inner_steps >= NEAR_THE_END * end:
            self._warned_of_the_end = True
            log.warning(
                "Inner step %d of training.total_steps %d: the learning rate is at %.0f %% of its "
                "peak and stays there, so later steps learn slowly: a network's file with a larger "
                "value, such as %d, raises it again",
                self.total_inner_steps,
                end,
                100 * rate / self.schedule.peak,
                2 * end,
            )

    def begin_schedule(self, network_steps: int, *, follows: bool = False) -> None:
        """Begin at the network's place in the learning rate's schedule, at a first start.

        Args:
            network_steps: Inner steps that the network has taken; 0 if its state does not say.
            follows: Whether the place is the network's, also in its warm-up.
        """
        # The warm-up is for the random weights of a new network. With trained ones it would cost a
        # newcomer's first outer steps, and AdamW finds its moments without it.
        if self.outer_step > 0:
            self.total_inner_steps = max(network_steps, self.schedule.warmup_steps - 1)
        if follows:
            self.follow_schedule(self.outer_step, network_steps)
        rate = self.schedule.rate(self.total_inner_steps)
        self._say(
            f"Training begins at inner step {self.total_inner_steps} of the learning rate's "
            f"schedule, at {rate:.3g}"
        )

    def follow_rules(self, settings: TrainingSettings) -> None:
        """Train with another schedule and another clip, from the next step on.

        Args:
            settings: The settings of the new version of the network's file.
        """
        slowed = self.schedule.state_dict()
        self.settings, self.schedule = settings, Schedule.of(settings)
        self.schedule.load_state_dict(slowed)
        self._warned_of_the_end = False

    @property
    def wants_roll_back(self) -> bool:
        """True after :data:`NAN_LIMIT` skipped inner steps in a row: load the last checkpoint."""
        return self.skipped_in_a_row >= NAN_LIMIT

    def slow_down(self) -> None:
        """Halve the learning rate for :data:`SLOW_STEPS` inner steps."""
        self.schedule.slow_down(self.total_inner_steps, steps=SLOW_STEPS)
        self.skipped_in_a_row = 0

    # --- outer step ----------------------------------------------------------------------------

    def write_pseudo_gradient(
        self, buffers: Sequence[Tensor] | None, *, trains_on: bool = False
    ) -> float:
        """Write this outer step's pseudo-gradient into rank 0's buffers. Collective.

        Args:
            buffers: As for :meth:`.OuterStep.write_pseudo_gradient`.
            trains_on: Whether inner steps follow before the average is there.

        Returns:
            The norm over all parameters, on every rank.
        """
        self._written_at = self.inner_step if trains_on else None
        return self.outer.write_pseudo_gradient(buffers, trains_on=trains_on)

    def prepare_outer_step(self, averaged: Sequence[Tensor] | None) -> None:
        """Compute the new weights and momentum from rank 0's average, without using them yet.

        Args:
            averaged: As for :meth:`.OuterStep.prepare`, which raises what this raises.
        """
        # A round needs the host memory that copies for a snapshot or a checkpoint hold.
        self.copier.wait()
        self.outer.prepare(averaged)
        self._left_sketch = self.starts.sketch(self.outer.epoch_start or [])

    def commit_outer_step(self) -> None:
        """Replace weights, epoch start, momentum, error feedback and progress together. Local.

        Inner steps taken since the pseudo-gradient was written belong to the new outer step.
        """
        self.copier.finish()
        if isinstance(self.outer, StoreOuterStep):
            super().commit_outer_step()
            return
        self.outer.commit()
        assert self._left_sketch is not None
        self.starts.leave(self.outer_step, self._left_sketch)
        self.outer_step += 1
        self.inner_step = 0 if self._written_at is None else self.inner_step - self._written_at
        self._written_at = None
        # Gradients of a step under way, and what FSDP has gathered, are of the weights before.
        self.drop_step()

    # --- uploads -------------------------------------------------------------------------------

    @torch.no_grad()
    def snapshot(
        self,
        folder: Path,
        *,
        progress: Progress,
        block: int,
        last_loss: float,
        parts: Parts = "all",
    ) -> SnapshotHandle:
        """Write the files of an upload, as of this step boundary, in the background. Collective.

        Training waits for the codes of vectors only (with DCT for all codes), and the next
        optimizer step waits until the rest is copied to host memory.

        Args:
            folder: Rank 0's folder of the files; it is emptied.
            progress: The point of training; rank 0's ``progress.blocks`` become the block list.
            block: The chain's present block.
            last_loss: Loss of the last inner step, in nats per token.
            parts: The files to write; all, or those that are scored.

        Returns:
            The snapshot under way; later failures are in it.

        Raises:
            OSError: On all ranks, when ``folder`` cannot be made.
            RankFailedError: On all ranks, when one has no memory.
        """
        started = time.perf_counter()
        start, layout, shards = self.outer.epoch_start, self.stream.layout, self.sharded.shards
        if start is None:
            raise AllReduceError(AllReduceFault.LOCAL, "no epoch-start weights are kept")
        # No copy is made of what is not uploaded.
        copies = self.boundary_copies(None if parts == "all" else self.feedback.moments)
        problem = None
        if self.rank == 0:
            try:
                shutil.rmtree(folder, ignore_errors=True)
                (folder / PARTS).mkdir(parents=True)
            except OSError as error:
                problem = f"{folder} cannot hold a snapshot: {error}"
        self.stream.raise_if_any(problem, OSError)  # no rank writes before
        if not all(len(s.shape) == 1 or self.feedback.by_rows(i) for i, s in enumerate(shards)):
            copies.wait()  # else only vectors are encoded here
        # Here and not in the thread: it is collective, and would meet training's collectives.
        directions = self.feedback.directions(
            start,
            copies.weights,
            self.outer.learning_rate,
            second_moment=copies.state.get("exp_avg_sq"),
        )
        description = describe_inner(
            self.schema,
            self.schedule,
            self.optimizer,
            finished_steps=self.total_inner_steps,
            outer_step=progress.outer_step,
        )
        counts: dict[str, Any] = {"block_list": progress.blocks, "inner_step": progress.inner_step}
        if parts != "all":  # by it a network is brought back, at its place in the schedule
            counts["total_inner_steps"] = progress.total_inner_steps
        state = SnapshotState(
            layout=layout,
            shards=shards,
            copies=copies,
            directions=directions,
            compression=self.feedback.compression,
            config=self._published_config | counts,
            gradients_metadata={
                "block": int(block),
                "inner_step": int(progress.inner_step),
                "outer_step": int(progress.outer_step),
                "loss": float(last_loss),
            },
            write_inner=partial(
                write_optimizer_shard,
                description=description,
                schema=self.schema,
                rank=layout.shard,
                ranks=layout.shards,
                counts=self.optimizer.counts(),
                moments=copies.state,
                keeps=self.optimizer.keeps,
            ),
            parts=parts,
        )
        epoch = Epoch(self.outer.epoch_id, start, self.outer.learning_rate)
        handle = SnapshotHandle(folder, time.perf_counter() - started, epoch)
        handle.start(partial(write_snapshot, state))
        return handle

    def hold_back(self, sequences: Tensor | None) -> None:
        """Use sequences of this rank as the held-out data of its gradient checks.

        Args:
            sequences: int64 ``(sequences, length)``; None: this rank has none.
        """
        self.gradient_check.hold_back(sequences)

    @property
    def preview_micro_batches(self) -> int:
        if isinstance(self.outer, StoreOuterStep):
            return 0
        at_once = self.micro_batch_size * self.world_size
        return -(-self.settings.preview_sequences // at_once)

    def check_gradient(self, handle: SnapshotHandle) -> float | None:
        """Measure by how much a snapshot's gradient changes the loss on held-out data. Collective.

        Args:
            handle: A snapshot whose codes are finished.

        Returns:
            Loss with minus loss without it, in nats per token, so below 0 is good. None when no
                rank has held-out data, or one has no memory.
        """
        self.copier.finish()
        # Many ranks have enough with less than a micro-batch each.
        wanted = -(-self.settings.preview_sequences // self.world_size)
        return self.gradient_check.run(
            handle,
            micro_batch=min(self.micro_batch_size, wanted),
            batches=self.preview_micro_batches,
        )
