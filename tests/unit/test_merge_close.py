"""Test how the uploads of a close are merged, and which merges the held-out loss refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bittensor.sp_core import verify

from distributed_training.common.kinds import import_plugins
from distributed_training.config import Config
from distributed_training.protocol.manifest import Master
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.validator.replay import ManifestChain
from tests.tools.store_world import StoreMiner, StoreWorld
from tests.tools.validator_world import VOCABULARY, one_thread, seed_of, sequences  # noqa: F401

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def world(tmp_path: Path) -> StoreWorld:
    return StoreWorld(tmp_path)


def test_rounds_end_with_the_same_weights_everywhere_and_a_lower_loss(world: StoreWorld) -> None:
    first = world.validator.mean(world.validator._losses)
    for n in (1, 2):
        manifest = world.round()
        assert manifest.outer_step == n and world.fates(n) == dict.fromkeys(world.uids, "merged")
        for miner in world.miners.values():
            miner.apply()
            assert all(map(torch.equal, miner.start, world.validator.state.weights))
    assert world.validator.mean(world.validator._losses) < first


def test_a_codec_from_outside_is_uploaded_judged_merged_and_audited(tmp_path: Path) -> None:
    import_plugins(["tests.toys.codec"])

    def change(config: Config) -> Config:
        return replace(config, rounds=replace(config.rounds, codec="eight"))

    world = StoreWorld(tmp_path, change=change)
    for n in (1, 2):
        world.round()
        assert world.fates(n) == dict.fromkeys(world.uids, "merged")
        for miner in world.miners.values():
            miner.apply()
    master = Master(world.run_id, world.master.ss58_address, verify)
    (tmp_path / "audit").mkdir()
    chain = ManifestChain(BucketReader(world.bucket), world.schema, tmp_path / "audit", master)
    found = chain.audit()
    assert not found.problems and found.replayed_from == 0
    uploads = [info for info in world.bucket.list_objects("outer/") if "/uploads/" in info.key]
    values = sum(math.prod(shape) for _, shape in world.schema)
    assert len(uploads) == 6 and all(
        info.size > values for info in uploads
    )  # each value takes a byte
    # An upload of another codec is refused.
    world.train()
    world.until_close()
    for uid, miner in world.miners.items():
        miner.upload(**({"codec": "4-bit"} if uid == 3 else {}))
    world.end()
    assert world.fates(3)[3] == "damaged"


def test_a_long_upload_is_clipped(world: StoreWorld) -> None:
    world.send(3, 5)
    world.miners[17].upload(moved=[4 * t for t in world.miners[17].moved])
    world.end()
    one, two, long = world.manifest(1).merged
    assert one.factor == two.factor == 1
    assert long.norm * long.factor == pytest.approx(2 * max(one.norm, two.norm), rel=1e-5)


def _other(seed: int, count: int = 8) -> torch.Tensor:
    """Return text in another language than the held-out text."""
    return VOCABULARY - 1 - sequences(seed, count)


def _train_on(miner: StoreMiner, loss_of: Callable[[StoreMiner, int], torch.Tensor]) -> None:
    miner.model.load(miner.start)
    parameters = [p.requires_grad_(True) for p in miner.model._parameters.values()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(miner, miner.uid * 100 + step).backward()
        optimizer.step()
    for p in parameters:
        p.requires_grad_(False)
    miner.moved = [a - b for a, b in zip(miner.start, miner.weights(), strict=True)]
    miner.pages = (0, 7)


def test_a_spoiler_is_found_by_the_held_out_text(tmp_path: Path) -> None:
    """Its upload helps on the text that uploads are judged on, which is in another language."""
    world = StoreWorld(tmp_path, uids=(3, 5, 8, 17))
    world.pages = lambda uid, block: _other(seed_of(uid, block))
    for uid in (3, 8, 17):
        _train_on(world.miners[uid], lambda m, s: m.model._loss(_other(s))[0])
    held_out = sequences(999_999_999, 16)
    _train_on(
        world.miners[5], lambda m, s: m.model._loss(_other(s))[0] - m.model._loss(held_out)[0]
    )
    world.until_close()
    for miner in world.miners.values():
        miner.upload()
    world.end()
    assert world.fates(1) == {3: "merged", 5: "spoiler", 8: "merged", 17: "merged"}
    assert "held-out loss" in world.manifest(1).refused[0].reason
    assert world.validator.standings.entries[5].published == 0


def test_a_gate_that_nothing_passes_blames_nobody(
    world: StoreWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Config, "loss_limit", lambda config, before: 0.0)
    for closes in range(3):
        world.send()
        world.end()
        assert world.state.outer_step == 0 and world.state.serial == closes + 2
        assert world.state.gate == closes + 1
        assert world.events.of("round")[-1]["fault"] == "GATE"
        assert world.events.of("network")[-1]["verdict"] == "gate"
    assert "3 closes in a row" in caplog.text
    # The validator continues once uploads pass the gate again.
    monkeypatch.undo()
    assert set(world.round().scores) == set(world.uids)
    assert world.state.gate == 0
