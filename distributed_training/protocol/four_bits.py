"""Encode float32 values with 4 bits each, and a scale for every 256 (protocol page, section 6).

Values are cut into groups of 256; the last one may be shorter. The *scale* of a group is a seventh
of its largest magnitude, and a value becomes the nearest of -7 to 7 scales. So zeros stay zeros, a
value is off by at most half a scale, and what is decoded is the same to the bit on every machine: a
small whole number times a float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 256  # values of one scale
_SCALE_BYTES = 4
_ZERO = 8  # what stands for 0: whole numbers of -8 to 7, plus 8
_LARGEST = 7
_FLOAT32 = torch.finfo(torch.float32)
#: Smaller ones would be subnormal, which some machines take for zero.
_LEAST_SCALE = _FLOAT32.tiny
#: Times -8, a number that :func:`encode` does not write, it is still finite.
_MOST_SCALE = _FLOAT32.max / 8


def bytes_of(count: int) -> int:
    """Return the length in bytes of ``count`` encoded values."""
    groups, rest = divmod(count, GROUP)
    return _SCALE_BYTES * (groups + bool(rest)) + GROUP // 2 * groups + (rest + 1) // 2


def encode(values: Tensor) -> Tensor:
    """Encode ``values`` (float32, one dimension, contiguous). Return uint8, one dimension.

    First come all scales (float32, little-endian), then the groups: byte j of a group of k values
    has value j in its lower four bits, and value j + ceil(k / 2) in its upper ones. A group whose
    scale would be subnormal becomes zeros. Values that are not finite, or above 2.9e38, give bytes
    that :func:`decode` refuses.
    """
    groups, rest = _groups(values)
    rest = pad(rest, (0, rest.numel() % 2))
    coded = [_encode_groups(each) for each in (groups, rest) if each.numel()]
    scales = [scales.view(torch.uint8) for scales, _ in coded]
    return torch.cat([*scales, *(pairs.view(-1) for _, pairs in coded)])


def _groups(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the whole groups, one a row, and the row of values that are left."""
    whole = len(values) // GROUP * GROUP
    return values[:whole].view(-1, GROUP), values[whole:].view(1, -1)


def _encode_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales of the groups, and their values, two in a byte."""
    scales = torch.maximum(groups.amax(1), groups.amin(1).neg_()).div_(_LARGEST)
    scales.mul_(scales >= _LEAST_SCALE)  # a NaN stays one
    factors = torch.where(scales > 0, scales.reciprocal(), 0)
    # Two operations, each rounded: a fused one would round once, on some machines alone. Then the
    # conversion cuts off what is left of the half.
    numbers = torch.mul(groups, factors.unsqueeze(1)).add_(_ZERO + 0.5)
    # By way of int8: torch converts to uint8 seven times slower.
    lower, upper = numbers.to(torch.int8).view(torch.uint8).chunk(2, dim=1)
    return scales, upper.bitwise_left_shift(4).bitwise_or_(lower)


def decode(data: Tensor, values: Tensor) -> None:
    """Decode ``data`` (uint8, one dimension) into ``values`` (float32, one dimension, contiguous).

    Raises ValueError for another length, and for a scale that is neither 0 nor a normal number of
    at most an eighth of float32's largest: before ``values`` are written.
    """
    count = len(values)
    if len(data) != bytes_of(count):
        raise ValueError(f"{len(data)} bytes instead of {bytes_of(count)} for {count} values")
    groups, rest = _groups(values)
    end = _SCALE_BYTES * (len(groups) + bool(rest.numel()))
    scales, pairs = data[:end].view(torch.float32), data[end:]
    normal = (scales >= _LEAST_SCALE) & (scales <= _MOST_SCALE)
    if not bool((normal | (scales == 0)).all()):
        raise ValueError("a scale that is negative, subnormal, too large or not finite")
    split = groups.numel() // 2
    for part, its_scales, both in (
        (groups, scales[: len(groups)], pairs[:split]),
        (rest, scales[len(groups) :], pairs[split:]),
    ):
        if part.numel():
            lower = both.view(len(part), -1)
            half = lower.shape[1]
            part[:, :half] = lower & 15
            part[:, half:] = lower[:, : part.shape[1] - half] >> 4
            part.sub_(_ZERO).mul_(its_scales.unsqueeze(1))
