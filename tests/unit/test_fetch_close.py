"""Test which uploads a close accepts, which members it waits for, and when its round ends."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distributed_training.config import Config
from distributed_training.protocol import keys
from distributed_training.store.errors import StoreError
from distributed_training.validator import outer_steps
from distributed_training.validator.average import AveragingValidator
from distributed_training.validator.standings import Standings
from distributed_training.validator.store_rounds import StoreValidator
from tests.tools.store_world import GRACE, PERIOD, StoreMiner, StoreWorld, keypair
from tests.tools.validator_world import one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def world(tmp_path: Path) -> StoreWorld:
    return StoreWorld(tmp_path)


def test_a_members_own_bucket_that_is_away_costs_only_its_owner(
    tmp_path: Path,
) -> None:
    world = StoreWorld(tmp_path, own=True)
    assert world.round().outer_step == 1
    assert world.fates(1) == dict.fromkeys(world.uids, "merged")
    assert not [key for key in world.bucket.objects if key.startswith("uploads/")]
    assert keys.merged_key(1, world.uids[0]) in world.bucket.objects
    for n, fault, fate in ((2, "down", {}), (3, "unreadable", {5: "not-judged"})):
        world.send()
        world.until_late()
        setattr(world.own[5], fault, True)
        world.tick()
        setattr(world.own[5], fault, False)
        assert world.fates(n) == {3: "merged", 17: "merged"} | fate


def test_recent_progress_is_a_valid_upload_where_none_was_judged(tmp_path: Path) -> None:
    world = StoreWorld(tmp_path, own=True)
    world.round()
    key, valid = keys.progress_key(17), []
    for n, age in ((2, 0.0), (3, 3 * (PERIOD + GRACE)), (4, 0.0), (5, 0.0)):
        world.clock.ahead -= age
        world.own[17].put(key, b"nobody reads it")
        world.clock.ahead += age
        world.send(3, 5)
        world.end()
        assert world.state.outer_step == n
        valid.append(world.validator.standings.entries[17].repo_valid)
    # An old progress upload is not valid, nor is one of a member that missed three closes in a row.
    assert valid == [1, 0, 1, 0], valid
    shared = StoreWorld(tmp_path / "shared")
    shared.bucket.put(key, b"nobody reads it")
    shared.send(3, 5)
    shared.end()
    assert shared.validator.standings.entries[17].repo_valid == 0


def test_an_upload_that_becomes_a_copy_after_the_look_comes_later(tmp_path: Path) -> None:
    world = StoreWorld(tmp_path, own=True)
    world.train()
    world.until_close()
    copier, bucket, looks = world.miners[17], world.own[17], iter((False, True))

    def replace_before_the_download(operation: str, key: str) -> None:
        if operation == "head" and next(looks, False):
            world.clock.ahead += 1
            copier.upload(moved=world.miners[3].moved)

    copier.upload()
    world.clock.ahead += 1
    for uid in (3, 5):
        world.miners[uid].upload()
    bucket._before = replace_before_the_download
    world.until_late()
    world.clock.ahead -= 10
    world.tick()
    fates = world.fates(1)
    # It may be uncertain on whose pages the loss fell more. Then the copy is not refused.
    assert (fates[3], fates[5]) == ("merged", "merged") and fates[17] in ("copy", "merged")


def test_an_upload_is_late_by_the_stores_clock(world: StoreWorld) -> None:
    world.send(3)
    world.until_late()
    world.miners[5].upload()
    world.tick()
    assert world.fates(1) == {3: "merged", 5: "late"}
    assert world.manifest(1).refused[0].digest == ""  # so its sender keeps its weights
    assert "after the end of the grace" in world.manifest(1).refused[0].reason
    assert world.validator.standings.entries[17].cause == "it sent no upload for the last close"


def test_a_close_without_enough_uploads_moves(world: StoreWorld) -> None:
    before = world.state
    world.train()
    world.end(3)
    moved = world.state
    assert (moved.outer_step, moved.serial) == (0, before.serial + 1)
    assert moved.closes_at >= world.clock() + PERIOD / 2 and moved.head == before.head
    assert world.events.of("round")[-1]["fault"] == "TOO_FEW"
    moved.check_after(before)
    world.until_close()
    void = world.miners[3].encode(serial=before.serial)
    world.bucket.put(keys.upload_key(3, 0, before.serial), void)
    world.miners[5].upload()
    world.end()
    assert world.fates(1) == {5: "merged"}
    # The uploads of past closes are deleted.
    assert not [key for key in world.bucket.objects if key.startswith("uploads/")]


def _newcomer(world: StoreWorld, uid: int) -> None:
    world.ledger.register(keypair(f"miner-{uid}").ss58_address, uid=uid)
    world.miners[uid] = StoreMiner(world, uid)
    world.miners[uid].outer_step = world.state.outer_step


def test_a_newcomer_that_is_slower_than_all_others_is_merged(world: StoreWorld) -> None:
    # Uid 17 misses the first close and is slow at the second; uid 4 joins at the third.
    for n, slow in ((0, 17), (1, 17), (2, 4)):
        if slow not in world.miners:
            _newcomer(world, slow)
        fast = [uid for uid in world.miners if uid != slow]
        world.train(*world.miners)
        world.until_close()
        for uid in fast:
            world.miners[uid].upload()
        world.tick()
        assert world.state.outer_step == n, "nobody waits for the slow one"
        if n:
            world.clock.ahead += GRACE / 2
            world.miners[slow].upload()
        else:
            world.until_late()
        world.tick()
        assert world.fates(n + 1) == dict.fromkeys(fast + [slow] * bool(n), "merged")


def test_absent_members_delay_few_rounds_however_many_they_are(world: StoreWorld) -> None:
    for uid in range(30, 40):
        _newcomer(world, uid)
    delayed = []
    for n in range(9):
        world.train(3)
        world.until_close()
        world.miners[3].upload()
        world.tick()
        if world.state.outer_step == n:
            delayed.append(world.state.serial)
            world.end()
        assert world.state.outer_step == n + 1
    assert delayed == [1, 2, 4, 8]


def test_another_validator_is_no_member_before_it_uploads(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a public chain, everybody with enough stake has a permit, and some of them train too."""
    idle, trains, first = 30, 31, 4  # the second sends its first upload for the fourth close
    for uid in (idle, trains):
        _newcomer(world, uid)
    chain = world.chain.neurons
    permits = lambda: [replace(n, validator_permit=n.uid in (idle, trains)) for n in chain()]
    monkeypatch.setattr(world.chain, "neurons", permits)
    for n in range(1, 9):  # all members are waited for at the eighth
        uploaders = [3, 5, 17, *([trains] if n >= first else [])]
        world.train(*uploaders)
        world.until_close()
        for uid in uploaders:
            world.miners[uid].upload()
        world.tick()
        assert world.state.outer_step == n, "nobody else is waited for"
        assert world.fates(n).keys() == {*uploaders}
        standings = world.validator.standings
        assert standings.present().keys() == {*uploaders}
        assert standings.entries[trains].missed == standings.entries[idle].missed == 0
    assert world.validator.standings.weights()[trains] > 0
    assert idle not in world.manifest(8).scores


def test_another_validator_takes_no_place_of_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def averages(config: Config) -> Config:
        return replace(config, rounds=replace(config.rounds, exchange="hivemind"))

    world = StoreWorld(tmp_path, own=True, begun=False, change=averages, sample=2)
    for uid in (30, 31):
        world.ledger.register(keypair(f"miner-{uid}").ss58_address, uid=uid)
    chain = world.chain.neurons
    permits = lambda: [replace(n, validator_permit=n.uid in (30, 31)) for n in chain()]
    monkeypatch.setattr(world.chain, "neurons", permits)
    world.restart()
    validator, drawn = world.validator, set[int]()
    assert isinstance(validator, AveragingValidator)
    for members in ({3, 5, 17}, {3, 5, 17, 31}):
        for serial in range(16):
            miners = validator._miners()
            validator._choose_awaited(serial, miners)
            looked_at = {miner.uid for miner in miners if miner.hotkey in validator._sampled}
            assert len(looked_at & members) == 2 and 30 in looked_at
            drawn |= looked_at
        assert drawn == {3, 5, 17, 30, 31}, "the first upload of each validator is seen"
        validator.standings.entries[31].uploaded = 0.0  # from now on it is a member


def test_a_round_with_too_few_uploads_takes_late_ones_within_the_grace(
    world: StoreWorld,
) -> None:
    for n in range(3):
        world.train(3, 5, 17)
        world.until_close()
        for uid in (3, 5):
            world.miners[uid].upload(b"damaged" if n == 2 else None)
        if n < 2:
            world.until_late()
        world.tick()
    assert world.state.outer_step == 2, "both uploads are refused, and the grace is not over"
    world.miners[17].upload()
    world.tick()
    assert world.fates(3) == {3: "damaged", 5: "damaged", 17: "merged"}


def test_a_close_of_a_clock_that_went_wrong_is_not_waited_for(world: StoreWorld) -> None:
    world.clock.ahead += 1e7
    world.tick()  # the close moves
    assert world.state.closes_at > world.clock()
    world.clock.ahead -= 1e7
    world.tick()
    assert world.state.closes_at <= world.clock() + PERIOD
    world.round()
    assert world.state.outer_step == 1


def test_a_store_that_is_away_makes_one_round_late(world: StoreWorld) -> None:
    world.send()
    world.bucket.down = True
    world.end(3)
    world.bucket.down = False
    # Let the store fail during the publication too: judging and merging are not repeated.
    failures = iter([StoreError("503")] * 3)

    def fail(key: str) -> None:
        if key.startswith("outer/1/") and (error := next(failures, None)) is not None:
            raise error

    world.bucket.before_put = fail
    world.tick(4)
    assert world.state.outer_step == 1 and len(world.events.of("upload_scored")) == 3
    assert len(world.events.of("scores")) == 1
    assert world.validator.standings.failed_rounds == 0
    world.round()
    assert world.state.outer_step == 2


@pytest.mark.parametrize("name", ["uploads", "epoch-1", "ledger"])
def test_a_full_disk_makes_one_round_late(
    world: StoreWorld, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.send()
    full = OSError(errno.ENOSPC, "No space left on device", name)

    def refuse(*_: Any, **__: Any) -> Any:
        raise full

    with monkeypatch.context() as patch:
        if name == "uploads":
            patch.setattr(StoreValidator, "_fetch", refuse)
        elif name == "epoch-1":
            patch.setattr(outer_steps, "write_set", refuse)
        else:
            patch.setattr(Standings, "save", refuse)
        world.end(2)
        assert world.state.outer_step == (name == "ledger")
    world.clock.ahead += 10  # between two tries
    world.tick()
    assert set(world.fates(1).values()) == {"merged"}
    assert len(world.events.of("scores")) == 1
