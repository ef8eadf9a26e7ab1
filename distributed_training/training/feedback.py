"""Error feedback: what a published pseudo-gradient left out is added to the next one.

With g = epoch start - current and the outer learning rate lr (protocol page, section 4):

    EF' = decay * EF + lr * g ;  publish top-k(EF') ;  EF = EF' - what was published

g is cumulative over the epoch, so an EF that advances at every upload adds the whole of g again and
again: after 50 uploads the cosine with g is 0.16. Three modes:

``round``   EF advances once per outer step, when it commits; uploads are previews from a copy.
``upload``  EF advances at every upload, as the public miner does.
``off``     publish top-k(lr * g) and remember nothing.

The code of some rows of a matrix is the same rows of the code of the matrix, so each rank encodes
its own rows where they lie. Vectors (and everything under DCT) are chunked across that border and
are encoded whole on rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distributed_training.protocol import gradients

from .shards import ParameterShard, RowStream

Code = tuple[Tensor, Tensor]  # idxs int16, vals float32
_DEVICE_ROWS = 1 << 26  # elements visiting the device at once


@dataclass(frozen=True)
class Codec:
    """Parameters of the published form; the public network's are the defaults."""

    topk: int = gradients.TOPK
    target_chunk: int = gradients.TARGET_CHUNK
    use_dct: bool = False

    def encode(self, whole: Tensor) -> Code:
        return gradients.encode(
            whole, topk=self.topk, target_chunk=self.target_chunk, use_dct=self.use_dct
        )

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return gradients.encoded_shape(
            shape, topk=self.topk, target_chunk=self.target_chunk, use_dct=self.use_dct
        )


class ErrorFeedback:
    """One rank's part. ``residual``: host row blocks like the shards; None: nothing left out yet.

    ``residual`` is never changed in place; a reference taken at a step boundary stays what it was.
    """

    def __init__(
        self,
        *,
        mode: str,
        decay: float,
        codec: Codec,
        shards: Sequence[ParameterShard],
        stream: RowStream,
    ) -> None:
        self.mode = mode
        self.decay = decay
        self.codec = codec
        self.residual: list[Tensor] | None = None
        self._shards = shards
        self._stream = stream

    def by_rows(self, index: int) -> bool:
        """Whether ranks encode their own rows of this parameter."""
        return len(self._shards[index].shape) == 2 and not self.codec.use_dct

    def accumulated(self, index: int, start: Tensor, current: Tensor, lr: float) -> Tensor:
        """EF' of one parameter's rows, a new host tensor."""
        return self._accumulate(index, start, current, lr, self.residual)

    def _accumulate(
        self, index: int, start: Tensor, current: Tensor, lr: float, residual: list[Tensor] | None
    ) -> Tensor:
        result = (start - current).mul_(lr)
        if self.mode != "off" and residual is not None:
            result.add_(residual[index], alpha=self.decay)
        return result

    def encoder(self, index: int, start: Tensor, current: Tensor, lr: float) -> Callable[[], Code]:
        """Encodes one parameter's rows later, in another thread, from what is true now."""
        residual, device = self.residual, self._shards[index].local.device

        def encode() -> Code:
            rows = self._accumulate(index, start, current, lr, residual)
            return self.encode_rows(rows, device)

        return encode

    def encode_rows(self, rows: Tensor, device: torch.device) -> Code:
        """``(rows, k)`` codes of host ``rows`` of a matrix, computed on ``device``."""
        if device.type == "cpu" or rows.numel() == 0:
            return gradients.encode_rows(rows, topk=self.codec.topk)
        step = max(1, _DEVICE_ROWS // rows.shape[1])
        parts = [
            gradients.encode_rows(part.to(device, non_blocking=True), topk=self.codec.topk)
            for part in rows.split(step)
        ]
        return torch.cat([i.cpu() for i, _ in parts]), torch.cat([v.cpu() for _, v in parts])

    def encode_whole(self, index: int, rows: Tensor, *, subtract: bool) -> Code | None:
        """The code of a parameter that must be whole; collective; rank 0 gets it.

        With ``subtract``, ``rows`` loses what the code holds.
        """
        shard = self._shards[index]
        lead = self._stream.rank == 0
        whole = torch.empty(shard.shape, dtype=torch.float32) if lead else None
        self._stream.gather(shard.shape, rows, whole)
        code = None
        if whole is not None:
            code = self.codec.encode(whole)
            if subtract:
                gradients.subtract_sent_(
                    whole,
                    *code,
                    target_chunk=self.codec.target_chunk,
                    use_dct=self.codec.use_dct,
                )
        if subtract:
            self._stream.scatter(shard.shape, whole, rows)
        return code

    def advance(self, start: Sequence[Tensor], lr: float) -> tuple[list[Tensor], list[Code | None]]:
        """EF after publishing now, and the codes: of this rank's rows, or whole on rank 0.

        Collective; ``self.residual`` does not change.
        """
        residual: list[Tensor] = []
        codes: list[Code | None] = []
        for i, shard in enumerate(self._shards):
            rows = self.accumulated(i, start[i], shard.local.to("cpu"), lr)
            if self.by_rows(i):
                code: Code | None = self.encode_rows(rows, shard.local.device)
                assert code is not None
                rows.scatter_(1, code[0].long(), 0.0)  # what is sent is exactly these entries
            else:
                code = self.encode_whole(i, rows, subtract=True)
            residual.append(rows)
            codes.append(code)
        return residual, codes

    def after_round(self, start: Sequence[Tensor], lr: float) -> list[Tensor]:
        """EF once the epoch that began at ``start`` is over. Collective; changes nothing."""
        return self.advance(start, lr)[0]
