"""Mutations of real files, drawn from a seed: the same seed gives the same bytes.

Each changes one place or a few, in the terms of the file's own format: names and numbers of a
safetensors header, values of JSON. What is left is a file that gets far into its reader, as random
bytes do not.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

_NUMBERS = (
    *(0, 1, -1, 7, 127, 255, 256, 2**15, 2**31 - 1, 2**31, 2**32),
    *(2**53, 2**63, 2**64, 10**400),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "x" * 5000, "\x00", "\ud800", "../..", "9" * 400, 1.5, -0.0),
    *(float("nan"), float("inf"), 1e308, [], {}, [[]], [None] * 300, {"a": {"a": 1}}, ["x"], [-1]),
    *_NUMBERS,
)


def mutated(draw: random.Random, name: str, honest: bytes) -> bytes:
    """Return a mutation of a file of that name."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        honest = draw.choice(_kinds(name))(draw, honest)
    return honest


def _kinds(name: str) -> tuple[Callable[[random.Random, bytes], bytes], ...]:
    if name.endswith(".safetensors"):
        return _headers, _headers, _bytes
    if name.endswith(".jsonl"):
        return _lines, _bytes
    if name.endswith((".json", "instance")):
        return _values, _values, _texts, _bytes
    return (_bytes,)


# --- any bytes ------------------------------------------------------------------------------------


def _bytes(draw: random.Random, data: bytes) -> bytes:
    """Cut, change, insert or copy a few."""
    found, at = bytearray(data), draw.randint(0, len(data))
    few = draw.randbytes(draw.choice((1, 1, 2, 4, 8)))
    match draw.randrange(6):
        case 0:
            del found[at : at + draw.choice((1, 2, 4, 30, len(data)))]
        case 1:
            found[at : at + len(few)] = few
        case 2:
            found[at:at] = few
        case 3:
            first = draw.randint(0, len(data))
            found[at:at] = found[first : first + draw.randint(1, 200)]
        case 4:
            found[at : at + 4] = struct.pack("<I", draw.choice(_NUMBERS) % 2**32)
        case 5:
            if at < len(found):
                found[at] ^= 1 << draw.randrange(8)
    return bytes(found)


# --- JSON -----------------------------------------------------------------------------------------


def _changed(draw: random.Random, content: Any) -> Any:
    """Return the content with one value changed, removed, or under another name."""
    holder: Any = [content]
    place: Any = 0
    while isinstance(holder[place], (dict, list)) and holder[place] and draw.random() < 0.8:
        holder = holder[place]
        place = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        if draw.random() < 0.15:
            break
    match draw.randrange(4):
        case 0 if isinstance(holder, dict):
            del holder[place]
        case 1 if isinstance(holder, dict):
            holder[draw.choice(("", "x", "__metadata__", "9", "\x00"))] = holder.pop(place)
        case 2 if isinstance(holder, list) and len(holder) > 1:
            holder.append(holder[place])
        case _:
            holder[place] = draw.choice(_VALUES)
    return content


def _values(draw: random.Random, data: bytes) -> bytes:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return data
    top = [content]
    _changed(draw, top)
    return json.dumps(top[0] if top else None).encode()


def _texts(draw: random.Random, data: bytes) -> bytes:
    """Put in what json.dumps does not write: a name twice, NaN, 1e999, brackets, encodings."""
    text = data.decode("utf-8", "replace")
    places = [at for at, letter in enumerate(text) if letter in '{[,:"0123456789'] or [0]
    at = draw.choice(places)
    piece = draw.choice(
        ("NaN", "-Infinity", "1e999", "[" * 2000, '"', "\\u", "0x1", "{}", "9" * 5000)
    )
    if draw.random() < 0.2:
        return text.encode(draw.choice(("utf-16", "utf-32", "utf-8-sig")), "replace")
    if draw.random() < 0.2 and text.startswith("{") and len(text) > 2:
        return f"{text[:-1]},{text[1:]}".encode()
    return f"{text[:at]}{piece}{text[at:]}".encode()


def _lines(draw: random.Random, data: bytes) -> bytes:
    rows = data.splitlines(keepends=True) or [b""]
    at = draw.randrange(len(rows))
    rows[at] = draw.choice((_values, _texts, _bytes))(draw, rows[at])
    return b"".join(rows)


def _headers(draw: random.Random, data: bytes) -> bytes:
    """Change the header of a safetensors file, and mostly its length with it."""
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]
    header = draw.choice((_values, _values, _texts, _bytes))(draw, header)
    if draw.random() < 0.9:
        length = len(header)
    else:
        length = draw.choice(_NUMBERS) % 2**64
    return struct.pack("<Q", length) + header + rest
