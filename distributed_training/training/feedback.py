"""Error feedback: what a published pseudo-gradient left out is added to the next one.

With g = epoch start - current and the outer learning rate lr (protocol page, section 4):

    EF' = decay * EF + lr * g ;  publish top-k(EF') ;  EF = EF' - what was published

g is cumulative over the epoch, so an EF that advances at every publication adds the whole of g
again and again, and it still holds the last epoch's g when a new one begins. What is published is a
*direction*; how long a step along it helps most is measured by the preview. Modes:

``best``    two directions are tried at each publication, ``upload`` and ``off``; the one that
            lowers the loss more is published.
``upload``  EF advances at every publication, as the public miner does.
``off``     publish top-k(lr * g) and remember nothing.

The code of some rows of a matrix is the same rows of the code of the matrix, so each rank encodes
its own rows where they lie, beside training. What is chunked across that border must be whole, and
training waits for its code: vectors, small and many, travel in one message, and all ranks encode
them; a matrix (under DCT alone) is gathered and encoded on rank 0.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from distributed_training.protocol import gradients

from .host_copies import side_stream
from .shards import ParameterShard, RowStream

Code = tuple[Tensor, Tensor]  # idxs int16, vals float32
_DEVICE_ROWS = 1 << 24  # elements visiting the device at once; topk needs several times as much


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

    def decode(self, code: Code, shape: Sequence[int]) -> Tensor:
        return gradients.decode(*code, shape, target_chunk=self.target_chunk, use_dct=self.use_dct)

    def subtract_sent(self, whole: Tensor, code: Code) -> None:
        """``whole`` loses what its ``code`` holds."""
        gradients.subtract_sent_(whole, *code, target_chunk=self.target_chunk, use_dct=self.use_dct)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return gradients.encoded_shape(
            shape, topk=self.topk, target_chunk=self.target_chunk, use_dct=self.use_dct
        )


Rows = Callable[[int], Tensor]  # parameter index -> a new host tensor of this rank's rows


@dataclass
class Direction:
    """One rank's part of one direction of a publication, fixed at a step boundary.

    ``parts``: per parameter a function that encodes this rank's rows later, in another thread; or
    the finished code (rank 0; None elsewhere). ``lock`` is held while they run; then ``done``.
    """

    name: str
    parts: list[Callable[[], Code] | Code | None]
    lock: contextlib.AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)
    done: Callable[[], None] = lambda: None

    def encode(self, check: Callable[[], None] = lambda: None) -> list[Code | None]:
        """The codes: of this rank's rows, or whole on rank 0. ``check`` may raise to give up."""
        codes: list[Code | None] = []
        with self.lock:
            for part in self.parts:
                check()
                codes.append(part() if callable(part) else part)
            self.done()
        return codes


class ErrorFeedback:
    """One rank's part. ``residual``: host row blocks like the shards; None: nothing left out yet.

    No tensor of ``residual`` is ever changed in place, nor the list: a reference taken at a step
    boundary stays what it was.
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
        self._in_turn = threading.Lock()  # publications advance EF one after the other
        self._swap = threading.Lock()  # of ``residual``, by training and by a publication

    def by_rows(self, index: int) -> bool:
        """Whether ranks encode their own rows of this parameter."""
        return len(self._shards[index].shape) == 2 and not self.codec.use_dct

    def directions(
        self, start: Sequence[Tensor], current: Sequence[Tensor], lr: float
    ) -> list[Direction]:
        """What may be published now; the first is published when nothing is measured.

        ``start``, ``current``: host row blocks that do not change any more. Collective. With
        ``best`` and ``upload`` EF advances, once the direction of that name is encoded.
        """

        def gradient(i: int) -> Tensor:
            return (start[i] - current[i]).mul_(lr)

        made = []
        if self.mode != "off":
            made.append(self._upload(gradient))
        if self.mode != "upload":
            made.append(self._off(gradient))
        return made

    def _off(self, gradient: Rows) -> Direction:
        """The code of what ``gradient`` gives; nothing is remembered."""

        def later(i: int) -> Callable[[], Code]:
            return lambda: self._encode_rows(i, gradient(i))

        count = range(len(self._shards))
        codes = self._take_wholes(gradient, None)
        return Direction("off", [codes[i] if i in codes else later(i) for i in count])

    def _upload(self, gradient: Rows) -> Direction:
        """The public miner's way: EF advances by what ``gradient`` gives."""
        if self.residual is None:
            self.residual = [torch.zeros_like(s.local, device="cpu") for s in self._shards]
        before = self.residual
        rows: dict[int, Tensor] = {}  # what remains of those encoded later

        def advanced(i: int) -> Tensor:
            # Read when it runs: the publication before may still have been under way.
            kept = self.residual or before
            return gradient(i).add_(kept[i], alpha=self.decay)

        def later(i: int) -> Callable[[], Code]:
            def part() -> Code:
                rows[i] = advanced(i)
                return self._take_rows(i, rows[i])

            return part

        def done() -> None:
            self._replace(rows)

        count = range(len(self._shards))
        remains: dict[int, Tensor] = {}
        codes = self._take_wholes(advanced, remains)
        self._replace(remains)
        parts = [codes[i] if i in codes else later(i) for i in count]
        return Direction("upload", parts, self._in_turn, done)

    def _replace(self, entries: Mapping[int, Tensor]) -> None:
        with self._swap:
            if self.residual is not None:  # else a checkpoint without one was loaded meanwhile
                self.residual = [entries.get(i, kept) for i, kept in enumerate(self.residual)]

    def _encode_rows(self, index: int, rows: Tensor) -> Code:
        """``(rows, k)`` codes of host ``rows`` of a matrix, computed where its shard lies."""
        device = self._shards[index].local.device
        if device.type == "cpu" or rows.numel() == 0:
            return gradients.encode_rows(rows, topk=self.codec.topk)
        step = max(1, _DEVICE_ROWS // rows.shape[1])
        with torch.cuda.stream(side_stream(device)):  # beside training's kernels, not between them
            parts = [
                gradients.encode_rows(part.to(device), topk=self.codec.topk)
                for part in rows.split(step)
            ]
            return torch.cat([i.cpu() for i, _ in parts]), torch.cat([v.cpu() for _, v in parts])

    def _take_rows(self, index: int, rows: Tensor) -> Code:
        """The code of ``rows``, which lose what it holds."""
        code = self._encode_rows(index, rows)
        rows.scatter_(1, code[0].long(), 0.0)  # what is sent is exactly these entries
        return code

    def _take_wholes(self, make: Rows, remains: dict[int, Tensor] | None) -> dict[int, Code | None]:
        """The codes of what must be whole, of the rows that ``make`` gives. Rank 0 gets them;
        collective. What they leave out goes into ``remains``, if given. Raises RankFailedError on
        all ranks alike, of a matrix."""
        codes: dict[int, Code | None] = {}
        indices = [i for i in range(len(self._shards)) if not self.by_rows(i)]
        vectors = [i for i in indices if len(self._shards[i].shape) == 1]
        matrices = [i for i in indices if i not in vectors]
        wholes = self._stream.whole([(self._shards[i].shape[0], make(i)) for i in vectors])
        for i, whole in zip(vectors, wholes, strict=True):
            code = self.codec.encode(whole)
            if remains is not None:
                self.codec.subtract_sent(whole, code)
                remains[i] = whole[self._shards[i].start : self._shards[i].stop].clone()
            codes[i] = code if self._stream.rank == 0 else None
        for i in matrices:
            rows = make(i)
            codes[i] = self._take_whole(i, rows, subtract=remains is not None)
            if remains is not None:
                remains[i] = rows
        return codes

    def _take_whole(self, index: int, rows: Tensor, *, subtract: bool) -> Code | None:
        """The code of a matrix that must be whole; collective; rank 0 gets it.

        With ``subtract``, ``rows`` loses what the code holds. Raises RankFailedError on all ranks
        alike.
        """
        shard, stream = self._shards[index], self._stream
        lead = stream.rank == 0
        whole = stream.together(
            lambda: torch.empty(shard.shape, dtype=torch.float32) if lead else None
        )
        stream.gather(shard.shape, rows, whole)

        def encode() -> Code | None:
            if whole is None:
                return None
            code = self.codec.encode(whole)
            if subtract:
                self.codec.subtract_sent(whole, code)
            return code

        code = stream.together(encode)
        if subtract:
            stream.scatter(shard.shape, whole, rows)
        return code
