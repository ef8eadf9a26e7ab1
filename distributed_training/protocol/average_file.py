"""Write and read the members' average of a close (protocol page, section 5).

The average is a safetensors file with each parameter in float16, as received from the members:
multiplied by a power of two, whose exponent is ``scale`` in the metadata. With this file an audit
can recompute the outer step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .types import Schema
from .update_file import rows_and_columns


def write_average(
    path: Path, names: Sequence[str], tensors: Sequence[Tensor], scale: float
) -> None:
    """Write an average in float16 as it was received: ``scale`` times its true values."""
    values = {n: t.detach().to(torch.float16) for n, t in zip(names, tensors, strict=True)}
    path.parent.mkdir(parents=True, exist_ok=True)
    # No fsync is needed: a validator that is killed here will use the merge instead of the average.
    save_file(values, path, metadata={"scale": str(round(math.log2(scale)))})


class Average:
    """A file written by :func:`write_average`, memory-mapped."""

    def __init__(self, path: Path, schema: Schema) -> None:
        """Open a file, which may contain any bytes.

        Raises ValueError if it is not an average of this model, and OSError.
        """
        try:
            with safe_open(path, "pt") as file:
                self._values = [file.get_tensor(name) for name, _ in schema]
                exponent = int((file.metadata() or {}).get("scale", ""))
                extra = len(list(file.keys())) != len(schema)
        except SafetensorError as error:
            raise ValueError(f"it is not an average: {error}") from None
        found = [(tuple(values.shape), values.dtype) for values in self._values]
        if extra or found != [(tuple(shape), torch.float16) for _, shape in schema]:
            raise ValueError("its parameters are not those of the model")
        if abs(exponent) > 100:
            raise ValueError(f"its scale is 2 to the power of {exponent}")
        self._factor = 2.0**-exponent

    def rows(self, index: int, first: int, stop: int) -> Tensor:
        """Return rows ``first`` to ``stop`` of parameter ``index``, float32 ``(rows, columns)``."""
        values = self._values[index]
        rows = values.view(rows_and_columns(values.shape))[first:stop]
        return rows.to(torch.float32).mul_(self._factor)
