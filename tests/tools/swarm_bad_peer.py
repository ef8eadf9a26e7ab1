"""A peer that misbehaves in the all-reduce: ``swarm_bad_peer.py SHAPES PEERS GROUP_SIZE``.

Each line on standard input is the kind of the next round, as in :data:`KINDS`. It joins the DHT and
finds its group as any peer does; only what it sends to the others is wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from hivemind.dht.node import DHTNode
from torch import Tensor

from distributed_training.exchange.sn38 import all_reduce, averager_process, wire
from distributed_training.exchange.sn38.bounds import Known
from distributed_training.exchange.sn38.wire import Stream
from tests.tools.swarm_world import ORDER

KINDS = (
    "short",  # fewer parts than its group needs of it
    "long",  # more
    "nan",
    "weight",  # one that is no number
    "heavy",  # the weight of a million peers
    "misframed",  # bytes that are no message
    "misshapen",  # parts of half as many values
    "silent",  # never comes
    "stall",  # stops in the middle, the stream open
    "deaf",  # sends all and takes none of the differences
    "short averages",  # as a reducer
    "nan averages",
    "no averages",
    "early averages",  # all of them at once, without a look at what comes
    "vanish",  # the process ends in the middle
)


class BadAllReduce(all_reduce.AllReduce):
    kind = ""

    async def _send_parts(self, stream: Stream, share: Sequence[Tensor]) -> None:
        middle, kind = len(share) // 2, self.kind
        encode: Any = wire.encode
        for i, part in enumerate(share):
            fields: dict[str, Any] = {"weight": 1.0}
            if not i:
                fields |= {"code": 4, "group_id": self.group.id}
            if i >= middle:
                match kind:
                    case "short":
                        break
                    case "vanish":
                        os._exit(9)
                    case "stall":
                        await asyncio.Event().wait()
                    case "misframed":
                        await stream.send(b"\x07" * 5000)
                    case "misshapen":
                        part = part[: len(part) // 2]
                    case "nan":
                        part = torch.full_like(part, float("nan"))
                    case "weight":
                        fields["weight"] = float("nan")
                    case "heavy":
                        fields["weight"] = 1e6
            await stream.send(*encode(part, **fields))
        if kind == "long":
            for part in share:
                await stream.send(*encode(part, weight=1.0))
        await stream.send(wire.END)

    async def _exchange(self, index: int) -> bool:
        return False if self.kind == "silent" else await super()._exchange(index)

    async def _receive_differences(self, stream: Stream, left: list[Tensor]) -> None:
        if self.kind == "deaf":
            await asyncio.Event().wait()
        await super()._receive_differences(stream, left)

    async def serve(self, stream: Stream, first: wire.Arriving) -> None:
        if self.kind != "early averages":
            await super().serve(stream, first)
            return
        for part in self._shares[self._mine]:
            await stream.send(*wire.encode(torch.zeros_like(part), code=5))
        await asyncio.Event().wait()

    async def _answer(self, stream: Stream, sums: Any, collecting: Any) -> None:
        if not self.kind.endswith(" averages"):
            await super()._answer(stream, sums, collecting)
            return
        first: Any = await sums.get()
        await first.done.wait()
        match self.kind:
            case "short averages":
                await stream.send(*wire.encode(first.values, code=5))
                return
            case "no averages":
                await asyncio.Event().wait()
        pending = first
        while pending is not None:
            await pending.done.wait()
            await stream.send(*wire.encode(pending.values * float("nan"), code=5))
            pending = await sums.get()


async def main() -> None:
    shapes, peers, group_size = (json.loads(text) for text in sys.argv[1:])
    averager_process.AllReduce = BadAllReduce
    node = await DHTNode.create(initial_peers=peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    tensors = [torch.ones(shape) for shape in shapes]
    config: Any = SimpleNamespace(
        sockets=tempfile.mkdtemp(prefix="bad-peer-"),
        prefix="test_grad_averager",
        part_size=512 * 1024,
        compression="none",
    )
    peer = averager_process.DTGradAverager(node, config, tensors, Known())
    loop = asyncio.get_running_loop()
    async with peer.serving():
        print(node.peer_id, flush=True)
        for number in range(1000):
            kind = (await loop.run_in_executor(None, sys.stdin.readline)).strip()
            if not kind:
                break
            BadAllReduce.kind = kind
            for tensor in tensors:
                tensor.fill_(1.0)
            order = replace(ORDER, number=number, min_group_size=group_size)
            print(await peer.average(order, lambda: None), flush=True)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
