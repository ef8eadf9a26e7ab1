"""Compress pseudo-gradients with error feedback: add the loss of one upload to the next.

A compressed pseudo-gradient holds a few entries of each row, so it leaves out most of the training.
*Error feedback* (EF) keeps the rest on this machine and adds it to the next upload. So a small but
steady change is sent in the end (Seide et al. 2014; Karimireddy et al. 2019, arXiv 1901.09847).
With g = epoch start - current and the outer learning rate lr (protocol page, section 4):

    EF' = decay * EF + lr * g ;  upload top-k(EF') ;  EF = EF' - top-k(EF')

g is cumulative over the outer step. So an EF that advances at every upload adds the whole of g
again and again, and it still holds the last outer step's g when a new one begins. An upload is a
*direction*; the gradient check measures the step along it that helps most. Modes:

- ``best``: three directions are tried at each upload, ``upload``, ``off`` and ``curved``, which
  sends other entries than ``off``; the one that lowers the loss most is uploaded.
- ``upload``: EF advances at every upload, as the public miner does.
- ``off``: upload top-k(lr * g) and remember nothing.

Compressing some rows of a matrix gives the same rows of the compressed matrix, so each rank encodes
its own rows where they are, during training. Chunks across that border must be whole, and training
waits for them. Vectors, small and many, travel in one message, and all ranks encode them. A matrix
(under DCT, or a compression that is not ``by_rows``) is gathered and encoded on rank 0.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from distributed_training.protocol.compression import Code, Compression

from .collectives import ParameterShard, RowStream, to_device

#: By device, for the thread that writes: neither it nor training waits for the other.
side_stream = cache(torch.cuda.Stream)
_DEVICE_ROWS = 1 << 24  # elements visiting the device at once; topk needs several times as much


Rows = Callable[[int], Tensor]  # parameter index -> a new host tensor of this rank's rows
Parts = list[Callable[[], Code] | Code | None]  # by parameter: see Direction


@dataclass
class Direction:
    """One rank's part of one candidate for an upload, fixed at a step boundary.

    Args:
        name: ``upload``, ``off`` or ``curved``.
        parts: By parameter: a function that encodes this rank's rows later, in another thread; or
            the finished code on rank 0 and None elsewhere.
        lock: Is held while ``parts`` run.
        done: Is called after they have run.

    Examples:
        >>> code = (torch.tensor([[0]], dtype=torch.int16), torch.tensor([[1.5]]))
        >>> direction = Direction("off", [lambda: code, None])
        >>> direction.encode()[0] is code, direction.encode()[1]
        (True, None)
    """

    name: str
    parts: Parts
    lock: contextlib.AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)
    done: Callable[[], None] = lambda: None

    def encode(self, check: Callable[[], None] = lambda: None) -> list[Code | None]:
        """Encode this rank's rows; on rank 0 also the parameters that must be whole.

        Args:
            check: Is called before each parameter, and may raise to give up.
        """
        codes: list[Code | None] = []
        with self.lock:
            for part in self.parts:
                check()
                codes.append(part() if callable(part) else part)
            self.done()
        return codes


class ErrorFeedback:
    """Owns one rank's residual: what uploads of this outer step and earlier ones left out.

    ``residual`` has host row blocks like the shards; None: nothing was left out yet. No tensor of
    it is ever changed in place, nor the list: a reference taken at a step boundary stays what it
    was.

    Args:
        mode: ``best``, ``upload`` or ``off`` (see the module).
        decay: Factor of the residual at each upload, in 0..1.
        compression: Encodes rows and whole parameters.
        shards: This rank's rows of every parameter.
        stream: Sends rows between the ranks.

    Examples:
        ```python
        feedback = trainer.feedback
        start = trainer.outer.epoch_start
        current = trainer.outer.current()
        for direction in feedback.directions(start, current, lr=0.7):
            codes = direction.encode()  # one pair (idxs, vals) for each parameter
        ```
    """

    def __init__(
        self,
        *,
        mode: str,
        decay: float,
        compression: Compression,
        shards: Sequence[ParameterShard],
        stream: RowStream,
    ) -> None:
        self.mode = mode
        self.decay = decay
        self.compression = compression
        self.residual: list[Tensor] | None = None
        self._shards = shards
        self._stream = stream
        self._in_turn = threading.Lock()  # publications advance EF one after the other
        self._swap = threading.Lock()  # of ``residual``, by training and by an upload
        self._loads = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the residual for a checkpoint."""
        return {"residual": self.residual}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the residual by that of a :meth:`state_dict`.

        Args:
            state: The state, with this rank's rows.
        """
        with self._swap:
            self.residual = state["residual"]
            # An upload under way that began before must not advance it: it is of steps given up.
            self._loads += 1

    @property
    def moments(self) -> frozenset[str]:
        """Names of the inner optimizer's tensors that the directions use."""
        curved = self.mode == "best" and self.compression.by_rows
        return frozenset({"exp_avg_sq"} if curved else ())

    def by_rows(self, index: int) -> bool:
        """Return whether ranks encode their own rows of a parameter.

        Args:
            index: The parameter's place in ``shards``.
        """
        return len(self._shards[index].shape) == 2 and self.compression.by_rows

    def directions(
        self,
        start: Sequence[Tensor],
        current: Sequence[Tensor],
        lr: float,
        *,
        second_moment: Sequence[Tensor] | None = None,
    ) -> list[Direction]:
        """List the candidates for an upload of now; the first is sent if nothing is measured.

        Collective. With ``best`` and ``upload`` the residual advances, once the direction of that
        name is encoded.

        Args:
            start: Epoch-start weights, float32 host row blocks that do not change any more.
            current: Present weights, as ``start``.
            lr: The outer learning rate.
            second_moment: AdamW's second moment, as ``start``, for ``curved``; None: there is none.

        Raises:
            RankFailedError: On all ranks, when one has no memory. The residual has not advanced.
        """

        def gradient(i: int) -> Tensor:
            return (start[i] - current[i]).mul_(lr)

        def encode_later(i: int, moments: Sequence[Tensor] | None) -> Code:
            rows = gradient(i)
            if moments is None or moments[i].shape != rows.shape:  # Muon keeps none of a matrix
                return self._encode_rows(i, rows)
            # The loss bends along an entry about as AdamW's second moment says (the diagonal of the
            # Fisher matrix), so an entry weighs |g| v^0.5 (arXiv 2509.11167).
            where, _ = self._encode_rows(i, rows * moments[i].sqrt())
            return where, rows.gather(1, where.long())

        made = []
        if self.mode != "upload":
            gathered = self._encode_gathered(gradient, None)
            kinds = {"off": None, "curved": second_moment}
            if not self.moments or second_moment is None:
                del kinds["curved"]
            for name, moments in kinds.items():
                parts: Parts = [
                    gathered.get(i, partial(encode_later, i, moments))
                    for i in range(len(self._shards))
                ]
                made.append(Direction(name, parts))
        # Made last: EF advances with it, and must not for an upload that fails with another one.
        if self.mode != "off":
            made.insert(0, self._upload(gradient))
        return made

    def _upload(self, gradient: Rows) -> Direction:
        """Encode as the public miner does: EF advances by what ``gradient`` gives."""
        if self.residual is None:
            self.residual = self._stream.run_on_all(
                lambda: [torch.zeros_like(s.local, device="cpu") for s in self._shards]
            )
        before, loads = self.residual, self._loads
        rows: dict[int, Tensor] = {}  # what remains of those encoded later

        def advanced(i: int) -> Tensor:
            # Read when it runs: the upload before may still have been under way.
            kept = self.residual or before
            both = gradient(i).add_(kept[i], alpha=self.decay)
            # A NaN that was left in it once would be in all uploads from then on, and in every
            # checkpoint.
            return both if bool(torch.isfinite(both).all()) else gradient(i)

        def encode_later(i: int) -> Code:
            rows[i] = advanced(i)
            code = self._encode_rows(i, rows[i])
            rows[i].scatter_(1, code[0].long(), 0.0)  # what is sent is exactly these entries
            return code

        remains: dict[int, Tensor] = {}
        codes = self._encode_gathered(advanced, remains)
        self._replace(remains, loads)
        parts: Parts = [codes.get(i, partial(encode_later, i)) for i in range(len(self._shards))]
        return Direction("upload", parts, self._in_turn, partial(self._replace, rows, loads))

    def _replace(self, entries: Mapping[int, Tensor], loads: int) -> None:
        with self._swap:
            # Another number: a checkpoint was loaded while this upload was encoded.
            if self.residual is not None and loads == self._loads:
                self.residual = [entries.get(i, kept) for i, kept in enumerate(self.residual)]

    def _encode_rows(self, index: int, rows: Tensor) -> Code:
        """Return ``(rows, k)`` codes of host ``rows`` of a matrix, computed by its shard."""
        device = self._shards[index].local.device
        if device.type == "cuda" and rows.numel():
            # Some rows at a time: training has filled the device, and topk needs several times its
            # input.
            pieces = rows.split(max(1, _DEVICE_ROWS // rows.shape[1]))
            # Training may fill the device at every try: a slow upload is better than none. On the
            # side stream the work runs next to training's kernels, not between them.
            with (
                contextlib.suppress(torch.OutOfMemoryError),
                torch.cuda.stream(side_stream(device)),
            ):
                parts = [self.compression.encode_rows(to_device(piece, device)) for piece in pieces]
                # These wait only for the side stream, and in the thread that writes, not in
                # training's.
                where, values = (
                    torch.cat([t.cpu() for t in each]) for each in zip(*parts, strict=True)
                )
                return where, values
        return self.compression.encode_rows(rows)

    def _encode_gathered(
        self, make: Rows, remains: dict[int, Tensor] | None
    ) -> dict[int, Code | None]:
        """Encode the parameters that must be whole, from the rows that ``make`` gives.

        Collective; rank 0 gets the codes. What they leave out goes into ``remains``, if given.
        Raises RankFailedError on all ranks alike, for a matrix.
        """
        codes: dict[int, Code | None] = {}
        indices = [i for i in range(len(self._shards)) if not self.by_rows(i)]
        vectors = [i for i in indices if len(self._shards[i].shape) == 1]
        matrices = [i for i in indices if i not in vectors]
        # In one message, and encoded by every rank: a model has hundreds of vectors, all of them
        # small.
        wholes = self._stream.whole([make(i) for i in vectors])
        for i, whole in zip(vectors, wholes, strict=True):
            code = self.compression.encode(whole)
            if remains is not None:
                self.compression.subtract_sent(whole, code)
                remains[i] = whole[self._shards[i].start : self._shards[i].stop].clone()
            codes[i] = code if self._stream.rank == 0 else None
        for i in matrices:
            codes[i] = self._encode_gathered_matrix(i, make, remains)
        return codes

    def _encode_gathered_matrix(
        self, index: int, make: Rows, remains: dict[int, Tensor] | None
    ) -> Code | None:
        """Encode a matrix that must be whole; collective; rank 0 gets the code.

        What the code leaves out goes into ``remains``, if given. Raises RankFailedError on all
        ranks alike.
        """
        shard, stream, subtract = self._shards[index], self._stream, remains is not None
        lead = stream.rank == 0
        # All ranks hear of it if one has no room, before they send rank 0 their rows.
        rows, whole = stream.run_on_all(
            lambda: (make(index), torch.empty(shard.shape) if lead else None)
        )
        stream.gather(shard.shape, rows, whole)

        def encode() -> Code | None:
            if whole is None:
                return None
            code = self.compression.encode(whole)
            if subtract:
                self.compression.subtract_sent(whole, code)
            return code

        code = stream.run_on_all(encode)
        if remains is not None:
            stream.scatter(shard.shape, whole, rows)
            remains[index] = rows
        return code
