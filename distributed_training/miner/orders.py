"""How rank 0's decision reaches all ranks: one small broadcast per micro-batch boundary.

The vector is int64 and always of the same length, so a boundary costs one gloo broadcast of 64
bytes whatever is ordered; what an order needs beyond integers (a folder, a round's request) stays
on rank 0 or is derived from the integers.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class OrderKind(enum.IntEnum):
    """What every rank does next."""

    CONTINUE = 0  # one micro-batch
    IDLE = 1  # nothing; rank 0 is waiting for something, arg 1: for data
    AVERAGE = 2
    OUTER_STEP = 3
    LOAD = 4  # arg: outer step
    SNAPSHOT = 5  # arg: chain block
    CHECKPOINT = 6
    ROLL_BACK = 7
    STOP = 8  # arg: exit status
    PREVIEW = 9
    REBASE = 10  # arg: outer step


class DataOrder(NamedTuple):
    """What an order says about data; 0 where there is none."""

    request: int = 0
    begin: int = 0
    sequences: int = 0
    start: int = 0


@dataclass(frozen=True)
class Order:
    """One boundary's order.

    ``request_block`` starts prefetching of that block (0: none), ``begin_block`` switches training
    to it, cut to ``begin_sequences`` sequences on every rank, of which the first ``begin_start``
    were trained on before a restart.
    """

    kind: OrderKind
    arg: int = 0
    request_block: int = 0
    begin_block: int = 0
    begin_sequences: int = 0
    begin_start: int = 0

    def pack(self) -> list[int]:
        return [
            int(self.kind),
            self.arg,
            self.request_block,
            self.begin_block,
            self.begin_sequences,
            self.begin_start,
            0,
            0,
        ]

    @classmethod
    def unpack(cls, vector: list[int]) -> Order:
        return cls(OrderKind(vector[0]), *vector[1:6])


class ControlChannel:
    """The ranks' side channel: orders, votes and the readiness of data.

    ``group`` is a gloo group over all ranks (its timeout covers the longest time rank 0 may take
    between two boundaries); ``store`` is the process group's key-value store. With one rank nothing
    is sent.
    """

    def __init__(self, *, rank: int, world_size: int, group: Any, store: Any) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = group
        self._store = store

    def exchange(self, order: Order | None) -> Order:
        """Rank 0 passes its order, the others None; all return the same order."""
        if self.world_size == 1:
            assert order is not None
            return order
        vector = torch.tensor(order.pack() if order is not None else [0] * 8, dtype=torch.int64)
        dist.broadcast(vector, src=0, group=self._group)
        return Order.unpack([int(v) for v in vector])

    def all_agree(self, ok: bool) -> bool:
        """The vote: True on every rank if and only if every rank passes True."""
        if self.world_size == 1:
            return ok
        vote = torch.tensor([int(ok)], dtype=torch.int64)
        dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self._group)
        return bool(vote.item())

    def report_ready(self, block: int, sequences: int) -> None:
        """Tell rank 0 that this rank holds ``sequences`` sequences of ``block``."""
        if self.world_size > 1 and self.rank != 0:
            self._store.set(f"data/{block}/{self.rank}", str(sequences))

    def ready_everywhere(self, block: int, own: int | None) -> int | None:
        """Rank 0: sequences every rank can serve of ``block``, or None while one is not ready.

        Never blocks: asks the key-value store, not the ranks.
        """
        if own is None:
            return None
        if self.world_size == 1:
            return own
        keys = [f"data/{block}/{rank}" for rank in range(1, self.world_size)]
        if not self._store.check(keys):
            return None
        least = min([own, *(int(self._store.get(key)) for key in keys)])
        for key in keys:
            self._store.delete_key(key)
        return least

    def share(self, name: str, value: str | None) -> str:
        """Rank 0 passes a value once at start, the others None and wait for it."""
        key = f"share/{name}"
        if value is not None:
            self._store.set(key, value)
            return value
        while True:
            try:
                self._store.wait([key], timedelta(minutes=10))
                return str(self._store.get(key).decode())
            except dist.DistStoreError:  # rank 0 may wait long for the subnet, and says so
                continue

    def close(self) -> None:
        """Leave the process group. All ranks call it, after their last collective."""
        if dist.is_initialized():
            self.all_agree(True)  # rank 0 may host the store: nobody leaves before the last
            dist.destroy_process_group()


def open_control_channel(
    *, environ: Mapping[str, str], timeout: timedelta, backend: str
) -> ControlChannel:
    """Join the process group that torchrun described in the environment and open the channel.

    ``timeout`` covers every gloo collective of the control channel: a rank that does not come to a
    boundary within it ends the miner (and pm2 starts it again).
    """
    rank, world_size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    store, rank, world_size = next(
        iter(dist.rendezvous("env://", rank=rank, world_size=world_size, timeout=timeout))
    )
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("pg", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    group = dist.new_group(backend="gloo", timeout=timeout) if world_size > 1 else None
    return ControlChannel(
        rank=rank, world_size=world_size, group=group, store=dist.PrefixStore("miner", store)
    )
