"""Define the interface of a compression. ``training/compression.py`` registers the kinds.

A *code* is what travels of one parameter: tensors that lie in ``gradients.pt`` under the
parameter's name and one ending each. The public network's is ``TopK`` in ``gradients.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

Code = tuple[Tensor, ...]  # in the order of the compression's ``endings``


class Compression(ABC):
    """Encodes one parameter of a pseudo-gradient, and decodes a peer's code of it.

    ``endings``: of the keys under which a code's tensors travel. ``scaled``: the endings of those
    that are multiplied where the pseudo-gradient is. ``by_rows``: whether the code of some rows of
    a matrix is ``(idxs, vals)`` of the entries that are sent, and the same range of the whole's
    code. Then each rank encodes the rows that it holds; else rank 0 encodes the whole matrix.
    """

    endings: tuple[str, ...]
    scaled: tuple[str, ...]

    @property
    def by_rows(self) -> bool:
        return False

    @abstractmethod
    def encode(self, whole: Tensor) -> Code:
        """Return the code of a float32 parameter."""

    @abstractmethod
    def decode(self, code: Code, shape: Sequence[int]) -> Tensor:
        """Return the float32 tensor of ``shape`` that a code stands for."""

    @abstractmethod
    def check(self, code: Code, shape: Sequence[int]) -> None:
        """Raise ValueError unless a code fits a parameter of ``shape``. It may be hostile.

        Its tensors are dense, on the CPU, and those of floats are finite. Nothing may be computed
        before types and shapes are right: a tensor of a few bytes may claim to be terabytes.
        """

    @abstractmethod
    def shapes(self, shape: Sequence[int]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and type of each tensor of the whole code of a parameter of ``shape``."""

    def subtract_sent(self, whole: Tensor, code: Code) -> None:
        """Subtract in place what its ``code`` holds from a parameter."""
        whole -= self.decode(code, whole.shape)

    def encode_rows(self, rows: Tensor) -> Code:
        """Return the code of some rows of a matrix, where ``by_rows``."""
        raise NotImplementedError
