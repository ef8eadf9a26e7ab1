"""Mutations of real files, drawn from a seed: the same seed gives the same bytes.

Each changes one place or a few, in the terms of the file's own format: instructions and arguments
of a pickle, members and records of a zip archive, names and numbers of a safetensors header, values
of JSON. What is left is a file that gets far into its reader, as random bytes do not.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import random
import struct
import warnings
import zipfile
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
#: Instructions of every kind that torch.save writes, and some that it does not: without arguments,
#: with one, and names of what torch.load allows or refuses.
_SNIPPETS = (
    *(bytes([code]) for code in b"N\x88\x89)]}(012.tRbaesuQ\x81\x85\x86\x87\x93\x94"),
    *(b"K\1", b"J\xff\xff\xff\xff", b"G\x7f\xf8" + bytes(6), b"\x8a\xff" + b"\x7f" * 255),
    *(b"X\1\0\0\0x", b"X\3\0\0\0cpu", b"\x8c\1x", b"\x80\x04", b"\x95" + bytes(8)),
    *(b"q\0", b"h\0", b"r\0\0\0\x7f", b"j\0\0\0\1"),
    *(
        b"c%s\n%s\n" % tuple(name.encode().rsplit(b".", 1))
        for name in (
            *("torch.Size", "torch.device", "torch.float32", "torch.HalfStorage"),
            *("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"),
            *("torch._utils._rebuild_sparse_tensor", "torch._utils._rebuild_qtensor"),
            *("torch.ComplexFloatStorage", "torch.nn.parameter.Parameter"),
            *("collections.OrderedDict", "collections.Counter", "builtins.bytearray", "os.system"),
        )
    ),
)


def mutated(draw: random.Random, name: str, honest: bytes) -> bytes:
    """Return a mutation of a file of that name."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        honest = draw.choice(_kinds(name))(draw, honest)
    return honest


def _kinds(name: str) -> tuple[Callable[[random.Random, bytes], bytes], ...]:
    if name.endswith(".pt"):
        return _pickles, _pickles, _pickles, _archives, _bytes
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


# --- pickles --------------------------------------------------------------------------------------


def _instructions(body: bytes) -> list[bytes]:
    try:
        starts = [at for *_, at in pickletools.genops(body) if at is not None]
    except Exception:  # noqa: BLE001 - of a mutation before
        starts = [0]
    return [body[a:b] for a, b in zip(starts, [*starts[1:], len(body)], strict=True)]


def _argument(draw: random.Random, code: bytes) -> bytes:
    """Return an instruction with another argument: of a number, a text or a place in the memo."""
    number = draw.choice(_NUMBERS)
    match code[:1]:
        case pickle.BININT1 | pickle.BINPUT | pickle.BINGET:
            return code[:1] + bytes([number % 256])
        case pickle.BININT2:
            return pickle.BININT2 + struct.pack("<H", number % 2**16)
        case pickle.BININT | pickle.LONG_BINPUT | pickle.LONG_BINGET:
            return code[:1] + struct.pack("<I", number % 2**32)
        case pickle.LONG1:
            long = number.to_bytes(180, "little", signed=True)
            return pickle.LONG1 + bytes([len(long)]) + long
        case pickle.BINFLOAT:
            return pickle.BINFLOAT + struct.pack(">d", draw.choice((float("nan"), 1e999, -1.0)))
        case pickle.BINUNICODE:
            text = draw.choice(
                (b"", b"x", b"storage", b"cpu", b"cuda:99", b"\xff\xfe", b"9" * 3000)
            )
            return pickle.BINUNICODE + struct.pack("<I", len(text)) + text
        case pickle.GLOBAL:
            return draw.choice([each for each in _SNIPPETS if each[:1] == pickle.GLOBAL])
    return code + draw.randbytes(1)


def _pickle(draw: random.Random, body: bytes) -> bytes:
    codes = _instructions(body)
    at, other = draw.randrange(len(codes)), draw.randrange(len(codes))
    match draw.randrange(7):
        case 0:
            del codes[at]
        case 1:
            codes.insert(at, draw.choice(_SNIPPETS))
        case 2:
            codes[at] = draw.choice(_SNIPPETS)
        case 3:
            codes[at], codes[other] = codes[other], codes[at]
        case 4:
            codes.insert(at, codes[other])
        case 5:
            first, last = sorted((at, other))
            codes[at:at] = codes[first : min(last, first + 40)]
        case 6:
            codes[at] = _argument(draw, codes[at])
    return b"".join(codes)


def _repacked(data: bytes, change: Callable[[list[tuple[str, bytes]]], None], kind: int) -> bytes:
    """Return the archive with its members changed, or what came if it is none any more."""
    buffer = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as old:
            members = [(member.filename, old.read(member)) for member in old.infolist()]
        change(members)
        with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", kind) as new:
            warnings.simplefilter("ignore")  # of two members with one name
            for name, content in members:
                new.writestr(name or "x", content)
    except Exception:  # noqa: BLE001 - of a mutation before
        return data
    return buffer.getvalue()


def _pickles(draw: random.Random, data: bytes) -> bytes:
    def change(members: list[tuple[str, bytes]]) -> None:
        for place, (name, content) in enumerate(members):
            if name.endswith("/data.pkl"):
                members[place] = name, _pickle(draw, content)

    return _repacked(data, change, zipfile.ZIP_STORED)


def _archives(draw: random.Random, data: bytes) -> bytes:
    """Change members, or the records and headers that describe them."""

    def change(members: list[tuple[str, bytes]]) -> None:
        place = draw.randrange(len(members))
        name, content = members[place]
        match draw.randrange(6):
            case 0:
                del members[place]
            case 1:
                members.insert(place, draw.choice(members))
            case 2:
                members[place] = (
                    draw.choice(("", name.upper(), "../x", f"{name}\0", "é" * 99)),
                    content,
                )
            case 3:
                members[place] = name, _bytes(draw, content)
            case 4:
                members[place] = name, content * 2
            case 5:
                draw.shuffle(members)

    if draw.random() < 0.5:
        return _repacked(data, change, draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))
    found = bytearray(data)
    places = [
        at for mark in (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6") for at in _all_of(data, mark)
    ]
    if places:
        at = draw.choice(places) + draw.randrange(46)
        found[at : at + 4] = struct.pack("<I", draw.choice(_NUMBERS) % 2**32)[
            : draw.choice((1, 2, 4))
        ]
    return bytes(found)


def _all_of(data: bytes, mark: bytes) -> list[int]:
    found, at = [], data.find(mark)
    while at >= 0:
        found.append(at)
        at = data.find(mark, at + 1)
    return found


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
