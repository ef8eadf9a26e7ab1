"""Reads a file as torch 2.5.1 does with ``weights_only`` and the public validators' allow-list.

Facts from that version's ``_weights_only_unpickler.py``: which names a file may use, and which
pickle operations it knows. An object of an allow-listed class gets its state as ``__dict__`` unless
the class has ``__setstate__`` (DeviceMesh, DTensorSpec and Shard have none there).
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import torch

ALLOW_LISTED = {
    "torch.distributed.tensor DTensor",
    "torch.distributed.tensor._dtensor_spec DTensorSpec",
    "torch.distributed.tensor._dtensor_spec TensorMeta",
    "torch.distributed.device_mesh DeviceMesh",
    "torch.distributed.tensor.placement_types Shard",
}
BUILT_IN = {
    "collections OrderedDict",
    "torch FloatStorage",
    "torch IntStorage",
    "torch Size",
    "torch device",
    "torch float32",
    "torch.serialization _get_layout",
    "torch._tensor _rebuild_from_type_v2",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_wrapper_subclass",
}
OPERATIONS = (
    "APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPERSID BINPUT BINUNICODE BUILD "
    "EMPTY_DICT EMPTY_LIST EMPTY_SET EMPTY_TUPLE GLOBAL LONG1 LONG_BINGET LONG_BINPUT MARK "
    "NEWFALSE NEWOBJ NEWTRUE NONE PROTO REDUCE SETITEM SETITEMS SHORT_BINSTRING STOP TUPLE "
    "TUPLE1 TUPLE2 TUPLE3"
)


class StandIn:
    """An object of DeviceMesh, DTensorSpec, Shard or DTensor: whatever state the file gives it."""

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            self.__dict__.update(part or {})


def load(path: Path) -> Any:
    """Raises AssertionError for what torch 2.5.1 would refuse. DTensors are :class:`StandIn`."""
    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        data = archive.read(name)
        folder = name.removesuffix("data.pkl")
        used = list(pickletools.genops(data))
        assert {op.name for op, _, _ in used} <= set(OPERATIONS.split())
        assert {a for op, a, _ in used if op.name == "GLOBAL"} <= ALLOW_LISTED | BUILT_IN

        class Unpickler(pickle.Unpickler):
            def find_class(self, module: str, name: str) -> Any:
                if name in ("DeviceMesh", "DTensorSpec", "Shard", "DTensor"):
                    return StandIn
                if name == "_rebuild_from_type_v2":
                    return lambda _function, kind, _arguments, state: _with_state(kind(), state)
                return super().find_class(module, name)

            def persistent_load(self, pid: Any) -> Any:
                _, storage, key, _, _ = pid
                raw = bytearray(archive.read(f"{folder}data/{key}"))
                values = torch.frombuffer(raw, dtype=storage.dtype) if raw else torch.empty(0)
                return torch.storage.TypedStorage(
                    wrap_storage=values.untyped_storage(), dtype=storage.dtype, _internal=True
                )

        return Unpickler(io.BytesIO(data)).load()


def _with_state(made: StandIn, state: Any) -> StandIn:
    made.__setstate__(state)
    return made
