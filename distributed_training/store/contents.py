"""Whether the files of a snapshot or a download are whole and finite, without torch.

The uploader is a small process beside training; importing torch there would cost more memory than
all the rest of it. Nothing in a file of a stranger can run: see :mod:`..protocol.pt_file`.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import numpy as np

from distributed_training.protocol.pt_file import PtContent, PtFileError, TensorStub, read_pt
from distributed_training.protocol.safetensors_header import Entry, safetensors_table

from .errors import IntegrityError, StoreError

_CHUNK = 4 * 1024 * 1024  # divides by every item size
#: numpy's names of little-endian floats; for what numpy does not know, the bits of NaN and Inf.
_SAFETENSORS_FLOATS = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "bf16"},
    **{"F8_E4M3": "e4m3", "F8_E5M2": "e5m2", "F8_E8M0": "e8m0"},
}
_STORAGE_FLOATS = {
    **{"DoubleStorage": "<f8", "FloatStorage": "<f4", "HalfStorage": "<f2"},
    **{"BFloat16Storage": "bf16", "ComplexFloatStorage": "<f4", "ComplexDoubleStorage": "<f8"},
}
# (integers read, mask, the least masked value that is no finite number)
_BITS = {
    "bf16": ("<u2", 0x7F80, 0x7F80),
    "e4m3": ("<u1", 0x7F, 0x7F),  # has NaN, no Inf
    "e5m2": ("<u1", 0x7F, 0x7C),
    "e8m0": ("<u1", 0xFF, 0xFF),
}


def safetensors_entries(path: Path) -> dict[str, Entry]:
    """Name -> entry, after checking that header and file size agree. Raises IntegrityError."""
    size = path.stat().st_size
    with path.open("rb") as handle:

        def read(first: int, count: int) -> bytes:
            handle.seek(first)
            return handle.read(count)

        try:
            return safetensors_table(read, size)
        except ValueError as error:
            raise IntegrityError(f"{path.name} is not a whole safetensors file: {error}") from None


def safetensors_not_finite(
    path: Path, *, on_chunk: Callable[[], None] = lambda: None
) -> str | None:
    """The first tensor that holds NaN or Inf, None if all are finite. Raises IntegrityError.

    ``on_chunk`` is called every 4 MiB, and may raise to end the search.
    """
    entries = safetensors_entries(path)
    with path.open("rb", buffering=0) as handle:
        for name, entry in entries.items():
            kind = _SAFETENSORS_FLOATS.get(entry.dtype)
            if kind is None:
                continue
            handle.seek(entry.start)
            if not _finite(handle, entry.size, kind, on_chunk):
                return f"{name!r:.80} of {path.name}"
    return None


def _finite(handle: IO[bytes], size: int, kind: str, on_chunk: Callable[[], None]) -> bool:
    while size > 0:
        on_chunk()
        data = handle.read(min(size, _CHUNK))
        if not data:
            raise IntegrityError("a file became shorter while it was read")
        size -= len(data)
        if kind in _BITS:
            integers, mask, least = _BITS[kind]
            bits = np.frombuffer(data, np.dtype(integers))
            if bool(((bits & bits.dtype.type(mask)) >= least).any()):
                return False
        else:
            values = np.frombuffer(data, np.dtype(kind))
            # NaN and Inf survive a sum; a finite sum proves the chunk, another is looked into.
            with np.errstate(over="ignore", invalid="ignore"):
                total = values.sum(dtype=np.float64)
            if not np.isfinite(total) and not bool(np.isfinite(values).all()):
                return False
    return True


class PtFile:
    """A ``.pt`` file: ``content`` is its pickle with tensors as :class:`TensorStub`. Of an open
    file only the pickle and the table of contents are read.

    Raises IntegrityError for a file that ``torch.save`` did not write.
    """

    def __init__(self, path: Path | IO[bytes]) -> None:
        self._path = path
        self._name = Path(path.name).name
        try:
            self._found: PtContent = read_pt(path)
        except PtFileError as error:
            raise IntegrityError(f"{self._name} is not a whole .pt file: {error}") from None
        self.content = self._found.content

    def not_finite(self, *, on_chunk: Callable[[], None] = lambda: None) -> str | None:
        """What holds NaN or Inf, None if nothing does. Raises IntegrityError for damage.

        ``on_chunk`` is called every 4 MiB, and may raise to end the search.
        """
        try:
            with zipfile.ZipFile(self._path) as archive:
                for key, member in self._found.members.items():
                    kind = _STORAGE_FLOATS.get(self._found.storages[key].kind)
                    if kind is None:
                        continue
                    with archive.open(member) as handle:
                        if not _finite(handle, member.file_size, kind, on_chunk):
                            return self._name
        except StoreError:  # a RuntimeError too
            raise
        except (zipfile.BadZipFile, EOFError, ValueError, RuntimeError) as error:
            # RuntimeError: encrypted, or packed in a way Python does not know
            raise IntegrityError(f"{self._name} is not whole: {error}") from None
        return None


def check_gradients(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> PtFile:
    """That ``gradients.pt`` holds for each parameter what validators expect (protocol, section 4).

    ``shapes``: of the model's parameters. Raises IntegrityError.
    """
    file = PtFile(path)
    content = file.content
    if not isinstance(content, dict):
        raise IntegrityError(f"{path.name} is not a dictionary")
    metadata = content.get("metadata")
    numbers = ("block", "inner_step", "outer_step")
    if not isinstance(metadata, dict) or not (
        all(type(metadata.get(n)) is int for n in numbers)
        and type(metadata.get("loss")) in (int, float)
        and math.isfinite(metadata["loss"])
    ):
        raise IntegrityError(f"{path.name}: metadata is missing or not of plain finite numbers")
    for name in shapes:
        idxs, vals = content.get(name + "idxs"), content.get(name + "vals")
        if not isinstance(idxs, TensorStub) or not isinstance(vals, TensorStub):
            raise IntegrityError(f"{path.name}: {name} is missing")
        if (idxs.storage, vals.storage) != ("ShortStorage", "FloatStorage"):
            raise IntegrityError(f"{path.name}: {name} is not int16 indices and float32 values")
        if idxs.shape != vals.shape or not idxs.shape:
            raise IntegrityError(f"{path.name}: {name} has indices and values of different shapes")
    return file
