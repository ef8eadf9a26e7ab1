"""Safetensors files written piece by piece: by several ranks at once, or hashed on the way."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distributed_training.common.files import atomic_file

_NAMES = {torch.float32: "F32", torch.int64: "I64", torch.int16: "I16", torch.uint8: "U8"}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    array: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


@dataclass(frozen=True)
class SafetensorsLayout:
    """Where each tensor of a safetensors file lies, so that several ranks can write it at once.

    The format is the public one: eight bytes little-endian header size, a JSON header, raw data.
    """

    header: bytes
    offsets: dict[str, int]  # of the first byte, from the start of the file
    size: int

    @classmethod
    def of(
        cls,
        entries: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> SafetensorsLayout:
        table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        position = 0
        starts: dict[str, int] = {}
        for name, dtype, shape in entries:
            size = math.prod(shape) * dtype.itemsize
            table[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [position, position + size],
            }
            starts[name] = position
            position += size
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return cls(header, {n: s + len(header) for n, s in starts.items()}, position + len(header))


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write ``tensors`` (CPU) durably; returns the SHA-256, computed on the way."""
    entries = [(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    layout = SafetensorsLayout.of(entries)
    digest = hashlib.sha256(layout.header)
    with atomic_file(path) as handle:
        handle.write(layout.header)
        for tensor in tensors.values():
            data = tensor_bytes(tensor)
            digest.update(data)
            handle.write(data)
    return digest.hexdigest()
