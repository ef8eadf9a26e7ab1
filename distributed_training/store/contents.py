"""Whether the files of a download are whole and finite, without torch.

The uploader is a small process beside training; importing torch there would cost more memory than
all the rest of it. Nothing in a file of a stranger can run: see :mod:`..protocol.pt_file`.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO

import numpy as np

from distributed_training.protocol.pt_file import (
    Entry,
    PtContent,
    PtFileError,
    read_pt,
    safetensors_table,
)
from distributed_training.store.s3 import IntegrityError

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


def safetensors_not_finite(path: Path) -> str | None:
    """Return the first tensor that holds NaN or Inf, None if all are finite.

    Raises IntegrityError.
    """
    entries = safetensors_entries(path)
    with path.open("rb", buffering=0) as handle:
        for name, entry in entries.items():
            kind = _SAFETENSORS_FLOATS.get(entry.dtype)
            if kind is None:
                continue
            handle.seek(entry.start)
            if not _finite(handle, entry.size, kind):
                return f"{name!r:.80} of {path.name}"
    return None


def _finite(handle: IO[bytes], size: int, kind: str) -> bool:
    while size > 0:
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
    """A ``.pt`` file: ``content`` is its pickle with inert values in place of tensors. Of an open
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

    def not_finite(self) -> str | None:
        """Return what holds NaN or Inf, None if nothing does. Raises IntegrityError for damage."""
        try:
            with zipfile.ZipFile(self._path) as archive:
                for key, member in self._found.members.items():
                    kind = _STORAGE_FLOATS.get(self._found.storages[key].kind)
                    if kind is None:
                        continue
                    with archive.open(member) as handle:
                        if not _finite(handle, member.file_size, kind):
                            return self._name
        except IntegrityError:
            raise
        except (zipfile.BadZipFile, EOFError, ValueError, RuntimeError) as error:
            # RuntimeError: encrypted, or packed in a way Python does not know
            raise IntegrityError(f"{self._name} is not whole: {error}") from None
        return None
