"""Encode the values of rows as bytes, with the codec that a network's file names.

A codec is two functions, ``encode_rows`` and ``decode_rows`` (:class:`Codec`). To add one, write
the line ``CODECS.register(name, Codec(...))`` in a module, which every member and the validator
name with ``--plugins``.

The product's own codecs write a 4-, 3- or 2-bit integer for each value, and a float32 *scale* for
each *group* of at most 256 values of a row. With 4 bits, the scale is a seventh of the group's
largest magnitude, and a value is rounded to the nearest of -7 to 7 scales, so a zero stays zero.
With 3 and 2 bits, there are too few integers for that. The scale then follows from the root mean
square (:data:`_SPREAD`), and a value is rounded to the nearest odd multiple of it: ±1 to ±7, or ±1
and ±3.

Decoded values are bit-identical on every machine, because each is a small integer times a float32.
Encoded values are bit-identical too, because each operation is rounded once, in a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from distributed_training.common.kinds import Kinds

from .types import OWN_CODECS

GROUP = 256  # values that share one scale, at most
SCALE_BYTES = 4
#: bits -> (step, offset): a value is scale * (step * number - offset).
_NUMBERS = {4: (1, 8), 3: (2, 7), 2: (2, 3)}
#: bits -> a row is padded to a multiple of this many numbers, so that it fills whole bytes.
_FILLED = {4: 2, 3: 8, 2: 4}
_LARGEST = 7  # the largest magnitude in scales, with 4 bits
#: bits -> scale divided by the root mean square. With error feedback, these values lose the least
#: of real pseudo-gradients.
_SPREAD = {3: 0.31, 2: 0.52}
_FLOAT32 = torch.finfo(torch.float32)
#: A smaller scale would be subnormal, and some machines treat that as zero.
_LEAST_SCALE = _FLOAT32.tiny
#: This scale times 8, the largest number, is still finite.
_MOST_SCALE = _FLOAT32.max / 8
# How many values are processed at once: few enough that their copies stay in the CPU's cache, or do
# not fill a GPU's memory.
_SLAB, _CUDA_SLAB = 1 << 19, 1 << 24
_TYPICAL = 1 << 12  # the bytes per value are measured on a row of this many values


@dataclass(frozen=True)
class Codec:
    """The two functions of a codec. Their results are bit-identical on all devices and machines.

    ``encode_rows(rows)``: ``rows`` are float32 ``(r, c)``, contiguous. It returns scales, float32
    ``(r, g)``, and codes, uint8 ``(r, b)``, on the device of ``rows``; ``g`` and ``b`` depend only
    on ``c``, even if ``r`` is 0. If a value is not finite, the scale must not be finite either.

    ``decode_rows(scales, codes, out)``: writes ``out``, float32 ``(r, c)``, contiguous. Each scale
    has been checked: it is 0 or a normal number of at most 4.2e37. The codes come from other peers:
    whatever bytes they are, ``out`` must become finite and nothing may be raised.
    """

    encode_rows: Callable[[Tensor], tuple[Tensor, Tensor]]
    decode_rows: Callable[[Tensor, Tensor, Tensor], None]

    def row(self, columns: int) -> tuple[int, int]:
        """Return the numbers of scales and of code bytes in a row of ``columns`` values."""
        return _row(self, columns)

    @property
    def bits(self) -> float:
        """Bits per value in a long row, including its share of the scales."""
        scales, codes = self.row(_TYPICAL)
        return (32 * scales + 8 * codes) / _TYPICAL

    @property
    def has_zero(self) -> bool:
        """True if a zero stays zero next to other values."""
        out = torch.empty(1, GROUP)
        self.decode_rows(*self.encode_rows(torch.eye(1, GROUP)), out)
        return not bool(out[0, 1:].any())


@functools.lru_cache(maxsize=1024)
def _row(codec: Codec, columns: int) -> tuple[int, int]:
    scales, codes = codec.encode_rows(torch.empty(0, columns))
    return scales.shape[1], codes.shape[1]


CODECS: Kinds[Codec] = Kinds("codec of uploads")


# --- the product's own codecs --------------------------------------------------------------------


def _encode_rows(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    count, columns = rows.shape
    scales = rows.new_empty((count, -(-columns // GROUP)))
    size = (columns + -columns % _FILLED[bits]) * bits // 8
    codes = rows.new_empty((count, size), dtype=torch.uint8)
    for slab in _slabs(rows):
        numbers = torch.empty(rows[slab].shape, dtype=torch.uint8, device=rows.device)
        for values, scale, number in _groups_of(rows[slab], scales[slab], numbers):
            # The scale of a group of zeros may be -0.0.
            scale.copy_(quantize(values, number, bits).abs_())
        codes[slab] = pack(numbers, bits)
    return scales, codes


def _decode_rows(scales: Tensor, codes: Tensor, out: Tensor, bits: int) -> None:
    step, offset = _NUMBERS[bits]
    for slab in _slabs(out):
        numbers = unpack(codes[slab], out.shape[1], bits)
        for values, scale, number in _groups_of(out[slab], scales[slab], numbers):
            whole = number.view(torch.int8)  # integers take a quarter of the memory of float32
            if step != 1:
                whole *= step
            whole -= offset
            values.copy_(whole).mul_(scale.unsqueeze(-1))


def _slabs(rows: Tensor) -> list[slice]:
    count, columns = rows.shape
    step = max(1, (_SLAB if rows.device.type == "cpu" else _CUDA_SLAB) // max(columns, 1))
    return [slice(first, first + step) for first in range(0, count, step)] if columns else []


def _groups_of(
    rows: Tensor, scales: Tensor, numbers: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield values, scales and numbers of the full groups, then of the rows' shorter last groups.

    Values and numbers have the shape ``(r, groups, values)``, scales ``(r, groups)``.
    """
    whole, rest = divmod(rows.shape[1], GROUP)
    at = whole * GROUP
    if whole:
        values, number = (each[:, :at].unflatten(1, (whole, GROUP)) for each in (rows, numbers))
        yield values, scales[:, :whole], number
    if rest:
        yield rows[:, at:].unsqueeze(1), scales[:, whole:], numbers[:, at:].unsqueeze(1)


def quantize(groups: Tensor, numbers: Tensor, bits: int) -> Tensor:
    """Quantize ``groups`` into ``numbers``, and return their scales.

    ``groups``: float32 ``(..., k)``, k at most 256; ``numbers``: uint8, of the same shape. The
    scales are float32 ``(...)``. A group whose scale would be subnormal becomes zeros. Values that
    are not finite, or too large, give a scale that :func:`refuse_scales` refuses.
    """
    step, offset = _NUMBERS[bits]
    # Divide by a tensor: with a plain number, a GPU would multiply by the reciprocal, and the bits
    # would differ.
    if bits == 4:
        scales = torch.maximum(groups.amax(-1), groups.amin(-1).neg_())
        scales.div_(scales.new_full((), _LARGEST))
        work = torch.empty_like(groups)
    else:
        work = groups.square()
        # Sum by halves, since torch's own order of summation depends on the device.
        width = work.shape[-1]
        while width > 1:
            half = (width + 1) // 2
            work[..., : width - half] += work[..., half:width]
            width = half
        scales = work[..., 0].clone()
        scales.div_(scales.new_full((), groups.shape[-1]))
        # With MKL a CPU's float32 root may be wrong in its last bit; a rounded float64 root is not.
        scales = scales.double().sqrt_().float().mul_(_SPREAD[bits])
    scales.mul_(scales >= _LEAST_SCALE)  # NaN stays NaN
    factors = torch.where(scales > 0, scales.reciprocal(), 0).div_(step)
    # Use two operations, each of which rounds: a fused one would round only once, and only on some
    # machines. The conversion to integers then truncates.
    torch.mul(groups, factors.unsqueeze(-1), out=work).add_(offset / step + 0.5)
    if bits != 4:
        work.clamp_(0, 2**bits - 1)
    numbers.view(torch.int8).copy_(work)  # torch's conversion to uint8 is seven times slower
    return scales


def refuse_scales(scales: Tensor) -> None:
    """Raise ValueError for a scale that is neither 0 nor a normal number of at most 4.2e37."""
    normal = (scales >= _LEAST_SCALE) & (scales <= _MOST_SCALE)
    if not bool((normal | (scales == 0)).all()):
        raise ValueError("a scale that is negative, subnormal, too large or not finite")


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Pack numbers, uint8 ``(..., count)``, into ``(..., bytes)``."""
    if missing := -numbers.shape[-1] % _FILLED[bits]:
        numbers = pad(numbers, (0, missing), value=2 ** (bits - 1))
    pairs = _halve(numbers, 4)
    if bits == 4:
        return pairs
    if bits == 2:
        return _halve(pairs, 2)
    return torch.cat([_halve(pairs & 0x33, 2), _halve((pairs >> 2) & 0x11, 2, 1)], dim=-1)


def unpack(data: Tensor, count: int, bits: int) -> Tensor:
    """Return the ``count`` numbers in each row that :func:`pack` has packed."""
    if bits == 2:
        data = _double(data, 2, 2)
    elif bits == 3:
        lower, upper = data.tensor_split([data.shape[-1] * 2 // 3], dim=-1)
        data = _double(lower, 2, 2).add_(_double(upper, 1, 1, 2), alpha=4)
    return _double(data, bits, 4)[..., :count]


def _halve(numbers: Tensor, *shifts: int) -> Tensor:
    """Move the second half to the bits above the first half, once for each of ``shifts``."""
    for shift in shifts:
        lower, upper = numbers.chunk(2, dim=-1)
        numbers = (upper << shift).bitwise_or_(lower)
    return numbers


def _double(data: Tensor, width: int, *shifts: int) -> Tensor:
    """Undo :func:`_halve` for numbers of ``width`` bits. Give the shifts in reverse order."""
    for shift in shifts:
        mask = (2**width - 1) * sum(1 << place for place in range(0, 8, 2 * shift))
        data = torch.cat([data & mask, (data >> shift).bitwise_and_(mask)], dim=-1)
    return data


for _name, _bits in OWN_CODECS.items():
    CODECS.register(
        _name, Codec(partial(_encode_rows, bits=_bits), partial(_decode_rows, bits=_bits))
    )
