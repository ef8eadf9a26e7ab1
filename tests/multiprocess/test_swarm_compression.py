"""Compressed rounds: near the average, and compatible with peers that compress otherwise."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distributed_training.protocol.types import AllReduceResult
from distributed_training.swarm.swarm import HivemindSwarm
from tests.tools.swarm_world import SETTINGS, Rounds, everybody, open_swarm

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.slow,
    pytest.mark.usefixtures("forked_hosts"),
]


def test_peers_average_in_half_precision_and_with_one_that_does_not(tmp_path: Path) -> None:
    """Each message names its compression."""
    generator = torch.Generator().manual_seed(3)
    swarms: list[HivemindSwarm] = []
    with ExitStack() as stack:
        for number, compression in enumerate(("float16", "float16", "none")):
            settings = replace(SETTINGS, compression=compression)
            known = swarms[0].visible_maddrs if swarms else ()
            shapes = [(400, 300), (64,)]
            swarms.append(open_swarm(tmp_path / str(number), shapes, known, settings))
            stack.callback(swarms[-1].close)
        for pair in (swarms[:2], swarms[1:]):
            wrote = []
            for swarm in pair:
                for buffer in swarm.buffers:
                    buffer.copy_(torch.randn(buffer.shape, generator=generator))
                wrote.append([buffer.clone() for buffer in swarm.buffers])
            for outcome in Rounds(*pair, request=everybody(pair), fill=False).join().values():
                assert isinstance(outcome, AllReduceResult) and not outcome.partial, outcome
            for i, (a, b) in enumerate(zip(*wrote, strict=True)):
                expected = (a + b) / 2
                for swarm in pair:
                    assert (swarm.buffers[i] - expected).abs().max() < 2e-3
                if pair[1] is swarms[1]:  # the other pair sends a part as it is
                    assert not torch.equal(pair[0].buffers[i], expected), "nothing was compressed"
