"""Whether our epoch start is the global one, judged by a sample of the published weights.

A peer that is lost in the middle of a transfer leaves the survivors of a round with averages that
differ in parts, and nobody is told: epochs are compared by number alone. So after a round, once the
validator has published, this miner reads a few slices of the global ``model.safetensors`` and
compares them with the weights it began the epoch with (rank 0's rows of them).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distributed_training.protocol.safetensors_header import safetensors_table

#: Of float32 weights that went through the same arithmetic in another order.
TOLERANCE = 1e-4
SLICES = 48
SLICE_ROWS_BYTES = 256 * 1024

#: (first byte, bytes) of the object -> its content.
ReadRange = Callable[[int, int], bytes]


@dataclass(frozen=True)
class Rows:
    """Rows of a parameter, as this rank holds them: float32, ``first`` is the first one's index."""

    name: str
    first: int
    values: Tensor


class NotComparable(ValueError):
    """The object is not a float32 safetensors file with our parameters; the message says why."""


def drift(
    rows: Sequence[Rows], read: ReadRange, *, size: int, seed: int, slices: int = SLICES
) -> float:
    """The largest difference found, relative to the largest weight of its slice.

    ``size``: bytes of the whole object.

    Reads the header and ``slices`` slices of at most 256 KiB, chosen at random among all rows by
    their size. Raises NotComparable, and what ``read`` raises.
    """
    try:
        table = safetensors_table(read, size)
    except ValueError as error:
        raise NotComparable(f"it is not a whole safetensors file: {error}") from None
    chosen = random.Random(seed)
    usable = [item for item in rows if item.values.numel()]
    weights = [item.values.numel() for item in usable]
    largest = 0.0
    for item in chosen.choices(usable, weights, k=slices):
        row_bytes = 4 * item.values[0].numel()
        count = max(1, min(len(item.values), SLICE_ROWS_BYTES // row_bytes))
        start = chosen.randrange(len(item.values) - count + 1)
        entry = table.get(item.name)
        if entry is None or entry.dtype != "F32":
            raise NotComparable(f"it holds no float32 {item.name}")
        at = (item.first + start) * row_bytes
        if at + count * row_bytes > entry.size or entry.shape[1:] != item.values.shape[1:]:
            raise NotComparable(f"{item.name} has another shape")
        data = read(entry.start + at, count * row_bytes)
        theirs = torch.frombuffer(bytearray(data), dtype=torch.float32)
        ours = item.values[start : start + count].reshape(-1)
        scale = max(float(theirs.abs().max()), 1e-12)
        difference = float((ours - theirs).abs().max()) / scale
        if not difference <= largest:  # NaN counts as the largest
            largest = difference
    return largest
