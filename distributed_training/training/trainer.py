"""The trainer of one rank: model, inner steps, outer step, snapshots.

All ranks call the same methods in the same order. Nothing here talks to a network beyond the
process group, and nothing waits for a device more than once per inner step.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed_training.config.training import TrainingSettings
from distributed_training.protocol.types import AllReduceError, AllReduceFault, Progress, StepReport

from . import weights
from .attention import implementation
from .feedback import Code, Codec, ErrorFeedback
from .hardware import (
    attention_line,
    find_micro_batch,
    make_mesh,
)
from .inner_optimizer import InnerOptimizer
from .loss import CausalLoss, choose_loss_kernel
from .micro_batches import MicroBatches
from .model import (
    Schema,
    build_meta_model,
    checkpoint_activations,
    compile_blocks,
    discard_gradients,
    schema_of,
    shard,
    tied_names,
)
from .outer_step import OuterStep
from .plan import check_sequence_length, compute_dtype, plan_batch, plan_memory
from .preview import Preview
from .profile import StepProfiler
from .schedule import CosineSchedule
from .shards import RowStream, shards_of
from .snapshot import SnapshotHandle, SnapshotState, prepare_folder, write_snapshot
from .throughput import DeviceGauge, flops_per_token

log = logging.getLogger(__name__)


class Trainer:
    """Owns model, AdamW, schedule, outer optimizer, epoch-start weights and error feedback.

    ``model_config``: content of a ``config.json``. ``group``: what FSDP uses, None for the default
    process group; on GPUs initialise that with ``"cpu:gloo,cuda:nccl"``. One rank alone needs none.
    ``group_timeout`` covers each collective of the host-memory streams (pseudo-gradient, average,
    votes), which run over a gloo group made here. ``say`` gets one line for each thing that was
    decided, and why. Raises ConfigError for settings the model or the hardware cannot follow.
    """

    def __init__(
        self,
        *,
        settings: TrainingSettings,
        model_config: Mapping[str, Any],
        device: torch.device,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None = None,
        group_timeout: timedelta = timedelta(minutes=10),
        say: Callable[[str], None] = log.info,
    ) -> None:
        self.settings = settings
        self.device = device
        self.rank = rank
        self.world_size = world_size
        self.model_config = dict(model_config)

        self._say = say if rank == 0 else log.debug
        say = self._say

        # batch arithmetic
        wanted = settings.local_batch_size_train
        self.micro_batch_size = 1 if isinstance(wanted, str) else wanted
        self._plan_batch()

        # model
        torch.manual_seed(settings.seed)
        memory = None
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32 where float32 is left
            memory = torch.cuda.get_device_properties(device).total_memory
        self.compute_dtype, line = compute_dtype(settings.precision, device)
        say(line)
        dropout = float(model_config.get("attention_dropout") or 0.0)
        attention = implementation(device, settings.sequence_length, dropout)
        model = build_meta_model(model_config, attention=attention)
        self.model = model
        config: Any = model.config
        check_sequence_length(settings.sequence_length, config)
        self.schema: Schema = schema_of(model)
        self._tied = tied_names(model)
        self._flops_per_token = flops_per_token(model, settings.sequence_length)
        self.plan = plan_memory(
            settings,
            model_config=config.to_dict(),
            world_size=world_size,
            micro_batch=self.micro_batch_size,
            device_bytes=memory,
        )
        say(self.plan.note)
        say(attention_line(config, device, self.compute_dtype))
        checkpoint_activations(model, settings.activation_checkpointing)
        compiled = False
        if settings.compile == "on" or (settings.compile == "auto" and device.type == "cuda"):
            problem = compile_blocks(model, device)
            compiled = problem is None
            say(f"torch.compile: {'each block' if problem is None else 'off: ' + problem}")
        kernel, line = choose_loss_kernel(settings.loss_kernel, device)
        say(line)
        self._root: nn.Module = CausalLoss(model, kernel)
        mesh = make_mesh(group, device, world_size)
        self._mesh = mesh
        self._modules = shard(
            self._root,
            model,
            mesh=mesh,
            device=device,
            per_block=self.plan.per_block,
            compute_dtype=self.compute_dtype,
            reshard_after_forward=not self.plan.keep_unsharded,
        )
        say(f"FSDP: {len(self._modules)} group(s) over {world_size} rank(s)")
        self.shards = shards_of(model, world_size=world_size, rank=rank)

        # optimizers
        self.schedule = CosineSchedule(
            settings.learning_rate, settings.warmup_steps, settings.total_steps
        )
        self._optimizer = InnerOptimizer(
            self.shards,
            betas=(settings.adam_beta1, settings.adam_beta2),
            weight_decay=settings.weight_decay,
            offload=self.plan.offload_optimizer,
        )
        group = dist.new_group(backend="gloo", timeout=group_timeout)
        assert group is not None
        self.stream = RowStream(group=group, world_size=world_size, rank=rank)
        codec = Codec(settings.topk_compression, settings.target_chunk, settings.use_dct)
        self._feedback = ErrorFeedback(
            mode=settings.error_feedback,
            decay=settings.momentum_decay,
            codec=codec,
            shards=self.shards,
            stream=self.stream,
        )
        self._outer = OuterStep(
            shards=self.shards,
            stream=self.stream,
            learning_rate=settings.outer_learning_rate,
            momentum=settings.outer_momentum,
            feedback=self._feedback,
        )

        self._held: Tensor | None = None

        # progress
        self.outer_step = 0
        self.inner_step = 0
        self.total_inner_steps = 0
        self.skipped_in_a_row = 0
        self.skipped_steps = 0  # since the start

        # the step under way
        self._gauge = DeviceGauge(device)
        self._step = MicroBatches(
            root=self._root,
            model=model,
            modules=self._modules,
            shards=self.shards,
            stream=self.stream,
            memory=self.plan,
            device=device,
            compiled=compiled,
            surgery=settings.pcgrad,
            say=say,
        )
        root = self._root
        self._preview = Preview(
            shards=self.shards,
            stream=self.stream,
            feedback=self._feedback,
            loss=lambda batch: root(batch.to(device)),
            dropped=self._step.drop,
        )
        self._waited = 0.0
        self._seconds = 0.0  # spent here; pauses between micro-batches, as in a round, do not count
        self._profiler = StepProfiler(
            steps=settings.profile_steps, start=settings.profile_start, rank=rank
        )
        if isinstance(wanted, str):
            self.micro_batch_size = find_micro_batch(
                self._try_micro_batch,
                device=device,
                vote=self.vote,
                say=say,
                largest=max(1, settings.local_batch_size_train_effective // world_size),
            )
            self._plan_batch()

    @property
    def micro_batches_per_step(self) -> int:
        """Calls of :meth:`add_micro_batch` per inner step, on each rank."""
        return self.batch_plan.micro_batches

    @property
    def pending_micro_batches(self) -> int:
        """Micro-batches of the inner step under way."""
        return len(self._step.batches)

    @property
    def wants_roll_back(self) -> bool:
        """``nan_limit`` inner steps in a row were skipped: load the last good checkpoint."""
        return self.skipped_in_a_row >= self.settings.nan_limit

    def parameter_schema(self) -> Schema:
        """Names and shapes in state-dict order."""
        return list(self.schema)

    def _plan_batch(self) -> None:
        self.batch_plan = plan_batch(
            micro_batch=self.micro_batch_size,
            effective=self.settings.local_batch_size_train_effective,
            world_size=self.world_size,
        )
        if self.batch_plan.note:
            self._say(self.batch_plan.note)

    # --- weights in ----------------------------------------------------------------------------

    def load_weights(self, path: Path | None) -> None:
        """Rank 0's safetensors file into all shards; rank 0's None: initial ones from the seed.

        All ranks are on one machine: each reads its own rows. AdamW and schedule stay. Raises
        ValueError on all ranks alike when the file is not this model's; nothing changes then.
        """
        weights.load(
            self.shards,
            path,
            self.stream,
            tied=self._tied,
            config=self.model.config,
            seed=self.settings.seed,
        )
        self._drop_step()

    def load_outer_optimizer(self, path: Path | None) -> None:
        """Momentum and learning rate from rank 0's ``outer_optimizer.pt``; None: a fresh start.

        Raises ValueError on all ranks alike; nothing changes then.
        """
        self._outer.load(path, self.schema)

    def begin_epoch(self, outer_step: int) -> None:
        """Epoch start := the present weights; inner steps count from 0 again."""
        self._outer.begin_epoch()
        self.outer_step = outer_step
        self.inner_step = 0
        self._drop_step()

    def load_global(
        self, weights_path: Path | None, outer_optimizer: Path | None, outer_step: int
    ) -> None:
        """Weights, outer momentum and epoch start := rank 0's files (None: fresh ones).

        Raises ValueError on all ranks alike when one is not this model's; nothing changes then.
        """
        self._load_both(weights_path, outer_optimizer)
        self.begin_epoch(outer_step)

    def _load_both(self, weights_path: Path | None, outer_optimizer: Path | None) -> None:
        outer = self._outer
        before = outer.momentum, outer.learning_rate, outer.mu
        outer.load(outer_optimizer, self.schema)
        try:
            self.load_weights(weights_path)
        except ValueError:
            outer.momentum, outer.learning_rate, outer.mu = before
            raise

    @torch.no_grad()
    def rebase(self, weights_path: Path | None, outer_optimizer: Path | None) -> None:
        """Epoch start and outer momentum := rank 0's files; what was trained since stays.

        The pseudo-gradient is the same afterwards; the inner step too. Raises ValueError on all
        ranks alike when a file is not this model's; nothing changes then.
        """
        start = self._outer.epoch_start
        assert start is not None
        current = self._outer.current()
        self._load_both(weights_path, outer_optimizer)
        self._outer.begin_epoch()
        for item, now, before in zip(self.shards, current, start, strict=True):
            item.local.add_((now - before).to(item.local.device))
        self._drop_step()

    def epoch_start_rows(self) -> list[tuple[str, int, Tensor]]:
        """Name, first row and this rank's rows of the weights the epoch began with; host memory,
        never changed in place."""
        start = self._outer.epoch_start or []
        return [(s.name, s.start, rows) for s, rows in zip(self.shards, start, strict=False)]

    def _drop_step(self) -> None:
        """Forget an inner step that is not finished, and every gathered weight."""
        self._step.drop()
        self._waited = self._seconds = 0.0

    def _forget_step(self) -> None:
        self._step.forget()
        self._waited = self._seconds = 0.0

    # --- inner step ----------------------------------------------------------------------------

    def add_micro_batch(
        self, batch: Tensor, *, data_wait_seconds: float = 0.0, domain: int = 0
    ) -> StepReport | None:
        """Forward and backward of int64 (micro-batch, sequence); the report of a finished step.

        The loss of the step is the mean over the predicted tokens of all micro-batches of all
        ranks; the gradient is that mean's, at every world size. ``domain``: of a mixture, equal on
        all ranks; see ``--train.pcgrad``. Raises ValueError for another shape than that of the
        settings.
        """
        started = time.perf_counter()
        expected = (self.micro_batch_size, self.settings.sequence_length)
        if tuple(batch.shape) != expected:
            raise ValueError(f"micro-batch of shape {tuple(batch.shape)}, expected {expected}")
        self._waited += data_wait_seconds
        self._step.add(batch, domain, self.batch_plan)
        if len(self._step.batches) < self.micro_batches_per_step:
            self._seconds += time.perf_counter() - started
            return None
        self._step.combine(self.total_inner_steps)
        loss, norm = self._read_step()
        rate = self.schedule.rate(self.total_inner_steps)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self._apply_step(norm, rate)
        else:
            self._skip_step()
        self._seconds += self._waited + time.perf_counter() - started
        report = self._report(loss, norm, rate, finite)
        if finite:
            self._forget_step()
        else:
            self._drop_step()
        self._profiler.step()
        return report

    @torch.no_grad()
    def _read_step(self) -> tuple[float, float]:
        """Loss and gradient norm over all ranks: the only wait for the device in a step."""
        norms = torch._foreach_norm([g for g in self._step.gradients() if g.numel()])
        square = torch.stack([n.double() for n in norms]).square().sum()
        sums = torch.stack([self._step.loss_sum.double(), square]).tolist()
        total_loss, total_square = self.stream.sum(sums)
        predicted = self.batch_plan.effective * (self.settings.sequence_length - 1)
        return total_loss / predicted, total_square**0.5

    @torch.no_grad()
    def _apply_step(self, norm: float, rate: float) -> None:
        gradients = self._step.gradients()
        clip = self.settings.gradient_clip
        if clip and norm > clip:
            torch._foreach_mul_(gradients, clip / (norm + 1e-6))
        self._optimizer.step(gradients, rate)
        for item in self.shards:
            item.dtensor.grad = None
        self.inner_step += 1
        self.total_inner_steps += 1
        self.skipped_in_a_row = 0

    def _skip_step(self) -> None:
        self.skipped_in_a_row += 1
        self.skipped_steps += 1
        line = (
            f"inner step skipped: its loss or gradient is NaN or Inf ({self.skipped_in_a_row} in a "
            f"row; at {self.settings.nan_limit} the last good checkpoint is loaded)"
        )
        log.warning(line)
        self._step.notes.append(line)

    def _report(self, loss: float, norm: float, rate: float, finite: bool) -> StepReport:
        samples = self.batch_plan.effective
        tokens = samples * self.settings.sequence_length
        return StepReport(
            outer_step=self.outer_step,
            inner_step=self.inner_step,
            loss=loss,
            learning_rate=rate,
            tokens=tokens,
            samples=samples,
            seconds=self._seconds,
            data_wait_seconds=self._waited,
            micro_batches=self.micro_batches_per_step,
            grad_norm=norm if finite else None,
            gpu_memory_gb=self._gauge.memory_gb(),
            gpu_utilization=self._gauge.utilization(),
            mfu=self._mfu(tokens / self._seconds),
            skipped=not finite,
            note="; ".join(self._step.notes),
        )

    def _mfu(self, tokens_per_second: float) -> float | None:
        if self._gauge.peak is None:
            return None
        return tokens_per_second * self._flops_per_token / (self.world_size * self._gauge.peak)

    def _try_micro_batch(self, sequences: int) -> float:
        """Seconds per sequence of a forward and backward; nothing is reduced or kept."""
        ids = torch.zeros((sequences, self.settings.sequence_length), dtype=torch.int64)
        try:
            for _ in range(2):  # the first one warms up
                started = time.perf_counter()
                self._step.measure(ids)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
            return (time.perf_counter() - started) / sequences
        finally:
            self._drop_step()

    @torch.no_grad()
    def evaluate(self, batches: Tensor) -> float:
        """Mean loss in nats per predicted token of int64 (sequences, length), equal on all ranks.

        All ranks pass the same sequences; each evaluates its share of them.
        """
        total = 0.0
        for i in range(0, len(batches), self.world_size):
            # Gathers are collective: a rank without a sequence runs one that does not count.
            index = i + self.rank if i + self.rank < len(batches) else i
            value = float(self._root(batches[index : index + 1].to(self.device)))
            total += value if index == i + self.rank else 0.0
        return self.stream.sum([total])[0] / (len(batches) * (batches.shape[1] - 1))

    # --- outer step ----------------------------------------------------------------------------

    def write_pseudo_gradient(self, buffers: Sequence[Tensor] | None) -> float:
        """See :meth:`~.outer_step.OuterStep.write_pseudo_gradient`."""
        return self._outer.write_pseudo_gradient(buffers)

    def anticipate_outer_step(self) -> None:
        """See :meth:`~.outer_step.OuterStep.anticipate`."""
        self._outer.anticipate()

    def prepare_outer_step(self, averaged: Sequence[Tensor] | None) -> None:
        """See :meth:`~.outer_step.OuterStep.prepare`."""
        self._outer.prepare(averaged)

    def commit_outer_step(self) -> None:
        """Weights, epoch start, momentum, error feedback and progress together. Local."""
        self._outer.commit()
        self.outer_step += 1
        self.inner_step = 0
        self._drop_step()

    def roll_back_outer_step(self) -> None:
        self._outer.roll_back()

    # --- snapshot ------------------------------------------------------------------------------

    @torch.no_grad()
    def snapshot(
        self, folder: Path, *, progress: Progress, block: int, last_loss: float
    ) -> SnapshotHandle:
        """Everything a publication needs, of this step boundary, written in the background.

        ``block`` is the chain's; rank 0's ``progress.blocks`` become the block list. Training is
        held for the copy to host memory and the codes of vectors only (under
        ``--neuron.error_feedback upload`` and with DCT for all codes). Raises OSError on all ranks
        alike when ``folder`` cannot be made; what fails later is in the handle.
        """
        started = time.perf_counter()
        if self._outer.epoch_start is None:
            raise AllReduceError(AllReduceFault.LOCAL, "no epoch-start weights are kept")
        current = self._outer.current()
        problem = None
        if self.rank == 0:
            try:
                prepare_folder(folder)
            except OSError as error:
                problem = f"{folder} cannot hold a snapshot: {error}"
        problem = self.stream.first_error(problem)  # also: no rank writes before it is there
        if problem is not None:
            raise OSError(problem)
        codes = self._codes(self._outer.epoch_start, current)
        rate = self.schedule.rate(self.total_inner_steps)
        model_config: Any = self.model.config
        config = {**self.model_config, **model_config.to_dict()}
        state = SnapshotState(
            rank=self.rank,
            world_size=self.world_size,
            shards=self.shards,
            weights=current,
            codes=codes,
            codec=self._feedback.codec,
            config=config | {"block_list": progress.blocks, "inner_step": progress.inner_step},
            gradients_metadata={
                "block": int(block),
                "inner_step": int(progress.inner_step),
                "outer_step": int(progress.outer_step),
                "loss": float(last_loss),
            },
            mesh=self._mesh,
            exp_avg=[t.to("cpu", copy=True) for t in self._optimizer.exp_avg],
            exp_avg_sq=[t.to("cpu", copy=True) for t in self._optimizer.exp_avg_sq],
            steps=self._optimizer.step_count,
            param_group=self._optimizer.published_group(
                [item.name for item in self.shards], rate, self.schedule.peak
            ),
            scheduler_state=self.schedule.published_state(self.total_inner_steps),
        )
        handle = SnapshotHandle(folder, time.perf_counter() - started, self._outer.epoch_id)
        handle.start(partial(write_snapshot, state, parts_timeout=timedelta(minutes=10)))
        return handle

    def _codes(
        self, start: Sequence[Tensor], current: Sequence[Tensor]
    ) -> list[Callable[[], Code] | Code | None]:
        rate = self._outer.learning_rate
        if self._feedback.mode == "upload":
            residual, made = self._feedback.advance(start, rate)
            self._feedback.residual = residual
            return list(made)
        codes: list[Callable[[], Code] | Code | None] = []
        for i in range(len(self.shards)):
            if self._feedback.by_rows(i):
                codes.append(self._feedback.encoder(i, start[i], current[i], rate))
            else:
                rows = self._feedback.accumulated(i, start[i], current[i], rate)
                codes.append(self._feedback.encode_whole(i, rows, subtract=False))
        return codes

    # --- preview -------------------------------------------------------------------------------

    def hold_back(self, sequences: Tensor | None) -> None:
        """int64 (n, sequence) of this rank that are never trained on; None: it has none."""
        self._held = sequences

    @property
    def preview_micro_batches(self) -> int:
        """Micro-batches that a preview runs on each rank."""
        return -(-self.settings.preview_sequences // self.micro_batch_size)

    def preview(self, handle: SnapshotHandle) -> float | None:
        """Loss with minus without the gradient of a finished snapshot, on what is held back.

        In nats per token; below 0 is good. None when no rank holds anything back, or the epoch the
        gradient belongs to is over. Collective, at an inner step's boundary; rank 0 must have seen
        ``handle.done()``. Nothing of the training state changes.
        """
        wanted = self.preview_micro_batches * self.micro_batch_size
        usable = self._held is not None and len(self._held) >= wanted > 0
        problem = float(handle.codes is None or handle.epoch_id != self._outer.epoch_id)
        there, problems = self.stream.sum([float(usable), problem])
        if not there or problems or self._step.batches:
            return None
        assert handle.codes is not None and self._outer.epoch_start is not None
        held = self._held if usable else None
        if held is None:
            held = torch.zeros((wanted, self.settings.sequence_length), dtype=torch.int64)
        delta = self._preview.measure(
            epoch_id=self._outer.epoch_id,
            start=self._outer.epoch_start,
            codes=handle.codes,
            learning_rate=self._outer.learning_rate,
            held=held[:wanted].split(self.micro_batch_size),
            count=float(usable),
        )
        handle.codes = None
        return delta

    # --- checkpoint ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """This rank's part of a checkpoint, in host memory; later steps do not change it.

        The micro-batches of an unfinished step are in it, so that none is lost or trained twice.
        """
        return {
            "tensors": {
                "weights": self._outer.current(),
                "exp_avg": [t.to("cpu", copy=True) for t in self._optimizer.exp_avg],
                "exp_avg_sq": [t.to("cpu", copy=True) for t in self._optimizer.exp_avg_sq],
                "epoch_start": self._outer.epoch_start,
                "momentum": self._outer.momentum,
                "residual": self._feedback.residual,
            },
            "pending": self._step.pending(),
            "domains": list(self._step.domains),
            "steps": self._optimizer.step_count,
            "schedule": self.schedule.state(),
            "outer_learning_rate": self._outer.learning_rate,
            "outer_momentum": self._outer.mu,
            "epoch_id": self._outer.epoch_id,
            "outer_step": self.outer_step,
            "inner_step": self.inner_step,
            "total_inner_steps": self.total_inner_steps,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if self.device.type == "cuda" else None,
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any], *, same_world_size: bool) -> None:
        """Back to a :meth:`state`, its tensors already cut to this rank's rows. All ranks.

        The random state is restored only at the same world size: otherwise ranks would share one.
        """
        discard_gradients(self._modules)
        tensors = state["tensors"]
        for item, rows in zip(self.shards, tensors["weights"], strict=True):
            item.local.copy_(rows)
        self._optimizer.load(tensors["exp_avg"], tensors["exp_avg_sq"], int(state["steps"]))
        self._outer.epoch_start = tensors["epoch_start"]
        self._outer.momentum = tensors["momentum"]
        self._outer.learning_rate = float(state["outer_learning_rate"])
        self._outer.mu = float(state["outer_momentum"])
        self._outer.epoch_id = state["epoch_id"]
        self._feedback.residual = tensors["residual"]
        self.schedule.load(state["schedule"])
        self.outer_step = int(state["outer_step"])
        self.inner_step = int(state["inner_step"])
        self.total_inner_steps = int(state["total_inner_steps"])
        if same_world_size:
            torch.set_rng_state(state["rng"])
            if state["cuda_rng"] is not None and self.device.type == "cuda":
                torch.cuda.set_rng_state(state["cuda_rng"])
        self._drop_step()
        pending = state["pending"]
        shape = (self.micro_batch_size, self.settings.sequence_length)
        if pending is not None and tuple(pending.shape[1:]) != shape:
            self._say(
                f"{len(pending)} micro-batch(es) of the inner step under way are dropped: they are "
                f"of {tuple(pending.shape[1:])} tokens, the flags say {shape}"
            )
        elif pending is not None:
            with torch.enable_grad():
                for i, batch in enumerate(pending[: self.micro_batches_per_step - 1]):
                    # Batches were stored, not gradients: run them again.
                    self.add_micro_batch(batch, domain=state["domains"][i])

    def slow_down(self) -> None:
        """Half the learning rate for ``--neuron.nan_slow_steps`` inner steps."""
        self.schedule.slow_down(self.total_inner_steps, steps=self.settings.nan_slow_steps)
        self.skipped_in_a_row = 0

    def row_ranges(self) -> list[tuple[int, int]]:
        """First and one past the last row of this rank, per parameter."""
        return [(item.start, item.stop) for item in self.shards]

    def vote(self, problem: str | None) -> str | None:
        """None if no rank has a problem, else the first one's, on all ranks."""
        return self.stream.first_error(problem)

    def from_rank_0(self, value: object) -> object:
        return self.stream.from_rank_0(value)


def with_micro_batch(settings: TrainingSettings, micro_batch: int) -> TrainingSettings:
    return dataclasses.replace(settings, local_batch_size_train=micro_batch)
