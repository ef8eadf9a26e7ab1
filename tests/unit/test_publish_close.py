"""Test the publication of outer steps: kills, outages, a second leader, and deletion."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from distributed_training.config import ConfigError
from distributed_training.protocol import keys
from distributed_training.store.errors import PreconditionError, StoreError
from distributed_training.validator.global_state import GlobalStateError
from distributed_training.validator.outer_steps import AnotherLeadsError
from tests.tools.store_world import PERIOD, StoreMiner, StoreWorld, keypair
from tests.tools.validator_world import one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def world(tmp_path: Path) -> StoreWorld:
    return StoreWorld(tmp_path)


def _bits(world: StoreWorld) -> tuple[str, ...]:
    return world.validator.steps.values.digests


def _uploaded(folder: Path, **changes: Any) -> StoreWorld:
    """Return a network after one outer step, whose members have uploaded for the second one."""
    world = StoreWorld(folder, **changes)
    world.round()
    world.send()
    return world


@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_kill_at_each_write_leaves_the_old_outer_step_or_the_new(
    tmp_path: Path, each: bool
) -> None:
    """After a kill, the validator restarts with its disk or with an empty one.

    ``each``: try both after each kill, instead of one of the two in turn.
    """
    world = _uploaded(tmp_path)
    world.until_late()
    held, folder = dict(world.bucket.objects), tmp_path / "validator"
    shutil.copytree(folder, tmp_path / "before")
    writes: list[str] = []
    world.bucket.before_put = writes.append
    world.tick()
    wanted, manifest = _bits(world), world.manifest(2)
    update, last = keys.outer_key(2, keys.UPDATE), keys.outer_key(2, keys.MANIFEST)
    assert writes.index(update) < writes.index(last) and writes[-1] == keys.STATE
    first = next(i for i, key in enumerate(writes) if key.startswith("outer/2/"))
    for at, empty_disk in product(range(first, len(writes)), (False, True)):
        if not (each or at == first or at % 2 == empty_disk):
            continue
        world.bucket.before_put = lambda key: None
        world.bucket.objects.clear()
        world.bucket.objects.update(held)
        world.closing.close()
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "before", folder)
        world.restarted()
        left = len(writes) - at

        def kill(key: str) -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                raise KeyboardInterrupt

        world.bucket.before_put = kill
        with pytest.raises(KeyboardInterrupt):
            world.tick()
        published = last in world.bucket.objects
        assert published == (at == first)  # only if killed before the last write
        assert world.state.outer_step == 1  # members see this until the next publication
        world.bucket.before_put = lambda key: None
        if empty_disk:  # it cannot know that nobody leads before a renewal is overdue
            world.clock.ahead += PERIOD / 2 + 1
        world.restarted(folder=tmp_path / f"empty-{at}" if empty_disk else None)
        assert world.validator.state.outer_step == world.state.outer_step == 1 + published
        standings = world.validator.standings
        scores = {uid: entry.published for uid, entry in standings.present().items()}
        assert (
            scores == world.manifest(1 + published).scores
        )  # no score of an unpublished step counts
        assert empty_disk or standings.successful_rounds == 1 + published
        world.tick()
        assert world.state.outer_step == 2
        assert {one.uid: one.digest for one in world.manifest(2).merged} == {
            one.uid: one.digest for one in manifest.merged
        }
        assert _bits(world) == wanted
        world.manifest(2).check_after(world.manifest(1))


def test_the_score_of_a_uids_second_owner_comes_back(world: StoreWorld, tmp_path: Path) -> None:
    """In the history the uid has another hotkey, whose upload was refused."""
    world.miners[3].upload = lambda: StoreMiner.upload(world.miners[3], b"damaged")  # type: ignore
    world.round()
    assert world.fates(1)[3] == "damaged"
    miner = world.miners[3] = StoreMiner(world, 3)
    miner.pair = keypair("second owner")
    miner.start, miner.outer_step = [*world.validator.state.weights], 1
    world.ledger.register(miner.pair.ss58_address, uid=3)
    manifest = world.round()
    assert world.fates(2)[3] == "merged" and manifest.scores[3] > 0
    world.restarted(folder=tmp_path / "empty")
    assert world.validator.standings.entries[3].published == manifest.scores[3]


def test_of_one_outer_step_there_is_one_manifest(world: StoreWorld) -> None:
    """Another leader may publish after this one has checked the state."""
    world.round()
    with pytest.raises(AnotherLeadsError, match="published by another process"):
        world.validator.steps.publish(world.manifest(1), b"another")


def test_a_bucket_that_was_emptied_does_not_begin_again(world: StoreWorld) -> None:
    world.round()
    world.bucket.objects.clear()
    shutil.rmtree(world.folder / "validator" / "global" / "signed")  # an older version had none
    with pytest.raises(GlobalStateError, match="restore the bucket"):
        world.restart()


def test_only_the_master_leads(world: StoreWorld) -> None:
    miner = replace(world.config.miner, master_ss58_address=keypair("other").ss58_address)
    world.config = replace(world.config, miner=miner)
    with pytest.raises(ConfigError, match="led by its master"):
        world.restart()


def test_past_objects_are_deleted_and_the_rest_leads_to_the_head(tmp_path: Path) -> None:
    world = StoreWorld(tmp_path, weights_every=2, keep_uploads=3)
    for _ in range(6):
        world.round()
    kept = {key for key in world.bucket.objects if key.startswith("outer/")}
    assert {k for k in kept if k.endswith(keys.MANIFEST)} == {
        keys.outer_key(n, keys.MANIFEST) for n in range(7)
    }
    assert {k for k in kept if k.endswith(keys.MODEL)} == {
        keys.outer_key(n, keys.MODEL) for n in (4, 6)
    }
    assert {k for k in kept if k.endswith(keys.UPDATE)} == {
        keys.outer_key(n, keys.UPDATE) for n in (5, 6)
    }
    merged = {
        keys.merged_key(n, one.uid)
        for n in (4, 5, 6)
        for one in world.manifest(n).merged
        if one.factor  # nobody needs the file of an upload that is carried over
    }
    assert len(merged) >= 6
    assert {k for k in kept if "/uploads/" in k} == merged
    assert world.state.weights_at == (4, 6)
    before = _bits(world)
    world.restarted(folder=tmp_path / "another")
    assert _bits(world) == before


def test_a_state_whose_answer_was_lost_shares_its_serial_with_no_other(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = [world.state]
    real, lost = world.bucket.put, iter([True, True])

    def put(key: str, data: Any) -> str:
        etag = real(key, data)
        if key == keys.STATE:
            shown.append(world.state)
            if shown[-1].serial > shown[-2].serial and next(lost, False):
                raise StoreError("the answer was lost")
        return etag

    monkeypatch.setattr(world.bucket, "put", put)
    world.until_late()
    for _ in range(4):  # nobody uploads: the close moves
        world.tick()
        world.clock.ahead += 1
    world.round()
    assert len(shown) > 3 and shown[-1].outer_step == 1
    for before, after in pairwise(shown):
        after.check_after(before)


def test_manifests_that_no_state_names_are_gone_on_from(world: StoreWorld) -> None:
    world.round()
    before = world.bucket.objects[keys.STATE]
    for _ in range(2):  # as if a publication and then a rewind were killed before the state
        world.round()
    world.bucket.objects[keys.STATE] = before
    world.restarted()
    assert world.validator.state.outer_step == world.state.outer_step == 3
    assert world.state.head == world.manifest(3).digest


def test_uploads_since_the_newest_set_stay_however_few_are_kept(tmp_path: Path) -> None:
    world = StoreWorld(tmp_path, weights_every=4, keep_uploads=1)
    for _ in range(2):
        world.round()
    before = _bits(world)
    world.restarted(folder=tmp_path / "another")
    assert _bits(world) == before


def test_a_manifest_that_was_not_written_is_not_gone_on_from(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, conflicts = world.bucket.put_new, iter([True])

    def put_new(key: str, data: Any) -> str:
        if next(conflicts, False):
            raise PreconditionError("409, of a write that failed")
        return real(key, data)

    monkeypatch.setattr(world.bucket, "put_new", put_new)
    world.send()
    world.end()
    assert world.validator.state.outer_step == world.state.outer_step == 0
    world.tick()
    assert world.state.outer_step == 1 and world.manifest(1).digest == world.state.head


def test_other_leader_is_seen_before_the_manifest_is_written(world: StoreWorld) -> None:
    world.send()
    world.until_late()
    other = replace(world.state, serial=9).to_bytes(world.master.sign)

    def take_over(key: str) -> None:
        if key == keys.outer_key(1, keys.UPDATE):
            world.bucket.before_put = lambda key: None
            world.bucket.put(keys.STATE, other)

    world.bucket.before_put = take_over
    with pytest.raises(AnotherLeadsError, match="written by another process"):
        world.tick()
    assert keys.outer_key(1, keys.MANIFEST) not in world.bucket.objects


def test_a_store_that_fails_after_the_manifest_shows_the_new_outer_step(world: StoreWorld) -> None:
    world.send()
    world.until_late()

    def fail(key: str) -> None:
        if key == keys.STATE and keys.outer_key(1, keys.MANIFEST) in world.bucket.objects:
            world.bucket.before_put = lambda key: None
            raise StoreError("503")

    world.bucket.before_put = fail
    world.tick()
    assert world.state.outer_step == 0 and world.validator.state.outer_step == 1
    world.tick()
    assert world.state.outer_step == 1
    assert len(world.events.of("upload_scored")) == 3
    world.round()
    assert world.state.outer_step == 2
