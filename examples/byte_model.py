"""A small byte-level model, its text and its held-out loss, for the workers of ``compare.py``.

All models train at once, stacked along the first dimension, so each operation works on all of them.
"""

from __future__ import annotations

import lzma
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 64, 2, 4, 64, 8
HELD_OUT_BYTES, HELD_OUT_BATCHES = 60_000, 16

Weights = dict[str, Tensor]
_CPU = torch.device("cpu")


def text(place: Path | None = None) -> Tensor:
    """Return the bytes of a file, or of all files below a folder; by default, Python's library.

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
    # Leave out the dimension of the models, since fused attention takes only four dimensions.
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
    """Return each model's loss on ``data``; by default, on the text that no model trains on."""
    models, context = weights["bytes"], weights["places"].shape[-2]
    data = text()[:HELD_OUT_BYTES] if data is None else data
    places = torch.linspace(0, len(data) - context - 1, BATCH * HELD_OUT_BATCHES).long()
    tokens = data[places.view(1, -1, 1) + torch.arange(context + 1)].to(models.device)
    return losses(weights, tokens.expand(len(models), -1, -1)).tolist()


def stack(starts: Sequence[Weights], workers: int, device: torch.device = _CPU) -> Weights:
    """Return the stacked weights of each network's ``workers``, which begin with ``starts``."""
    stacked = {n: torch.stack([s[n] for s in starts for _ in range(workers)]) for n in starts[0]}
    return {name: each.to(device).requires_grad_() for name, each in stacked.items()}
