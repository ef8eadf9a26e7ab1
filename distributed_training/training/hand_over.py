"""A snapshot of a model that is sharded across nodes: node 0's ranks write what all ranks have.

Each rank of another node sends its part to the rank of node 0 with its number there, a parameter at
a time. That goes through the ranks' own group, so training waits for it; without
``--neuron.shard_across_nodes`` node 0 has everything, and nothing is sent.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .feedback import Code, Direction
from .shards import RowStream, row_range
from .snapshot import SnapshotState


def hand_over(state: SnapshotState, stream: RowStream) -> list[SnapshotState]:
    """What this rank writes, its own part last. Collective."""
    layout = stream.layout
    if layout.shards == layout.local:
        return [state]
    if layout.on_node_0:
        others = range(layout.rank + layout.local, layout.world_size, layout.local)
        return [*(_receive(state, stream, rank) for rank in others), state]
    codes = {each.name: each.encode() for each in state.directions}
    for i, parts in enumerate(
        zip(state.weights, state.exp_avg, state.exp_avg_sq, strict=True)
    ):  # a parameter at a time
        mine = (*parts, {name: made[i] for name, made in codes.items()})
        receiver = layout.rank % layout.local
        dist.send_object_list([mine], group=stream.group, group_dst=receiver)
    made = [Direction(name, list(parts)) for name, parts in codes.items()]
    return [dataclasses.replace(state, directions=made, writes=False)]


def _receive(state: SnapshotState, stream: RowStream, rank: int) -> SnapshotState:
    weights, first, second = [], [], []
    codes: dict[str, list[Code | None]] = {each.name: [] for each in state.directions}
    shards = []
    for shard in state.shards:
        box: list[Any] = [None]
        dist.recv_object_list(box, group=stream.group, group_src=rank)
        rows, exp_avg, exp_avg_sq, made = box[0]
        weights.append(rows)
        first.append(exp_avg)
        second.append(exp_avg_sq)
        for name, code in made.items():
            codes[name].append(code)
        start, stop = row_range(shard.shape[0], stream.layout.shards, rank)
        shards.append(dataclasses.replace(shard, start=start, stop=stop))
    return dataclasses.replace(
        state,
        rank=rank,
        own=False,
        shards=shards,
        weights=weights,
        exp_avg=first,
        exp_avg_sq=second,
        directions=[Direction(name, list(parts)) for name, parts in codes.items()],
        mesh=_seen_from(state.mesh, rank),
    )


def _seen_from(mesh: DeviceMesh, rank: int) -> DeviceMesh:
    """The file says which rank's part it holds by that rank's place in the mesh."""
    other = copy.copy(mesh)
    other._coordinate_on_dim = (rank,)
    return other
