"""One rank's AdamW state in the public network's form (protocol page, section 3).

Validators load these shards under torch 2.5.1, with ``weights_only`` and an allow-list of five
classes: DTensor, DTensorSpec, TensorMeta, DeviceMesh, Shard. A newer torch pickles DeviceMesh,
DTensorSpec and Shard with other classes inside (``_MeshLayout`` and others), which that list does
not have. So these three are written as torch 2.5.1 writes them: their class by name, and the
attributes that its ``__init__`` sets (its sources: ``torch/distributed/device_mesh.py`` and
``torch/distributed/tensor/{_dtensor_spec,placement_types}.py``).
"""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from distributed_training.common.files import atomic_file

from .shards import ParameterShard


def shard_content(
    *,
    shards: Sequence[ParameterShard],
    mesh: DeviceMesh,
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    steps: int,
    param_group: Mapping[str, Any],
    scheduler_state: Mapping[str, Any],
    outer_step: int,
) -> dict[str, Any]:
    """What one ``inner_optimizer.rank000R-of-W.pt`` holds. ``exp_avg``, ``exp_avg_sq``: host row
    blocks like the shards."""

    def sharded(shard: ParameterShard, rows: Tensor) -> Tensor:
        # Not DTensor.from_local: that would move host rows to the mesh's device.
        meta = TensorMeta(torch.Size(shard.shape), shard.dtensor.stride(), torch.float32)
        spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
        return DTensor(rows, spec, requires_grad=False)  # type: ignore[call-arg,abstract]

    entries = {}
    for shard, first, second in zip(shards, exp_avg, exp_avg_sq, strict=True):
        entries[shard.name] = {
            "step": torch.tensor(float(steps)),
            "exp_avg": sharded(shard, first),
            "exp_avg_sq": sharded(shard, second),
        }
    return {
        "optimizer_state_dict": {"state": entries, "param_groups": [dict(param_group)]},
        "learning_rate": float(param_group["lr"]),
        "scheduler_state": dict(scheduler_state),
        "epoch": outer_step,
    }


def write_shard(path: Path, content: Mapping[str, Any]) -> None:
    """Durably, in the form torch 2.5.1 loads. Raises OSError."""
    with atomic_file(path) as file:
        torch.save(dict(content), file, pickle_module=_AS_TORCH_2_5)


class _Pickler(pickle.Pickler):
    """Writes the three classes whose state changed since torch 2.5.1 as that version does."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is DeviceMesh:
            state = _mesh_state(obj)
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
        return copyreg.__newobj__, (type(obj),), state  # type: ignore[attr-defined]


def _mesh_state(mesh: DeviceMesh) -> dict[str, Any]:
    """A mesh of one dimension over all ranks. Validators compare it with theirs, by ranks, device
    type and names; theirs is of GPUs."""
    ranks = mesh.mesh.flatten().tolist()
    return {
        "device_type": "cuda",
        "mesh": mesh.mesh.detach().to("cpu", torch.int),
        "mesh_dim_names": None,
        "_flatten_mesh_list": tuple(ranks),
        "_thread_id": None,
        "_dim_group_infos": [("ptd:0", ranks, "0")],  # the default process group
        "_coordinate_on_dim": list(mesh.get_coordinate() or ()),
    }


_AS_TORCH_2_5 = ModuleType("pickle_as_torch_2_5")  # torch.save wants a module
_AS_TORCH_2_5.Pickler = _Pickler  # type: ignore[attr-defined]
