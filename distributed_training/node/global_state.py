"""The global state from its files: the network's model between two rounds.

``store.bucket_reader`` fetches the files and checks each by itself: whole, finite, of one revision.
Here they are read and compared with the model that ``config.json`` describes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distributed_training.protocol import keys
from distributed_training.protocol.gradients import Schema
from distributed_training.protocol.metadata import parse_config
from distributed_training.training.model import parameter_schema, without_extras
from distributed_training.training.outer_step import load_outer_optimizer


def model_config(folder: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a fetched state, with its extras. Raises ValueError."""
    return parse_config((folder / keys.CONFIG).read_bytes())[0]


def model_bytes(schema: Schema) -> int:
    """Return the most bytes of a float32 ``model.safetensors`` (it may hold tied weights twice)."""
    tensors = sum(4 * math.prod(shape) + 256 + len(name) for name, shape in schema)
    return 2 * tensors + 1024 * 1024


def load_weights(path: Path, schema: Schema) -> list[Tensor]:
    """Load float32 tensors in the order of ``schema``; names outside it are left out.

    Raises ValueError for a missing name, another shape, NaN or Inf, or an unreadable file.
    """
    try:
        with safe_open(path, "pt") as file:  # memory-mapped, one tensor after another
            missing = sorted({name for name, _ in schema} - set(file.keys()))
            if missing:
                raise ValueError(f"{path.name} lacks {missing[0]} and {len(missing) - 1} more")
            return [_checked(path, name, file.get_tensor(name), shape) for name, shape in schema]
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from None


def _checked(path: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{path.name}: {name} has shape {tuple(tensor.shape)}, not {shape}")
    floats = tensor.to(torch.float32)  # a finite float64 may be Inf then
    if not tensor.is_floating_point() or not bool(torch.isfinite(floats).all()):
        raise ValueError(f"{path.name}: {name} is not finite floating-point numbers")
    return floats


@dataclass(frozen=True)
class GlobalState:
    """The network's model between two rounds.

    Tensors are float32 on the CPU, in schema order, and never changed in place.
    """

    model_config: Mapping[str, Any]
    schema: Schema
    outer_step: int
    weights: list[Tensor]
    momentum: list[Tensor] | None
    learning_rate: float
    mu: float
    last_allreduce_block: int

    @classmethod
    def read(cls, folder: Path, outer_step: int) -> GlobalState:
        """Read the global state from a folder that ``BucketReader.fetch`` returned.

        Raises ValueError for files that do not fit the model of their ``config.json``.
        """
        config = model_config(folder)
        schema = parameter_schema(config)
        outer = load_outer_optimizer(folder / keys.OUTER_OPTIMIZER, schema)
        return cls(
            model_config=without_extras(config),
            schema=schema,
            outer_step=outer_step,
            weights=load_weights(folder / keys.MODEL, schema),
            # Copies: the tensors read are a file's, which may be written again.
            momentum=None if outer.momentum is None else [t.clone() for t in outer.momentum],
            learning_rate=outer.learning_rate,
            mu=outer.mu,
            last_allreduce_block=config.get("last_allreduce_block") or 0,
        )

    def after(self, weights: list[Tensor], momentum: list[Tensor], *, block: int) -> GlobalState:
        """Return the state that follows by one outer step."""
        return replace(
            self,
            outer_step=self.outer_step + 1,
            weights=weights,
            momentum=momentum,
            last_allreduce_block=block,
        )
