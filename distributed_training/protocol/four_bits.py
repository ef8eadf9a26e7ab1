"""Encode float32 values with 4 bits each, and a scale for every 256 (protocol page, section 6).

Values are cut into groups of 256; the last one may be shorter. The *scale* of a group is a seventh
of its largest magnitude, and a value becomes the nearest of -7 to 7 scales. So zeros stay zeros, a
value is off by at most half a scale. Decoded values are the same to the bit on every machine: a
small whole number times a float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .quantization import (
    GROUP,
    SCALE_BYTES,
    dequantize,
    pack,
    packed_bytes,
    quantize,
    refuse_scales,
    unpack,
)

_BITS = 4


def bytes_of(count: int) -> int:
    """Return the length in bytes of ``count`` encoded values."""
    groups, rest = divmod(count, GROUP)
    scales = SCALE_BYTES * (groups + bool(rest))
    return scales + packed_bytes(GROUP, _BITS) * groups + packed_bytes(rest, _BITS)


def encode(values: Tensor) -> Tensor:
    """Encode ``values`` (float32, one dimension, contiguous). Return uint8, one dimension.

    First come all scales (float32, little-endian), then the groups: byte j of a group of k values
    has value j in its lower four bits, and value j + ceil(k / 2) in its upper ones. A group whose
    scale would be subnormal becomes zeros. Values that are not finite, or above 2.9e38, give bytes
    that :func:`decode` refuses.
    """
    scales, pairs = [], []
    for groups in _groups(values):
        if groups.numel():
            numbers = torch.empty(groups.shape, dtype=torch.uint8, device=groups.device)
            scales.append(quantize(groups, numbers, _BITS).view(torch.uint8))
            pairs.append(pack(numbers, _BITS).view(-1))
    return torch.cat([*scales, *pairs])


def _groups(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the whole groups, one a row, and the row of values that are left."""
    whole = len(values) // GROUP * GROUP
    return values[:whole].view(-1, GROUP), values[whole:].view(1, -1)


def decode(data: Tensor, values: Tensor) -> None:
    """Decode ``data`` (uint8, one dimension) into ``values`` (float32, one dimension, contiguous).

    Raises ValueError for another length, and for a scale that is neither 0 nor a normal number of
    at most an eighth of float32's largest: before ``values`` are written.
    """
    count = len(values)
    if len(data) != bytes_of(count):
        raise ValueError(f"{len(data)} bytes instead of {bytes_of(count)} for {count} values")
    groups, rest = _groups(values)
    end = SCALE_BYTES * (len(groups) + bool(rest.numel()))
    scales, pairs = data[:end].view(torch.float32), data[end:]
    refuse_scales(scales)
    split = groups.numel() // 2
    for part, its_scales, both in (
        (groups, scales[: len(groups)], pairs[:split]),
        (rest, scales[len(groups) :], pairs[split:]),
    ):
        if part.numel():
            numbers = unpack(both.view(len(part), -1), part.shape[1], _BITS)
            dequantize(its_scales, numbers, part, _BITS)
