"""Whether our epoch start is the global one, judged by a sample of the published weights.

A peer that is lost in the middle of a transfer leaves the survivors of a round with averages that
differ in parts, and nobody is told: epochs are compared by number alone. So after a round, once the
validator has published, this miner reads a few slices of the global ``model.safetensors`` and
compares them with the weights it began the epoch with (rank 0's rows of them).
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Of float32 weights that went through the same arithmetic in another order.
TOLERANCE = 1e-4
SLICES = 48
SLICE_ROWS_BYTES = 256 * 1024
_LARGEST_HEADER = 100 * 1024 * 1024

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


def drift(rows: Sequence[Rows], read: ReadRange, *, seed: int, slices: int = SLICES) -> float:
    """The largest difference found, relative to the largest weight of its slice.

    Reads the header and ``slices`` slices of at most 256 KiB, chosen at random among all rows by
    their size. Raises NotComparable, and what ``read`` raises.
    """
    length = struct.unpack("<Q", read(0, 8))[0]
    if not 2 <= length <= _LARGEST_HEADER:
        raise NotComparable("the header's length is impossible")
    try:
        header = json.loads(read(8, length))
    except ValueError as error:
        raise NotComparable("the header is not JSON") from error
    chosen = random.Random(seed)
    usable = [item for item in rows if item.values.numel()]
    weights = [item.values.numel() for item in usable]
    largest = 0.0
    for item in chosen.choices(usable, weights, k=slices):
        row_bytes = 4 * item.values[0].numel()
        count = max(1, min(len(item.values), SLICE_ROWS_BYTES // row_bytes))
        start = chosen.randrange(len(item.values) - count + 1)
        entry = header.get(item.name)
        if not isinstance(entry, dict) or entry.get("dtype") != "F32":
            raise NotComparable(f"it holds no float32 {item.name}")
        begin, end = entry["data_offsets"]
        at = begin + (item.first + start) * row_bytes
        if at + count * row_bytes > end or entry["shape"][1:] != list(item.values.shape[1:]):
            raise NotComparable(f"{item.name} has another shape")
        data = read(8 + length + at, count * row_bytes)
        theirs = torch.frombuffer(bytearray(data), dtype=torch.float32)
        ours = item.values[start : start + count].reshape(-1)
        scale = max(float(theirs.abs().max()), 1e-12)
        difference = float((ours - theirs).abs().max()) / scale
        if not difference <= largest:  # NaN counts as the largest
            largest = difference
    return largest
