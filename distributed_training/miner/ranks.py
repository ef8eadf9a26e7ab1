"""Send rank 0's decision to all ranks: one small broadcast per micro-batch boundary.

The vector is int64 and always of the same length, so a boundary costs one gloo broadcast of 64
bytes whatever the command. Data beyond integers (a folder, a round's request) stays on rank 0
(:class:`~.events.LocalPart`) or is derived from the integers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.node.start import NetworkFailure

from .events import COMMAND_INTEGERS, Command
from .run_folder import RANK_STORE

_SHARE_POLL = 0.1  # seconds


class RankChannel:
    """The ranks' side channel: commands, votes and the readiness of data.

    ``group`` is a gloo group over all ranks (its timeout covers the longest time rank 0 may take
    between two boundaries); ``store`` is the process group's key-value store. With one rank nothing
    is sent. ``local_world_size``: ranks on each machine; 0: all are on this one.
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
        """Return rank 0's command on every rank, its local part apart; the others pass None."""
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
        # A store in memory would keep them for ever.
        for key in keys:
            self._store.delete_key(key)
        return least

    def share(self, name: str, value: dict[str, Any] | None) -> dict[str, Any]:
        """Rank 0 passes something JSON-able once at the start, the others None and wait for it."""
        key = f"share/{name}"
        if value is not None:
            self._store.set(key, json.dumps(value))
            return value
        # Rank 0 may wait long for the subnet, and says so. Do not use Store.wait: a rank that
        # blocks in it handles no SIGTERM.
        while not self._store.check([key]):
            time.sleep(_SHARE_POLL)
        shared: dict[str, Any] = json.loads(self._store.get(key))
        return shared

    def close(self) -> None:
        """Leave the process group. All ranks call it, after their last collective."""
        if dist.is_initialized():
            self.vote(True)  # rank 0 may host the store: nobody leaves before the last
            dist.destroy_process_group()


def join_ranks(
    *,
    environ: Mapping[str, str],
    timeout: timedelta,
    backend: str,
    collective_timeout: timedelta | None = None,
) -> RankChannel:
    """Join the process group that torchrun described in the environment.

    ``timeout`` covers every gloo collective of the control channel: a rank that does not come to a
    boundary within it ends the miner (and it is started again). ``collective_timeout`` covers each
    collective of the default group, which is the model's, and the meeting at rank 0's store; None:
    ``timeout``. Raises NetworkFailure if ranks of several nodes do not meet.
    """
    rank, world_size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    local = int(environ.get("LOCAL_WORLD_SIZE", world_size))
    of_model = collective_timeout or timeout
    try:
        store = _store(environ, world_size, of_model)  # all ranks were started together
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("pg", store),
            rank=rank,
            world_size=world_size,
            timeout=of_model,
        )
        # Make a gloo group next to NCCL too: a command must not wait for what is queued on the GPU.
        group = dist.new_group(backend="gloo", timeout=timeout) if world_size > 1 else None
    except RuntimeError as error:
        # On one machine nothing lies between the ranks.
        if local == world_size:
            raise
        # A firewall may pass torchrun's port and no other: torch names no cause.
        raise NetworkFailure(
            f"the ranks of the nodes did not meet at {environ['MASTER_ADDR']} "
            f"({str(error).splitlines()[0]}), so all ranks start again: let all TCP ports through "
            "between the nodes, in the firewalls of both (docs/several-machines.md)"
        ) from error
    return RankChannel(
        rank=rank,
        world_size=world_size,
        group=group,
        store=dist.PrefixStore("miner", store),
        local_world_size=local,
    )


def _store(environ: Mapping[str, str], world_size: int, timeout: timedelta) -> dist.Store:
    """Return the store through which the ranks meet.

    On one machine it is a file of the launcher that no other account can open. Under torchrun it is
    that of its agent on node 0.
    """
    if world_size == 1:
        return dist.HashStore()  # nobody to meet: neither a port nor a file that a disk may refuse
    # TCPStore asks nobody who they are: any local account could read, change and delete its keys,
    # among them the addresses that gloo and NCCL connect to.
    if path := environ.get(RANK_STORE):
        # It grows by 50 bytes per block and rank, until the ranks start again.
        file = dist.FileStore(path, world_size)
        file.set_timeout(timeout)
        return file
    return dist.TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        world_size,
        is_master=False,
        timeout=timeout,
        # Its constructor would wait for all of them, and handle no SIGTERM meanwhile.
        wait_for_workers=False,
    )
