"""Train one rank: the model, its inner steps and its outer step.

All ranks call the same methods in the same order. Nothing here uses the network except for the
process group, and nothing waits for a device more than once per inner step.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distributed_training.config.settings import TrainingSettings
from distributed_training.protocol.types import StepReport

from . import sharding
from .collectives import Layout, ParameterShard, open_stream
from .frozen import FrozenTensors, kept_buffers
from .held_weights import HeldWeights
from .inner_optimizer import InnerOptimizer, Schedule
from .memory_plan import plan_batch
from .micro_batches import KnownSize, MicroBatches, facts_of, measured_micro_batch
from .sharding import build_sharded_model
from .throughput import StepMeter, start_profiler

log = logging.getLogger(__name__)

#: After ``NAN_LIMIT`` consecutive inner steps with NaN or Inf, the last good checkpoint is loaded.
#: The next ``SLOW_STEPS`` inner steps run at half the learning rate, because the same data at the
#: same rate would diverge again.
NAN_LIMIT, SLOW_STEPS = 3, 50


class Trainer(HeldWeights):
    """Trains one rank: model, inner optimizer, schedule, outer step, epoch start.

    Ranks communicate in the default process group; on GPUs initialise it with
    ``"cpu:gloo,cuda:nccl"``. A single rank needs no group.

    Args:
        settings: The training settings of the network's file and of this miner.
        model_config: Content of a ``config.json``.
        device: The device that this rank trains on.
        layout: This rank's place among the ranks; None: it is the only rank.
        utilization: Returns the utilization of this rank's GPU in percent, or None if unknown.
        say: Called for each decision, with one line that states it and the reason.
        frozen: Rank 0's safetensors file with the frozen parameters; None: all are trained.
        run_folder: The folder for ``micro-batch.json``, which records how many sequences the GPU
            can hold; None: nothing is recorded.

    Raises:
        ConfigError: For settings that the model or the hardware does not support.

    Examples:
        ```python
        import torch

        from pathlib import Path
        from transformers import LlamaConfig, LlamaForCausalLM

        from distributed_training.config.settings import TrainingSettings
        from distributed_training.training.trainer import Trainer

        model = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4,
        )
        LlamaForCausalLM(model).save_pretrained("begin")
        settings = TrainingSettings(sequence_length=64, local_batch_size_train_effective=8)
        trainer = Trainer(
            settings=settings,
            model_config=model.to_dict(),
            device=torch.device("cpu"),
        )
        trainer.load_weights(Path("begin/model.safetensors"))
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
        frozen: Path | None = None,
        run_folder: Path | None = None,
    ) -> None:
        self.settings = settings
        layout = layout or Layout()
        self.rank, self.world_size = layout.rank, layout.world_size
        self._say = say if self.rank == 0 else log.debug

        wanted = settings.local_batch_size_train
        # The memory plan needs a micro-batch size before the size can be measured.
        effective = settings.local_batch_size_train_effective
        self.plan_micro_batches(1 if isinstance(wanted, str) else min(wanted, effective))
        # Look up the known sizes first: the memory plan, and so the model's form, depends on them.
        path = None if run_folder is None else run_folder / "micro-batch.json"
        known = KnownSize(path, facts_of(settings, model_config, device, layout.shards))
        torch.manual_seed(settings.seed)
        self.sharded = build_sharded_model(
            settings,
            model_config,
            device=device,
            layout=layout,
            micro_batch=self.micro_batch_size,
            rung=known.rung,
            say=self._say,
        )
        # Open the stream after building the model: all ranks must create their groups in the same
        # order.
        stream = open_stream(layout)
        shards = self.sharded.shards
        self.schedule = Schedule.of(settings)
        self.optimizer = InnerOptimizer(
            shards,
            settings,
            offload=self.sharded.plan.way.offload_optimizer,
            embeddings=self.sharded.embeddings,
            matrices=self.sharded.matrices,
        )
        self._say(self.optimizer.line)
        super().__init__(
            shards=shards,
            stream=stream,
            settings=settings,
            steps=self.optimizer,
        )
        shared, fixed = self.stream.from_rank_0(frozen), list[ParameterShard]()
        if shared is not None:
            fixed = self.sharded.frozen
            sharding.load_file(fixed, shared, self.stream)
        self.frozen = FrozenTensors(
            {shard.name: shard.local for shard in fixed} | kept_buffers(self.sharded.model)
        )
        known.agree(stream, self.sharded.plan.rung)
        self.step = MicroBatches(
            sharded=self.sharded, stream=self.stream, known=known, say=self._say
        )

        self.skipped_in_a_row = 0
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
            # Do this after creating the optimizer, since ``auto`` measures what is left of the
            # device's memory.
            def end_step() -> None:
                # Run the norm and the optimizer before weights are loaded; the optimizer is reset
                # afterwards.
                gradients = self.step.gradients()
                self._reduce(gradients)
                self.optimizer.step(gradients, 0.0)
                self.optimizer.reset()

            self.plan_micro_batches(measured_micro_batch(self.step, settings, end_step=end_step))

    # --- batch arithmetic ----------------------------------------------------------------------

    def plan_micro_batches(self, size: int) -> None:
        """Plan micro-batches of another size from now on. Call this at a step boundary.

        Args:
            size: Sequences per micro-batch.
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

    @property
    def tokens(self) -> int:
        return self.inner_step * self.batch_plan.effective * self.settings.sequence_length

    @property
    def moments(self) -> float:
        kept = sum(rows.numel() for rows in chain.from_iterable(self.optimizer.state.values()))
        return kept / max(1, sum(shard.local.numel() for shard in self.shards))

    def drop_step(self) -> None:
        """Forget an unfinished inner step, and every gathered weight."""
        self.step.drop()
        self._meter.drop()

    def pause(self, seconds: float) -> None:
        """Exclude a pause from the inner step's time.

        Args:
            seconds: How long there was nothing to train on.
        """
        self._meter.pause(seconds)

    # --- what survives a restart ---------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for a checkpoint (see :meth:`.HeldWeights.state_dict`)."""
        batches = self.step.batches
        return super().state_dict() | {
            "schedule": self.schedule.state_dict(),
            # These batches are kept so that no micro-batch is lost or trained twice.
            "pending": torch.stack(batches).cpu() if batches else None,
            # One 0 for each micro-batch. The list is the same on all ranks, so with another layout
            # it shows that micro-batches were dropped. The name comes from version 0.2.0, which can
            # read these checkpoints if an operator goes back to it.
            "domains": [0] * len(batches),
            **self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore a :meth:`state_dict` that has this rank's rows. Collective.

        Args:
            state: A :meth:`state_dict`, saved by any number of ranks.

        Returns:
            False, on all ranks, if micro-batches of an unfinished step were dropped.
        """
        super().load_state_dict(state)
        self.optimizer.load_state_dict(state)
        self.schedule.load_state_dict(state["schedule"])
        if state["pending"] is None:
            return not state["domains"]
        # Run the pending micro-batches again, since their gradients were not stored, unless they do
        # not fit a step with the current flags.
        pending: Tensor = state["pending"]
        shape = (self.micro_batch_size, self.settings.sequence_length)
        if tuple(pending.shape[1:]) != shape or len(pending) >= self.batch_plan.micro_batches:
            self._say(
                f"{len(pending)} micro-batch(es) of the unfinished inner step are dropped: they "
                f"have {tuple(pending.shape[1:])} tokens, but the flags say {shape} and "
                f"{self.batch_plan.micro_batches} per step"
            )
            return False
        for batch in pending:
            self.add_micro_batch(batch)
        return True

    # --- inner step ----------------------------------------------------------------------------

    def add_micro_batch(self, rows: Tensor, *, data_wait_seconds: float = 0.0) -> StepReport | None:
        """Train on one micro-batch; return a report if this finishes an inner step, else None.

        Args:
            rows: int64 ``(micro_batch_size, sequence_length)`` token ids, on the host.
            data_wait_seconds: How long this rank waited for them.

        Raises:
            ValueError: If the shape does not match the settings.
            torch.OutOfMemoryError: If not even one sequence fits, or if memory ran out while other
                ranks are in a collective.
        """
        expected = (self.micro_batch_size, self.settings.sequence_length)
        if tuple(rows.shape) != expected:
            raise ValueError(f"micro-batch has shape {tuple(rows.shape)}, expected {expected}")
        self._meter.micro_batch(data_wait_seconds)
        self.step.batches.append(rows)
        self._forward_backward(rows)
        done = len(self.step.batches) == self.batch_plan.micro_batches
        return self.train_step() if done else None

    def train_step(self) -> StepReport:
        """Take the inner step, after forward and backward of all its micro-batches."""
        gradients = self.step.gradients()
        loss, norm = self._reduce(gradients)
        rate = self.schedule.rate(self.total_inner_steps)
        # All ranks have the same two numbers, so either all of them apply the step, or none.
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            clip = self.settings.gradient_clip
            if clip and norm > clip:
                torch._foreach_mul_(gradients, clip / (norm + 1e-6))
            # Finish boundary copies first: they need the weights and moments before this step.
            self.copier.finish()
            self.optimizer.step(gradients, rate)
            for item in self.sharded.shards:
                # Set None, not zero: FSDP adds to an existing gradient, and the next step must
                # start with none.
                item.dtensor.grad = None
            self.inner_step += 1
            self.total_inner_steps += 1
            self.skipped_in_a_row = 0
            self._warn_near_the_end(rate)
        else:
            self.skipped_in_a_row += 1
            line = (
                "Inner step skipped: its loss or gradient is NaN or Inf "
                f"({self.skipped_in_a_row} in a row; at {NAN_LIMIT} the last good checkpoint is "
                "loaded)"
            )
            log.warning(line)
            self.step.notes.append(line)
        report = self._report(loss, norm if finite else None, rate)
        # The last backward has dropped FSDP's gathered weights. If the result was not finite, drop
        # the whole step.
        self.step.forget() if finite else self.drop_step()
        if self._profiler is not None:
            self._profiler.step()
        return report

    def _forward_backward(self, rows: Tensor) -> None:
        """Add the gradients of a micro-batch; after a failure run the whole step again."""
        step, plan = self.step, self.batch_plan
        missing = [rows]  # micro-batches that the summed gradients do not include yet
        while missing:
            started, failed = time.perf_counter(), False
            failures: tuple[type[Exception], ...] = (torch.OutOfMemoryError, *step.compiler_errors)
            last_batch = len(missing) == 1 and len(step.batches) == plan.micro_batches
            pieces = missing[0].to(self.device, non_blocking=True).split(step.at_once(len(rows)))
            try:
                for number, piece in enumerate(pieces, 1):
                    step.set_last(last_batch and number == len(pieces))
                    loss_sum, count = self.sharded.root(self.sharded.root.kind.batch(piece))
                    (loss_sum / self._predictions).backward()
                    # Add up on the device: ``float(loss_sum)`` would wait for all queued work in
                    # each micro-batch.
                    step.loss_sum += loss_sum.detach()
                    step.count += count
            except failures as error:
                step.prepare_again(error, plan)  # raises if other ranks are in a collective
                failed = True
            if failed:
                # Run the step again only here, where the error is gone, because the error held the
                # frames of the failed pass, and the loss held its activations. The whole step runs
                # again, since its pieces now have another size.
                loss_sum = None
                step.discard(free=True)
                missing = list(step.batches)
            else:
                step.report_compiled(started)
                del missing[0]

    @property
    def _predictions(self) -> int:
        """Return the number of predictions that a rank divides its loss by.

        It is fixed before the real number is known. FSDP divides by the world size, so a rank's
        share of the mean is its own mean.
        """
        return (
            self.batch_plan.micro_batches
            * self.micro_batch_size
            * (self.settings.sequence_length - 1)
        )

    def _reduce(self, gradients: list[Tensor]) -> tuple[float, float]:
        """Return the mean loss over all ranks and the norm of its gradient."""
        # Add up in float64, since the square of a large float32 norm would overflow.
        norms = torch._foreach_norm([g for g in gradients if g.numel()])
        square = torch.stack([n.double() for n in norms]).square().sum()
        # A step waits for the device only here. During a second wait the host could not queue
        # kernels ahead, so loss and norm are read together.
        sums = torch.stack([self.step.loss_sum.double(), square]).tolist()
        loss, square_sum, count = self.stream.sum([*sums, self.step.count])
        # Every copy of the model has the same gradient, so the sum counts it once for each copy.
        norm = (square_sum / self.stream.layout.replicas) ** 0.5
        predictions = self._predictions * self.world_size
        if count not in (0, predictions):  # some kinds of model do not predict every token
            torch._foreach_mul_(gradients, predictions / count)
            norm *= predictions / count
        return loss / (count or predictions), norm

    def _report(self, loss: float, norm: float | None, rate: float) -> StepReport:
        plan = self.batch_plan
        return StepReport(
            outer_step=self.outer_step,
            inner_step=self.inner_step,
            total_inner_steps=self.total_inner_steps,
            loss=loss,
            grad_norm=norm,
            skipped=norm is None,
            learning_rate=rate,
            learning_rate_share=rate / self.schedule.peak,
            samples=plan.effective,
            micro_batches=plan.micro_batches,
            note="; ".join(self.step.notes),
            **self._meter.finish(plan.effective * self.settings.sequence_length),
        )

    def _warn_near_the_end(self, rate: float) -> None:
        """Warn once per start that the schedule has reached its lowest rate."""
        end, steps = self.schedule.lowest_from, self.total_inner_steps
        if end is None or steps < end or self.rank != 0 or self._warned_of_the_end:
            return
        self._warned_of_the_end = True
        if self.schedule.constant:
            log.warning(
                "Inner step %d is the end of the decay: the learning rate is 0, so training has no "
                "effect any more: the founder can export the model, or sign a network's file "
                "without training.decay_from",
                steps,
            )
        else:
            total = self.schedule.total_steps
            log.warning(
                "Inner step %d of training.total_steps %d: the learning rate is at %.0f %% of its "
                "peak and stays there, so later steps learn slowly: to raise it, the founder can "
                "sign a network's file with a larger training.total_steps, such as %d",
                *(steps, total, 100 * rate / self.schedule.peak, 2 * total),
            )

    @property
    def wants_roll_back(self) -> bool:
        """True after :data:`NAN_LIMIT` consecutive skipped steps: load the last checkpoint."""
        return self.skipped_in_a_row >= NAN_LIMIT

    def slow_down(self) -> None:
        """Halve the learning rate for :data:`SLOW_STEPS` inner steps."""
        self.schedule.slow_down(self.total_inner_steps, steps=SLOW_STEPS)
        self.skipped_in_a_row = 0
