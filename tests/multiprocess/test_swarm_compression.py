"""Compressed rounds: near the average, and compatible with peers that compress otherwise."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from distributed_training.config.settings import SwarmSettings
from distributed_training.protocol.types import (
    AllReduceError,
    AllReduceResult,
    RoundRequest,
)
from distributed_training.swarm import HivemindSwarm

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.slow,
    pytest.mark.usefixtures("forked_hosts"),
]

SCHEMA = [("a", (400, 300)), ("b", (64,))]
SETTINGS = SwarmSettings(
    dht_port=0, dht_listen_ip="127.0.0.1", initial_peers=(), run_id="compressed"
)
REQUEST = RoundRequest(
    caller="5V",
    timeout=timedelta(seconds=7),
    min_group_size=2,
    min_matchmaking_time=timedelta(seconds=1.5),
    request_timeout=timedelta(seconds=1),
)


@contextmanager
def peers(tmp_path: Path, *compressions: str) -> Iterator[list[HivemindSwarm]]:
    with ExitStack() as stack:
        made: list[HivemindSwarm] = []
        for compression in compressions:
            known = tuple(made[0].visible_maddrs) if made else ()
            swarm = HivemindSwarm(
                settings=replace(SETTINGS, initial_peers=known, compression=compression),
                schema=SCHEMA,
                run_folder=tmp_path / str(len(made)),
            )
            stack.callback(swarm.close)
            made.append(swarm)
        yield made


def together(swarms: list[HivemindSwarm]) -> list[AllReduceResult | AllReduceError]:
    outcomes: dict[int, AllReduceResult | AllReduceError] = {}

    def run(i: int) -> None:
        try:
            outcomes[i] = swarms[i].average(REQUEST)
        except AllReduceError as error:
            outcomes[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(swarms))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [outcomes[i] for i in range(len(swarms))]


def test_two_peers_in_half_precision(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    with peers(tmp_path, "float16", "float16") as swarms:
        wrote = []
        for swarm in swarms:
            for buffer in swarm.buffers:
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
            wrote.append([buffer.clone() for buffer in swarm.buffers])
        for outcome in together(swarms):
            assert isinstance(outcome, AllReduceResult), outcome
            assert not outcome.partial
        for i, (a, b) in enumerate(zip(*wrote, strict=True)):
            expected = (a + b) / 2
            for swarm in swarms:
                assert (swarm.buffers[i] - expected).abs().max() < 2e-3
            assert not torch.equal(swarms[0].buffers[i], expected), "nothing was compressed"


def test_peers_with_other_settings_average_all_the_same(tmp_path: Path) -> None:
    """What travels says how it is compressed."""
    with peers(tmp_path, "none", "float16") as swarms:
        for i, swarm in enumerate(swarms):
            for buffer in swarm.buffers:
                buffer.fill_(float(i))
        for outcome in together(swarms):
            assert isinstance(outcome, AllReduceResult), outcome
        for swarm in swarms:
            for buffer in swarm.buffers:
                assert torch.allclose(buffer, torch.full_like(buffer, 0.5))
