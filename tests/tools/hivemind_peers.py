"""Run a real hivemind peer process that may misbehave in an all-reduce.

    python -m tests.tools.hivemind_peers DESCRIPTOR

The file ``kind`` next to the peer's key contains a word that says how the peer misbehaves from its
next order on. Without that file the peer is honest.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind knows streams by this name only

import torch
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2

from distributed_training.exchange import hivemind_peer
from distributed_training.exchange.hivemind import Answer, Order, Settings

kind, _place = "", Path()
_victim: list[str] = []  # peer id of the only peer that gets false values


def _read_kind() -> None:
    global kind
    kind = _place.read_text() if _place.exists() else ""


class Runner(hivemind_peer.Runner):
    """A runner that sends or returns what ``kind`` says."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if kind == "weight":
            self.weight = 1e6

    async def _generate_input_for_peer(self, peer_index: int) -> AsyncIterator[Any]:
        async for part in super()._generate_input_for_peer(peer_index):
            if kind == "slow":
                await asyncio.sleep(len(part.tensor_part.buffer) * 8 / 1e6 + 1.0)
            yield part

    async def rpc_aggregate_part(self, stream: Any, context: P2PContext) -> AsyncIterator[Any]:
        if kind == "silent":
            await asyncio.sleep(3600)
        async for message in super().rpc_aggregate_part(stream, context):
            if message.code == averaging_pb2.AVERAGED_PART and self._lies_to(
                str(context.remote_id)
            ):
                values = deserialize_torch_tensor(message.tensor_part)
                if kind == "lie-one-value":
                    values.view(-1)[0] = 30000.0
                else:
                    values.add_(torch.randn_like(values), alpha=3.0)
                message.tensor_part.CopyFrom(
                    serialize_torch_tensor(values, message.tensor_part.compression)
                )
            yield message

    def _lies_to(self, peer: str) -> bool:
        if kind in ("lie-to-one", "lie-to-a-member"):
            return peer in _victim
        return kind in ("lie-all", "lie-one-value")


class Averager(hivemind_peer.Averager):  # the class name is part of the names of its RPCs
    runner_class = Runner

    async def _begin_round(self, order: Order, future: Any) -> None:
        _read_kind()  # in the averager's process
        # Only the validator's average counts.
        members = [peer for peer, _, _ in order.members if peer != order.leader]
        _victim[:] = members[:1] if kind == "lie-to-a-member" else [order.leader]
        await super()._begin_round(order, future)


class Peer(hivemind_peer.Peer):
    averager_class = Averager

    def __init__(self, settings: Settings) -> None:
        global _place
        _place = Path(settings.identity).parent / "kind"
        super().__init__(settings)

    def _fill(self, order: Order, scale: float) -> None:
        super()._fill(order, scale)
        with self._averager.get_tensors() as tensors:
            for tensor in tensors:
                if kind == "nan":
                    tensor.view(-1)[0] = math.nan
                elif kind == "poison":
                    tensor.neg_()

    def average(self, order: Order) -> Answer:
        _read_kind()
        if kind == "dies":
            os._exit(1)
        if kind == "hangs":
            time.sleep(3600)
        if kind == "late":
            time.sleep(max(0.0, order.at - time.time()) + 10 * self._settings.gather)
        return super().average(order)


if __name__ == "__main__":
    hivemind_peer.main(Peer)
    sys.exit()
