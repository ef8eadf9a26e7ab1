"""A plug-in: a compression that sends each entry's sign, and one magnitude for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distributed_training.protocol.compression import Code, Compression
from distributed_training.training.compression import COMPRESSIONS


class Sign(Compression):
    """One byte an entry; the magnitude is the mean of the parameter's (arXiv 1802.04434)."""

    endings = ("signs", "scale")
    scaled = ("scale",)

    def encode(self, whole: Tensor) -> Code:
        return whole.sign().to(torch.int8), whole.abs().mean().reshape(1)

    def decode(self, code: Code, shape: Sequence[int]) -> Tensor:
        signs, scale = code
        return signs.to(torch.float32) * scale

    def check(self, code: Code, shape: Sequence[int]) -> None:
        found = [(tuple(part.shape), part.dtype) for part in code]
        if found != self.shapes(shape):
            raise ValueError(f"a code of {found} is none of a parameter of {tuple(shape)}")

    def shapes(self, shape: Sequence[int]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [(tuple(shape), torch.int8), ((1,), torch.float32)]


COMPRESSIONS.register("sign", lambda *_: Sign())
