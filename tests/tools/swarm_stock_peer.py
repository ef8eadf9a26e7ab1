"""A plain hivemind averager: ``swarm_stock_peer.py SHAPES PEERS GROUP_SIZE``.

Each line on standard input is the value its tensors begin the next round with. It answers with "ok"
or with what the round failed with.
"""

from __future__ import annotations

import json
import os
import sys

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager


class DTGradAverager(DecentralizedAverager):
    """The name is part of what peers call each other by."""


def main() -> None:
    shapes, peers, group_size = (json.loads(text) for text in sys.argv[1:])
    dht = hivemind.DHT(initial_peers=peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    averager = DTGradAverager(
        averaged_tensors=[torch.zeros(shape) for shape in shapes],
        dht=dht,
        prefix="test_grad_averager",
        min_group_size=group_size,
        # Longer than the others', so one of them leads the group: hivemind closes a stream right
        # after its last word, p2pd may reset it, and a follower then never hears that it begins.
        min_matchmaking_time=6.0,
        request_timeout=1.2,
        allreduce_timeout=12.0,
        next_chunk_timeout=3.0,
        start=True,
    )
    print("ready", flush=True)
    for line in sys.stdin:
        with averager.get_tensors() as tensors:
            for tensor in tensors:
                tensor.fill_(float(line))
        try:
            averager.step(gather=0, timeout=20.0, allow_retries=False)
        except Exception as error:  # noqa: BLE001 - whatever it was, the next round is asked for
            print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)
        else:
            print("ok", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
