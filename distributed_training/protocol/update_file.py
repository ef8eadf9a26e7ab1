"""Write and read the files of a round through the store (protocol page, section 11).

A member's *upload* holds its pseudo-gradient, and the validator's *update* holds what all members
subtract from their weights. Both are dense, with 4, 3 or 2 bits a value and a scale for each group
of at most 256 (:mod:`~.quantization`). Both are one safetensors file with a signed header.

*Rows* of a parameter: a matrix, or a tensor of more dimensions, has its first dimension of them,
each flattened; a vector or a scalar is one row. No group crosses a row. So each rank encodes the
rows that it holds and writes them at their place (:func:`write_rows`); rank 0 signs the file when
all are there (:func:`finish`). The header comes last: a file that a kill left half is none.

The header's length, and with it the place of each row, is known before anything is encoded: the
digest of the body and the signature have fixed lengths.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import mmap
import os
import re
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from .gradients import Schema
from .quantization import (
    GROUP,
    SCALE_BYTES,
    decode_groups,
    encode_groups,
    group_bytes,
    refuse_scales,
)
from .types import Sign, Verify

BITS = (4, 3, 2)
MOST_BLOCKS = 10_000  # of a header
_LENGTH_BYTES = 8
_SIGNATURE_BYTES = 64
_MOST_NUMBER = 2**53 - 1  # what any JSON reader keeps exact
_NAME = re.compile(r"[0-9A-Za-z_.-]{1,64}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NO_DIGEST, _NO_SIGNATURE = "0" * 64, "0" * 2 * _SIGNATURE_BYTES
# Values handled at once: copies of them stay in the cache, and do not fill a GPU.
_SLAB, _CUDA_SLAB = 1 << 19, 1 << 24
_CHUNK = 1 << 22  # bytes read at once


@dataclass(frozen=True, kw_only=True)
class Header:
    """The fields of a file that its signature covers.

    ``start``: SHA-256, in hexadecimal digits, of the weights from which the movement counts
    (:func:`digest_weights`). ``blocks``: trained on since the upload before, at most
    :data:`MOST_BLOCKS`. Raises ValueError for values that no file has.
    """

    kind: Literal["upload", "update"]
    run_id: str
    outer_step: int  # whose epoch-start weights it counts from
    serial: int  # of the close; 0 for updates
    hotkey: str
    start: str
    bits: int
    inner_steps: int
    tokens: int
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        numbers = (self.outer_step, self.serial, self.inner_steps, self.tokens, *self.blocks)
        good = {
            "kind": self.kind in ("upload", "update"),
            "run_id": _matches(_NAME, self.run_id),
            "hotkey": _matches(_NAME, self.hotkey),
            "start": _matches(_DIGEST, self.start),
            "bits": type(self.bits) is int and self.bits in BITS,
            "number": all(type(n) is int and 0 <= n <= _MOST_NUMBER for n in numbers),
            "block list": len(self.blocks) <= MOST_BLOCKS,
        }
        if bad := [name for name, fine in good.items() if not fine]:
            raise ValueError(f"its header has an impossible {bad[0]}")


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


@dataclass(frozen=True)
class _Part:
    """One parameter in a file: its rows, and where their scales and numbers begin."""

    name: str
    rows: int
    columns: int
    scales: int  # bytes from the beginning of the file
    codes: int
    groups: int  # of a row
    code_bytes: int  # of a row


@dataclass(frozen=True)
class UpdateLayout:
    """The place of each parameter in a file, and the size of the file in bytes."""

    header: Header
    parts: tuple[_Part, ...]
    body: int  # bytes from the beginning of the file
    size: int
    schema: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, schema: Schema, header: Header) -> UpdateLayout:
        plain = tuple((name, tuple(shape)) for name, shape in schema)
        body = len(_head(plain, header, _NO_DIGEST, _NO_SIGNATURE))
        shapes = [rows_and_columns(shape) for _, shape in plain]
        scales, codes = (
            body,
            body + sum(SCALE_BYTES * rows * _groups(columns) for rows, columns in shapes),
        )
        parts = []
        for (name, _), (rows, columns) in zip(plain, shapes, strict=True):
            part = _Part(
                name, rows, columns, scales, codes, _groups(columns),
                _row_bytes(columns, header.bits),
            )  # fmt: skip
            parts.append(part)
            scales += SCALE_BYTES * rows * part.groups
            codes += rows * part.code_bytes
        return cls(header, tuple(parts), body, codes, plain)

    def head(self, body: str, signature: str) -> bytes:
        """Return what comes before the body, with that digest and signature."""
        return _head(self.schema, self.header, body, signature)


def rows_and_columns(shape: Sequence[int]) -> tuple[int, int]:
    """Return how many rows a parameter of ``shape`` has, and values in each."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def _groups(columns: int) -> int:
    return -(-columns // GROUP)


def _row_bytes(columns: int, bits: int) -> int:
    whole, rest = divmod(columns, GROUP)
    return whole * group_bytes(GROUP, bits) + group_bytes(rest, bits)


def _head(schema: Schema, header: Header, body: str, signature: str) -> bytes:
    """Return the length and the canonical JSON of a file's safetensors header."""
    metadata = {"body": body, "header": _canonical(asdict(header)), "signature": signature}
    table: dict[str, Any] = {"__metadata__": metadata}
    shapes = [(name, *rows_and_columns(shape)) for name, shape in schema]
    position = 0
    for name, rows, columns in shapes:
        end = position + SCALE_BYTES * rows * _groups(columns)
        table[f"{name}.scales"] = _entry("F32", rows, _groups(columns), position, end)
        position = end
    for name, rows, columns in shapes:
        end = position + rows * _row_bytes(columns, header.bits)
        table[f"{name}.codes"] = _entry("U8", rows, _row_bytes(columns, header.bits), position, end)
        position = end
    text = _canonical(table).encode()
    text += b" " * (-len(text) % 8)  # the scales are float32: at a multiple of their size
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _entry(dtype: str, rows: int, columns: int, start: int, end: int) -> dict[str, Any]:
    return {"data_offsets": [start, end], "dtype": dtype, "shape": [rows, columns]}


def largest_file(schema: Schema, bits: int) -> int:
    """Return the most bytes of a file for a model with the parameters of ``schema``."""
    return UpdateLayout.of(schema, _largest_header(bits)).size


@functools.lru_cache(maxsize=4)  # a validator opens many files of one model
def _longest_head(schema: tuple[tuple[str, tuple[int, ...]], ...]) -> int:
    return UpdateLayout.of(schema, _largest_header(max(BITS))).body


def _largest_header(bits: int) -> Header:
    return Header(
        kind="upload", run_id="x" * 64, outer_step=_MOST_NUMBER, serial=_MOST_NUMBER,
        hotkey="x" * 64, start=_NO_DIGEST, bits=bits, inner_steps=_MOST_NUMBER,
        tokens=_MOST_NUMBER, blocks=(_MOST_NUMBER,) * MOST_BLOCKS,
    )  # fmt: skip


# --- rows -----------------------------------------------------------------------------------------


def encode_rows(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Encode ``rows`` (float32 ``(r, c)``, contiguous), on their device.

    Returns scales, float32 ``(r, groups)``, and codes, uint8 ``(r, bytes of a row)``. Values
    that are not finite give scales that no reader takes.
    """
    count, columns = rows.shape
    scales = rows.new_empty((count, _groups(columns)))
    codes = rows.new_empty((count, _row_bytes(columns, bits)), dtype=torch.uint8)
    for slab in _slabs(rows):
        for values, scale, code in _runs(rows[slab], scales[slab], codes[slab], bits):
            found, numbers = encode_groups(values.reshape(-1, values.shape[-1]), bits)
            scale.copy_(found.abs_().view(scale.shape))  # of a group of zeros it may be -0.0
            code.copy_(numbers.view(code.shape))
    return scales, codes


def decode_rows(scales: Tensor, codes: Tensor, out: Tensor, bits: int) -> None:
    """Decode what :func:`encode_rows` returned into ``out``: equal to the bit on each device.

    ``out``: float32 ``(r, c)``, contiguous. The scales must have been checked
    (:class:`UpdateFile` does).
    """
    for slab in _slabs(out):
        for values, scale, code in _runs(out[slab], scales[slab], codes[slab], bits):
            flat = (scale.reshape(-1), code.reshape(scale.numel(), -1))
            if values.is_contiguous():
                decode_groups(*flat, values.view(scale.numel(), -1), bits)
            else:
                found = torch.empty((scale.numel(), values.shape[-1]), device=values.device)
                decode_groups(*flat, found, bits)
                values.copy_(found.view(values.shape))


def _slabs(rows: Tensor) -> list[slice]:
    count, columns = rows.shape
    step = max(1, (_SLAB if rows.device.type == "cpu" else _CUDA_SLAB) // max(columns, 1))
    return [slice(first, first + step) for first in range(0, count, step)] if columns else []


def _runs(
    rows: Tensor, scales: Tensor, codes: Tensor, bits: int
) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
    """Yield values, scales and codes of the whole groups of ``rows``, then of the shorter ones.

    Values are ``(r, g, k)``, scales ``(r, g)`` and codes ``(r, g, bytes)``.
    """
    whole, rest = divmod(rows.shape[1], GROUP)
    at, split = whole * GROUP, whole * group_bytes(GROUP, bits)
    if whole:
        length = group_bytes(GROUP, bits)
        yield (
            rows[:, :at].unflatten(1, (whole, GROUP)),
            scales[:, :whole],
            codes[:, :split].unflatten(1, (whole, length)),
        )
    if rest:
        yield rows[:, at:].unsqueeze(1), scales[:, whole:], codes[:, split:].unsqueeze(1)


# --- writing --------------------------------------------------------------------------------------


def write_rows(path: Path, layout: UpdateLayout, index: int, first_row: int, rows: Tensor) -> None:
    """Encode some rows of parameter ``index`` and write them at their place in ``path``.

    ``rows``: float32 ``(r, columns)`` on any device. Several ranks and threads may write one file;
    it is made where it is missing. Raises OSError, and ValueError for values that are not finite.
    """
    part = layout.parts[index]
    if rows.shape[1] != part.columns or first_row + len(rows) > part.rows:
        raise ValueError(f"rows of shape {tuple(rows.shape)} are none of {part.name}")
    scales, codes = (each.cpu() for each in encode_rows(rows.contiguous(), layout.header.bits))
    try:
        refuse_scales(scales)
    except ValueError:
        raise ValueError(f"{part.name}: values that are not finite, or too large") from None
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _write_at(handle, scales, part.scales + SCALE_BYTES * first_row * part.groups)
        _write_at(handle, codes, part.codes + first_row * part.code_bytes)
    finally:
        os.close(handle)


def _write_at(handle: int, tensor: Tensor, position: int) -> None:
    data = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    while data:
        # Linux writes 2 GiB at once at the most, and of a disk that becomes full takes less.
        written = os.pwrite(handle, data[: 1 << 30], position)
        data, position = data[written:], position + written


def finish(path: Path, layout: UpdateLayout, sign: Sign) -> str:
    """Sign the file whose rows are all written, durably; return its SHA-256 in hexadecimal digits.

    For one process, after the others. Raises OSError, and ValueError where rows are missing at its
    end.
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
        file.seek(0)
        return _digest_rest(file)


def _digest_rest(file: Any) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def _message(layout: UpdateLayout, body: str) -> bytes:
    """Return what is signed: it covers the header, and by the digest of the body the rest."""
    head = layout.head(body, _NO_SIGNATURE)
    return b"update-file 1 " + hashlib.sha256(head).hexdigest().encode()


# --- reading --------------------------------------------------------------------------------------


class UpdateFile:
    """A file that was checked, memory-mapped. It may be read by several threads."""

    def __init__(self, path: Path, layout: UpdateLayout, data: Tensor) -> None:
        self.path, self.layout, self._data = path, layout, data
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
        bits: int | None = None,
    ) -> UpdateFile:
        """Open and check a file, of foreign bytes too.

        ``hotkey``: who must have signed it: the master an update, the uid's hotkey an upload.
        Nothing is allocated for its tensors.

        Raises ValueError, in one line, for a file that is not exactly as the protocol page has it,
        and OSError.
        """
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            layout, body, signature = _read_head(file, size, schema)
            header = layout.header
            for name, found, wanted in (
                ("kind", header.kind, kind),
                ("run", header.run_id, run_id),
                ("hotkey", header.hotkey, hotkey),
                ("number of bits", header.bits, bits or header.bits),
            ):
                if found != wanted:
                    raise ValueError(f"its {name} is {found}, not {wanted}")
            if not verify(_message(layout, body), bytes.fromhex(signature), hotkey):
                raise ValueError(f"its signature is not by {hotkey}")
            file.seek(layout.body)
            if _digest_rest(file) != body:
                raise ValueError("its values are not those that were signed")
            opened = cls._map(file, layout)
        for part in layout.parts:
            try:
                refuse_scales(opened._scales(part, 0, part.rows))
            except ValueError as error:
                raise ValueError(f"{part.name}: {error}") from None
        return opened

    @classmethod
    def reopen(cls, path: Path, schema: Schema) -> UpdateFile:
        """Open a file that this machine has made, or has checked before, as rank 0 does.

        Its header alone is looked at. Raises ValueError, in one line, and OSError.
        """
        with open(path, "rb") as file:
            layout, _, _ = _read_head(file, os.fstat(file.fileno()).st_size, schema)
            return cls._map(file, layout)

    @classmethod
    def _map(cls, file: Any, layout: UpdateLayout) -> UpdateFile:
        mapped = mmap.mmap(file.fileno(), layout.size, access=mmap.ACCESS_COPY)
        return cls(Path(file.name), layout, torch.frombuffer(mapped, dtype=torch.uint8))

    def rows(self, index: int, first: int, stop: int) -> Tensor:
        """Return rows ``first`` to ``stop`` of parameter ``index``, float32 ``(rows, columns)``."""
        part = self.layout.parts[index]
        if not 0 <= first <= stop <= part.rows:
            raise ValueError(f"{part.name} has {part.rows} rows, not {first} to {stop}")
        out = torch.empty((stop - first, part.columns))
        begin, end = (part.codes + row * part.code_bytes for row in (first, stop))
        codes = self._data[begin:end].view(stop - first, part.code_bytes)
        decode_rows(self._scales(part, first, stop), codes, out, self.header.bits)
        return out

    def decode(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return a whole parameter in its ``shape``, float32."""
        index = self._indices[name]
        return self.rows(index, 0, self.layout.parts[index].rows).view(tuple(shape))

    def _scales(self, part: _Part, first: int, stop: int) -> Tensor:
        begin, end = (part.scales + SCALE_BYTES * row * part.groups for row in (first, stop))
        return self._data[begin:end].view(torch.float32).view(stop - first, part.groups)


def _read_head(file: Any, size: int, schema: Schema) -> tuple[UpdateLayout, str, str]:
    """Return layout, digest of the body and signature, of a file that has exactly that layout."""
    most = _longest_head(tuple((name, tuple(shape)) for name, shape in schema))
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if not 2 <= length <= min(most, size) - _LENGTH_BYTES:
        raise ValueError("the length of its header is impossible")
    text = file.read(length)
    try:
        metadata = json.loads(text)["__metadata__"]
        body, signature = metadata["body"], metadata["signature"]
        raw = json.loads(metadata["header"])
        known = {field.name for field in fields(Header)}
        if not isinstance(raw, dict) or set(raw) != known or not isinstance(raw["blocks"], list):
            raise ValueError("other names than a header has")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = reprlib.repr(str(error))
        raise ValueError(f"its header cannot be read ({type(error).__name__}: {why})") from None
    header = Header(**{**raw, "blocks": tuple(raw["blocks"])})
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
    """Return the SHA-256 of each row, joined: 32 bytes a row.

    ``rows``: float32 ``(r, columns)`` on any device; hashed are their bytes, little-endian.
    """
    raw = rows.detach().cpu().contiguous().view(torch.uint8).numpy()
    return b"".join(hashlib.sha256(row).digest() for row in raw)


def digest_weights(parts: Iterable[bytes]) -> str:
    """Return the digest of all weights, in hexadecimal digits.

    ``parts``: of each parameter, in the schema's order, what :func:`digest_rows` gives for all its
    rows. Ranks digest their own rows; rank 0 joins them.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
