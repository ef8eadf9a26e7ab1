"""Step whole matrices, of which each rank keeps some rows, with the inner optimizer Muon.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) replaces a matrix's momentum
with the nearest orthogonal matrix, found by five Newton-Schulz steps, so that the weights move
equally far in all directions. Multiplying by 0.2 sqrt(larger side) gives the step about the same
length as AdamW's (Liu et al. 2025, arXiv 2502.16982). So the learning rate and the weight decay
have the same scale as for AdamW, which steps every parameter that is not a matrix of a decoder
layer.

The momentum is kept in rows, like the weights. In a step each of the W ranks gets the whole
direction of every W-th matrix from the rows of all ranks, and sends back the rows of the result.
While these are being computed, the next W matrices are sent. Ranks without rows of a matrix take
part as well. If several machines hold copies of the model, only the first machine's ranks compute,
and the others get the result from them: other GPUs might round differently, and the copies would
drift apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .collectives import row_range

MOMENTUM = 0.95
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)

#: Values, and the transfer that is still delivering them (None: they have already arrived).
Arriving = tuple[Tensor, dist.Work | None]


class MatrixRows(nn.Parameter):
    """This rank's rows of a matrix of a decoder layer.

    ``whole``: the matrix's shape. ``mesh``: the mesh that the rows are spread over, with the
    dimensions (copies, shards) or only (shards); None: this rank has all rows.
    """

    whole: tuple[int, ...]
    mesh: DeviceMesh | None

    @classmethod
    def of(cls, rows: Tensor, whole: Sequence[int], mesh: DeviceMesh | None = None) -> MatrixRows:
        made = cls(rows)
        made.whole, made.mesh = tuple(whole), mesh
        return made


def orthogonal(matrices: Tensor) -> Tensor:
    """Return approximately the nearest orthogonal matrices to ``(..., rows, columns)``."""
    a, b, c = _NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Steps matrices whose rows are spread over the ranks of one mesh; all call :meth:`step`.

    ``parameters``: the same matrices in the same order on each rank.
    """

    def __init__(self, parameters: Sequence[MatrixRows], weight_decay: float) -> None:
        super().__init__(
            parameters, {"lr": 0.0, "momentum": MOMENTUM, "weight_decay": weight_decay}
        )
        mesh = parameters[0].mesh
        # Use bf16 like Muon's authors, except on a CPU, which may not have bf16 products.
        device = parameters[0].device
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._shards = 1 if mesh is None else mesh.size(mesh.ndim - 1)
        self._shard = self._copy = 0
        self._group = self._peers = None
        if mesh is not None and self._shards > 1:
            self._shard = mesh.get_local_rank(mesh.ndim - 1)
            self._group = mesh.get_group(mesh.ndim - 1)
        if mesh is not None and mesh.ndim == 2:
            self._copy, self._peers = mesh.get_local_rank(0), mesh.get_group(0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        matrices = group["params"]
        # Send all matrices of a window at once, the n-th to the n-th rank. All ranks run the
        # collectives in the order of the matrices.
        windows = [
            matrices[first : first + self._shards]
            for first in range(0, len(matrices), self._shards)
        ]
        coming = self._gather(windows[0], group["momentum"])
        before: tuple[list[MatrixRows], Arriving] | None = None
        for window, following in itertools.zip_longest(windows, windows[1:]):
            arriving = coming
            if following is not None:
                coming = self._gather(following, group["momentum"])
            returning = self._scatter(window, arriving)
            if before is not None:
                self._apply(*before)
            before = window, returning
        assert before is not None
        self._apply(*before)

    def _gather(self, window: Sequence[MatrixRows], momentum: float) -> Arriving:
        """Start gathering the direction of this rank's matrix in ``window``."""
        directions = []
        for rows in window:
            assert rows.grad is not None
            state = self.state[rows]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(rows)
            kept = state["momentum_buffer"].lerp_(rows.grad, 1 - momentum)
            directions.append(rows.grad.lerp(kept, momentum).to(self._dtype).flatten())
        flat = torch.cat(directions)
        if self._copy > 0:
            return flat.new_empty(0), None  # the first copy has the same rows and computes instead
        return self._exchange(flat, self._own(window), self._parts(window))

    def _scatter(self, window: Sequence[MatrixRows], arriving: Arriving) -> Arriving:
        """Orthogonalize this rank's matrix, and start sending its rows to their owners."""
        flat, work = arriving
        if work is not None:
            work.wait()
        if self._shard < len(window):
            whole = window[self._shard].whole
            if self._copy == 0:
                flat = orthogonal(flat.view(whole)).flatten()
            else:
                flat = flat.new_empty(math.prod(whole))
            if self._peers is not None:
                dist.broadcast(flat, group=self._peers, group_src=0)
        return self._exchange(flat, self._parts(window), self._own(window))

    def _apply(self, window: Sequence[MatrixRows], arriving: Arriving) -> None:
        (group,) = self.param_groups
        flat, work = arriving
        if work is not None:
            work.wait()
        parts = flat.split([rows.numel() for rows in window])
        for rows, direction in zip(window, parts, strict=True):
            rows.mul_(1 - group["lr"] * group["weight_decay"])
            length = 0.2 * max(rows.whole[-2:]) ** 0.5
            rows.sub_(direction.view_as(rows), alpha=group["lr"] * length)

    def _exchange(self, flat: Tensor, sent: list[int], received: list[int]) -> Arriving:
        if self._group is None:
            return flat, None
        out = flat.new_empty(sum(received))
        work = dist.all_to_all_single(out, flat, received, sent, group=self._group, async_op=True)
        return out, work

    def _own(self, window: Sequence[MatrixRows]) -> list[int]:
        """Count the values that this rank has of each rank's matrix in ``window``."""
        own = [rows.numel() for rows in window]
        return own + [0] * (self._shards - len(own))

    def _parts(self, window: Sequence[MatrixRows]) -> list[int]:
        """Count the values that each rank has of this rank's matrix in ``window``, if any."""
        if self._shard >= len(window):
            return [0] * self._shards
        rows, *columns = window[self._shard].whole
        ranges = (row_range(rows, self._shards, shard) for shard in range(self._shards))
        return [(stop - start) * math.prod(columns) for start, stop in ranges]
