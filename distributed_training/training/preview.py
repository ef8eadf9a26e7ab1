"""What a gradient about to be published would do to the loss, as a validator measures it.

Weights for a moment: epoch start - outer_lr * 0.5 * decode(code) (protocol page, section 4). The
sequences are this rank's own, held back from training; the loss without the gradient is measured
once per epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distributed_training.protocol import gradients

from .feedback import Code, ErrorFeedback
from .sharding import ShardedModel
from .shards import RowStream

#: Of the decoded gradient times the outer learning rate (protocol page, section 4).
APPLIED_FRACTION = 0.5


class Preview:
    """One rank's part."""

    def __init__(
        self, *, sharded: ShardedModel, stream: RowStream, feedback: ErrorFeedback
    ) -> None:
        self._sharded = sharded
        self._shards = sharded.shards
        self._stream = stream
        self._feedback = feedback
        self._before: tuple[str, float] | None = None  # epoch, loss without a gradient

    @torch.no_grad()
    def measure(
        self,
        *,
        epoch_id: str,
        start: Sequence[Tensor],
        codes: Sequence[Code | None],
        learning_rate: float,
        held: Sequence[Tensor],
        count: float,
    ) -> float:
        """Mean loss with minus without the gradient, nats per token, equal on all ranks.

        ``codes``: as published, of this rank's rows, or whole on rank 0. ``held``: micro-batches,
        equally many on all ranks; ``count`` is 1.0, or 0.0 for a rank whose own do not count
        (it has none and runs something else in the collectives). NaN if no rank's count. At an
        inner step's boundary only; the weights are afterwards what they were, to the bit.
        """
        current = [shard.local.to("cpu", copy=True) for shard in self._shards]
        try:
            if self._before is None or self._before[0] != epoch_id:
                for shard, rows in zip(self._shards, start, strict=True):
                    shard.local.copy_(rows)
                self._before = (epoch_id, self._mean(held, count))
            self._apply(start, codes, learning_rate * APPLIED_FRACTION)
            return self._mean(held, count) - self._before[1]
        finally:
            for shard, rows in zip(self._shards, current, strict=True):
                shard.local.copy_(rows)
            self._sharded.discard_gradients()

    def _apply(self, start: Sequence[Tensor], codes: Sequence[Code | None], factor: float) -> None:
        codec = self._feedback.codec
        for i, shard in enumerate(self._shards):
            code = codes[i]
            rows = torch.zeros_like(start[i])
            if self._feedback.by_rows(i):
                assert code is not None
                rows.scatter_(1, code[0].long(), code[1])
            else:
                whole = None
                if code is not None:
                    whole = gradients.decode(
                        *code,
                        shard.shape,
                        target_chunk=codec.target_chunk,
                        use_dct=codec.use_dct,
                    )
                self._stream.scatter(shard.shape, whole, rows)
            shard.local.copy_(torch.add(start[i], rows, alpha=-factor))

    def _mean(self, held: Sequence[Tensor], count: float) -> float:
        self._sharded.discard_gradients()
        total = sum(float(self._sharded.loss_of(batch)) for batch in held) if count else 0.0
        if not count:
            for batch in held:
                self._sharded.loss_of(batch)
        tokens = sum(batch.shape[0] * (batch.shape[1] - 1) for batch in held)
        summed, counted = self._stream.sum([total, count * tokens])
        return summed / counted if counted else float("nan")
