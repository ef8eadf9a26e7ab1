"""A codec of 8 bits for each value: ``--plugins tests.toys.codec``, ``round.codec = "eight"``."""

from __future__ import annotations

import torch
from torch import Tensor

from distributed_training.protocol.codecs import CODECS, Codec


def encode_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    if not len(rows):
        return rows.new_empty(0, 1), rows.new_empty((0, rows.shape[1]), dtype=torch.uint8)
    scales = rows.abs().amax(1, keepdim=True).div_(127)
    scales[scales < torch.finfo(torch.float32).tiny] = 0
    numbers = torch.where(scales > 0, rows / scales, 0).round_()
    return scales, numbers.add_(128).to(torch.uint8)


def decode_rows(scales: Tensor, codes: Tensor, out: Tensor) -> None:
    # 127 times the largest scale would not be finite.
    torch.mul(codes.float().sub_(128), scales.clamp(max=1e36), out=out)


CODECS.register("eight", Codec(encode_rows, decode_rows))
