"""A network over hivemind whose all-reduce is computed in this process: many members, no peers.

What each member would send and get is rounded to float16 as on the wire. The validator, its judge,
and all that is published are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed_training.exchange.hivemind import Answer, Order
from distributed_training.protocol import keys
from distributed_training.protocol.average_file import write_average
from distributed_training.protocol.manifest import Manifest
from distributed_training.protocol.update_file import UpdateFile
from distributed_training.validator import average
from tests.tools.hivemind_world import HivemindWorld
from tests.tools.store_world import StoreBucket, StoreWorld, keypair


class CountingBucket(StoreBucket):
    """A member's bucket. ``fetched``: bytes that were read from it."""

    fetched = 0

    def get(self, key: str, *, limit: int) -> bytes | None:
        data = super().get(key, limit=limit)
        self.fetched += len(data or b"")
        return data

    def get_range(self, key: str, start: int, length: int, **how: Any) -> bytes:
        data = super().get_range(key, start, length, **how)
        self.fetched += len(data)
        return data


def count_bytes(world: StoreWorld) -> None:
    """Count from now on what is fetched of each member's uploads."""
    world.own = {uid: CountingBucket(world.clock) for uid in world.uids}


def fetched_bytes(world: StoreWorld) -> int:
    return sum(
        bucket.fetched for bucket in world.own.values() if isinstance(bucket, CountingBucket)
    )


class InstantPeer:
    """Stands for the validator's peer process: answers an order at once, from all uploads."""

    def __init__(self, answered: Callable[[Answer], None], world: InstantWorld) -> None:
        self._answered, self._world = answered, world

    def close(self) -> None:
        pass

    def send(self, order: Order) -> None:
        world, sums, senders = self._world, list[Tensor](), list[str]()
        schema = world.validator.state.schema
        scale = order.scale(sum(torch.Size(shape).numel() for _, shape in schema))
        for uid in world.uids:
            key = keys.upload_key(uid, world.state.outer_step, order.serial)
            path = world.folder / "averaged.safetensors"
            path.write_bytes(world.own[uid].objects[key][0])
            file = UpdateFile.reopen(path, schema)
            parts = [file.decode(name, shape).mul_(scale).half().float() for name, shape in schema]
            sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
            senders.append(f"peer-{uid}")
        average = [total / len(senders) for total in sums]
        write_average(Path(order.average), [name for name, _ in schema], average, scale)
        count = sum(tensor.numel() for tensor in average)
        share = [count // len(senders)] * len(senders)
        share[0] += count - sum(share)
        self._answered(Answer(order.serial, tuple(zip(senders, share, strict=True))))


class InstantWorld(HivemindWorld):
    """See the module; ``patch`` puts :class:`InstantPeer` in the place of the peer process."""

    def __init__(
        self,
        folder: Path,
        patch: pytest.MonkeyPatch,
        *,
        uids: Sequence[int] = (3, 5, 17),
        **changes: Any,
    ) -> None:
        patch.setattr(average, "open_peer", lambda *given: InstantPeer(given[-1], self))
        StoreWorld.__init__(self, folder, uids=uids, own=True, **changes)
        self.peers = {}
        for uid in uids:
            hotkey = keypair(f"miner-{uid}").ss58_address
            self.ledger.serve(hotkey, "127.0.0.1", 9, f"peer-{uid}")

    def average_round(self, **_: Any) -> Manifest:
        before = self.state.outer_step
        self.send()
        self.until_step(before + 1)
        return self.manifest(before + 1)
