"""A peer that sends parts that are short, long, NaN or no parts at all, stalls or vanishes.

The others' round ends within its deadline with an average, and each knows which peer it was made
without, and why. They hold the same one, or know that it is not whole (and take the published
weights later). The next round is as any other.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from distributed_training.exchange.sn38.swarm import HivemindSwarm
from distributed_training.protocol.types import AllReduceResult
from tests.tools.swarm_bad_peer import KINDS
from tests.tools.swarm_world import REQUEST, LinePeer, Rounds, assert_good_round, open_swarms

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked_hosts")]

SHAPES = [(600, 1000)] * 3  # several parts for each reducer
CHUNK, TRANSFER = 3.0, 12.0
TROUBLED = replace(
    REQUEST,
    timeout=timedelta(seconds=20),
    allreduce_timeout=timedelta(seconds=TRANSFER),
    next_chunk_timeout=timedelta(seconds=CHUNK),
    min_group_size=3,
)
#: What it sent before it failed is in the average.
WHOLE = ("long", "deaf", "early averages")
#: One of each way to fail; whatever else a reducer answers: test_swarm_all_reduce.py.
DAILY = ("short", "nan", "heavy", "nan averages", "stall", "vanish")
#: "vanish" is the last: the process ends.


def bad_peer(folder: Path, known: list[str], group_size: int) -> LinePeer:
    """Its first answer is its peer ID; a line is the kind of the next round."""
    folder.mkdir()
    order = (json.dumps(each) for each in (SHAPES, known, group_size))
    return LinePeer("swarm_bad_peer.py", folder / "log", *order)


World = tuple[list[HivemindSwarm], LinePeer, str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("swarm")
    with (
        open_swarms(folder, 2, SHAPES) as swarms,
        contextlib.closing(bad_peer(folder / "bad", swarms[0].visible_maddrs, 3)) as bad,
    ):
        yield swarms, bad, bad.answer()


@pytest.mark.parametrize(
    "kind",
    [kind if kind in DAILY else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS],
)
def test_the_others_end_in_time_and_equal(world: World, kind: str) -> None:
    swarms, bad, bad_id = world
    for swarm in swarms:
        swarm._judge.norms.clear()
    bad.begin(kind)
    rounds = Rounds(*swarms, request=TROUBLED)
    outcomes = rounds.join()
    for swarm in swarms:
        outcome = outcomes[swarm]
        assert rounds.seconds[swarm] < 10 + TRANSFER
        assert isinstance(outcome, AllReduceResult), outcome
        assert len(outcome.peers) == 3
        assert outcome.failed_peers in ((), (bad_id,))
        assert outcome.partial or kind in WHOLE
        assert tuple(outcome.causes) == outcome.failed_peers
        assert all(bool(torch.isfinite(buffer).all()) for buffer in swarm.buffers)
    if not kind.endswith(" averages") and kind != "vanish":
        # It averaged its own share as it should, so nobody lost anything.
        for ours, theirs in zip(swarms[0].buffers, swarms[1].buffers, strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)
    answer = bad.answer()
    assert answer or kind == "vanish"
    if kind in ("nan", "heavy"):
        # It has the average of its own share only, which is at most two of three; a line says so
        # where that is less than half.
        kept = re.search(r"kept_local=([\d.]+)", answer)
        assert "PEER_FAILED" in answer or (kept and 1 / 3 <= float(kept[1]) <= 1 / 2)
    assert_good_round(*swarms)
