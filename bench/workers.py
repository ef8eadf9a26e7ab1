"""Simulate workers of networks: a byte model, its text, inner steps, rounds of a store network.

All models train at once, stacked along the first dimension: each operation serves all of them. What
is exchanged is the product's own: uploads and updates are its files (``protocol/update_file.py``),
merged as a validator merges them (``validator/merge.py``) by the outer rule that is named.
"""

from __future__ import annotations

import lzma
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from distributed_training.protocol.types import UPDATE_CODEC
from distributed_training.protocol.update_file import (
    Header,
    UpdateFile,
    UpdateLayout,
    finish,
    rows_and_columns,
    write_rows,
)
from distributed_training.training.outer_rule import OUTER_RULES, UploadFacts
from distributed_training.validator.merge import (
    Measured,
    OuterState,
    Rule,
    Values,
    merge,
    norm_of,
    whole_uploads,
)

WORKERS = 4  # of a store network
WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 64, 2, 4, 64, 8
RATE, WARMUP = 1e-3, 30
HELD_OUT_BYTES, HELD_OUT_BATCHES = 60_000, 16

Weights = dict[str, Tensor]
_CPU = torch.device("cpu")


def text(place: Path | None = None) -> Tensor:
    """Return the bytes of a file, or of all files below a folder; None: Python's own library.

    Files whose names end in ``.xz`` are unpacked.
    """
    if place is not None:
        files = [place] if place.is_file() else sorted(f for f in place.rglob("*") if f.is_file())
    else:
        files = sorted(Path(os.__file__).parent.glob("*.py"))[:80]
    read = [(file, file.read_bytes()) for file in files]
    data = b"".join(lzma.decompress(of) if file.suffix == ".xz" else of for file, of in read)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def initial(seed: int, width: int = WIDTH, layers: int = LAYERS, context: int = CONTEXT) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * rows**-0.5

    weights = {"bytes": matrix(256, width), "places": 0.1 * matrix(context, width)}
    for layer in range(layers):
        weights |= {
            f"{layer}.attention": matrix(width, 3 * width),
            f"{layer}.mixed": matrix(width, width) / 2,
            f"{layer}.up": matrix(width, 4 * width),
            f"{layer}.down": matrix(4 * width, width) / 2,
        }
    return weights


def losses(weights: Weights, tokens: Tensor) -> Tensor:
    """Return each model's mean loss; ``tokens`` are (models, batch, context + 1)."""
    models, batch, _ = tokens.shape
    context, width = weights["places"].shape[-2:]
    every = torch.arange(models, device=tokens.device).view(-1, 1, 1)
    x = weights["bytes"][every, tokens[..., :-1]] + weights["places"].unsqueeze(1)
    x = x.view(models, -1, width)
    size = 64 if width % 512 == 0 else WIDTH // HEADS
    # Without a dimension for the models: fused attention takes four of them.
    heads = (models * batch, context, width // size, size)
    for layer in range(sum(name.endswith(".mixed") for name in weights)):
        normed = F.layer_norm(x, (width,))
        q, k, v = (
            each.reshape(heads).transpose(1, 2)
            for each in (normed @ weights[f"{layer}.attention"]).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + mixed.reshape(models, -1, width) @ weights[f"{layer}.mixed"]
        inner = F.gelu(F.layer_norm(x, (width,)) @ weights[f"{layer}.up"])
        x = x + inner @ weights[f"{layer}.down"]
    logits = F.layer_norm(x, (width,)) @ weights["bytes"].transpose(1, 2)
    each = F.cross_entropy(logits.reshape(-1, 256), tokens[..., 1:].reshape(-1), reduction="none")
    return each.view(models, -1).mean(1)


@torch.no_grad()
def held_out_losses(weights: Weights, data: Tensor | None = None) -> list[float]:
    """Return each model's loss on ``data``; None: on the text that none trains on."""
    models, context = weights["bytes"], weights["places"].shape[-2]
    data = text()[:HELD_OUT_BYTES] if data is None else data
    places = torch.linspace(0, len(data) - context - 1, BATCH * HELD_OUT_BATCHES).long()
    tokens = data[places.view(1, -1, 1) + torch.arange(context + 1)].to(models.device)
    return losses(weights, tokens.expand(len(models), -1, -1)).tolist()


def stack(starts: Sequence[Weights], workers: int, device: torch.device = _CPU) -> Weights:
    """Return the weights of the ``workers`` of each network, which begin at ``starts``."""
    stacked = {n: torch.stack([s[n] for s in starts for _ in range(workers)]) for n in starts[0]}
    return {name: each.to(device).requires_grad_() for name, each in stacked.items()}


def _unsigned(message: bytes) -> bytes:
    return bytes(64)


@dataclass
class Network:
    """The rounds of one store network: the outer state, and what each worker's upload left out.

    ``sent`` and ``received``: bytes of one worker in all outer steps, by the body of the files.
    """

    rule: Rule
    names: Sequence[str]
    state: OuterState
    codec: str = UPDATE_CODEC
    workers: int = WORKERS
    sent: float = 0.0
    received: float = 0.0
    residuals: dict[int, Sequence[Tensor]] = field(default_factory=dict)  # by worker

    def exchange(self, weights: Sequence[Tensor], folder: Path, outer_step: int) -> None:
        """Upload what the workers trained, and take the outer step that follows from it.

        ``weights``: ``(workers, ...)`` of each parameter, on the CPU.
        """
        uploads = [
            self.upload(worker, [each[worker] for each in weights], folder, outer_step)
            for worker in range(self.workers)
        ]
        self.merge_all(uploads, folder, outer_step)

    def state_of(self, worker: int) -> OuterState:
        """Return the state that a worker begins its inner steps with."""
        return self.state

    def merge_all(self, uploads: Sequence[UpdateFile], folder: Path, outer_step: int) -> None:
        """Merge uploads that all gain the same, none of which is clipped."""
        found = [Measured(norm_of(upload), 1.0, 0.0) for upload in uploads]
        factors = [1.0] * len(uploads)
        update = self.merge(uploads, factors, whole_uploads(found), folder, outer_step)
        self.sent += sum(upload.layout.body_bytes for upload in uploads) / self.workers
        self.received += update.layout.body_bytes

    def merge(
        self,
        uploads: Sequence[Values],
        factors: Sequence[float],
        divisor: float,
        folder: Path,
        outer_step: int,
        facts: Sequence[UploadFacts] = (),
    ) -> UpdateFile:
        """Take the outer step of ``uploads``; return its update, a file in ``folder``."""
        path = folder / "update"
        path.unlink(missing_ok=True)
        layout = self._layout("update", UPDATE_CODEC, outer_step)
        _, self.state = merge(
            uploads, factors, self.state, self.rule,
            path=path, layout=layout, sign=_unsigned, divisor=divisor, facts=facts,
        )  # fmt: skip
        return UpdateFile.reopen(path, layout.schema)

    def upload(
        self, worker: int, weights: Sequence[Tensor], folder: Path, outer_step: int
    ) -> UpdateFile:
        """Write one worker's upload as a member does; keep what it left out."""
        rule = OUTER_RULES[self.rule.name]
        moved = [s - w for s, w in zip(self.state_of(worker).weights, weights, strict=True)]
        if (residual := self.residuals.get(worker)) is not None:
            moved = [m + r * rule.feedback for m, r in zip(moved, residual, strict=True)]
        path = folder / f"upload-{worker}"
        path.unlink(missing_ok=True)
        layout = self._layout("upload", self.codec, outer_step)
        for index, tensor in enumerate(moved):
            rows = tensor.reshape(rows_and_columns(tensor.shape))
            write_rows(path, layout, index, 0, rows if rule.select is None else rule.select(rows))
        finish(path, layout, _unsigned)
        upload = UpdateFile.reopen(path, layout.schema)
        self.residuals[worker] = [
            m - upload.decode(name, m.shape) for name, m in zip(self.names, moved, strict=True)
        ]
        return upload

    def _layout(
        self, kind: Literal["upload", "update"], codec: str, outer_step: int
    ) -> UpdateLayout:
        header = Header(
            kind=kind, run_id="bench", outer_step=outer_step, serial=0, hotkey="bench",
            start="0" * 64, codec=codec, inner_steps=1, tokens=1,
        )  # fmt: skip
        shapes = [tuple(weight.shape) for weight in self.state.weights]
        return UpdateLayout.of(list(zip(self.names, shapes, strict=True)), header)
