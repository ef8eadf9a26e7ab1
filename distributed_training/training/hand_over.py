"""A snapshot of a model that is sharded across nodes: node 0's ranks write what all ranks have.

Each rank of another node sends its part to the rank of node 0 with its number there, a parameter at
a time, beside training: in the snapshot's thread, over a group of its own. Without
``--neuron.shard_across_nodes`` node 0 has everything, and nothing is sent.

Hazard: both go through the same messages whatever happens, or one waits until the group's timeout.
So the receiver asks for each parameter once it has the memory for it. A rank of either side that
gives up says so in place of the next one, and there are no more.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .feedback import Code, Direction
from .layout import Layout
from .shards import row_range
from .snapshot import SnapshotState


def hand_over(
    state: SnapshotState, layout: Layout, group: dist.ProcessGroup, check: Callable[[], None]
) -> list[SnapshotState]:
    """What this rank writes, its own part last. All ranks call it. ``check`` raises to give up.

    Raises what ``check`` and the encoding raise; RuntimeError where another rank gave up."""
    if layout.on_node_0:
        return [*_receive_all(state, layout, group, check), state]
    codes: dict[str, list[Code | None]] = {}
    problem: BaseException | None = None
    try:
        codes = {each.name: each.encode(check) for each in state.directions}
    except BaseException as error:  # noqa: BLE001 - raised below, once the other side knows
        problem = error
    for i, parts in enumerate(
        zip(state.weights, state.exp_avg, state.exp_avg_sq, strict=True)
    ):  # a parameter at a time
        receiver = layout.rank % layout.local
        wanted = torch.empty(1)
        dist.recv(wanted, group=group, group_src=receiver)
        if not wanted:
            raise RuntimeError(f"rank {receiver} gave up the snapshot") from problem
        mine = None if problem else {name: made[i] for name, made in codes.items()}
        dist.send_object_list([mine], group=group, group_dst=receiver)
        if problem is not None:
            raise problem
        for rows in parts if parts[0].numel() else ():
            dist.send(rows.contiguous(), group=group, group_dst=receiver)
    made = [Direction(name, list(parts)) for name, parts in codes.items()]
    return [dataclasses.replace(state, directions=made, writes=False)]


def _receive_all(
    state: SnapshotState, layout: Layout, group: dist.ProcessGroup, check: Callable[[], None]
) -> list[SnapshotState]:
    ranks = deque(range(layout.rank + layout.local, layout.world_size, layout.local))
    found: list[SnapshotState] = []
    try:
        while ranks:
            found.append(_receive(state, layout, group, ranks.popleft(), check))
    finally:
        for rank in ranks:  # which wait to be asked
            dist.send(torch.zeros(1), group=group, group_dst=rank)
    return found


def _receive(
    state: SnapshotState,
    layout: Layout,
    group: dist.ProcessGroup,
    rank: int,
    check: Callable[[], None],
) -> SnapshotState:
    kept: tuple[list[Tensor], ...] = ([], [], [])
    codes: dict[str, list[Code | None]] = {each.name: [] for each in state.directions}
    shards = []
    for shard in state.shards:
        wanted = torch.zeros(1)
        try:
            check()
            start, stop = row_range(shard.shape[0], layout.shards, rank)
            rows = [torch.empty((stop - start, *shard.shape[1:])) for _ in kept]
            wanted = torch.ones(1)
        finally:
            dist.send(wanted, group=group, group_dst=rank)
        box: list[Any] = [None]
        dist.recv_object_list(box, group=group, group_src=rank)
        if box[0] is None:
            raise RuntimeError(f"rank {rank} gave up its part of the snapshot")
        for name, code in box[0].items():
            codes[name].append(code)
        for each, into in zip(rows, kept, strict=True):
            if each.numel():
                dist.recv(each, group=group, group_src=rank)
            into.append(each)
        shards.append(dataclasses.replace(shard, start=start, stop=stop))
    weights, first, second = kept
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
