"""Durable files (temporary name, sync, rename) and safetensors files written piece by piece."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

_NAMES = {torch.float32: "F32", torch.int64: "I64", torch.int16: "I16", torch.uint8: "U8"}


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under ``path`` complete or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, content: Any) -> None:
    with atomic_file(path) as handle:
        handle.write(json.dumps(content, indent=4, sort_keys=True).encode())


def sha256_of(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


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
