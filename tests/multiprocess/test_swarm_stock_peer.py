"""A plain hivemind averager of the right name, as any other program of the network runs it."""

from __future__ import annotations

import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tools.swarm_world import SETTINGS, LinePeer, everybody, open_swarm


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked_hosts")
@pytest.mark.parametrize(
    ("compression", "error"),
    [("none", 1e-6), pytest.param("float16", 2e-3, marks=pytest.mark.long)],
)
def test_a_stock_averager_of_the_right_name_averages_with_ours(
    tmp_path: Path, compression: str, error: float
) -> None:
    """Several parts a tensor: with tensors of one part each, peers that cut parts otherwise would
    still understand each other."""
    shapes = [(500, 700), (7,), (2, 400, 500)]
    ramps = [torch.arange(math.prod(shape)).reshape(shape) / 1e6 for shape in shapes]
    settings = replace(SETTINGS, compression=compression)
    with closing(open_swarm(tmp_path / "ours", shapes, settings=settings)) as ours:
        order = (json.dumps(each) for each in (shapes, ours.visible_maddrs, 2, 80))
        with closing(LinePeer("swarm_stock_peer.py", tmp_path / "log", *order)) as stock:
            assert stock.answer() == "ready"
            stock.begin("[0, 5, 0, 3]")
            for buffer, ramp in zip(ours.buffers, ramps, strict=True):
                buffer.copy_(ramp)
            result = ours.average(everybody([ours, stock], 80))
            ok, apart = stock.answer().split()
    assert ok == "ok" and float(apart) < error
    assert len(result.peers) == 2
    assert result.failed_peers == ()
    # p2pd may lose the last averages of a stock reducer, whose share is half of all: hivemind
    # closes its stream at once. Such values stay what they were.
    kept = 0
    for buffer, ramp in zip(ours.buffers, ramps, strict=True):
        averaged = (buffer - 3 * ramp).abs() < error
        assert bool((averaged | (buffer == ramp)).all())
        kept += int((~averaged).sum())
    assert kept <= result.kept_local * sum(ramp.numel() for ramp in ramps) + 0.5
    assert result.kept_local < 0.5
