"""A plain hivemind averager: ``swarm_stock_peer.py SHAPES PEERS GROUP_SIZE SECONDS``.

SECONDS are those of a round. Each line on standard input begins one: ``[a, b, c, d]``. The values
of a tensor are a + b * i / 1e6 before it, and their average should be c + d * i / 1e6. It answers
with "ok" and the largest difference from that, or with what the round failed with.
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


def ramp(tensor: torch.Tensor, first: float, slope: float) -> torch.Tensor:
    return first + slope * torch.arange(tensor.numel()).view_as(tensor) / 1e6


def main() -> None:
    shapes, peers, group_size, seconds = (json.loads(text) for text in sys.argv[1:])
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
        allreduce_timeout=0.6 * seconds,
        next_chunk_timeout=0.15 * seconds,
        start=True,
    )
    print("ready", flush=True)
    for line in sys.stdin:
        *before, first, slope = json.loads(line)
        with averager.get_tensors() as tensors:
            for tensor in tensors:
                tensor.copy_(ramp(tensor, *before))
        try:
            averager.step(gather=0, timeout=seconds, allow_retries=False)
        except Exception as error:  # noqa: BLE001 - whatever it was, the next round is asked for
            print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)
        else:
            with averager.get_tensors() as tensors:
                apart = max(float((t - ramp(t, first, slope)).abs().max()) for t in tensors)
            print("ok", apart, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
