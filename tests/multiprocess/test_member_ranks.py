"""Test a script of two ranks in a store network, under DDP and FSDP2: their weights are equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distributed_training.telemetry import read_events
from tests.tools.forked import Ranks
from tests.tools.member_world import UID, MemberWorld
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_of_a_script_apply_the_same_update_as_all(kind: str, tmp_path: Path) -> None:
    world, events = MemberWorld(tmp_path), tmp_path / "run" / "events.jsonl"
    ranks = Ranks("member_script", kind, str(tmp_path), folder=tmp_path)
    try:
        wait_for(lambda: events.exists() and len([*read_events(events, "step")]) > 2, "inner steps")
        world.leader.open_close()
        world.leader.take_outer_step(UID)
        ranks.finish()
    finally:
        ranks.kill()
    held = torch.load(tmp_path / "epoch-start.pt", weights_only=True)
    pairs = zip(held, world.leader.state.weights, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
