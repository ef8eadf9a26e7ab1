"""What is inside the files of a snapshot or a download, without torch.

The uploader is a small process beside training; importing torch there would cost more memory than
all the rest of it. A ``.pt`` file is a zip of a pickle and raw tensor data. The pickle is read by
an unpickler that resolves no name to real code: every class and function in it becomes an inert
stand-in, so nothing in a file of a stranger can run.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from .errors import IntegrityError, StoreError

_CHUNK = 4 * 1024 * 1024  # divides by every item size
MAX_HEADER = 64 * 1024 * 1024
_SAFETENSORS_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "bf16"}
_SAFETENSORS_SIZES = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2},
    **{"I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1},
}
_STORAGES = {
    **{"DoubleStorage": ("<f8", 8), "FloatStorage": ("<f4", 4), "HalfStorage": ("<f2", 2)},
    **{"BFloat16Storage": ("bf16", 2), "LongStorage": ("", 8), "IntStorage": ("", 4)},
    **{"ShortStorage": ("", 2), "CharStorage": ("", 1), "ByteStorage": ("", 1)},
    **{"BoolStorage": ("", 1)},
}


@dataclass(frozen=True)
class Entry:
    """A tensor of a safetensors file; ``start`` from the file's beginning, bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def safetensors_entries(path: Path) -> dict[str, Entry]:
    """Name -> entry, after checking that header and file size agree. Raises IntegrityError."""
    size = path.stat().st_size
    try:
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise ValueError("the header's length is impossible")
            table = json.loads(handle.read(length))
        begin = 8 + length
        entries = {}
        for name, raw in table.items():
            if name == "__metadata__":
                continue
            first, last = raw["data_offsets"]
            shape = tuple(raw["shape"])
            if any(type(n) is not int or n < 0 for n in (first, last, *shape)):
                raise ValueError(f"{name} has an impossible shape or place")
            expected = math.prod(shape) * _SAFETENSORS_SIZES[raw["dtype"]]
            if last - first != expected or not 0 <= first <= last <= size - begin:
                raise ValueError(f"{name} does not lie where the header says")
            entries[name] = Entry(raw["dtype"], shape, begin + first, expected)
        if sum(e.size for e in entries.values()) != size - begin:
            raise ValueError("the file is longer or shorter than its tensors")
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise IntegrityError(f"{path.name} is not a whole safetensors file: {error}") from None
    return entries


def safetensors_not_finite(
    path: Path, *, on_chunk: Callable[[], None] = lambda: None
) -> str | None:
    """The first tensor that holds NaN or Inf, None if all are finite. Raises IntegrityError.

    ``on_chunk`` is called every 4 MiB, and may raise to end the search.
    """
    with path.open("rb", buffering=0) as handle:
        for name, entry in safetensors_entries(path).items():
            kind = _SAFETENSORS_FLOATS.get(entry.dtype)
            if kind and not _finite(handle, entry.start, entry.size, kind, on_chunk):
                return f"{name} of {path.name}"
    return None


def _finite(
    handle: IO[bytes], start: int, size: int, kind: str, on_chunk: Callable[[], None]
) -> bool:
    handle.seek(start)
    while size > 0:
        on_chunk()
        data = handle.read(min(size, _CHUNK))
        if not data:
            raise IntegrityError("a file became shorter while it was read")
        size -= len(data)
        if kind == "bf16":
            bits = np.frombuffer(data, np.dtype("<u2")) & np.uint16(0x7F80)
            if bool((bits == 0x7F80).any()):
                return False
        else:
            values = np.frombuffer(data, np.dtype(kind))
            # NaN and Inf survive a sum; a finite sum proves the chunk, another is looked into.
            with np.errstate(over="ignore", invalid="ignore"):
                total = values.sum(dtype=np.float64)
            if not np.isfinite(total) and not bool(np.isfinite(values).all()):
                return False
    return True


# --- .pt ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorStub:
    """What the pickle says of a tensor."""

    storage: str  # e.g. FloatStorage
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _StorageStub:
    kind: str
    key: str


class _Inert:
    """Stands for any class or function; accepts whatever a pickle does to it."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __setstate__(self, _: Any) -> None: ...
    def __setitem__(self, *_: Any) -> None: ...
    def __call__(self, *_: Any, **__: Any) -> _Inert:
        return self

    def append(self, _: Any) -> None: ...
    def extend(self, _: Any) -> None: ...


def _tensor(storage: Any, _offset: Any, shape: Any, *_: Any) -> Any:
    kind = storage.kind if isinstance(storage, _StorageStub) else ""
    return TensorStub(kind, tuple(int(n) for n in shape))


class _Reader(pickle.Unpickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.storages: dict[str, str] = {}  # record key -> storage kind

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        return type(name, (_Inert,), {})

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, tuple) and len(pid) >= 3 and pid[0] == "storage":
            kind, key = getattr(pid[1], "__name__", ""), str(pid[2])
            self.storages[key] = kind
            return _StorageStub(kind, key)
        return _Inert()


class PtFile:
    """A ``.pt`` file: ``content`` is its pickle with tensors as :class:`TensorStub`. Of an open
    file only the pickle and the table of contents are read.

    Raises IntegrityError for a file that ``torch.save`` did not write.
    """

    def __init__(self, path: Path | IO[bytes]) -> None:
        self._path = path
        name = Path(path.name).name
        try:
            with zipfile.ZipFile(path) as archive:
                records = archive.infolist()
                pickles = [r for r in records if r.filename.endswith("/data.pkl")]
                if len(pickles) != 1 or pickles[0].file_size > MAX_HEADER:
                    raise ValueError("it holds no pickle of a sensible size")
                if any(r.compress_type != zipfile.ZIP_STORED for r in records):
                    raise ValueError("it is compressed")
                self._prefix = pickles[0].filename.removesuffix("data.pkl")
                reader = _Reader(io.BytesIO(archive.read(pickles[0])))
                self.content = reader.load()
                self._storages = reader.storages
        except (
            ValueError,
            zipfile.BadZipFile,
            pickle.UnpicklingError,
            EOFError,
            TypeError,
            AttributeError,
            IndexError,
            KeyError,
            OverflowError,
            RuntimeError,  # also: an encrypted record, RecursionError, NotImplementedError
            MemoryError,
        ) as error:  # all that unpickling damaged bytes raises
            raise IntegrityError(f"{name} is not a whole .pt file: {error}") from None

    def not_finite(self, *, on_chunk: Callable[[], None] = lambda: None) -> str | None:
        """What holds NaN or Inf, None if nothing does. Raises IntegrityError for missing data.

        ``on_chunk`` is called every 4 MiB, and may raise to end the search.
        """
        try:
            with zipfile.ZipFile(self._path) as archive:
                for key, kind in self._storages.items():
                    dtype = _STORAGES.get(kind, ("", 0))[0]
                    record = archive.getinfo(f"{self._prefix}data/{key}")
                    with archive.open(record) as handle:  # type: ignore[assignment]
                        if dtype and not _finite(handle, 0, record.file_size, dtype, on_chunk):  # type: ignore[arg-type]
                            return Path(self._path.name).name
        except StoreError:  # a RuntimeError too
            raise
        except (KeyError, zipfile.BadZipFile, EOFError, ValueError, RuntimeError) as error:
            # RuntimeError: encrypted, or packed in a way Python does not know
            raise IntegrityError(f"{Path(self._path.name).name} is not whole: {error}") from None
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
