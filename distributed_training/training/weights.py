"""Read the network's weight files, and hold the weights between two outer steps.

The files are not trusted: the functions check names and shapes, and that all values are finite.
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
    """Return the largest size of a float32 ``model.safetensors``, in bytes.

    It may hold tied weights twice.
    """
    tensors = sum(4 * math.prod(shape) + 256 + len(name) for name, shape in schema)
    return 2 * tensors + 1024 * 1024


def load_weights(path: Path, schema: Schema) -> list[Tensor]:
    """Load float32 tensors in the order of ``schema``; other tensors in the file are ignored.

    Raises ValueError for a missing name, a wrong shape, NaN or Inf, or an unreadable file.
    """
    try:
        # The file is memory-mapped, so the rest of it takes no memory.
        with safe_open(path, "pt") as file:
            missing = sorted({name for name, _ in schema} - set(file.keys()))
            if missing:
                raise ValueError(f"{path.name} lacks {missing[0]} and {len(missing) - 1} more")
            return [
                checked_tensor(path, name, file.get_tensor(name), shape) for name, shape in schema
            ]
    except ValueError:
        raise
    except Exception as error:  # noqa: BLE001 - foreign bytes, such as a type that torch lacks
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{path.name} cannot be read: {why:.200}") from None


def checked_tensor(path: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor from a file as float32.

    Raises ValueError for a wrong shape or type, NaN or Inf.
    """
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{path.name}: {name} has shape {tuple(tensor.shape)}, not {shape}")
    floats = tensor.to(torch.float32)  # a finite float64 may become Inf
    if not tensor.is_floating_point() or not bool(torch.isfinite(floats).all()):
        raise ValueError(f"{path.name}: {name} is not finite or not floating-point")
    return floats


@dataclass(frozen=True)
class GlobalState:
    """The network's model between two rounds.

    Tensors are float32 on the CPU, in schema order, and never changed in place.
    ``total_inner_steps``: the steps of a miner that has trained from the beginning.
    ``total_tokens``: the tokens of all miners together.
    """

    model_config: Mapping[str, Any]
    schema: Schema
    outer_step: int
    weights: list[Tensor]
    total_inner_steps: int = 0
    total_tokens: int = 0
