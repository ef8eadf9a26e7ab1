"""Quantize groups of float32 values to whole numbers of 4, 3 or 2 bits, and a scale each.

A *group* has at most 256 values. With 4 bits its *scale* is a seventh of its largest magnitude, and
a value becomes the nearest of -7 to 7 scales: a zero stays one. With 3 and 2 bits there are too few
numbers for that, so the scale follows from the root mean square (:data:`_SPREAD`). A value becomes
the nearest odd number of scales: ±1 to ±7, or ±1 and ±3.

What is decoded is the same to the bit on every machine: a small whole number times a float32. So is
what is encoded: each operation is rounded once, in an order that is written here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 256  # values of one scale, at most
SCALE_BYTES = 4
#: A value is scale * (step * number - offset), by bits.
_NUMBERS = {4: (1, 8), 3: (2, 7), 2: (2, 3)}
#: A group is filled up to a multiple of that many values, by bits: they take whole bytes.
_FILLED = {4: 2, 3: 8, 2: 4}
_LARGEST = 7  # scales, with 4 bits
#: Scale by root mean square, by bits: between the best of normal and of Laplace values.
_SPREAD = {3: 0.33, 2: 0.52}
_FLOAT32 = torch.finfo(torch.float32)
#: Smaller ones would be subnormal, which some machines take for zero.
_LEAST_SCALE = _FLOAT32.tiny
#: Times 8, the largest number, it is still finite.
_MOST_SCALE = _FLOAT32.max / 8


def group_bytes(count: int, bits: int) -> int:
    """Return the bytes of the numbers of one group of ``count`` values."""
    return -(-count // _FILLED[bits]) * _FILLED[bits] * bits // 8


def encode_groups(groups: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the scales and the numbers of some groups.

    ``groups``: float32 ``(n, k)``, k at most 256. The scales are float32 ``(n,)``, the numbers
    uint8 ``(n, group_bytes(k, bits))``. A group whose scale would be subnormal becomes zeros.
    Values that are not finite, or too large, give a scale that :func:`refuse_scales` refuses.
    """
    if missing := -groups.shape[1] % _FILLED[bits]:
        groups = pad(groups, (0, missing))
    step, offset = _NUMBERS[bits]
    if bits == 4:
        scales = torch.maximum(groups.amax(1), groups.amin(1).neg_()).div_(_LARGEST)
        numbers = torch.empty_like(groups)
    else:
        numbers = groups.square()
        scales = _added(numbers).div_(groups.shape[1] - missing).sqrt_().mul_(_SPREAD[bits])
    scales.mul_(scales >= _LEAST_SCALE)  # a NaN stays one
    factors = torch.where(scales > 0, scales.reciprocal(), 0).div_(step)
    # Two operations, each rounded: a fused one would round once, on some machines alone. Then the
    # conversion cuts off what is left of the half.
    torch.mul(groups, factors.unsqueeze(1), out=numbers).add_(offset / step + 0.5)
    if bits != 4:
        numbers.clamp_(0, 2**bits - 1)
    # By way of int8: torch converts to uint8 seven times slower.
    whole = numbers.to(torch.int8).view(torch.uint8)
    if bits != 3:
        return scales, _pack(whole, bits)
    return scales, torch.cat([_pack(whole & 3, 2), _pack(whole >> 2, 1)], dim=1)


def _added(values: Tensor) -> Tensor:
    """Return the sum of each row; ``values`` are overwritten.

    By halves: torch adds in an order that depends on the device.
    """
    width = values.shape[1]
    while width > 1:
        half = (width + 1) // 2
        values[:, : width - half] += values[:, half:width]
        width = half
    return values[:, 0].clone()


def _pack(numbers: Tensor, width: int) -> Tensor:
    """Put a plane's numbers, uint8 of ``width`` bits each, into whole bytes, by halves of a row."""
    shift = 4
    while shift >= width:
        lower, upper = numbers.chunk(2, dim=1)
        numbers = (upper << shift).bitwise_or_(lower)
        shift //= 2
    return numbers


def _unpack(plane: Tensor, width: int) -> Tensor:
    """Return the numbers of a plane, uint8, one in a byte."""
    shift = width
    while shift <= 4:
        mask = (2**width - 1) * sum(1 << place for place in range(0, 8, 2 * shift))
        plane = torch.cat([plane & mask, (plane >> shift).bitwise_and_(mask)], dim=1)
        shift *= 2
    return plane


def refuse_scales(scales: Tensor) -> None:
    """Raise ValueError for a scale that is neither 0 nor a normal number of at most 4.2e37."""
    normal = (scales >= _LEAST_SCALE) & (scales <= _MOST_SCALE)
    if not bool((normal | (scales == 0)).all()):
        raise ValueError("a scale that is negative, subnormal, too large or not finite")


def decode_groups(scales: Tensor, data: Tensor, out: Tensor, bits: int) -> None:
    """Decode what :func:`encode_groups` returned into ``out``, float32 ``(n, k)``."""
    step, offset = _NUMBERS[bits]
    if bits == 3:
        lower, upper = data.tensor_split([data.shape[1] * 2 // 3], dim=1)
        numbers = _unpack(lower, 2).add_(_unpack(upper, 1), alpha=4)
    else:
        numbers = _unpack(data, bits)
    whole = numbers.view(torch.int8)  # in a quarter of the memory that float32 takes
    if step != 1:
        whole *= step
    whole -= offset
    out.copy_(whole[:, : out.shape[1]]).mul_(scales.unsqueeze(1))
