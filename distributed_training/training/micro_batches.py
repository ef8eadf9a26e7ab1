"""The micro-batches of the inner step under way: forward, backward, and gradients of the whole.

Without gradient surgery FSDP adds the gradients up and reduces them once, with the last
micro-batch. With it (``--train.pcgrad``) every micro-batch is reduced by itself and added to its
domain's gradient: one more gradient in float32 shards for each domain, and a reduction for each
micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .hardware import OUT_OF_MEMORY_ADVICE, first_line, is_compiler_error
from .model import discard_gradients, uncompile_blocks
from .pcgrad import pcgrad
from .plan import BatchPlan, MemoryPlan
from .shards import ParameterShard, RowStream

log = logging.getLogger(__name__)


class MicroBatches:
    """``root``: int64 (sequences, length) -> summed loss; ``modules``: the FSDP ones, root last.

    ``surgery``: keep the gradients of domains apart until the step's end.
    """

    def __init__(
        self,
        *,
        root: nn.Module,
        model: nn.Module,
        modules: Sequence[FSDPModule],
        shards: Sequence[ParameterShard],
        stream: RowStream,
        memory: MemoryPlan,
        device: torch.device,
        compiled: bool,
        surgery: bool,
        say: Callable[[str], None],
    ) -> None:
        # Of the step under way, as they came: on the device, or after a restart on the host. Kept
        # to run the step again in smaller pieces, and for checkpoints.
        self.batches: list[Tensor] = []
        self.domains: list[int] = []
        self.notes: list[str] = []
        self.loss_sum = torch.zeros((), dtype=torch.float32, device=device)
        self.compiled = compiled
        self.say = say
        self._root = root
        self._model = model
        self._modules = list(modules)
        self._shards = shards
        self._stream = stream
        self._memory = memory
        self._device = device
        self._surgery = surgery
        self._by_domain: dict[int, list[Any]] = {}
        self._pieces = 1  # each micro-batch is run in this many; doubled when memory ran out
        self._last: bool | None = None

    def add(self, batch: Tensor, domain: int, plan: BatchPlan) -> None:
        """Run one; when memory ran out, the whole step again in smaller pieces.

        One rank alone can do that. With several the others would be left in a collective, so the
        miner stops and the error says what to change. Raises torch.OutOfMemoryError.
        """
        self.batches.append(batch)
        self.domains.append(domain)
        try:
            self._run(batch, domain, plan, last=len(self.batches) == plan.micro_batches)
            return
        except torch.OutOfMemoryError as error:
            self._out_of_memory(error, plan)
        except Exception as error:
            if not self.compiled or not is_compiler_error(error):
                raise
            self.say(f"torch.compile: off from here: {type(error).__name__}: {first_line(error)}")
            uncompile_blocks(self._model)
            self.compiled = False
        self._discard()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        again = list(zip(self.batches, self.domains, strict=True))
        self.batches, self.domains = [], []
        for each, where in again:
            self.add(each, where, plan)

    def measure(self, batch: Tensor) -> None:
        """A forward and backward that count for nothing; see :meth:`drop`."""
        self._set_last(False)
        self._root(batch.to(self._device)).backward()

    def combine(self, seed: int) -> None:
        """Gradient surgery, once all micro-batches ran; collective. ``seed``: of its order."""
        if not self._surgery:
            return
        domains = [self._by_domain[domain] for domain in sorted(self._by_domain)]
        self._by_domain = {}
        if len(domains) > 1:
            # pcgrad overwrites the first domain's tensors with the result.
            _, projections = pcgrad(domains, seed=seed, group=self._stream.group)
            if projections:
                self.notes.append(f"PCGrad: {projections} of {len(domains)} domains' conflicts")
        for shard, gradient in zip(self._shards, domains[0], strict=True):
            shard.dtensor.grad = gradient

    def gradients(self) -> list[Tensor]:
        """This rank's rows of every parameter's gradient, reduced over ranks."""
        result = []
        for shard in self._shards:
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
        self._discard()
        self.forget()

    def forget(self) -> None:
        """The step is over."""
        self.loss_sum.zero_()
        self.batches, self.domains, self.notes, self._by_domain = [], [], [], {}

    def _discard(self) -> None:
        discard_gradients(self._modules)
        self.loss_sum.zero_()
        self._by_domain = {}

    def _out_of_memory(self, error: torch.OutOfMemoryError, plan: BatchPlan) -> None:
        was = plan.micro_batch // self._pieces
        if self._stream.world_size > 1 or was % 2:
            raise torch.OutOfMemoryError(
                f"out of memory with {was} sequences at once ({first_line(error)}), so the miner "
                f"stops: {OUT_OF_MEMORY_ADVICE}"
            ) from error
        self._pieces *= 2
        line = (
            f"out of memory: the step is retried with {was // 2} instead of {was} sequences at "
            f"once and the same effective batch of {plan.effective}; to keep it so, give "
            f"--neuron.local_batch_size_train {was // 2}"
        )
        log.warning(line)
        self.notes.append(line)

    def _run(self, batch: Tensor, domain: int, plan: BatchPlan, *, last: bool) -> None:
        # FSDP divides by the world size; a rank's share of the mean is therefore its own mean.
        tokens = plan.micro_batches * batch.shape[0] * (batch.shape[1] - 1)
        pieces = batch.to(self._device, non_blocking=True).chunk(self._pieces)
        for i, piece in enumerate(pieces):
            self._set_last((last or self._surgery) and i == len(pieces) - 1)
            loss = self._root(piece)
            (loss / tokens).backward()
            self.loss_sum += loss.detach()
        if self._surgery:
            self._set_apart(domain)

    @torch.no_grad()
    def _set_apart(self, domain: int) -> None:
        """Move what FSDP just reduced to its domain's gradient."""
        new: list[Any] = []
        for shard in self._shards:
            grad = shard.dtensor.grad
            new.append(torch.zeros_like(shard.dtensor) if grad is None else grad)
            shard.dtensor.grad = None
        held = self._by_domain.setdefault(domain, new)
        if held is not new:
            for total, part in zip(held, new, strict=True):
                total.add_(part)

    def _set_last(self, last: bool) -> None:
        """Only the last backward of a step reduces gradients and drops gathered weights."""
        if self._last is last:
            return
        self._last = last
        root = self._modules[-1]
        root.set_requires_gradient_sync(last or self._memory.sync_every)
        root.set_reshard_after_backward(last or not self._memory.keep_unsharded)
