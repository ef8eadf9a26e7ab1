"""Watch the tensors that are not trained, and notice if training has changed one of them.

Frozen tensors are sent only once, before training. So a member with a different frozen tensor
trains another model, and no digest of the exchanged weights shows that. A checksum on the device
does. At each close it reads the tensors once and waits for the device once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

#: The integer type for each size of a value. Sums are modulo 2**64, so their order does not matter.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 22  # values that are read at once; each takes 24 bytes


class FrozenTensorError(RuntimeError):
    """A frozen tensor has changed. The text is one line that names a remedy."""


class FrozenTensors:
    """Tensors that nothing may change from now on.

    Args:
        tensors: This rank's own tensors, by name, on its device.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._before = self._checksums()

    def find_changed(self) -> str:
        """Return the name of the first tensor that has changed, or "" if none has."""
        if not self._tensors:
            return ""
        same = (self._checksums() == self._before).all(dim=1).tolist()
        return next((name for name, one in zip(self._tensors, same, strict=True) if not one), "")

    @torch.no_grad()
    def _checksums(self) -> Tensor:
        """Return int64 ``(tensors, 2)``: a plain and a weighted sum of each tensor's words.

        The weighted sum depends on the order of the words.
        """
        sums = []
        for tensor in self._tensors.values():
            words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.itemsize])
            found = torch.zeros(2, dtype=torch.int64, device=tensor.device)
            for piece in words.split(_PIECE):
                wide = piece.to(torch.int64)
                places = torch.arange(1, len(wide) + 1, device=wide.device)
                found = found * 31 + torch.stack([wide.sum(), (wide * places).sum()])
            sums.append(found)
        return torch.stack(sums) if sums else torch.zeros(0, 2, dtype=torch.int64)


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to the state dict, such as BatchNorm's, by name.

    Uploads do not contain the changes that training makes to them. For a DTensor this returns this
    rank's part.
    """
    states = model.state_dict(keep_vars=True).items()
    kept = ((name, each) for name, each in states if not isinstance(each, nn.Parameter))
    return {n: each.to_local() if isinstance(each, DTensor) else each for n, each in kept}
