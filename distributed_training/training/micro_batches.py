"""Run the micro-batches of one inner step, and find how many sequences fit into memory.

FSDP accumulates gradients where they are computed and reduces them over ranks once, at the last
micro-batch, or at each micro-batch if memory is short. With ``--neuron.local_batch_size_train
auto`` the fastest micro-batch size is measured.

If memory runs out, the miner steps down a ladder: first it halves the number of sequences that run
at once. Below one sequence it takes the next arrangement of :func:`~.memory_plan.plan_memory`,
which recomputes activations or keeps the optimizer's state in host memory. :class:`KnownSize`
records the miner's place on the ladder in the run folder. A single rank runs the step again in
smaller pieces. Several ranks start again from the last checkpoint. The micro-batches stay the same,
so nothing else changes.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from distributed_training.common.files import read_state, write_state
from distributed_training.config.settings import TrainingSettings
from distributed_training.config.types import ConfigError

from .collectives import RowStream
from .memory_plan import BatchPlan, plan_batch
from .sharding import ShardedModel

log = logging.getLogger(__name__)

OUT_OF_MEMORY_ADVICE = (
    "use more GPUs; --neuron.local_batch_size_train and --neuron.activation_checkpointing save "
    "most memory when set to auto; the effective batch makes no difference"
)


@dataclass(frozen=True)
class _Known:
    facts: dict[str, Any]
    rung: Annotated[int, Field(ge=0)] = 0
    most: Annotated[int, Field(gt=0)] | None = None
    fastest: Annotated[int, Field(gt=0)] | None = None


class KnownSize:
    """The sizes that fit this model on these GPUs, kept in a file in the run folder.

    ``path`` None: nothing is saved. ``facts``: everything that the sizes depend on. With another
    model, sequence length, inner optimizer or GPU, nothing is known. ``rung``: how many memory
    arrangements could not fit even one sequence. ``most``: how many sequences at once fit, or None
    if memory has never run out. ``fastest``: the size that ``auto`` found.
    """

    def __init__(self, path: Path | None, facts: Mapping[str, Any]) -> None:
        self._path = path
        self._facts = dict(facts)
        lost = "the size that fits is determined again"
        found = read_state(path, _Known, lost=lost) if path is not None else None
        if found is None or found.facts != self._facts:
            found = _Known(self._facts)
        self.rung, self.most, self.fastest = found.rung, found.most, found.fastest

    def agree(self, stream: RowStream, rung: int) -> None:
        """Adopt the smallest sizes that any rank knows; all ranks are at ``rung``. Collective.

        Each machine has its own file, and the file may apply to only some ranks if their GPUs
        differ. If a rank measured without the others, it would wait for them forever.
        """
        if rung != self.rung:
            self.rung, self.most, self.fastest = rung, None, None
        answers = stream.all_gather((self.most, self.fastest))
        most, fastest = ([n for n in each if n] for each in zip(*answers, strict=True))
        self.most = min(most, default=None)
        # All ranks measure if any of them knows no size.
        self.fastest = min(fastest) if len(fastest) == len(answers) else None

    def ran_out(self, sequences: int) -> int:
        """Record that ``sequences`` at once did not fit; return how many to try next.

        Any rank may call it.
        """
        self.most = max(1, sequences // 2)
        self.fastest = None if self.fastest is None else min(self.fastest, self.most)
        self._write()
        return self.most

    def step_down(self) -> None:
        """Record that the current memory arrangement cannot fit even one sequence.

        Any rank may call it.
        """
        self.rung, self.most, self.fastest = self.rung + 1, None, None
        self._write()

    def measured(self, fastest: int) -> None:
        self.fastest = fastest
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            known = _Known(self._facts, self.rung, self.most, self.fastest)
            write_state(self._path, known, lost="a restart determines the size that fits again")


def facts_of(
    settings: TrainingSettings, model_config: Mapping[str, Any], device: torch.device, ranks: int
) -> dict[str, Any]:
    """Return everything that the fitting size depends on.

    ``ranks``: how many ranks hold one copy of the model.
    """
    hardware, size = "cpu", 0
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
        size = torch.cuda.get_device_properties(device).total_memory
    model = json.dumps(model_config, sort_keys=True, default=str)
    return {
        "device": hardware,
        "device_bytes": size,
        "model": hashlib.sha256(model.encode()).hexdigest(),
        "ranks": ranks,
        "torch": torch.__version__,
        **{
            name: getattr(settings, name)
            for name in (
                "sequence_length", "optimizer", "activation_checkpointing", "offload_optimizer",
                "gradient_sync", "keep_unsharded", "precision", "compile",
            )
        },
    }  # fmt: skip


_TIMED = 3  # timed passes in a trial


class MicroBatches:
    """The micro-batches of the current inner step, and the sums over them.

    ``known``: how many sequences at once fit. ``say`` gets a line for each decision, such as
    continuing without the compiler.
    """

    def __init__(
        self,
        *,
        sharded: ShardedModel,
        stream: RowStream,
        known: KnownSize,
        say: Callable[[str], None],
    ) -> None:
        # The micro-batches of the current step, on the host. They are kept for checkpoints, and to
        # run the step again in smaller pieces.
        self.batches: list[Tensor] = []
        self.notes: list[str] = []
        self.loss_sum = torch.zeros((), dtype=torch.float32, device=sharded.device)
        self.count = 0  # number of predictions in ``loss_sum``
        self.compiled = sharded.compiled
        self.say = say
        self.sharded = sharded
        self.stream = stream
        self.known = known
        self._tell_compiled = sharded.compiled
        self._last: bool | None = None
        if known.most is not None:
            say(f"At most {known.most} sequences at once: more ran out of memory before")

    def lower(self) -> str:
        """Let the next start use the next memory arrangement; return a line about it, or advice."""
        if self.sharded.plan.is_last:
            return OUT_OF_MEMORY_ADVICE
        self.known.step_down()
        return "it starts again, and arranges memory in the next way that takes less"

    @property
    def compiler_errors(self) -> tuple[type[Exception], ...]:
        """The exceptions that come from torch.compile itself, not from the compiled model."""
        if not self.compiled:
            return ()
        from torch._dynamo.exc import TorchDynamoException

        return (TorchDynamoException,)

    def prepare_again(self, error: Exception, plan: BatchPlan) -> None:
        """Prepare to run the step again, in smaller pieces or without the compiler.

        Raises torch.OutOfMemoryError if that is impossible here: not even one sequence fits, or
        other ranks are still in a collective.
        """
        if not isinstance(error, torch.OutOfMemoryError):
            self._uncompile(error)
            return
        was = self.at_once(plan.micro_batch)
        found = f"out of memory with {was} sequences at once ({_first_line(error)})"
        if was == 1:
            raise torch.OutOfMemoryError(f"{found}, so the miner stops: {self.lower()}") from error
        # Write this to disk before the rank ends; otherwise the next start would run out of memory
        # again.
        fits = self.known.ran_out(was)
        if self.stream.world_size > 1:
            raise torch.OutOfMemoryError(
                f"{found}: the ranks start again from the last checkpoint and run {fits} at once; "
                f"otherwise, {OUT_OF_MEMORY_ADVICE}"
            ) from error
        line = (
            f"Out of memory: the step is retried with {fits} instead of {was} sequences at "
            f"once and the same effective batch of {plan.effective}, like all later steps; to make "
            f"that the micro-batch size, set --neuron.local_batch_size_train {fits}"
        )
        log.warning(line)
        self.notes.append(line)

    def report_compiled(self, started: float) -> None:
        """Report how long the first micro-batch took, which includes compiling the blocks."""
        if self._tell_compiled:
            self._tell_compiled = False
            seconds = time.perf_counter() - started
            self.say(f"✓ Model compiled successfully: the first micro-batch took {seconds:.1f} s")

    def seconds_per_sequence(
        self, sequences: int, length: int, *, end_step: Callable[[], None] = lambda: None
    ) -> float:
        """Run a trial step on (sequences, length) token ids; return the seconds per sequence.

        The time is the median of three forward and backward passes. Then the end of a step runs,
        to see whether it fits into memory: a backward that reduces gradients, and ``end_step``. No
        results are kept.
        """
        try:
            return self._trial(sequences, length, end_step)
        except self.compiler_errors as error:
            self._uncompile(error)
            return self._trial(sequences, length, end_step)

    def _trial(self, sequences: int, length: int, end_step: Callable[[], None]) -> float:
        device = self.sharded.device
        ids = torch.zeros((sequences, length), dtype=torch.int64).to(device)
        seconds = []
        try:
            self.set_last(False)
            for _ in range(1 + _TIMED):  # the first pass is a warm-up
                started = time.perf_counter()
                self._loss(ids).backward()
                # The host must wait here; otherwise only the queueing of kernels would be timed.
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                seconds.append(time.perf_counter() - started)
            # Run one more pass, untimed, since reducing gradients takes memory as well.
            self.set_last(True)
            self._loss(ids).backward()
            end_step()
            return statistics.median(seconds[1:]) / sequences
        finally:
            self.drop()
            if self.compiled:
                torch._dynamo.reset()  # for a second size torch would compile dynamic shapes

    def _loss(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.sharded.root(self.sharded.root.kind.batch(ids))[0]
        return loss

    @torch.no_grad()  # otherwise ``to_local`` would go through autograd for each parameter
    def gradients(self) -> list[Tensor]:
        """Return this rank's rows of every parameter's gradient, reduced over ranks.

        Raises RuntimeError if a parameter has no gradient after all micro-batches have run.
        """
        result = []
        for shard in self.sharded.shards:
            grad: Any = shard.dtensor.grad
            if grad is None and shard.local.numel():
                # Using zeros instead would end learning silently: weight decay would continue and
                # the loss would barely move. A restart sets up FSDP again.
                raise RuntimeError(
                    f"{shard.name} has no gradient after the last micro-batch, so this step would "
                    "train nothing: the miner stops and starts again from its last checkpoint. If "
                    "this repeats, the model has a parameter that its loss does not use, "
                    f"or torch {torch.__version__} is not one of the versions this miner was "
                    "tested with"
                )
            result.append(torch.zeros_like(shard.local) if grad is None else grad.to_local())
        return result

    def drop(self) -> None:
        """Forget an unfinished step, and every gathered weight."""
        self.discard()
        self.forget()

    def forget(self) -> None:
        """Forget the micro-batches of a step that has ended."""
        self.loss_sum.zero_()
        self.count = 0
        self.batches, self.notes = [], []

    def discard(self, *, free: bool = False) -> None:
        """Drop the results of the current step, but keep its batches.

        ``free``: also release the memory that the allocator caches, because the sizes of its blocks
        would not suit the next pieces.
        """
        self.sharded.discard_gradients()
        self.loss_sum.zero_()
        self.count = 0
        if free:
            _free_memory()

    def _uncompile(self, error: Exception) -> None:
        """Run blocks and loss eagerly from now on."""
        self.say(f"torch.compile: off from now on: {type(error).__name__}: {_first_line(error)}")
        self.sharded.uncompile()
        self.compiled = self._tell_compiled = False

    def at_once(self, micro_batch: int) -> int:
        """Return how many sequences run together: all, unless memory has run out before."""
        return min(micro_batch, self.known.most or micro_batch)

    def set_last(self, last: bool) -> None:
        """Let only the last backward of a step reduce gradients and drop gathered weights."""
        # Reducing gradients only at the last micro-batch takes 0.81 s per step instead of 1.08 s
        # with 1.7 M parameters on two CPU ranks. Skip the calls below if nothing changes, since
        # FSDP visits all modules in each of them.
        if self._last is last:
            return
        self._last = last
        root, plan = self.sharded.modules[-1], self.sharded.plan
        root.set_requires_gradient_sync(last or not plan.way.reduce_at_last)
        root.set_reshard_after_backward(last or not plan.way.keep_unsharded)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


# Fraction of the free memory to use; the rest is for later needs, such as encoding an upload.
_MARGIN = 0.85

# This many sequences of 1024 tokens fill any GPU. A data block has about 300 sequences: larger
# micro-batches would waste more of its end, and one larger than a block would train on nothing.
AUTO_AT_MOST = 32
_CPU_AT_MOST = 16
_BLOCK_LENGTH = 1024  # tokens per sequence; a block has fewer sequences if they are longer

# Allow only a little rounding, since more sequences per inner step change the training itself.
_EXCESS = 0.03


def sizes_to_try(settings: TrainingSettings, world_size: int, device: torch.device) -> list[int]:
    """Return the sizes that ``auto`` may choose: 1, 2, 4, ...

    A size may not exceed the effective batch, change it noticeably, or waste much of a data block.
    """
    effective = settings.local_batch_size_train_effective
    most = min(AUTO_AT_MOST, AUTO_AT_MOST * _BLOCK_LENGTH // settings.sequence_length)
    if device.type == "cpu":
        most = min(most, _CPU_AT_MOST)
    sizes = [1]
    while (size := 2 * sizes[-1]) <= most and size * world_size <= effective:
        # A larger size would round up to at least as much, so no size is missed.
        plan = plan_batch(micro_batch=size, effective=effective, world_size=world_size)
        if plan.effective > effective * (1 + _EXCESS):
            break
        sizes.append(size)
    return sizes


def find_micro_batch(
    seconds_of: Callable[[int], float | None], sizes: Sequence[int], first: int
) -> tuple[int, dict[int, float]]:
    """Return the fastest of ``sizes`` that fits (0 if none does) and sequences per second by size.

    ``seconds_of``: returns the seconds per sequence with micro-batches of a size, or None if it
    does not fit. Each trial compiles, so the search begins at ``first``, the largest size that is
    expected to fit. It goes down until a size fits, or up while each doubling gains at least 2 %;
    a smaller gain is not worth the memory.
    """
    at = sizes.index(first)
    while (seconds := seconds_of(sizes[at])) is None:
        if at == 0:
            return 0, {}
        at -= 1
    best, rates = sizes[at], {sizes[at]: 1 / seconds}
    for size in sizes[at + 1 :] if best == first else ():
        if (seconds := seconds_of(size)) is None:
            break
        rates[size] = 1 / seconds
        if rates[size] < 1.02 * rates[best]:
            break
        best = size
    return best, rates


def measured_micro_batch(
    step: MicroBatches, settings: TrainingSettings, *, end_step: Callable[[], None]
) -> int:
    """Return the size that an earlier start found for ``auto``, or find one by trial.

    All ranks call this, and it returns the same size on all of them. ``end_step``: runs the norm
    and the optimizer on the gradients of a trial. Raises torch.OutOfMemoryError if not even one
    sequence fits, or if a size ran out of memory while other ranks continued; the next start uses
    what this one has found. Raises ConfigError if no other memory arrangement is left.
    """
    known, stream, device = step.known, step.stream, step.sharded.device
    sizes = sizes_to_try(settings, stream.world_size, device)
    if known.fastest in sizes:  # the effective batch may have changed since
        step.say(f"--neuron.local_batch_size_train auto: {known.fastest}, as found before")
        return known.fastest
    sizes = [size for size in sizes if size <= (known.most or size)]
    room, first = math.inf, sizes[0]
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        room = (free + torch.cuda.memory_reserved(device)) * _MARGIN
        plan = step.sharded.plan
        first = max((size for size in sizes if plan.bytes_with(size) <= room), default=first)
    first = min(stream.all_gather(first))

    def seconds_of(size: int) -> float | None:
        """Try a size; return None, on all ranks, if it does not fit."""
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        seconds: float | None = None
        with contextlib.suppress(torch.OutOfMemoryError):
            seconds = step.seconds_per_sequence(size, settings.sequence_length, end_step=end_step)
        if seconds is None:  # the error, whose frames held the activations, is gone by now
            _free_memory()
            if stream.world_size > 1:  # the other ranks are waiting in a collective
                then = f"at most {known.ran_out(size)} are tried" if size > 1 else step.lower()
                raise torch.OutOfMemoryError(
                    f"{size} sequences at once ran out of memory on rank {stream.rank}: the ranks "
                    f"start again, and {then}"
                )
        # Compare the reserved memory, not the memory in use: FSDP's streams have separate pools.
        elif device.type == "cuda" and torch.cuda.max_memory_reserved(device) > room:
            seconds = None
        answers = [each for each in stream.all_gather(seconds) if each is not None]
        return max(answers) if len(answers) == stream.world_size else None

    best, rates = find_micro_batch(seconds_of, sizes, first)
    if not best:
        line = f"--neuron.local_batch_size_train auto: not even one sequence fits: {step.lower()}"
        raise ConfigError(line) if step.sharded.plan.is_last else torch.OutOfMemoryError(line)
    tried = ", ".join(f"{size}: {rate:.2f}" for size, rate in rates.items())
    step.say(f"--neuron.local_batch_size_train auto: {best} (sequences/s by micro-batch: {tried})")
    # One rank of each machine writes: the ranks of a machine share the file.
    if stream.layout.shard == 0:
        known.measured(best)
    return best


def _free_memory() -> None:
    gc.collect()  # in Python 3.11.2 an error that passes through a @contextmanager is a cycle
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
