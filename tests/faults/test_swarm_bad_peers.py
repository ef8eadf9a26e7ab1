"""A peer that sends parts that are short, long, NaN or no parts at all, stalls or vanishes.

The others' round ends within its deadline. They hold the same average, or each knows that its own
is not whole (and takes the published weights later). The next round is as any other.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from distributed_training.protocol.types import AllReduceError, AllReduceFault, AllReduceResult
from distributed_training.swarm import HivemindSwarm
from tests.multiprocess.swarm_bad_peer import KINDS
from tests.swarm_world import REQUEST, Rounds, assert_good_round, open_swarms

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).parents[2]
SHAPES = [(1000, 1000)] * 3
CHUNK, TRANSFER = 3.0, 12.0
TROUBLED = replace(
    REQUEST,
    timeout=timedelta(seconds=20),
    allreduce_timeout=timedelta(seconds=TRANSFER),
    next_chunk_timeout=timedelta(seconds=CHUNK),
    min_group_size=3,
)
#: What it sent before it failed is in the average, or the average shows it.
WHOLE = ("long", "deaf", "nan", "nan averages", "early averages")


class BadPeer:
    def __init__(self, folder: Path, known: list[str]) -> None:
        folder.mkdir()
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "tests" / "multiprocess" / "swarm_bad_peer.py"),
                str(folder),
                json.dumps(SHAPES),
                json.dumps(known),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self.peer_id = self.answer()

    def answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def begin(self, kind: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(kind + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        self._log.close()


World = tuple[list[HivemindSwarm], BadPeer]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("swarm")
    with open_swarms(folder, 2, SHAPES) as swarms:
        bad = BadPeer(folder / "bad", swarms[0].visible_maddrs)
        try:
            yield swarms, bad
        finally:
            bad.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_others_end_in_time_and_equal(world: World, kind: str) -> None:
    swarms, bad = world
    for swarm in swarms:
        swarm._judge._norms._norms.clear()
    bad.begin(kind)
    rounds = Rounds(*swarms, request=TROUBLED)
    outcomes = rounds.join()
    for swarm in swarms:
        outcome = outcomes[swarm]
        assert rounds.seconds[swarm] < 10 + TRANSFER
        if kind in ("nan", "nan averages"):
            assert isinstance(outcome, AllReduceError), outcome
            assert outcome.fault is AllReduceFault.NOT_FINITE
            continue
        assert isinstance(outcome, AllReduceResult), outcome
        assert len(outcome.peers) == 3
        assert outcome.failed_peers in ((), (bad.peer_id,))
        assert outcome.partial or kind in WHOLE
        assert all(bool(torch.isfinite(buffer).all()) for buffer in swarm.buffers)
    if not kind.endswith(" averages") and kind not in ("nan", "vanish"):
        # It averaged its own share as it should, so nobody lost anything.
        for ours, theirs in zip(swarms[0].buffers, swarms[1].buffers, strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)
    assert bad.answer() or kind == "vanish"
    assert_good_round(*swarms)
