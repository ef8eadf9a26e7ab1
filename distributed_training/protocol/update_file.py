"""Write and read the files of a round through the store (protocol page, section 4).

A member's *upload* contains its pseudo-gradient, and the validator's *update* contains the values
that all members subtract from their weights. Both are dense: a codec's scales and codes for each
row (:mod:`~.codecs`), in one safetensors file with a signed header.

*Rows* of a parameter: a matrix, or a tensor with more dimensions, has one row for each index of its
first dimension, flattened. A vector or a scalar is one row. So is a matrix with narrow rows, such
as an adapter's B, since a scale for each of its rows would cost as much as their values. A codec
encodes whole rows, so each rank encodes its own rows and writes them to their place
(:func:`write_rows`). Rank 0 signs the file when all rows are written (:func:`finish`). The header
is written last, so a file that a kill cut short is not valid.

The header's length, and so the place of each row, is known before anything is encoded, because the
digest of the body and the signature have fixed lengths.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from .codecs import CODECS, GROUP, SCALE_BYTES, refuse_scales
from .types import OWN_CODECS, Schema, Sign, Verify

_MOST_LISTED = 10_000  # chain blocks that a header written before 0.3 may list
_LENGTH_BYTES = 8
_SIGNATURE_BYTES = 64
_MOST_NUMBER = 2**53 - 1  # the largest integer that every JSON reader keeps exact
_NAME = re.compile(r"[0-9A-Za-z_.-]{1,64}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NO_DIGEST, _NO_SIGNATURE = "0" * 64, "0" * 2 * _SIGNATURE_BYTES
_CHUNK = 1 << 22  # bytes read at once
_VALUES = 1 << 22  # values decoded at once
_NARROW = 32  # a matrix whose rows have at most this many values is written as one row


@dataclass(frozen=True, kw_only=True)
class Header:
    """The header fields of a file, which its signature covers.

    ``start``: SHA-256, in hexadecimal digits, of the weights from which the pseudo-gradient counts
    (:func:`digest_weights`). ``pages``: the first and the last page of the outer step that the
    upload was trained on, or neither; uploads from versions before 0.3 list chain blocks instead.
    Raises ValueError for values that no file can have.
    """

    kind: Literal["upload", "update"]
    run_id: str
    outer_step: int  # the outer step whose weights it starts from
    serial: int  # number of the close; 0 in an update
    hotkey: str
    start: str
    codec: str
    inner_steps: int
    tokens: int
    pages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        numbers = (self.outer_step, self.serial, self.inner_steps, self.tokens, *self.pages)
        good = {
            "kind": self.kind in ("upload", "update"),
            "run_id": _matches(_NAME, self.run_id),
            "hotkey": _matches(_NAME, self.hotkey),
            "start": _matches(_DIGEST, self.start),
            "codec": _matches(_NAME, self.codec) and self.codec in CODECS,
            "number": all(type(n) is int and 0 <= n <= _MOST_NUMBER for n in numbers),
            "list of pages": len(self.pages) <= _MOST_LISTED,
        }
        if bad := [name for name, fine in good.items() if not fine]:
            raise ValueError(f"its header has an impossible {bad[0]}")


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


@dataclass(frozen=True)
class _Part:
    """One parameter in a file: its rows, and the offsets of its scales and codes in the body."""

    name: str
    rows: int
    columns: int
    scales: int
    codes: int
    groups: int  # per row
    code_bytes: int  # per row


@dataclass(frozen=True)
class UpdateLayout:
    """The place of each parameter in a file."""

    schema: Schema
    header: Header
    parts: tuple[_Part, ...]
    body_bytes: int

    @classmethod
    def of(cls, schema: Schema, header: Header) -> UpdateLayout:
        shapes = [(name, *rows_and_columns(shape)) for name, shape in schema]
        row = CODECS[header.codec].row
        scales, codes = 0, sum(SCALE_BYTES * rows * row(columns)[0] for _, rows, columns in shapes)
        parts = []
        for name, rows, columns in shapes:
            groups, code_bytes = row(columns)
            parts.append(_Part(name, rows, columns, scales, codes, groups, code_bytes))
            scales += SCALE_BYTES * rows * groups
            codes += rows * code_bytes
        return cls(schema, header, tuple(parts), codes)

    def head(self, body: str, signature: str) -> bytes:
        """Return the bytes before the body, including the body's digest and the signature."""
        said = asdict(self.header)
        # In a file, pages keep the name of the chain blocks that they replaced, and the product's
        # codecs are named by their bits.
        said["blocks"] = said.pop("pages")
        if (bits := OWN_CODECS.get(self.header.codec)) is not None:
            del said["codec"]
            said["bits"] = bits
        table: dict[str, Any] = {
            "__metadata__": {"body": body, "header": _canonical(said), "signature": signature}
        }
        for part in self.parts:
            for ending, dtype, start, columns, size in (
                ("scales", "F32", part.scales, part.groups, SCALE_BYTES),
                ("codes", "U8", part.codes, part.code_bytes, 1),
            ):
                table[f"{part.name}.{ending}"] = {
                    "data_offsets": [start, start + part.rows * columns * size],
                    "dtype": dtype,
                    "shape": [part.rows, columns],
                }
        text = _canonical(table).encode()
        text += b" " * (-len(text) % 8)  # align the float32 scales to a multiple of 8
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text

    @functools.cached_property
    def body(self) -> int:
        """Number of bytes before the body."""
        return len(self.head(_NO_DIGEST, _NO_SIGNATURE))

    @property
    def size(self) -> int:
        """Size of the whole file in bytes."""
        return self.body + self.body_bytes


def rows_and_columns(shape: Sequence[int]) -> tuple[int, int]:
    """Return how many rows a parameter with this ``shape`` has in a file, and how many columns."""
    count = math.prod(shape)
    if len(shape) < 2 or (math.prod(shape[1:]) <= _NARROW and count > GROUP):
        return 1, count
    return shape[0], math.prod(shape[1:])


def row_chunks(rows: int, columns: int, files: int = 1) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, after the last) of a parameter's rows to process at once.

    ``files``: how many files have their rows of a range in memory at the same time.
    """
    step = max(1, _VALUES // max(1, columns * files))
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def largest_file(schema: Schema, codec: str) -> int:
    """Return the largest size in bytes of a file for a model with the parameters ``schema``."""
    return _largest(schema, codec).size


def _largest(schema: Schema, codec: str) -> UpdateLayout:
    header = Header(
        kind="upload", run_id="x" * 64, outer_step=_MOST_NUMBER, serial=_MOST_NUMBER,
        hotkey="x" * 64, start=_NO_DIGEST, codec=codec, inner_steps=_MOST_NUMBER,
        tokens=_MOST_NUMBER, pages=(_MOST_NUMBER,) * _MOST_LISTED,
    )  # fmt: skip
    return UpdateLayout.of(schema, header)


@functools.lru_cache(maxsize=4)  # a validator opens many files of one model
def _longest_head(schema: tuple[tuple[str, tuple[int, ...]], ...], codecs: tuple[str, ...]) -> int:
    return max(_largest(schema, codec).body for codec in codecs)


# --- writing --------------------------------------------------------------------------------------


def write_rows(path: Path, layout: UpdateLayout, index: int, first_row: int, rows: Tensor) -> None:
    """Encode some rows of parameter ``index`` and write them to their place in ``path``.

    ``rows``: float32 ``(r, columns)`` on any device. Several ranks and threads may write to one
    file; it is created if it does not exist. Raises OSError, and ValueError for values that are not
    finite.
    """
    part = layout.parts[index]
    if rows.shape[1] != part.columns or first_row + len(rows) > part.rows:
        raise ValueError(f"rows of shape {tuple(rows.shape)} are none of {part.name}")
    encode_rows = CODECS[layout.header.codec].encode_rows
    scales, codes = (each.cpu() for each in encode_rows(rows.contiguous()))
    try:
        refuse_scales(scales)
    except ValueError:
        raise ValueError(f"{part.name}: values that are not finite, or too large") from None
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        for tensor, place in ((scales, part.scales), (codes, part.codes)):
            position = layout.body + place + first_row * tensor.shape[1] * tensor.itemsize
            data = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            while data:
                # Linux writes at most 2 GiB at once, and less if the disk is nearly full.
                written = os.pwrite(handle, data[: 1 << 30], position)
                data, position = data[written:], position + written
    finally:
        os.close(handle)


def finish(path: Path, layout: UpdateLayout, sign: Sign) -> None:
    """Sign the file and sync it to the disk, once all rows are written.

    Call this only once, in one process, after all others are done: sr25519 signatures are random,
    so a second call would make a different file. Raises OSError, and ValueError if rows are missing
    at its end.
    """
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size < layout.size:
            raise ValueError(f"{path.name} has {size} bytes of {layout.size}: rows are missing")
        file.truncate(layout.size)
        file.seek(layout.body)
        body = _digest_rest(file)
        signature = sign(_message(layout, body))
        if len(signature) != _SIGNATURE_BYTES:
            raise ValueError(f"a signature of {len(signature)} bytes, not {_SIGNATURE_BYTES}")
        file.seek(0)
        file.write(layout.head(body, signature.hex()))
        file.flush()
        os.fsync(file.fileno())


def _digest_rest(file: Any) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def _message(layout: UpdateLayout, body: str) -> bytes:
    """Return the text to sign. It covers the header and, through its digest, the body."""
    head = layout.head(body, _NO_SIGNATURE)
    return b"update-file 1 " + hashlib.sha256(head).hexdigest().encode()


# --- reading --------------------------------------------------------------------------------------


class UpdateFile:
    """A checked file, memory-mapped. Several threads may read it."""

    def __init__(self, path: Path, layout: UpdateLayout) -> None:
        self.path, self.layout = path, layout
        # Map the file, since that keeps no descriptor open: a close may have a thousand uploads.
        self._data = torch.from_file(str(path), size=layout.size, dtype=torch.uint8)
        self._indices = {part.name: index for index, part in enumerate(layout.parts)}

    @property
    def header(self) -> Header:
        return self.layout.header

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the whole file, in hexadecimal digits."""
        digest = hashlib.sha256()
        for chunk in self._data.split(_CHUNK):
            digest.update(chunk.numpy())
        return digest.hexdigest()

    @classmethod
    def open(
        cls,
        path: Path,
        schema: Schema,
        *,
        run_id: str,
        kind: Literal["upload", "update"],
        hotkey: str,
        verify: Verify,
        codec: str | None = None,
    ) -> UpdateFile:
        """Open and check a file, which may contain any bytes.

        ``hotkey``: the key that must have signed it: the master's for an update, the member's for
        an upload. No memory is allocated for its tensors.

        Raises OSError, and ValueError, with one line, for a file that is not exactly as the
        protocol page specifies.
        """
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            layout, body, signature = _read_head(file, size, schema)
            header = layout.header
            for name, found, wanted in (
                ("kind", header.kind, kind),
                ("run", header.run_id, run_id),
                ("hotkey", header.hotkey, hotkey),
                ("codec", header.codec, codec or header.codec),
            ):
                if found != wanted:
                    raise ValueError(f"its {name} is {found}, not {wanted}")
            if not verify(_message(layout, body), bytes.fromhex(signature), hotkey):
                raise ValueError(f"its signature is not by {hotkey}")
            file.seek(layout.body)
            if _digest_rest(file) != body:
                raise ValueError("its values are not those that were signed")
        opened = cls(path, layout)
        for part in layout.parts:
            try:
                refuse_scales(opened._scales(part, 0, part.rows))
            except ValueError as error:
                raise ValueError(f"{part.name}: {error}") from None
        return opened

    @classmethod
    def reopen(cls, path: Path, schema: Schema) -> UpdateFile:
        """Open a file that this machine has written or already checked, as rank 0 does.

        Only the header is read. Raises OSError, and ValueError with one line.
        """
        with open(path, "rb") as file:
            layout, _, _ = _read_head(file, os.fstat(file.fileno()).st_size, schema)
        return cls(path, layout)

    def rows(self, index: int, first: int, stop: int) -> Tensor:
        """Return rows ``first`` to ``stop`` of parameter ``index``, float32 ``(rows, columns)``."""
        part = self.layout.parts[index]
        if not 0 <= first <= stop <= part.rows:
            raise ValueError(f"{part.name} has {part.rows} rows, not {first} to {stop}")
        out = torch.empty((stop - first, part.columns), dtype=torch.float32)
        codes = self._rows(part.codes, part.code_bytes, first, stop)
        CODECS[self.header.codec].decode_rows(self._scales(part, first, stop), codes, out)
        return out

    def decode(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return a whole parameter as float32 in its ``shape``."""
        index = self._indices[name]
        return self.rows(index, 0, self.layout.parts[index].rows).view(tuple(shape))

    def _scales(self, part: _Part, first: int, stop: int) -> Tensor:
        raw = self._rows(part.scales, SCALE_BYTES * part.groups, first, stop)
        return raw.view(torch.float32)

    def _rows(self, place: int, length: int, first: int, stop: int) -> Tensor:
        """Return some rows as bytes, uint8 ``(rows, length)``; row 0 begins at ``place``."""
        begin, end = (self.layout.body + place + row * length for row in (first, stop))
        return self._data[begin:end].view(stop - first, length)


def _read_head(file: Any, size: int, schema: Schema) -> tuple[UpdateLayout, str, str]:
    """Return layout, body digest and signature of a file, if it has exactly that layout."""
    most = _longest_head(tuple((name, tuple(shape)) for name, shape in schema), tuple(CODECS))
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if not 2 <= length <= min(most, size) - _LENGTH_BYTES:
        raise ValueError("the length of its header is impossible")
    text = file.read(length)
    try:
        metadata = json.loads(text)["__metadata__"]
        body, signature = metadata["body"], metadata["signature"]
        raw = json.loads(metadata["header"])
        if isinstance(raw, dict) and "bits" in raw:
            raw["codec"] = f"{raw.pop('bits')}-bit"  # named differently in the file, see head
        if isinstance(raw, dict) and isinstance(raw.get("blocks"), list) and "pages" not in raw:
            raw["pages"] = raw.pop("blocks")
        if not isinstance(raw, dict) or set(raw) != {field.name for field in fields(Header)}:
            raise ValueError("other names than a header has")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = reprlib.repr(str(error))
        raise ValueError(f"its header cannot be read ({type(error).__name__}: {why})") from None
    header = Header(**{**raw, "pages": tuple(raw["pages"])})
    layout = UpdateLayout.of(schema, header)
    if not _matches(_DIGEST, body) or not _matches(re.compile(r"[0-9a-f]{128}"), signature):
        raise ValueError("its header has an impossible digest or signature")
    if layout.head(body, signature)[_LENGTH_BYTES:] != text:
        raise ValueError("its header is not that of this model's tensors in canonical JSON")
    if layout.size != size:
        raise ValueError(f"it has {size} bytes instead of {layout.size}")
    return layout, body, signature


# --- digests of weights ---------------------------------------------------------------------------


def digest_rows(rows: Tensor) -> bytes:
    """Return the concatenated SHA-256 digests of the rows: 32 bytes per row.

    ``rows``: float32 ``(r, columns)`` on any device; their little-endian bytes are hashed.
    """
    raw = rows.detach().cpu().contiguous().view(torch.uint8).numpy()
    return b"".join(hashlib.sha256(row).digest() for row in raw)


def digest_rows_of(parameters: Iterable[Tensor]) -> list[bytes]:
    """Return :func:`digest_rows` of each parameter, computed with as many threads as torch has."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(digest_rows, parameters))


def digest_weights(parts: Iterable[bytes]) -> str:
    """Return the digest of all weights, in hexadecimal digits.

    ``parts``: the results of :func:`digest_rows` for all rows of each parameter, in the schema's
    order. Ranks digest their own rows; rank 0 joins the digests.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
