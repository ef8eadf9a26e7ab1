"""A codec for uploads: the 64 largest of each 4,096 values, in 2 bits and a place of 12 bits each.

    PYTHONPATH=examples dt-network init --plugins sparse_codec --set round.codec=sparse

A row of the file has the same number of bytes whatever its values are, so the codec writes a fixed
number of entries and one scale for each chunk of a row: 0.028 bytes per value. No chunk extends
beyond the end of its row. A shorter chunk has 4 entries for each 256 values or part of 256. What is
not sent is the member's residual, which is part of its next upload.

An entry is a place, times 4, plus a number for one of 1, 2, -1, -2 times the scale, which is half
the largest magnitude. Four entries take 7 bytes. A value that is nearer to zero than to the scale
is not sent: its entry repeats the first one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from distributed_training.protocol.codecs import CODECS, Codec

CHUNK, SHARE, UNIT = 4096, 64, 256  # values that share 7 bytes, of which one is sent
_SHIFTS, _BYTES = (0, 14, 28, 42), (0, 8, 16, 24, 32, 40, 48)
_LEVELS = (0, 1, 2, -1, -2)


def _width(columns: int) -> int:
    """Return the number of values in a chunk, with the zeros that fill its last unit."""
    return columns + -columns % UNIT


def encode_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    scales, codes = [], []
    for chunk in rows.split(CHUNK, 1):
        filled = F.pad(chunk, (0, _width(chunk.shape[1]) - chunk.shape[1]))
        # A stable sort, since all devices and machines must choose the same ones of equal values.
        order = filled.abs().sort(dim=1, descending=True, stable=True).indices
        places = order[:, : filled.shape[1] // SHARE]
        values = filled.gather(1, places)
        scale = values[:, :1].abs() / 2
        scale = scale.where(~(scale < torch.finfo(torch.float32).tiny), 0)  # NaN stays
        numbers = 2 * (values < 0).long() + (values.abs() >= 1.5 * scale).long()
        entries = places * 4 + numbers
        entries = torch.where(values.abs() < scale / 2, entries[:, :1], entries)
        shifts = torch.tensor(_SHIFTS, device=rows.device)
        words = (entries.unflatten(1, (-1, 4)) << shifts).sum(2, keepdim=True)
        found = (words >> torch.tensor(_BYTES, device=rows.device)) & 255
        scales.append(scale)
        codes.append(found.flatten(1).to(torch.uint8))
    return torch.cat(scales, 1), torch.cat(codes, 1)


def decode_rows(scales: Tensor, codes: Tensor, out: Tensor) -> None:
    first = 0
    for index, chunk in enumerate(out.split(CHUNK, 1)):
        width = _width(chunk.shape[1])
        last = first + width // UNIT * len(_BYTES)
        parts = codes[:, first:last].long().unflatten(1, (-1, len(_BYTES)))
        words = (parts << torch.tensor(_BYTES, device=out.device)).sum(2, keepdim=True)
        entries = ((words >> torch.tensor(_SHIFTS, device=out.device)) & 0x3FFF).flatten(1)
        # Bytes from outside may name places beyond the chunk, or a place twice. Taking the largest
        # whole number makes the result independent of the order in which a device writes them.
        numbers = torch.zeros((len(out), width), dtype=torch.int32, device=out.device)
        numbers.scatter_reduce_(1, (entries >> 2) % width, (entries & 3).int() + 1, "amax")
        levels = torch.tensor(_LEVELS, dtype=out.dtype, device=out.device)
        chunk.copy_(levels[numbers[:, : chunk.shape[1]]] * scales[:, index : index + 1])
        first = last


CODECS.register("sparse", Codec(encode_rows, decode_rows))
