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
#: The bits of a number that lie together, lowest first, by bits. Each plane is a run of bytes.
_PLANES = {4: (4,), 3: (2, 1), 2: (2,)}
#: A group is filled up to a multiple of that many values, by bits: its planes are whole bytes.
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
    step, offset = _NUMBERS[bits]
    if bits == 4:
        scales = torch.maximum(groups.amax(1), groups.amin(1).neg_()).div_(_LARGEST)
    else:
        scales = _root_mean_square(groups).mul_(_SPREAD[bits])
    scales.mul_(scales >= _LEAST_SCALE)  # a NaN stays one
    groups = pad(groups, (0, -groups.shape[1] % _FILLED[bits]))
    factors = torch.where(scales > 0, scales.reciprocal(), 0).div_(step)
    # Two operations, each rounded: a fused one would round once, on some machines alone. Then the
    # conversion cuts off what is left of the half.
    numbers = torch.mul(groups, factors.unsqueeze(1)).add_(offset / step + 0.5)
    if bits != 4:
        numbers.clamp_(0, 2**bits - 1)
    # By way of int8: torch converts to uint8 seven times slower.
    return scales, _pack(numbers.to(torch.int8).view(torch.uint8), bits)


def _root_mean_square(groups: Tensor) -> Tensor:
    """Return the root mean square of each group.

    By halves: torch adds in an order that depends on the device.
    """
    squares = pad(groups.square(), (0, GROUP - groups.shape[1]))
    while squares.shape[1] > 1:
        lower, upper = squares.chunk(2, dim=1)
        squares = lower + upper
    return squares.squeeze(1).div_(groups.shape[1]).sqrt_()


def _pack(numbers: Tensor, bits: int) -> Tensor:
    """Put the planes of ``numbers`` (uint8, one in a byte) one after the other."""
    planes, shift = [], 0
    for width in _PLANES[bits]:
        plane = numbers >> shift if shift else numbers
        first, *others = plane.bitwise_and(2**width - 1).chunk(8 // width, dim=1)
        for place, other in enumerate(others, 1):
            first |= other << width * place
        planes.append(first)
        shift += width
    return torch.cat(planes, dim=1)


def refuse_scales(scales: Tensor) -> None:
    """Raise ValueError for a scale that is neither 0 nor a normal number of at most 4.2e37."""
    normal = (scales >= _LEAST_SCALE) & (scales <= _MOST_SCALE)
    if not bool((normal | (scales == 0)).all()):
        raise ValueError("a scale that is negative, subnormal, too large or not finite")


def decode_groups(scales: Tensor, data: Tensor, out: Tensor, bits: int) -> None:
    """Decode what :func:`encode_groups` returned into ``out``, float32 ``(n, k)``."""
    step, offset = _NUMBERS[bits]
    numbers: Tensor | None = None
    shift = 0
    for width in _PLANES[bits]:
        plane, data = data.tensor_split([data.shape[1] * width // (bits - shift)], dim=1)
        parts = [(plane >> place) & (2**width - 1) for place in range(0, 8, width)]
        found = torch.cat(parts, dim=1)
        numbers = found if numbers is None else numbers + (found << shift)
        shift += width
    assert numbers is not None
    out.copy_(numbers[:, : out.shape[1]])
    if step != 1:
        out.mul_(step)
    out.sub_(offset).mul_(scales.unsqueeze(1))
