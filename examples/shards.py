"""Store packed tokens in files, the shards of ``examples/pretokenize.py``.

A file consists of ``magic`` (8 bytes), the length of the header (uint32, little endian), the
header, and the tokens. The header is JSON, padded with spaces so that the data begins at a multiple
of 64 bytes. The tokens are little endian: uint16 if the vocabulary has at most 65536 entries,
otherwise uint32. The header contains the dtype, the sequence length, the number of sequences, the
tokenizer's hash, EOS id and vocabulary size, and the SHA-256 of the tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from distributed_training.common.files import atomic_file

SUFFIX = ".tokens"
_MAGIC = b"DTTOKEN1"
_ALIGN = 64
_LARGEST_HEADER = 2**20
_ITEM_BYTES = {"uint16": 2, "uint32": 4}


class ShardError(ValueError):
    """A file is not a valid shard; the message says what is wrong with it."""


@dataclass(frozen=True)
class ShardHeader:
    """The header of a file of tokens. ``extra`` is JSON-able."""

    dtype: str
    sequence_length: int
    sequences: int
    tokenizer: str  # hash of the tokenizer, as tokenizer_hash returns it
    eos_id: int
    vocabulary: int
    sha256: str  # SHA-256 of the tokens as they are stored
    extra: Mapping[str, Any] = field(default_factory=dict)


def write_shard(
    path: Path,
    sequences: np.ndarray[Any, Any],
    *,
    tokenizer: str,
    eos_id: int,
    vocabulary: int,
    extra: Mapping[str, Any] | None = None,
    durable: bool = True,
) -> ShardHeader:
    """Write integer ``sequences`` (sequences, sequence_length) completely or not at all.

    ``durable``: see :func:`~distributed_training.common.files.atomic_file`. Raises OSError.
    """
    data = np.ascontiguousarray(sequences, dtype="<u2" if vocabulary <= 2**16 else "<u4")
    header = ShardHeader(
        dtype=data.dtype.name,
        sequence_length=data.shape[1],
        sequences=data.shape[0],
        tokenizer=tokenizer,
        eos_id=eos_id,
        vocabulary=vocabulary,
        sha256=hashlib.sha256(data.data).hexdigest(),
        extra=dict(extra or {}),
    )
    text = json.dumps(header.__dict__, sort_keys=True).encode()
    text += b" " * (-(len(_MAGIC) + 4 + len(text)) % _ALIGN)
    with atomic_file(path, durable=durable) as file:
        file.write(_MAGIC + len(text).to_bytes(4, "little") + text)
        file.write(data.data)
    return header


def read_header(path: Path) -> tuple[ShardHeader, int]:
    """Return the header and the offset at which the data begins.

    Raises ShardError, OSError. The checksum is not verified.
    """
    with path.open("rb") as file:
        start = file.read(len(_MAGIC) + 4)
        if len(start) < len(_MAGIC) + 4 or start[: len(_MAGIC)] != _MAGIC:
            raise ShardError(f"{path} is not a file of tokens")
        length = int.from_bytes(start[len(_MAGIC) :], "little")
        # Refuse a damaged length before reading the header into memory.
        if length > _LARGEST_HEADER:
            raise ShardError(f"{path} has a damaged header")
        text = file.read(length)
    try:
        header = ShardHeader(**json.loads(text))
        # Refuse other dtypes: floats are not tokens, and objects could crash the process.
        size = len(start) + length + _ITEM_BYTES[header.dtype] * math.prod(_shape(header))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ShardError(f"{path} has a damaged header") from error
    # Compare the size before mapping the file, since reading a map beyond the end of its file kills
    # the process (SIGBUS).
    if path.stat().st_size != size:
        raise ShardError(f"{path} has {path.stat().st_size} bytes, but its header says {size}")
    return header, len(start) + length


def _shape(header: ShardHeader) -> tuple[int, int]:
    sequences, length = header.sequences, header.sequence_length
    if not (type(sequences) is type(length) is int and sequences >= 0 and length >= 1):
        raise ValueError("no tokens")
    return sequences, length


def open_shard(path: Path, *, verify: bool = True) -> tuple[ShardHeader, np.ndarray[Any, Any]]:
    """Return the header and the memory-mapped tokens (sequences, sequence_length).

    Raises ShardError for a damaged file. With ``verify``, all of it is read and its checksum
    compared.
    """
    header, offset = read_header(path)
    shape = _shape(header)
    dtype = np.dtype(header.dtype).newbyteorder("<")
    # An empty file cannot be mapped.
    if header.sequences == 0:
        return header, np.zeros(shape, dtype=dtype)
    data: np.ndarray[Any, Any] = np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape)
    if verify and hashlib.sha256(data.data).hexdigest() != header.sha256:
        raise ShardError(f"{path} is corrupted: its tokens do not match the header's checksum")
    return header, data
