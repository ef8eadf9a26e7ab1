"""Read the files of the network's weights, and hold them between two outer steps.

A file is foreign bytes: each function checks names, shapes and that all values are finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from distributed_training.protocol import keys
from distributed_training.protocol.metadata import parse_config
from distributed_training.protocol.types import Schema


def read_model_config(folder: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a fetched state, with its extras. Raises ValueError."""
    return parse_config((folder / keys.CONFIG).read_bytes())


def model_bytes(schema: Schema) -> int:
    """Return the most bytes of a float32 ``model.safetensors`` (it may hold tied weights twice)."""
    tensors = sum(4 * math.prod(shape) + 256 + len(name) for name, shape in schema)
    return 2 * tensors + 1024 * 1024


def load_weights(path: Path, schema: Schema) -> list[Tensor]:
    """Load float32 tensors in the order of ``schema``; names outside it are left out.

    Raises ValueError for a missing name, another shape, NaN or Inf, or an unreadable file.
    """
    try:
        # The file is memory-mapped, so only one tensor is in memory.
        with safe_open(path, "pt") as file:
            missing = sorted({name for name, _ in schema} - set(file.keys()))
            if missing:
                raise ValueError(f"{path.name} lacks {missing[0]} and {len(missing) - 1} more")
            return [
                checked_tensor(path, name, file.get_tensor(name), shape) for name, shape in schema
            ]
    except ValueError:
        raise
    except Exception as error:  # noqa: BLE001 - foreign bytes: of a type torch lacks, for one
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{path.name} cannot be read: {why:.200}") from None


def checked_tensor(path: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of a file as float32.

    Raises ValueError for another shape or type, NaN or Inf.
    """
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{path.name}: {name} has shape {tuple(tensor.shape)}, not {shape}")
    floats = tensor.to(torch.float32)  # a finite float64 may become Inf
    if not tensor.is_floating_point() or not bool(torch.isfinite(floats).all()):
        raise ValueError(f"{path.name}: {name} is not finite floating-point numbers")
    return floats


@dataclass(frozen=True)
class GlobalState:
    """The network's model between two rounds.

    Tensors are float32 on the CPU, in schema order, and never changed in place.
    ``total_inner_steps``: as many as a miner has done that trained from the beginning;
    ``total_tokens``: those of all miners.
    """

    model_config: Mapping[str, Any]
    schema: Schema
    outer_step: int
    weights: list[Tensor]
    total_inner_steps: int = 0
    total_tokens: int = 0
