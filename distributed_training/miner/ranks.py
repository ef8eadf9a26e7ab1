"""Send rank 0's decision to all ranks, with one small broadcast per micro-batch boundary.

The broadcast is an int64 vector of fixed length, so a boundary costs one gloo broadcast of 64
bytes, whatever the command. Anything other than integers (a file, a close) stays on rank 0
(:class:`~.events.LocalPart`) or is derived from the integers.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.node.start import NetworkFailure

from .events import COMMAND_INTEGERS, Command
from .run_folder import RANK_STORE, RankEnvironment

_SHARE_POLL = 0.1  # seconds between two checks for a shared value


class RankChannel:
    """Carries commands, votes, and news about which data is ready between the ranks.

    ``group`` is a gloo group over all ranks (its timeout covers the longest time that rank 0 may
    take between two boundaries); ``store`` is the process group's key-value store. With one rank
    nothing is sent. ``local_world_size``: ranks on each machine; 0 if all are on this one.
    """

    def __init__(
        self, *, rank: int, world_size: int, group: Any, store: Any, local_world_size: int = 0
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_world_size = local_world_size or world_size
        self.local_rank = rank % self.local_world_size
        self._group = group
        self._store = store

    def broadcast(self, command: Command | None) -> Command:
        """Send rank 0's command, except its local part, to the other ranks, which pass None."""
        if self.world_size > 1:
            integers = command.to_integers() if command else [0] * COMMAND_INTEGERS
            vector = torch.tensor(integers, dtype=torch.int64)
            dist.broadcast(vector, src=0, group=self._group)
            command = command or Command.from_integers(vector.tolist())
        assert command is not None
        return command

    def vote(self, ok: bool) -> bool:
        """Return True on every rank if and only if every rank passes True."""
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
        """Return how many sequences of ``block`` every rank can serve; None if one is not ready.

        Only rank 0 calls it. It never blocks, since it asks the key-value store, not the ranks.
        """
        if own is None:
            return None
        if self.world_size == 1:
            return own
        keys = [f"data/{block}/{rank}" for rank in range(1, self.world_size)]
        if not self._store.check(keys):
            return None
        least = min([own, *(int(self._store.get(key)) for key in keys)])
        # An in-memory store would keep the keys forever.
        for key in keys:
            self._store.delete_key(key)
        return least

    def share(self, name: str, value: dict[str, Any] | None) -> dict[str, Any]:
        """Share one rank's JSON-able value, once, at the start; the others pass None and wait."""
        key = f"share/{name}"
        if value is not None:
            self._store.set(key, json.dumps(value))
            return value
        # Rank 0 may wait a long time for the subnet, and logs that. Do not use Store.wait: a rank
        # that blocks in it does not handle SIGTERM.
        while not self._store.check([key]):
            time.sleep(_SHARE_POLL)
        shared: dict[str, Any] = json.loads(self._store.get(key))
        return shared

    def close(self) -> None:
        """Leave the process group. All ranks call it, after their last collective."""
        if dist.is_initialized():
            self.vote(True)  # wait for all ranks, since rank 0 may host the store
            dist.destroy_process_group()


def join_ranks(
    me: RankEnvironment,
    *,
    timeout: timedelta,
    backend: str,
    collective_timeout: timedelta | None = None,
) -> RankChannel:
    """Join the process group of all ranks as the rank ``me``.

    ``timeout`` covers every gloo collective of the control channel: if a rank does not reach a
    boundary within it, the miner ends (and is started again). ``collective_timeout`` covers each
    collective of the default group, which the model uses, and the meeting at rank 0's store; None
    means ``timeout``. Raises NetworkFailure if the ranks of several nodes do not meet.
    """
    of_model = collective_timeout or timeout
    try:
        store = _store(me.world_size, of_model)  # all ranks were started together
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("pg", store),
            rank=me.rank,
            world_size=me.world_size,
            timeout=of_model,
        )
        # Create a gloo group in addition to NCCL: a command must not wait for work queued on a GPU.
        group = dist.new_group(backend="gloo", timeout=timeout) if me.world_size > 1 else None
    except RuntimeError as error:
        # On one machine there is no network between the ranks.
        if me.local_world_size == me.world_size:
            raise
        # A firewall may allow only torchrun's port, and torch does not name the cause.
        raise NetworkFailure(
            f"the ranks of the nodes did not meet at {os.environ['MASTER_ADDR']} "
            f"({str(error).splitlines()[0]}), so all ranks start again: open all TCP ports "
            "between the nodes in each node's firewall (docs/several-machines.md)"
        ) from error
    return RankChannel(
        rank=me.rank,
        world_size=me.world_size,
        group=group,
        store=dist.PrefixStore("miner", store),
        local_world_size=me.local_world_size,
    )


def _store(world_size: int, timeout: timedelta) -> dist.Store:
    """Return the store through which the ranks meet.

    On one machine it is a file of the launcher that no other account can open. Under torchrun it is
    the store of torchrun's agent on node 0.
    """
    if world_size == 1:
        return dist.HashStore()  # there is no other rank, so it needs neither a port nor a file
    # TCPStore authenticates nobody: any local account could read, change and delete its keys,
    # including the addresses that gloo and NCCL connect to.
    if path := os.environ.get(RANK_STORE):
        # The file grows by 50 bytes per block and rank, until the ranks start again.
        file = dist.FileStore(path, world_size)
        file.set_timeout(timeout)
        return file
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=False,
        timeout=timeout,
        # The constructor would wait for all workers, and would not handle SIGTERM meanwhile.
        wait_for_workers=False,
    )
