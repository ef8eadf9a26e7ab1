"""The micro-batches of one inner step: forward, backward, and gradients of the whole.

FSDP adds gradients up where they are computed and reduces them over ranks once, with the last
micro-batch; where memory is short at each. ``--neuron.local_batch_size_train auto``
measures the micro-batch size instead of guessing it.

Running out of memory is no reason to lose a day. A single rank runs the step again in pieces of
half the size. With several ranks the others wait in a collective that the failed rank left, so all
end and start again from the last checkpoint; :class:`KnownSize` remembers the smaller size for
them. Both train on the same micro-batches as before, each in pieces, so nothing else changes.
"""

from __future__ import annotations

import contextlib
import gc
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
from .memory_plan import BatchPlan, MemoryPlan, plan_batch
from .sharding import ShardedModel

log = logging.getLogger(__name__)

OUT_OF_MEMORY_ADVICE = (
    "lower --neuron.local_batch_size_train (or give auto), add --neuron.activation_checkpointing "
    "full or --neuron.offload_optimizer on; --neuron.local_batch_size_train_effective does not "
    "change memory"
)


@dataclass(frozen=True)
class _Known:
    facts: dict[str, Any]
    most: Annotated[int, Field(gt=0)] | None = None
    fastest: Annotated[int, Field(gt=0)] | None = None


class KnownSize:
    """Facts found out about this model on these GPUs, kept in a file of the run folder.

    ``path`` None: nothing is remembered. ``facts``: all that it depends on; another model, length,
    inner optimizer or GPU starts without knowledge. ``most``: sequences at once that fit, None
    while it never ran out. ``fastest``: the size that ``auto`` found. Of all ranks the smallest:
    all of them make one.
    """

    def __init__(self, path: Path | None, facts: Mapping[str, Any], stream: RowStream) -> None:
        self._path = path
        self._facts = dict(facts)
        lost = "the size that fits is found out again"
        found = read_state(path, _Known, lost=lost) if path is not None else None
        if found is None or found.facts != self._facts:
            found = _Known(self._facts)
        # Nodes have files of their own, and GPUs of one machine may differ, so that its file holds
        # for some of them only. A rank that measures by itself would wait for the others forever.
        answers = stream.all_gather((found.most, found.fastest))
        most, fastest = ([n for n in each if n] for each in zip(*answers, strict=True))
        self.most = min(most, default=None)
        # One rank that knows nothing: all measure.
        self.fastest = min(fastest) if len(fastest) == len(answers) else None

    def ran_out(self, sequences: int) -> int:
        """Note that ``sequences`` at once did not fit; return how many to try.

        Any rank may call it.
        """
        self.most = max(1, sequences // 2)
        self.fastest = None if self.fastest is None else min(self.fastest, self.most)
        self._write()
        return self.most

    def measured(self, fastest: int) -> None:
        self.fastest = fastest
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            known = _Known(self._facts, self.most, self.fastest)
            write_state(self._path, known, lost="a restart finds out the size that fits again")


# Of a trial. A size that an older one found is measured again: up to 1 neither the reduction of
# gradients nor the optimizer's step was in it, so what it found may not fit.
_METHOD = 2


def facts_of(sharded: ShardedModel, settings: TrainingSettings, ranks: int) -> dict[str, Any]:
    """Return everything that the size that fits depends on; ``ranks``: of one copy."""
    device, hardware, size = sharded.device, "cpu", 0
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
        size = torch.cuda.get_device_properties(device).total_memory
    return {
        "measured": _METHOD,
        "device": hardware,
        "device_bytes": size,
        "model": [[name, list(shape)] for name, shape in sharded.schema[:12]]
        + [len(sharded.schema)],
        "ranks": ranks,
        "sequence_length": settings.sequence_length,
        "activation_checkpointing": settings.activation_checkpointing,
        "optimizer": settings.optimizer,
        "offload_optimizer": sharded.plan.offload_optimizer,
        "keep_unsharded": sharded.plan.keep_unsharded,
        "reduces_each": sharded.plan.sync_every,
        "precision": str(sharded.compute_dtype),
        "compiled": sharded.compiled,
        "torch": torch.__version__,
    }


_TIMED = 3  # passes of a trial that are timed


class MicroBatches:
    """``known``: how many sequences at once fit.

    ``say`` gets a line for each thing that was decided, as when compiling failed.
    """

    def __init__(
        self,
        *,
        sharded: ShardedModel,
        stream: RowStream,
        known: KnownSize,
        say: Callable[[str], None],
    ) -> None:
        # Of the step under way, as they came: on the device, or after a restart on the host. Kept
        # to run the step again in smaller pieces, and for checkpoints.
        self.batches: list[Tensor] = []
        self.notes: list[str] = []
        self.loss_sum = torch.zeros((), dtype=torch.float32, device=sharded.device)
        self.count = 0  # predictions that it adds up
        self.compiled = sharded.compiled
        self.say = say
        self.sharded = sharded
        self.stream = stream
        self.known = known
        self._tell_compiled = sharded.compiled
        self._last: bool | None = None
        if known.most is not None:
            say(f"At most {known.most} sequences at once: more ran out of memory before")

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """The errors of a pass after which the step can be run again."""
        return (torch.OutOfMemoryError, *_compiler_errors(self.compiled))

    def prepare_again(self, error: Exception, plan: BatchPlan) -> None:
        """Make another try of the step possible: smaller pieces, or no compiler.

        Raises torch.OutOfMemoryError if there can be none here: not even one sequence fits, or
        other ranks were left in a collective.
        """
        if not isinstance(error, torch.OutOfMemoryError):
            self._uncompile(error)
            return
        was = self.at_once(plan.micro_batch)
        found = f"out of memory with {was} sequences at once ({_first_line(error)})"
        if was == 1:
            raise torch.OutOfMemoryError(
                f"{found}, so the miner stops: {OUT_OF_MEMORY_ADVICE}"
            ) from error
        # On disk before this rank ends, or the next start would run out again.
        fits = self.known.ran_out(was)
        if self.stream.world_size > 1:
            raise torch.OutOfMemoryError(
                f"{found}: the ranks start again from the last checkpoint and run {fits} at once; "
                f"to choose yourself, {OUT_OF_MEMORY_ADVICE}"
            ) from error
        line = (
            f"Out of memory: the step is retried with {fits} instead of {was} sequences at "
            f"once and the same effective batch of {plan.effective}, and so are later ones; for a "
            f"micro-batch of that size give --neuron.local_batch_size_train {fits}"
        )
        log.warning(line)
        self.notes.append(line)

    def report_compiled(self, started: float) -> None:
        """Say how long the first micro-batch took, in which blocks are compiled."""
        if self._tell_compiled:
            self._tell_compiled = False
            seconds = time.perf_counter() - started
            self.say(f"✓ Model compiled successfully: the first micro-batch took {seconds:.1f} s")

    def seconds_per_sequence(
        self, sequences: int, length: int, *, end_step: Callable[[], None] = lambda: None
    ) -> float:
        """Run a step of (sequences, length) as a trial; return the seconds of a sequence in it.

        The time is the median of three forward and backward passes. After them comes what ends a
        step, for the memory it takes: a backward that reduces, and ``end_step``. Nothing is kept.
        """
        try:
            return self._trial(sequences, length, end_step)
        except _compiler_errors(self.compiled) as error:
            self._uncompile(error)
            return self._trial(sequences, length, end_step)

    def _trial(self, sequences: int, length: int, end_step: Callable[[], None]) -> float:
        device = self.sharded.device
        ids = torch.zeros((sequences, length), dtype=torch.int64).to(device)
        seconds = []
        try:
            self.set_last(False)
            for _ in range(1 + _TIMED):  # the first one warms up
                started = time.perf_counter()
                self._loss(ids).backward()
                # Here the host must wait, or only the queueing of kernels would be timed.
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                seconds.append(time.perf_counter() - started)
            # Not timed, but run, for the memory that reducing gradients also takes.
            self.set_last(True)
            self._loss(ids).backward()
            end_step()
            return statistics.median(seconds[1:]) / sequences
        finally:
            self.drop()
            if self.compiled:
                torch._dynamo.reset()  # after a second size it would compile for any size

    def _loss(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.sharded.root(self.sharded.root.kind.batch(ids))[0]
        return loss

    @torch.no_grad()  # else ``to_local`` goes through autograd, parameter by parameter
    def gradients(self) -> list[Tensor]:
        """Return this rank's rows of every parameter's gradient, reduced over ranks.

        Raises RuntimeError if a parameter has none once all micro-batches ran.
        """
        result = []
        for shard in self.sharded.shards:
            grad: Any = shard.dtensor.grad
            if grad is None and shard.local.numel():
                # A zero in its place would end learning without a sign: weight decay continues, and
                # the loss barely moves. After a restart FSDP is as new.
                raise RuntimeError(
                    f"{shard.name} has no gradient after the last micro-batch, so this step would "
                    "train nothing: the miner stops and starts again from its last checkpoint. If "
                    "this line comes back, the model has a parameter that its loss does not use, "
                    f"or torch {torch.__version__} is not one of the versions this miner was "
                    "tested with"
                )
            result.append(torch.zeros_like(shard.local) if grad is None else grad.to_local())
        return result

    def pending(self) -> Tensor | None:
        """Return the batches of the step under way as one host tensor; None if there is none."""
        if not self.batches:
            return None
        return torch.stack([batch.to("cpu") for batch in self.batches])

    def drop(self) -> None:
        """Forget a step that is not finished, and every gathered weight."""
        self.discard()
        self.forget()

    def forget(self) -> None:
        """Forget the step's micro-batches: it is over."""
        self.loss_sum.zero_()
        self.count = 0
        self.batches, self.notes = [], []

    def discard(self, *, free: bool = False) -> None:
        """Drop what was computed of the step under way; its batches stay.

        ``free``: give back what the allocator keeps too, in sizes that would not fit the pieces to
        come.
        """
        self.sharded.discard_gradients()
        self.loss_sum.zero_()
        self.count = 0
        if free:
            _free_memory()

    def _uncompile(self, error: Exception) -> None:
        self.say(f"torch.compile: off from here: {type(error).__name__}: {_first_line(error)}")
        self.sharded.uncompile()
        self.compiled = self._tell_compiled = False

    def at_once(self, micro_batch: int) -> int:
        """Return how many sequences run together: all, unless memory ran out before."""
        return min(micro_batch, self.known.most or micro_batch)

    def set_last(self, last: bool) -> None:
        """Let only the last backward of a step reduce gradients and drop gathered weights."""
        # The public miner reduces at each, and reads its loss back: 1.08 s a step instead of 0.81,
        # measured with 1.7 M parameters on two CPU ranks.
        # FSDP goes through all modules for each of these two.
        if self._last is last:
            return
        self._last = last
        root, plan = self.sharded.modules[-1], self.sharded.plan
        root.set_requires_gradient_sync(last or plan.sync_every)
        root.set_reshard_after_backward(last or not plan.keep_unsharded)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _compiler_errors(compiled: bool) -> tuple[type[Exception], ...]:
    """Return the exceptions that torch.compile itself raises, not the model it compiled."""
    if not compiled:
        return ()
    from torch._dynamo.exc import TorchDynamoException

    return (TorchDynamoException,)


# Of the memory that is free; the rest is for what comes later: the codes of an upload.
_MARGIN = 0.85


class DeviceBudget:
    """Bytes of a CUDA device that micro-batches may fill; made once the model is there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        free, _ = torch.cuda.mem_get_info(device)
        self.limit = round((free + torch.cuda.memory_reserved(device)) * _MARGIN)
        self.peak()  # of what came before

    def peak(self) -> int:
        """Return the most that the allocator held since the last call.

        Held, not used: FSDP's streams have pools that share nothing.
        """
        held = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.empty_cache()  # what this size left in the allocator's pools
        torch.cuda.reset_peak_memory_stats(self._device)
        return held


# At 1024 tokens this number of sequences fills any GPU. A block of data has about 300: larger
# micro-batches lose more of its end, and one larger than a block would train on nothing.
AUTO_AT_MOST = 32
_CPU_AT_MOST = 16
_BLOCK_LENGTH = 1024  # tokens of a sequence; of longer ones a block has fewer

# Rounding up what an inner step trains on changes the training itself.
_EXCESS = 0.03


def sizes_to_try(
    settings: TrainingSettings, world_size: int, device: torch.device
) -> tuple[list[int], str]:
    """Return the sizes that ``auto`` may choose, 1, 2, 4, ..., and why there is none larger."""
    effective = settings.local_batch_size_train_effective
    most = min(AUTO_AT_MOST, AUTO_AT_MOST * _BLOCK_LENGTH // settings.sequence_length)
    sizes = [1]
    while True:
        size = 2 * sizes[-1]
        if size * world_size > effective:
            return sizes, "that is the effective batch"
        if size > most:
            return sizes, f"{size} would waste too much of each block of data"
        # What a size rounds up to, each larger one rounds up to at least: none is left out.
        plan = plan_batch(micro_batch=size, effective=effective, world_size=world_size)
        if plan.effective > effective * (1 + _EXCESS):
            return sizes, f"{size} would make the effective batch {plan.effective}"
        if device.type == "cpu" and size > _CPU_AT_MOST:
            return sizes, "enough for a CPU"
        sizes.append(size)


def measured_micro_batch(
    step: MicroBatches,
    settings: TrainingSettings,
    *,
    end_step: Callable[[], None],
) -> int:
    """Return what an earlier start found for ``auto``, or the result of trying.

    All ranks call this. ``end_step``: norm and optimizer, on the gradients of a trial.
    Raises ConfigError if not even one sequence fits, RuntimeError if a size ran out of memory while
    other ranks continued (they start again then, and it is known).
    """
    known = step.known
    stream, device = step.stream, step.sharded.device
    sizes, why = sizes_to_try(settings, stream.world_size, device)
    if known.fastest in sizes:  # the effective batch may be another now
        step.say(f"--neuron.local_batch_size_train auto: {known.fastest}, as found before")
        return known.fastest

    def seconds(sequences: int) -> float:
        try:
            return step.seconds_per_sequence(sequences, settings.sequence_length, end_step=end_step)
        except torch.OutOfMemoryError as error:
            if stream.world_size > 1 and sequences > 1:
                fits = known.ran_out(sequences)
                raise RuntimeError(
                    f"{sequences} sequences at once ran out of memory on rank {stream.rank}: the "
                    f"ranks start again and try at most {fits}"
                ) from error
            raise

    if known.most is not None and known.most < sizes[-1]:
        sizes = [size for size in sizes if size <= known.most]
        why = f"more than {known.most} ran out of memory before"
    budget = DeviceBudget(device) if device.type == "cuda" else None
    found = find_micro_batch(
        seconds,
        sizes,
        first=min(stream.all_gather(_predict(step.sharded.plan, sizes, budget))),
        why=why,
        vote=stream.vote_error,
        say=step.say,
        budget=budget,
    )
    # One rank writes for each node: the ranks of a node share the file.
    if stream.layout.shard == 0:
        known.measured(found)
    return found


def _predict(plan: MemoryPlan, sizes: Sequence[int], budget: DeviceBudget | None) -> int:
    """Return the largest size that fits by the model of memory; the smallest on a CPU."""
    limit = 0 if budget is None else budget.limit
    return max((size for size in sizes if plan.bytes_with(size) <= limit), default=sizes[0])


def find_micro_batch(
    seconds_per_sequence: Callable[[int], float],
    sizes: Sequence[int],
    *,
    first: int = 1,
    why: str,
    vote: Callable[[str | None], str | None],
    say: Callable[[str], None],
    budget: DeviceBudget | None = None,
) -> int:
    """Return the fastest micro-batch that fits, of ``sizes``: 1, 2, 4, ...

    ``seconds_per_sequence(n)`` runs one of ``n`` sequences; ``why``: the reason, for the log, that
    no larger one is tried. All ranks call this; all take the same size. Each trial compiles, so the
    search begins at ``first``, where memory is expected to end, and compares it with its half. A
    doubling that gains less than 2 % is not worth its memory. Memory grows by the same amount for
    each sequence, so from the third size on it is known before the trial whether it would fit
    ``budget``: a rank that ran out would leave the others in a collective. Raises ConfigError if
    not even one sequence fits.
    """
    found: dict[int, float] = {}
    peaks: dict[int, int] = {}

    def problem_of(size: int) -> str | None:
        """Try a size; return in words why it is not to be taken, the same on all ranks."""
        # Before and after each size all ranks vote: one that stopped would leave the others
        # in a collective.
        problem = vote(_too_large(size, peaks, budget))
        if problem is not None:
            return problem
        seconds = math.nan
        with contextlib.suppress(torch.OutOfMemoryError):
            seconds = seconds_per_sequence(size)
        if math.isnan(seconds):  # and the error is gone, whose frames hold the activations
            _free_memory()
            problem = f"{size} does not fit the GPU's memory"
        elif budget is not None:
            peaks[size] = budget.peak()
            if peaks[size] > budget.limit:
                share = peaks[size] / budget.limit
                problem = f"{size} would fill {share:.0%} of what may be filled"
        problem = vote(problem)
        if problem is None:
            found[size] = seconds
        return problem

    def is_slow(size: int) -> bool:
        """Return whether a size is hardly faster than its half, on any rank."""
        slow = found[size] > 0.98 * found[size // 2]
        return vote("slower" if slow else None) is not None

    at = sizes.index(first)
    while (problem := problem_of(sizes[at])) is not None:
        if at == 0:
            raise ConfigError(
                f"--neuron.local_batch_size_train auto: not even one sequence fits: "
                f"{OUT_OF_MEMORY_ADVICE}"
            )
        at, why = at - 1, problem
    best = sizes[at]
    larger = sizes[at + 1 :] if best == first else []  # else that did not fit
    if best == first > sizes[0] and problem_of(first // 2) is None and is_slow(first):
        best, larger, why = first // 2, [], f"{first} is not faster than {first // 2}"
    for size in larger:
        if (problem := problem_of(size)) is not None:
            why = problem
            break
        if is_slow(size):
            why = f"{size} is not faster than {size // 2}"
            break
        best = size
    rates = ", ".join(f"{n}: {1 / s:.2f}" for n, s in found.items())
    say(
        f"--neuron.local_batch_size_train auto: {best} (sequences/s by micro-batch: {rates}; {why})"
    )
    return best


def _too_large(size: int, peaks: Mapping[int, int], budget: DeviceBudget | None) -> str | None:
    """Predict from the two sizes before whether ``size`` fits; the peak is a straight line."""
    if budget is None or size // 4 not in peaks:
        return None
    expected = 3 * peaks[size // 2] - 2 * peaks[size // 4]
    if expected <= budget.limit:
        return None
    return f"{size} would take {expected / 1e9:.1f} of {budget.limit / 1e9:.1f} GB"


def _free_memory() -> None:
    gc.collect()  # Python 3.11.2 makes a cycle of an error that passes a @contextmanager
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
