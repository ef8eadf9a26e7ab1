"""Codecs of uploads: how the values of rows become bytes, by the name in a network's file.

A codec is two functions, ``encode_rows`` and ``decode_rows`` (:class:`Codec`). The product's own
write 4, 3 or 2 bits for each value, and a scale for each group of at most 256 values of a row
(:mod:`~.quantization`). To add another one, write the line ``CODECS.register(name, Codec(...))``
into a module, which each member and the validator name with ``--plugins``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from distributed_training.common.kinds import Kinds

from .quantization import GROUP, dequantize, pack, packed_bytes, quantize, unpack
from .types import OWN_CODECS

# How many values are handled at once: few enough that their copies stay in the CPU's cache, or do
# not fill a GPU.
_SLAB, _CUDA_SLAB = 1 << 19, 1 << 24
_TYPICAL = 1 << 12  # the bytes per value are measured on a row of this many values


@dataclass(frozen=True)
class Codec:
    """The two functions of a codec. Both give the same bits on each device and machine.

    ``encode_rows(rows)``: ``rows`` are float32 ``(r, c)``, contiguous. It returns scales, float32
    ``(r, g)``, and codes, uint8 ``(r, b)``, on the device of ``rows``; ``g`` and ``b`` depend only
    on ``c``, also where ``r`` is 0. Of values that are not finite it makes a scale that is not
    finite.

    ``decode_rows(scales, codes, out)``: writes ``out``, float32 ``(r, c)``, contiguous. Each scale
    has been checked: it is 0 or a normal number of at most 4.2e37. The codes are foreign bytes, and
    whatever they are, ``out`` must become finite and nothing may be raised.
    """

    encode_rows: Callable[[Tensor], tuple[Tensor, Tensor]]
    decode_rows: Callable[[Tensor, Tensor, Tensor], None]

    def row(self, columns: int) -> tuple[int, int]:
        """Return how many scales, and how many bytes of codes, a row of ``columns`` values has."""
        return _row(self, columns)

    @property
    def bits(self) -> float:
        """Bits per value in a long row, with its part of the scales."""
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


def _encode_rows(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    count, columns = rows.shape
    scales = rows.new_empty((count, -(-columns // GROUP)))
    codes = rows.new_empty((count, packed_bytes(columns, bits)), dtype=torch.uint8)
    for slab in _slabs(rows):
        numbers = torch.empty(rows[slab].shape, dtype=torch.uint8, device=rows.device)
        for values, scale, number in _groups_of(rows[slab], scales[slab], numbers):
            # The scale of a group of zeros may come out as -0.0.
            scale.copy_(quantize(values, number, bits).abs_())
        codes[slab] = pack(numbers, bits)
    return scales, codes


def _decode_rows(scales: Tensor, codes: Tensor, out: Tensor, bits: int) -> None:
    for slab in _slabs(out):
        numbers = unpack(codes[slab], out.shape[1], bits)
        for values, scale, number in _groups_of(out[slab], scales[slab], numbers):
            dequantize(scale, number, values, bits)


def _slabs(rows: Tensor) -> list[slice]:
    count, columns = rows.shape
    step = max(1, (_SLAB if rows.device.type == "cpu" else _CUDA_SLAB) // max(columns, 1))
    return [slice(first, first + step) for first in range(0, count, step)] if columns else []


def _groups_of(
    rows: Tensor, scales: Tensor, numbers: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield values, scales and numbers of the whole groups, then of those at the rows' ends.

    Values and numbers are ``(r, groups, values)``, scales ``(r, groups)``.
    """
    whole, rest = divmod(rows.shape[1], GROUP)
    at = whole * GROUP
    if whole:
        values, number = (each[:, :at].unflatten(1, (whole, GROUP)) for each in (rows, numbers))
        yield values, scales[:, :whole], number
    if rest:
        yield rows[:, at:].unsqueeze(1), scales[:, whole:], numbers[:, at:].unsqueeze(1)


for _name, _bits in OWN_CODECS.items():
    CODECS.register(
        _name, Codec(partial(_encode_rows, bits=_bits), partial(_decode_rows, bits=_bits))
    )
