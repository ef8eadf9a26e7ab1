"""The table of a safetensors file, read without its tensors.

The format is public (huggingface/safetensors, README, "Format"): eight bytes, little-endian, the
length N of the header; N bytes of JSON, from names to ``dtype``, ``shape`` and ``data_offsets``,
which count from the header's end; then the tensors, without gap or overlap. What is read comes from
strangers: the work is bounded by the header's length, and that by ``MOST_HEADER``.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

LENGTH_BYTES = 8
#: Bytes. Of 35,000 tensors; the JSON of a stranger takes up to 25 times as much memory.
MOST_HEADER = 4 * 1024 * 1024
_MOST_DIMENSIONS = 16
_LARGEST = 2**53  # of a size or a place: what any JSON reader keeps exact
_ITEM_BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2},
    **{"I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1},
    **{"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
}


@dataclass(frozen=True)
class Entry:
    """A tensor of a safetensors file; ``start`` from the file's beginning and ``size`` in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def safetensors_table(read: Callable[[int, int], bytes], size: int) -> dict[str, Entry]:
    """Name -> entry, in the order of the data, after checking that table and file size agree.

    ``read``: (first byte, bytes) -> content of a file of ``size`` bytes. Raises ValueError, in one
    short line, and what ``read`` raises.
    """
    length = int.from_bytes(read(0, LENGTH_BYTES), "little")
    if not 2 <= length <= min(MOST_HEADER, size - LENGTH_BYTES):
        raise ValueError("the header's length is impossible")
    text = read(LENGTH_BYTES, length)
    try:
        table = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise ValueError("its header is not a JSON object")
    table.pop("__metadata__", None)
    begin = LENGTH_BYTES + length
    entries = {name: _entry(name, raw, begin) for name, raw in table.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].size)))
    for name, entry in ordered.items():
        if entry.start != begin:
            raise ValueError(f"{reprlib.repr(name)} does not lie where the one before it ends")
        begin += entry.size
    if begin != size:
        raise ValueError("the file is longer or shorter than its tensors")
    return ordered


def _without_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A reader that takes the first of two equal names sees another file than one that takes the
    last."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{reprlib.repr(name)} is there twice")
        found[name] = value
    return found


def _entry(name: str, raw: Any, begin: int) -> Entry:
    try:
        dtype, shape, (first, last) = raw["dtype"], raw["shape"], raw["data_offsets"]
        item = _ITEM_BYTES[dtype]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{reprlib.repr(name)} is not described as a tensor") from None
    numbers_only = isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS
    if not numbers_only or not all(map(_is_size, (first, last, *shape))):
        raise ValueError(f"{reprlib.repr(name)} has an impossible shape or place")
    if last - first != math.prod(shape) * item:
        raise ValueError(f"{reprlib.repr(name)} does not take the bytes of its shape")
    return Entry(dtype, tuple(shape), begin + first, last - first)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST
