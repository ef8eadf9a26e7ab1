"""The inner optimizer's files, as this miner uploads them.

``inner_optimizer.rankRRRR-of-W.pt`` holds AdamW's moments of the rows that one rank of W had, and
the place in the schedule (protocol page, section 3).

Validators load these shards under torch 2.5.1, with ``weights_only`` and an allow-list
of five classes: DTensor, DTensorSpec, TensorMeta, DeviceMesh, Shard. A newer torch pickles
DeviceMesh, DTensorSpec and Shard with other classes inside (``_MeshLayout`` and others), which that
list does not have. So these three are written as torch 2.5.1 writes them: their class by name, and
the attributes that its ``__init__`` sets (its sources: ``torch/distributed/device_mesh.py`` and
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
from distributed_training.protocol.gradients import Schema

from .inner_optimizer import InnerOptimizer, Schedule, StateNames


def describe_inner(
    schema: Schema,
    schedule: Schedule,
    optimizer: InnerOptimizer,
    *,
    finished_steps: int,
    outer_step: int,
) -> dict[str, Any]:
    """Return the content of a file as it is now, without the state of parameters."""
    rate = schedule.rate(finished_steps)
    here = {"lr": rate, "foreach": None, "fused": None}
    group = {key: here.get(key, value) for key, value in optimizer.group.items() if key != "params"}
    group |= {"initial_lr": schedule.peak}
    names = [name for name, _ in schema if name not in optimizer.matrices]
    groups = [group | {"params": [name for name in names if name not in optimizer.undecayed]}]
    if optimizer.undecayed:
        rest = [name for name in names if name in optimizer.undecayed]
        groups.append(group | {"weight_decay": 0.0, "params": rest})
    if optimizer.matrix_group is not None:
        groups.append(optimizer.matrix_group | {"lr": rate, "params": [*optimizer.matrices]})
    return {
        "optimizer_state_dict": {"param_groups": groups},
        "learning_rate": rate,
        "scheduler_state": {  # as LambdaLR.state_dict() (protocol page, section 3)
            "base_lrs": [schedule.peak],
            "last_epoch": finished_steps,
            "_step_count": finished_steps + 1,
            "_get_lr_called_within_step": False,
            "_last_lr": [rate],
            "lr_lambdas": [None],
        },
        "epoch": outer_step,
    }


def write_optimizer_shard(
    path: Path,
    description: Mapping[str, Any],
    *,
    schema: Schema,
    rank: int,
    ranks: int,
    counts: Mapping[str, float],
    moments: Mapping[str, Sequence[Tensor]],
    keeps: Sequence[StateNames],
) -> None:
    """Write the file of ``rank`` durably, in the form torch 2.5.1 loads. Raises OSError.

    ``description``: :func:`describe_inner`. By the optimizer's own names ``counts`` of each
    parameter, and ``moments``: the rank's rows of every parameter, in host memory. ``keeps``: which
    of them a parameter has.
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
        entries[name] = {count: torch.tensor(counts[count]) for count in keeps[i].counts}
        for kind in keeps[i].rows:
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
        self.rank = rank

    # pickle compares it with its own
    __class__ = property(lambda self: DeviceMesh)  # type: ignore[assignment]


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
                "_coordinate_on_dim": [obj.rank],
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
