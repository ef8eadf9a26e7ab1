"""The micro-batches of the inner step under way: forward, backward, and gradients of the whole.

FSDP adds the gradients up where they are computed and reduces them over ranks once, with the last
micro-batch; with ``--neuron.gradient_sync every`` at each. When memory runs out, the whole step is
run again in smaller pieces (one rank), or all ranks start again with them (several).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .known_size import OUT_OF_MEMORY_ADVICE, KnownSize
from .plan import BatchPlan
from .sharding import ShardedModel
from .shards import RowStream

log = logging.getLogger(__name__)


class MicroBatches:
    """``known``: how many sequences at once fit. ``say`` gets a line for each thing that was
    decided, as when compiling failed."""

    #: Whether every micro-batch is reduced over ranks by itself.
    reduces_each = False

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
        self.domains: list[int] = []
        self.notes: list[str] = []
        self.loss_sum = torch.zeros((), dtype=torch.float32, device=sharded.device)
        self.compiled = sharded.compiled
        self.say = say
        self.sharded = sharded
        self.stream = stream
        self.known = known
        self._tell_compiled = sharded.compiled
        self._last: bool | None = None
        if known.most is not None:
            say(f"at most {known.most} sequences at once: more ran out of memory before")

    def add(self, batch: Tensor, domain: int, plan: BatchPlan) -> None:
        """Run one; when memory ran out, the whole step again in smaller pieces.

        One rank alone can do that. With several the others are left in a collective, so this rank
        ends the miner, and the next start knows. Raises torch.OutOfMemoryError then, and when not
        even one sequence fits.
        """
        self.batches.append(batch)
        self.domains.append(domain)
        started = time.perf_counter()
        try:
            self._run(batch, domain, plan, last=len(self.batches) == plan.micro_batches)
            if self._tell_compiled:
                self._tell_compiled = False
                seconds = time.perf_counter() - started
                self.say(
                    f"✓ Model compiled successfully: the first micro-batch took {seconds:.1f} s"
                )
            return
        except torch.OutOfMemoryError as error:
            self._out_of_memory(error, plan)
        except _compiler_errors(self.compiled) as error:
            self.say(f"torch.compile: off from here: {type(error).__name__}: {_first_line(error)}")
            self.sharded.uncompile()
            self.compiled = self._tell_compiled = False
        self.discard()
        if self.sharded.device.type == "cuda":
            torch.cuda.empty_cache()
        again = list(zip(self.batches, self.domains, strict=True))
        self.batches, self.domains = [], []
        for each, where in again:
            self.add(each, where, plan)

    def seconds_per_sequence(self, sequences: int, length: int) -> float:
        """Of a forward and backward of (sequences, length); nothing is reduced or kept."""
        device = self.sharded.device
        ids = torch.zeros((sequences, length), dtype=torch.int64)
        try:
            self._set_last(False)
            for _ in range(2):  # the first one warms up
                started = time.perf_counter()
                self.sharded.root(ids.to(device)).backward()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            return (time.perf_counter() - started) / sequences
        finally:
            self.drop()
            if self.compiled:
                torch._dynamo.reset()  # after a second size it would compile for any size

    def combine(self, seed: int) -> None:
        """Once all micro-batches ran. ``seed``: equal on all ranks, another for each step."""

    def gradients(self) -> list[Tensor]:
        """This rank's rows of every parameter's gradient, reduced over ranks."""
        result = []
        for shard in self.sharded.shards:
            grad: Any = shard.dtensor.grad
            result.append(torch.zeros_like(shard.local) if grad is None else grad.to_local())
        return result

    def pending(self) -> Tensor | None:
        """The batches of the step under way as one tensor in host memory; None if there is none."""
        if not self.batches:
            return None
        return torch.stack([batch.to("cpu") for batch in self.batches])

    def drop(self) -> None:
        """Forget a step that is not finished, and every gathered weight."""
        self.discard()
        self.forget()

    def forget(self) -> None:
        """The step is over."""
        self.loss_sum.zero_()
        self.batches, self.domains, self.notes = [], [], []

    def discard(self) -> None:
        """Drop what was computed of the step under way; its batches stay."""
        self.sharded.discard_gradients()
        self.loss_sum.zero_()

    def _out_of_memory(self, error: torch.OutOfMemoryError, plan: BatchPlan) -> None:
        was = self._at_once(plan.micro_batch)
        found = f"out of memory with {was} sequences at once ({_first_line(error)})"
        if was == 1:
            raise torch.OutOfMemoryError(
                f"{found}, so the miner stops: {OUT_OF_MEMORY_ADVICE}"
            ) from error
        fits = self.known.ran_out(was)
        if self.stream.world_size > 1:
            raise torch.OutOfMemoryError(
                f"{found}: the ranks start again from the last checkpoint and run {fits} at once; "
                f"to choose yourself, {OUT_OF_MEMORY_ADVICE}"
            ) from error
        line = (
            f"out of memory: the step is retried with {fits} instead of {was} sequences at "
            f"once and the same effective batch of {plan.effective}, and so are later ones; for a "
            f"micro-batch of that size give --neuron.local_batch_size_train {fits}"
        )
        log.warning(line)
        self.notes.append(line)

    def _at_once(self, micro_batch: int) -> int:
        """Sequences of a micro-batch that are run together; all, unless memory ran out before."""
        return min(micro_batch, self.known.most or micro_batch)

    def _run(self, batch: Tensor, domain: int, plan: BatchPlan, *, last: bool) -> None:
        # FSDP divides by the world size; a rank's share of the mean is therefore its own mean.
        tokens = plan.micro_batches * batch.shape[0] * (batch.shape[1] - 1)
        pieces = batch.to(self.sharded.device, non_blocking=True).split(self._at_once(len(batch)))
        for i, piece in enumerate(pieces):
            self._set_last((last or self.reduces_each) and i == len(pieces) - 1)
            loss = self.sharded.root(piece)
            (loss / tokens).backward()
            self.loss_sum += loss.detach()

    def _set_last(self, last: bool) -> None:
        """Only the last backward of a step reduces gradients and drops gathered weights."""
        if self._last is last:
            return
        self._last = last
        root, plan = self.sharded.modules[-1], self.sharded.plan
        root.set_requires_gradient_sync(last or plan.sync_every)
        root.set_reshard_after_backward(last or not plan.keep_unsharded)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _compiler_errors(compiled: bool) -> tuple[type[Exception], ...]:
    """What torch.compile raises when it fails, and not the model it compiled."""
    if not compiled:
        return ()
    from torch._dynamo.exc import TorchDynamoException

    return (TorchDynamoException,)
