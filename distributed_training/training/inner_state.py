"""The inner optimizer's files: those of this miner as it uploads them, and those of another.

``inner_optimizer.rankRRRR-of-W.pt`` holds AdamW's moments of the rows that one rank of W had, and
the place in the schedule (protocol page, section 3).

*Written.* Validators load these shards under torch 2.5.1, with ``weights_only`` and an allow-list
of five classes: DTensor, DTensorSpec, TensorMeta, DeviceMesh, Shard. A newer torch pickles
DeviceMesh, DTensorSpec and Shard with other classes inside (``_MeshLayout`` and others), which that
list does not have. So these three are written as torch 2.5.1 writes them: their class by name, and
the attributes that its ``__init__`` sets (its sources: ``torch/distributed/device_mesh.py`` and
``torch/distributed/tensor/{_dtensor_spec,placement_types}.py``).

*Read.* Number and dtype of the files are the writer's. A moment is put together from all files and
cut again to the rows of the reader. Nothing in a file can run: pickles are read with inert values
in place of tensors (:mod:`..protocol.pt_file`), and numbers as bytes.
"""

from __future__ import annotations

import copyreg
import math
import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from distributed_training.common.files import atomic_file
from distributed_training.protocol import keys
from distributed_training.protocol.gradients import Schema
from distributed_training.protocol.pt_file import Made, PtContent, Storage, read_pt

from .inner_optimizer import EPS, CosineSchedule

MOMENTS = ("exp_avg", "exp_avg_sq")


def describe_inner(
    schema: Schema,
    schedule: CosineSchedule,
    *,
    finished_steps: int,
    outer_step: int,
    betas: tuple[float, float],
    weight_decay: float,
) -> dict[str, Any]:
    """Return the content of a file as it is now, without the moments."""
    rate = schedule.rate(finished_steps)
    group = {
        "lr": rate,
        "betas": betas,
        "eps": EPS,
        "weight_decay": weight_decay,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
        "initial_lr": schedule.peak,
        "params": [name for name, _ in schema],
    }
    return {
        "optimizer_state_dict": {"param_groups": [group]},
        "learning_rate": rate,
        "scheduler_state": schedule.published_state(finished_steps),
        "epoch": outer_step,
    }


def write_shard(
    path: Path,
    description: Mapping[str, Any],
    *,
    schema: Schema,
    rank: int,
    ranks: int,
    steps: int,
    moments: Mapping[str, Sequence[Tensor]],
) -> None:
    """Write the file of ``rank`` durably, in the form torch 2.5.1 loads. Raises OSError.

    ``description``: :func:`describe_inner`. ``steps``: AdamW's. ``moments``: by kind, the rank's
    rows of every parameter, in host memory.
    """
    mesh = _Mesh(ranks, rank)

    def sharded(shape: tuple[int, ...], rows: Tensor) -> Tensor:
        # Not DTensor.from_local: that wants ranks that run, and would move rows to their device.
        stride = torch.empty(shape, device="meta").stride()
        meta = TensorMeta(torch.Size(shape), stride, torch.float32)
        spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)  # type: ignore[arg-type]
        return DTensor(rows, spec, requires_grad=False)  # type: ignore[call-arg,abstract]

    entries: dict[str, dict[str, Tensor]] = {}
    for i, (name, shape) in enumerate(schema):
        entries[name] = {"step": torch.tensor(float(steps))}
        for kind in MOMENTS:
            entries[name][kind] = sharded(shape, moments[kind][i])
    state = {"state": entries, **description["optimizer_state_dict"]}
    with atomic_file(path) as file:
        # With torch's own pickle module validators would refuse it: see the module's docstring.
        torch.save(
            {**description, "optimizer_state_dict": state}, file, pickle_module=_AS_TORCH_2_5
        )


class _Mesh:
    """The mesh of ``ranks`` as ``rank`` sees it: for DTensors of ranks that need not run."""

    ndim = 1
    device_type = "cpu"

    def __init__(self, ranks: int, rank: int) -> None:
        self.mesh = torch.arange(ranks, dtype=torch.int)
        self._rank = rank

    def _class(self) -> type:
        return DeviceMesh

    __class__ = property(_class)  # type: ignore[assignment]  # pickle compares it with its own

    def get_coordinate(self) -> list[int]:
        return [self._rank]


class _Pickler(pickle.Pickler):
    """Writes the three classes whose state changed since torch 2.5.1 as that version does."""

    def reducer_override(self, obj: Any) -> Any:
        state: dict[str, Any]
        if type(obj) is _Mesh:
            ranks = obj.mesh.tolist()
            # Validators compare it with theirs, by ranks, device type and names; theirs is of GPUs.
            state = {
                "device_type": "cuda",
                "mesh": obj.mesh,
                "mesh_dim_names": None,
                "_flatten_mesh_list": tuple(ranks),
                "_thread_id": None,
                "_dim_group_infos": [("ptd:0", ranks, "0")],  # the default process group
                "_coordinate_on_dim": obj.get_coordinate(),
            }
        elif type(obj) is DTensorSpec:
            state = {
                "mesh": obj.mesh,
                "placements": tuple(obj.placements),
                "tensor_meta": obj.tensor_meta,
                "_hash": None,
            }
        elif type(obj) is Shard:
            state = {"dim": obj.dim}
        else:
            return NotImplemented
        return copyreg.__newobj__, (obj.__class__,), state  # type: ignore[attr-defined]


_AS_TORCH_2_5 = ModuleType("pickle_as_torch_2_5")  # torch.save wants a module
_AS_TORCH_2_5.Pickler = _Pickler  # type: ignore[attr-defined]

_DTYPES = {"FloatStorage": torch.float32, "BFloat16Storage": torch.bfloat16}
# PKWARE's APPNOTE.TXT, 4.3.7: bytes of a member's local header, and where in it the lengths are of
# the name and of the extra field that follow it, and the stored bytes those.
_LOCAL_HEADER, _LOCAL_LENGTHS = 30, 26
_MOST_STEPS = 10**9


@dataclass(frozen=True)
class InnerFacts:
    """``steps``: AdamW's, for its bias correction; ``finished_steps``: the schedule's, never reset.

    ``peak``: the highest learning rate of the schedule, None if the file does not say.
    """

    steps: int
    finished_steps: int
    peak: float | None


class InnerState:
    """The shards in ``folder``, of any number of ranks.

    Raises ValueError, in one line, if they are not whole or of another model; of the moments only
    the description is read so far.
    """

    def __init__(self, folder: Path, schema: Schema) -> None:
        self._paths = _shards_in(folder)
        self._schema = schema
        try:
            self._files = [read_pt(path) for path in self._paths]
            self.facts = self._facts(self._files[0])
            for name, shape in schema:
                for kind in MOMENTS:
                    self._parts(kind, name, shape)
        except Exception as error:  # noqa: BLE001 - foreign bytes, in values of any kind
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ValueError(
                f"{folder} holds no inner optimizer of this model ({why:.200})"
            ) from None

    def moment(self, kind: str, index: int) -> Tensor:
        """Return the whole float32 moment ``kind`` of a parameter. Raises ValueError, OSError."""
        name, shape = self._schema[index]
        whole = torch.empty(shape, dtype=torch.float32)
        first = 0
        for number, (storage, offset, size) in enumerate(self._parts(kind, name, shape)):
            rows = self._read(number, storage, offset, math.prod(size))
            whole[first : first + size[0]] = rows.view(size)
            first += size[0]
        if not bool(torch.isfinite(whole).all()) or (
            kind == MOMENTS[1] and bool((whole < 0).any())
        ):
            raise ValueError(f"{kind} of {name} is no moment of AdamW: NaN, Inf or below 0")
        return whole

    def _read(self, number: int, storage: Storage, offset: int, count: int) -> Tensor:
        """Return ``count`` elements of a storage. Raises OSError, ValueError."""
        dtype = _DTYPES[storage.kind]
        if not count:
            return torch.empty(0, dtype=dtype)
        member = self._files[number].members[storage.key]
        with self._paths[number].open("rb") as file:
            # Lengths of the local header: torch pads it, so that data lie aligned, and the table of
            # contents has others.
            file.seek(member.header_offset + _LOCAL_LENGTHS)
            # Filled up: a place beyond the end is then found short, as a cut file is, below.
            name_and_extra = sum(struct.unpack("<2H", file.read(4).ljust(4, b"\0")))
            start = member.header_offset + _LOCAL_HEADER + name_and_extra
            file.seek(start + offset * dtype.itemsize)
            # Not the storage: an untrusted peer's moments, hundreds of them, may all be views of
            # one that is as large as the file.
            data = bytearray(file.read(count * dtype.itemsize))
        if len(data) != count * dtype.itemsize:
            raise ValueError(f"{self._paths[number].name} became shorter while it was read")
        return torch.frombuffer(data, dtype=dtype)

    def _facts(self, file: PtContent) -> InnerFacts:
        content = file.content
        finished = finished_steps(file)
        rates = content["scheduler_state"].get("base_lrs") or [None]
        step = content["optimizer_state_dict"]["state"][self._schema[0][0]]["step"]
        if isinstance(step, Made):
            storage, offset, _ = _tensor(step)
            step = float(self._read(0, storage, offset, 1)[0])
        _check_count(step)
        peak = rates[0] if type(rates[0]) is float and 0 < rates[0] < 10 else None
        return InnerFacts(int(step), finished, peak)

    def _parts(
        self, kind: str, name: str, shape: tuple[int, ...]
    ) -> list[tuple[Storage, int, tuple[int, ...]]]:
        """Locate the rows of a moment in each file, and their shape. Raises TypeError."""
        parts = []
        for file in self._files:
            entry = file.content["optimizer_state_dict"]["state"][name]
            parts.append(_tensor(entry[kind]))
        if sum(size[0] for *_, size in parts) != shape[0] or any(
            size[1:] != shape[1:] for *_, size in parts
        ):
            raise TypeError(f"{kind} of {name} does not have the shape {shape}")
        return parts


def finished_steps(file: PtContent) -> int:
    """Return the place in the learning rate's schedule. Raises ValueError."""
    try:
        finished = file.content["scheduler_state"]["last_epoch"]
        _check_count(finished)
    except (LookupError, TypeError, AttributeError):
        raise ValueError("its file names no place in the schedule") from None
    return int(finished)


def _check_count(count: Any) -> None:
    # Not isinstance(): True is an int. NaN fails both comparisons.
    if type(count) not in (int, float) or not 0 <= count <= _MOST_STEPS:
        raise TypeError(f"{count!r:.40} is no number of inner steps")


def _shards_in(folder: Path) -> list[Path]:
    """List the files of all ranks, in their order. Raises ValueError if some are missing."""
    found = {
        shard: path for path in folder.iterdir() if (shard := keys.parse_inner_optimizer(path.name))
    }
    count = len(found)
    if not count or sorted(found) != [(rank, count) for rank in range(count)]:
        raise ValueError(f"{folder} does not hold one inner optimizer of each rank")
    return [found[rank, count] for rank in range(count)]


def _tensor(value: Any) -> tuple[Storage, int, tuple[int, ...]]:
    """Return storage, first element and shape of a contiguous tensor, or of a DTensor's local one.

    Raises TypeError.
    """
    if isinstance(value, Made) and value.by.endswith("._rebuild_from_type_v2"):
        # Attributes, or a pair of them and of slots, where DTensor's are.
        state = value.arguments[3]
        parts = state if isinstance(state, tuple) else (state,)
        value = next(part["_local_tensor"] for part in parts if part)
    if not isinstance(value, Made) or not value.by.endswith("._rebuild_tensor_v2"):
        raise TypeError("a moment is no tensor")
    storage, offset, size, stride = value.arguments[:4]
    if not all(type(number) is int and number >= 0 for number in (offset, *size, *stride)):
        raise TypeError("a moment has an impossible place")
    contiguous, elements = [], 1
    for length in reversed(size):
        contiguous.append(elements)
        elements *= length
    inside = offset + elements <= storage.count
    plain = elements <= 1 or tuple(stride) == tuple(reversed(contiguous))
    if storage.kind not in _DTYPES or not (inside and plain):
        raise TypeError(f"a moment of {storage.kind} does not lie there in rows")
    return storage, offset, tuple(size)
