"""A plain hivemind averager of the right name, as any other program of the network runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from distributed_training.config.swarm import SwarmSettings
from distributed_training.protocol.types import RoundRequest
from distributed_training.swarm import HivemindSwarm

STOCK_PEER = """
import json, sys
import hivemind, torch
from hivemind.averaging import DecentralizedAverager


class DTGradAverager(DecentralizedAverager):
    pass


def main():
    peers, prefix, shapes, value, seconds = json.loads(sys.argv[1])
    dht = hivemind.DHT(initial_peers=peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    averager = DTGradAverager(
        averaged_tensors=[torch.full(shape, value) for shape in shapes], dht=dht, start=True,
        prefix=prefix, min_group_size=2, min_matchmaking_time=2.0, request_timeout=1.0,
        allreduce_timeout=20.0, next_chunk_timeout=10.0)
    print("ready", flush=True)
    averager.step(gather=0, timeout=seconds)
    with averager.get_tensors() as tensors:
        print(json.dumps([[float(t.min()), float(t.max())] for t in tensors]), flush=True)
    averager.shutdown()
    dht.shutdown()


main()
"""


@pytest.mark.timeout(90)
def test_a_stock_averager_of_the_right_name_averages_with_ours(tmp_path: Path) -> None:
    shapes = [(300, 200), (7,), (3, 4, 5)]
    script = tmp_path / "stock_peer.py"
    script.write_text(STOCK_PEER)
    settings = SwarmSettings(
        dht_port=0, dht_listen_ip="127.0.0.1", initial_peers=(), run_id="v1_2_7_r5"
    )
    ours = HivemindSwarm(
        settings=settings,
        schema=[(str(i), shape) for i, shape in enumerate(shapes)],
        run_folder=tmp_path / "ours",
    )
    order = json.dumps([ours.visible_maddrs, "v1_2_7_r5_grad_averager", shapes, 5.0, 40])
    stock = subprocess.Popen(
        [sys.executable, str(script), order], stdout=subprocess.PIPE, text=True
    )
    try:
        assert stock.stdout is not None
        assert stock.stdout.readline() == "ready\n"
        for buffer in ours.buffers:
            buffer.fill_(1.0)
        result = ours.average(
            RoundRequest(
                caller="5V",
                received_at=0.0,
                timeout=timedelta(seconds=40),
                min_group_size=2,
                min_matchmaking_time=timedelta(seconds=2),
                request_timeout=timedelta(seconds=1),
            )
        )
        assert len(result.peers) == 2
        assert result.failed_peers == ()
        for buffer in ours.buffers:
            assert torch.allclose(buffer, torch.full_like(buffer, 3.0))
        theirs = json.loads(stock.stdout.readline())
        assert torch.allclose(torch.tensor(theirs), torch.full((len(shapes), 2), 3.0))
        assert stock.wait(20) == 0
    finally:
        stock.kill()
        stock.wait()
        ours.close()
