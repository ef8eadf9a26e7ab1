"""The validator of a store network: the real one, with miners that train in its process."""

from __future__ import annotations

import errno
import hashlib
import math
import shutil
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from bittensor.sp_core import verify

from distributed_training.common.kinds import import_plugins
from distributed_training.config import Config, ConfigError
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Master
from distributed_training.protocol.scoring import ScoreBoard
from distributed_training.protocol.update_file import (
    Header,
    UpdateFile,
    UpdateLayout,
    finish,
    write_rows,
)
from distributed_training.scoring.evaluator import Evaluator
from distributed_training.scoring.upload import DataUnavailable, Judged
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.errors import IntegrityError, PreconditionError, StoreError
from distributed_training.training.outer_rule import nesterov_sgd
from distributed_training.validator import judging, outer_steps
from distributed_training.validator.global_state import GlobalStateError
from distributed_training.validator.judging import UploadJudge, find_copies
from distributed_training.validator.merge import digest_of
from distributed_training.validator.outer_steps import AnotherLeadsError, Prepared
from distributed_training.validator.replay import Chain
from distributed_training.validator.standings import Standings
from distributed_training.validator.store_rounds import StoreValidator
from tests.tools.store_world import GRACE, PERIOD, StoreMiner, StoreWorld, keypair
from tests.tools.validator_world import VOCABULARY, one_thread, sequences  # noqa: F401

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def world(tmp_path: Path) -> StoreWorld:
    return StoreWorld(tmp_path)


def test_rounds_end_with_the_same_weights_everywhere_and_a_lower_loss(world: StoreWorld) -> None:
    first = world.validator._rules.mean(world.validator._losses)
    for n in (1, 2):
        manifest = world.round()
        assert manifest.outer_step == n and world.fates(n) == dict.fromkeys(world.uids, "merged")
        for miner in world.miners.values():
            miner.apply()
            assert all(map(torch.equal, miner.start, world.validator.state.weights))
    assert world.validator._rules.mean(world.validator._losses) < first


def test_a_codec_from_outside_is_uploaded_judged_merged_and_audited(tmp_path: Path) -> None:
    import_plugins(["tests.toys.codec"])

    def change(config: Config) -> Config:
        return replace(config, validator=replace(config.validator, codec="eight"))

    world = StoreWorld(tmp_path, change=change)
    for n in (1, 2):
        world.round()
        assert world.fates(n) == dict.fromkeys(world.uids, "merged")
        for miner in world.miners.values():
            miner.apply()
    master = Master(world.run_id, world.master.ss58_address, verify)
    (tmp_path / "audit").mkdir()
    chain = Chain(BucketReader(world.bucket), world.schema, tmp_path / "audit", master)
    found = chain.audit()
    assert not found.problems and found.replayed_from == 0
    uploads = [info for info in world.bucket.list_objects("outer/") if "/uploads/" in info.key]
    values = sum(math.prod(shape) for _, shape in world.schema)
    assert len(uploads) == 6 and all(info.size > values for info in uploads)  # a byte for each
    # An upload of another codec is refused.
    world.train()
    world.until_close()
    for uid, miner in world.miners.items():
        miner.upload(**({"codec": "4-bit"} if uid == 3 else {}))
    world.until_late()
    world.tick()
    assert world.fates(3)[3] == "damaged"


def test_a_members_own_bucket_that_is_away_costs_only_its_owner(
    tmp_path: Path,
) -> None:
    world = StoreWorld(tmp_path, own=True)
    assert world.round().outer_step == 1
    assert world.fates(1) == dict.fromkeys(world.uids, "merged")
    assert not [key for key in world.bucket.objects if key.startswith("uploads/")]
    assert keys.merged_key(1, world.uids[0]) in world.bucket.objects
    for n, fault, fate in ((2, "down", {}), (3, "unreadable", {5: "not-judged"})):
        world.train()
        world.until_close()
        for miner in world.miners.values():
            miner.upload()
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
        world.train()
        world.until_close()
        for uid in (3, 5):
            world.miners[uid].upload()
        world.until_late()
        world.tick()
        assert world.state.outer_step == n
        valid.append(world.validator.standings.entries[17].repo_valid)
    # An old one is not, nor one of a member that has missed three closes in a row.
    assert valid == [1, 0, 1, 0], valid
    shared = StoreWorld(tmp_path / "shared")
    shared.bucket.put(key, b"nobody reads it")
    shared.train()
    shared.until_close()
    for uid in (3, 5):
        shared.miners[uid].upload()
    shared.until_late()
    shared.tick()
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
    # Which page gained more may be within its error: then the copy is not called one.
    assert (fates[3], fates[5]) == ("merged", "merged") and fates[17] in ("copy", "merged")


# --- what is refused ---


def _nan(miner: StoreMiner) -> bytes:
    """An upload whose first scale is NaN, signed as it is."""
    layout = UpdateLayout.of(miner.world.schema, miner.header())
    path = miner.world.folder / "nan.safetensors"
    path.write_bytes(miner.encode())
    with path.open("r+b") as file:
        file.seek(layout.body)
        file.write(struct.pack("<f", math.nan))
    finish(path, layout, miner.pair.sign)
    return path.read_bytes()


BAD: dict[str, tuple[str, Callable[[StoreMiner], bytes]]] = {
    "signature": ("damaged", lambda m: m.encode(pair=keypair("another"))),
    "hotkey": ("damaged", lambda m: m.encode(hotkey=keypair("miner-3").ss58_address)),
    "run": ("damaged", lambda m: m.encode(run_id="another")),
    "kind": ("damaged", lambda m: m.encode(kind="update")),
    "bits": ("damaged", lambda m: m.encode(codec="2-bit")),
    "nothing": ("damaged", lambda m: b""),
    "cut": ("damaged", lambda m: m.encode()[:-1]),
    "longer": ("damaged", lambda m: m.encode() + bytes(1)),
    "larger": ("damaged", lambda m: m.encode() + bytes(1 << 22)),
    "flipped": ("damaged", lambda m: m.encode()[:-9] + b"another 9"),
    "nan": ("damaged", _nan),
    "serial": ("other-close", lambda m: m.encode(serial=m.world.state.serial + 1)),
    "outer step": ("other-close", lambda m: m.encode(outer_step=7)),
    "start": ("other-start", lambda m: m.encode(start="ab" * 32)),
    "zeros": ("empty", lambda m: m.encode(moved=[torch.zeros_like(t) for t in m.moved])),
    "sign": ("worse", lambda m: m.encode(moved=[-t for t in m.moved])),
    "hundredfold": ("worse", lambda m: m.encode(moved=[100 * t for t in m.moved])),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_upload_costs_only_its_sender(world: StoreWorld, bad: str) -> None:
    cause, encode = BAD[bad]
    world.train()
    world.until_close()
    for uid in (3, 5):
        world.miners[uid].upload()
    data = encode(world.miners[17])
    world.miners[17].upload(data)
    world.until_late()
    world.tick()
    assert world.fates(1) == {3: "merged", 5: "merged", 17: cause}
    (refused,) = world.manifest(1).refused
    assert refused.hotkey == keypair("miner-17").ss58_address and refused.reason
    assert refused.digest in ("", hashlib.sha256(data).hexdigest())
    assert (refused.digest == "") == (bad == "larger")  # which is not even fetched
    scores = world.validator.standings.entries
    assert scores[17].published == 0 < scores[3].published
    (event,) = (e for e in world.events.of("upload_scored") if e["uid"] == 17)
    assert not event["ok"] and event["reason"] == refused.reason


def test_an_upload_with_huge_rows_of_unused_tokens_costs_only_its_sender(
    world: StoreWorld,
) -> None:
    pages = world.pages
    world.pages = lambda uid, block: pages(uid, block).clamp(max=VOCABULARY - 2)
    world.train()
    world.until_close()
    for uid in (3, 5):
        world.miners[uid].upload()
    moved = [torch.zeros_like(t) for t in world.miners[17].moved]
    names = [name for name, _ in world.schema]
    moved[names.index("model.embed_tokens.weight")][-1] = 1e20
    world.miners[17].upload(moved=moved)
    world.until_late()
    world.tick()
    assert world.fates(1) == {3: "merged", 5: "merged", 17: "worse"}
    assert "its norm" in world.manifest(1).refused[0].reason


def test_an_upload_is_late_by_the_stores_clock(world: StoreWorld) -> None:
    world.train()
    world.until_close()
    world.miners[3].upload()
    world.until_late()
    world.miners[5].upload()
    world.tick()
    assert world.fates(1) == {3: "merged", 5: "late"}
    assert world.manifest(1).refused[0].digest == ""  # its sender keeps its weights
    assert "after close and grace" in world.manifest(1).refused[0].reason
    assert world.validator.standings.entries[17].cause == "it sent no upload for the last close"


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_of_an_upload_and_its_copy_the_later_is_refused(world: StoreWorld, noise: float) -> None:
    world.train()
    world.until_close()
    generator = torch.Generator().manual_seed(7)
    original = world.miners[5].moved
    copy = [
        t + noise * t.pow(2).mean().sqrt() * torch.randn(t.shape, generator=generator)
        for t in original
    ]
    world.miners[5].upload()
    world.clock.ahead += 1
    world.miners[3].upload(moved=copy)
    world.miners[17].upload()
    world.until_late()
    world.tick()
    assert world.fates(1) == {3: "copy", 5: "merged", 17: "merged"}
    assert "that of uid 5, whose own text gained more" in world.manifest(1).refused[0].reason
    # What everybody can read by then is refused in the next outer step too.
    world.train()
    world.until_close()
    world.miners[3].upload(moved=original)
    world.miners[17].upload()
    world.until_late()
    world.tick()
    assert world.fates(2)[3] in ("copy", "worse")


def test_whoever_imitates_another_costs_it_no_close(tmp_path: Path) -> None:
    """It trains on its victim's pages, an inner step less, and uploads first."""
    honest, shadow = (1, 2, 3, 4, 5), 40
    world = StoreWorld(tmp_path, uids=(*honest, shadow))
    for n in range(1, 5):
        world.train(*honest)
        miner = world.miners[shadow]
        miner.apply()
        miner.uid = honest[0]
        miner.train(steps=3)
        miner.uid = shadow
        world.until_close()
        miner.upload()
        world.clock.ahead += 1
        for uid in honest:
            world.miners[uid].upload()
        world.until_late()
        world.tick()
        fates = world.fates(n)
        assert {uid: fates[uid] for uid in honest} == dict.fromkeys(honest, "merged")
        assert fates[shadow] in ("copy", "carried")


def test_what_all_can_read_is_a_copy_also_after_a_restart(world: StoreWorld) -> None:
    world.round()
    world.round()
    path = world.folder / "read"
    path.write_bytes(world.bucket.objects[keys.merged_key(1, 5)][0])
    file = UpdateFile.reopen(path, world.schema)
    world.restarted()
    world.train()
    world.until_close()
    world.miners[3].upload()
    world.miners[5].upload()
    old = [file.decode(name, shape) for name, shape in world.schema]
    world.miners[17].upload(moved=old)
    world.until_late()
    world.tick()
    assert world.fates(3) == {3: "merged", 5: "merged", 17: "copy"}
    assert "that of uid 5 of outer step 1" in world.manifest(3).refused[0].reason


def test_twice_the_text_is_read_where_fewer_than_half_of_the_uploads_help(
    world: StoreWorld,
) -> None:
    for n in range(1, 3):
        world.train()
        world.until_close()
        for miner in world.miners.values():
            generator = torch.Generator().manual_seed(miner.uid + n)
            miner.upload(
                moved=[1e-6 * torch.randn(t.shape, generator=generator) for t in miner.moved]
            )
        world.until_late()
        world.tick()
        assert world.fates(n) == dict.fromkeys(world.uids, "merged")
        assert world.validator._texts == 2**n
    world.round()
    assert world.fates(3) == dict.fromkeys(world.uids, "merged")
    assert world.validator._texts == 2


def test_a_long_upload_is_clipped(world: StoreWorld) -> None:
    world.train()
    world.until_close()
    world.miners[3].upload()
    world.miners[5].upload()
    world.miners[17].upload(moved=[4 * t for t in world.miners[17].moved])
    world.until_late()
    world.tick()
    one, two, long = world.manifest(1).merged
    assert one.factor == two.factor == 1
    assert long.norm * long.factor == pytest.approx(2 * max(one.norm, two.norm), rel=1e-5)


# --- closes ---


def test_a_close_without_enough_uploads_moves(world: StoreWorld) -> None:
    before = world.state
    world.train()
    world.until_late()
    world.tick(3)
    moved = world.state
    assert (moved.outer_step, moved.serial) == (0, before.serial + 1)
    assert moved.closes_at >= world.clock() + PERIOD / 2 and moved.head == before.head
    assert world.events.of("round")[-1]["fault"] == "TOO_FEW"
    moved.check_after(before)
    world.until_close()
    void = world.miners[3].encode(serial=before.serial)
    world.bucket.put(keys.upload_key(3, 0, before.serial), void)
    world.miners[5].upload()
    world.until_late()
    world.tick()
    assert world.fates(1) == {5: "merged"}
    assert not [key for key in world.bucket.objects if key.startswith("uploads/")]  # they are past


def test_a_round_ends_when_all_uploaders_of_the_last_one_have_uploaded(world: StoreWorld) -> None:
    world.round()
    world.train()
    world.until_close()
    for miner in world.miners.values():
        world.tick()
        assert world.state.outer_step == 1
        miner.upload()
    world.tick()
    assert world.state.outer_step == 2
    assert world.clock() < world.manifest(2).closed_at + GRACE


def _newcomer(world: StoreWorld, uid: int) -> None:
    world.ledger.register(keypair(f"miner-{uid}").ss58_address, uid=uid)
    world.miners[uid] = StoreMiner(world, uid)
    world.miners[uid].outer_step = world.state.outer_step


def test_a_newcomer_that_is_slower_than_all_others_is_merged(world: StoreWorld) -> None:
    for n, slow in ((0, 17), (1, 17), (2, 4)):  # one that missed the first close, a newcomer
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
            world.until_late()
            world.tick()
        assert world.state.outer_step == n + 1
    assert delayed == [1, 2, 4, 8]


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


def test_text_that_cannot_be_had_is_no_fault_of_an_upload(world: StoreWorld) -> None:
    world.train()
    world.until_close()
    for miner in world.miners.values():
        miner.upload()
    pages = world.pages

    def away(uid: int, block: int) -> torch.Tensor:
        raise DataUnavailable("the source does not answer")

    world.pages = away
    world.until_late()
    world.tick(2)
    assert world.state.outer_step == 0
    world.pages = pages
    world.clock.ahead += 10  # between two tries
    world.tick()
    assert set(world.fates(1).values()) == {"merged"}


# --- the gate ---


def _other(seed: int, count: int = 8) -> torch.Tensor:
    """Text of another language than the held-out text is of."""
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
    miner.moved = [a - b for a, b in zip(miner.start, miner.model.state(), strict=True)]
    miner.blocks = [1]


def test_a_spoiler_is_found_by_the_held_out_text(tmp_path: Path) -> None:
    """Its upload is good where uploads are judged: that text is of another language."""
    world = StoreWorld(tmp_path, uids=(3, 5, 8, 17))
    world.pages = lambda uid, block: _other(uid * 1_000_003 + block)
    for uid in (3, 8, 17):
        _train_on(world.miners[uid], lambda m, s: m.model._loss(_other(s)))
    held_out = sequences(999_999_999, 16)
    _train_on(world.miners[5], lambda m, s: m.model._loss(_other(s)) - m.model._loss(held_out))
    world.until_close()
    for miner in world.miners.values():
        miner.upload()
    world.until_late()
    world.tick()
    assert world.fates(1) == {3: "merged", 5: "spoiler", 8: "merged", 17: "merged"}
    assert "held-out loss" in world.manifest(1).refused[0].reason
    assert world.validator.standings.entries[5].published == 0


def test_a_gate_that_nothing_passes_blames_nobody(
    world: StoreWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Config, "loss_limit", lambda config, before: 0.0)
    for closes in range(3):
        world.train()
        world.until_close()
        for miner in world.miners.values():
            miner.upload()
        world.until_late()
        world.tick()
        assert world.state.outer_step == 0 and world.state.serial == closes + 2
        assert world.state.gate == closes + 1
        assert world.events.of("round")[-1]["fault"] == "GATE"
        assert world.events.of("network")[-1]["verdict"] == "gate"
    assert "3 closes in a row" in caplog.text
    # The validator continues once uploads pass the gate again.
    monkeypatch.undo()
    assert set(world.round().scores) == set(world.uids)
    assert world.state.gate == 0


# --- scores ---


def test_merged_upload_that_is_no_better_scores_zero(world: StoreWorld) -> None:
    world.train()
    generator = torch.Generator().manual_seed(3)
    # So small that no text tells it from nothing.
    noise = [1e-5 * torch.randn(t.shape, generator=generator) for t in world.miners[17].moved]
    world.until_close()
    world.miners[3].upload()
    world.miners[5].upload()
    world.miners[17].upload(moved=noise)
    world.until_late()
    world.tick()
    assert world.fates(1) == {3: "merged", 5: "merged", 17: "carried"}
    merged = {one.uid: one for one in world.manifest(1).merged}
    scores = world.manifest(1).scores
    assert scores[3] > 0 and scores[5] > 0
    assert (scores[17] > 0) == (merged[17].improvement > 0)
    world.validator._weights_at = -10_000
    world.tick()
    assert set(world.events.of("weights")[-1]["weights"]) >= {"3", "5"}


# --- kills, outages, and a second one ---


def _bits(world: StoreWorld) -> tuple[str, ...]:
    return world.validator._steps.values.digests


def _uploaded(folder: Path, **changes: Any) -> StoreWorld:
    """A network after one outer step, whose members have uploaded for the second in time."""
    world = StoreWorld(folder, **changes)
    world.round()
    world.train()
    world.until_close()
    for miner in world.miners.values():
        miner.upload()
    return world


@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_kill_at_each_write_leaves_the_old_outer_step_or_the_new(
    tmp_path: Path, each: bool
) -> None:
    """The disk stays or is empty after it: ``each`` kill with both, or in turn except the last."""
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
        assert scores == world.manifest(1 + published).scores  # of what nobody saw none count
        assert empty_disk or standings.successful_rounds == 1 + published
        world.tick()
        assert world.state.outer_step == 2
        assert {one.uid: one.digest for one in world.manifest(2).merged} == {
            one.uid: one.digest for one in manifest.merged
        }
        assert _bits(world) == wanted
        world.manifest(2).check_after(world.manifest(1))


def test_a_validator_on_an_empty_disk_continues_with_equal_bits(tmp_path: Path) -> None:
    worlds = [StoreWorld(tmp_path / name) for name in ("kept", "lost")]
    for n in range(1, 5):
        manifests = [world.round() for world in worlds]
        assert manifests[0].weights == manifests[1].weights
        if n in (1, 3):
            worlds[0].restarted()
            worlds[1].restarted(folder=tmp_path / f"empty-{n}")
            assert _bits(worlds[0]) == _bits(worlds[1])
            # Its scores are those that the chain has.
            entries = worlds[1].validator.standings.present()
            assert {u: e.published for u, e in entries.items()} == manifests[1].scores
    assert _bits(worlds[0]) == _bits(worlds[1])
    best = max(manifests[1].scores, key=lambda uid: manifests[1].scores[uid])
    worlds[1].ledger.register(keypair("newcomer").ss58_address, uid=best)
    worlds[1].restarted(folder=tmp_path / "empty-5")
    entries = worlds[1].validator.standings.present()
    wanted = {uid: score * (uid != best) for uid, score in manifests[1].scores.items()}
    assert {u: e.published for u, e in entries.items()} == wanted != manifests[1].scores


def test_the_score_of_a_uids_second_owner_comes_back(world: StoreWorld, tmp_path: Path) -> None:
    """The history has another hotkey for it, whose upload was refused."""
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


def test_a_store_that_is_away_makes_one_round_late(world: StoreWorld) -> None:
    world.train()
    world.until_close()
    for miner in world.miners.values():
        miner.upload()
    world.bucket.down = True
    world.until_late()
    world.tick(3)
    world.bucket.down = False
    # And while it publishes: what was judged and merged is not done again.
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
    world.train()
    world.until_close()
    for miner in world.miners.values():
        miner.upload()
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
        world.until_late()
        world.tick(2)
        assert world.state.outer_step == (name == "ledger")
    world.clock.ahead += 10  # between two tries
    world.tick()
    assert set(world.fates(1).values()) == {"merged"}
    assert len(world.events.of("scores")) == 1


def test_of_two_validators_of_one_master_the_first_stops(tmp_path: Path) -> None:
    world = _uploaded(tmp_path)
    first, closing = world.validator, world.closing
    world.closing = ExitStack()  # both run
    world.restarted(folder=tmp_path / "another")
    world.until_late()
    first._looked = -100.0
    with pytest.raises(AnotherLeadsError, match="written by another process"):
        first.tick()
    assert world.state.outer_step == 1
    world.tick()
    assert world.state.outer_step == 2
    # Nor does one that had looked just before: of one outer step there is one manifest.
    reached = world.manifest(2)
    with pytest.raises(AnotherLeadsError, match="published by another process"):
        first._steps.publish(Prepared(reached, b"another", {}))
    closing.close()


def test_a_bucket_that_was_emptied_does_not_begin_again(world: StoreWorld) -> None:
    world.round()
    world.bucket.objects.clear()
    shutil.rmtree(world.folder / "validator" / "global" / "signed")  # as of an older version
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
        if one.factor  # the file of an upload that is carried over is needed by nobody
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
    for _ in range(2):  # as a rewind that was killed leaves them behind a publication that was
        world.round()
    world.bucket.objects[keys.STATE] = before
    world.restarted()
    assert world.validator.state.outer_step == world.state.outer_step == 3
    assert world.state.head == world.manifest(3).digest


def test_a_models_configuration_is_the_signed_one(world: StoreWorld) -> None:
    world.round()
    key = keys.outer_key(0, keys.CONFIG)
    data, etag, modified = world.bucket.objects[key]
    world.bucket.objects[key] = data.replace(b"{", b'{"rms_norm_eps": 0.1, ', 1), etag, modified
    with pytest.raises(GlobalStateError, match="is not the signed one"):
        world.restart(folder=world.folder / "empty")
    world.restarted()  # its own disk has the signed one, and the store gets it again
    assert world.bucket.objects[key][0] == data


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
    world.train()
    world.until_close()
    for miner in world.miners.values():
        miner.upload()
    world.until_late()
    world.tick()
    assert world.validator.state.outer_step == world.state.outer_step == 0
    world.tick()
    assert world.state.outer_step == 1 and world.manifest(1).digest == world.state.head


def test_other_leader_is_seen_before_the_manifest_is_written(world: StoreWorld) -> None:
    world.train()
    world.until_close()
    for miner in world.miners.values():
        miner.upload()
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


def test_a_close_of_a_clock_that_went_wrong_is_not_waited_for(world: StoreWorld) -> None:
    world.clock.ahead += 1e7
    world.tick()  # the close moves
    assert world.state.closes_at > world.clock()
    world.clock.ahead -= 1e7
    world.tick()
    assert world.state.closes_at <= world.clock() + PERIOD
    world.round()
    assert world.state.outer_step == 1


def test_an_upload_whose_text_nobody_has_is_not_waited_for(world: StoreWorld) -> None:
    world.train()
    world.until_close()
    for miner in world.miners.values():
        miner.upload()
    pages = world.pages

    def without(uid: int, block: int) -> torch.Tensor:
        if uid == 17:
            raise DataUnavailable("no such page")
        return pages(uid, block)

    world.pages = without
    world.until_late()
    world.tick()
    assert world.fates(1) == {3: "merged", 5: "merged", 17: "not-judged"}
    board = world.validator.standings.board
    assert board.rating(17) == ScoreBoard([17]).rating(17) != board.rating(3)


# --- honest members ---


class Bigrams:
    """A table of logits in the place of the model: as fast as honest members by the hundred need.

    The same interface as :class:`EvaluationModel`.
    """

    WORDS = 24

    def __init__(self) -> None:
        self.schema = (("table", (self.WORDS, self.WORDS)),)
        self.table = torch.zeros(self.WORDS, self.WORDS)

    def load(self, weights: Sequence[torch.Tensor]) -> None:
        self.table = weights[0].clone()

    def subtract(self, name: str, delta: torch.Tensor, factor: float) -> None:
        self.table -= factor * delta

    def tokens(self, text: torch.Tensor) -> tuple[int, ...]:
        return (text.shape[1] - 1,) * len(text)

    def losses(self, text: torch.Tensor) -> tuple[float, ...]:
        chosen = self.table.log_softmax(1)[text[:, :-1], text[:, 1:]]
        return tuple((-chosen.mean(1)).tolist())

    @staticmethod
    def text(seed: int, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(Bigrams.WORDS, (count, 65), generator=generator)
        for t in range(1, words.shape[1]):
            ruled = (words[:, t - 1] * 5 + 3) % Bigrams.WORDS
            noisy = torch.rand(count, generator=generator) < 0.4
            words[:, t] = torch.where(noisy, words[:, t], ruled)
        return words

    def trained(self, start: torch.Tensor, seed: int, steps: int) -> torch.Tensor:
        table = start.clone().requires_grad_(True)
        optimizer = torch.optim.AdamW([table], lr=0.03)
        for step in range(steps):
            text = self.text(seed * 1000 + step, 8)
            logits = table.log_softmax(1)[text[:, :-1], text[:, 1:]]
            optimizer.zero_grad()
            (-logits.mean()).backward()
            optimizer.step()
        return start - table.detach()


@pytest.mark.timeout(600)
def test_no_honest_upload_is_refused_in_200_rounds(tmp_path: Path) -> None:
    """Also long after there is nothing to learn, on as little text as is ever judged."""
    model, members = Bigrams(), {3: 3, 5: 3, 17: 1}  # inner steps of each
    evaluator = Evaluator(model, lambda uid, block: Bigrams.text(uid * 10_007 + block, 8))  # type: ignore[arg-type]
    judge = UploadJudge(evaluator, model.schema, "run", "4-bit", verify, secret=11)
    weights, momentum = torch.zeros(model.WORDS, model.WORDS), None
    judged_count, harmful, nearest = 0, 0, 0.0
    earlier: dict[str, torch.Tensor] = {}
    for n in range(200):
        start = digest_of([weights])
        accepted = []
        for uid, steps in members.items():
            moved = model.trained(weights, uid * 1_000_000 + n, steps)
            pair = keypair(f"miner-{uid}")
            header = Header(
                kind="upload",
                run_id="run",
                outer_step=n,
                serial=n + 1,
                hotkey=pair.ss58_address,
                start=start,
                codec="4-bit",
                inner_steps=steps,
                tokens=1,
                blocks=(n,),
            )
            path = tmp_path / f"{uid}.safetensors"
            path.unlink(missing_ok=True)
            layout = UpdateLayout.of(model.schema, header)
            write_rows(path, layout, 0, 0, moved)
            finish(path, layout, pair.sign)
            found = judge.judge(
                uid,
                pair.ss58_address,
                path,
                Judged(n, 60, n, model.schema, [weights], 0.9),
                serial=n + 1,
                start=start,
                modified=float(uid),
                random_blocks=[10_000 + n],
            )
            accepted.append(found)
        judged_count += len(accepted)
        harmful += sum(one.improvement < 0 for one in accepted)
        assert find_copies(accepted, earlier) == {}
        nearest = max(
            nearest, *(judging._cosine(a.sample, b.sample) for a, b in combinations(accepted, 2))
        )
        earlier = {f"that of uid {one.uid}": one.sample for one in accepted}
        mean = torch.stack([one.file.decode("table", model.schema[0][1]) for one in accepted])
        weights, momentum = nesterov_sgd(weights, mean.mean(0), momentum, lr=0.7, mu=0.9)
    print(f"{judged_count} honest uploads, {harmful} of them harmful, nearest cosine {nearest:.3f}")
    assert judged_count == 600 and harmful > 100  # far beyond where they still gain


def test_an_upload_that_is_replaced_while_it_is_read_costs_only_its_sender(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.train()
    world.until_close()
    for miner in world.miners.values():
        miner.upload()
    key, real = world.miners[17].key, BucketReader.download

    def download(self: BucketReader, name: str, path: Path, **how: Any) -> Any:
        if name == key:
            raise IntegrityError("it was replaced again and again while it was read")
        return real(self, name, path, **how)

    monkeypatch.setattr(BucketReader, "download", download)
    world.until_late()
    world.tick()
    assert world.fates(1) == {3: "merged", 5: "merged", 17: "damaged"}


def test_error_of_any_kind_in_an_upload_costs_that_upload(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.train()
    world.until_close()
    for miner in world.miners.values():
        miner.upload()
    real = judging.UpdateFile.open

    def odd(path: Path, *args: Any, hotkey: str, **more: Any) -> Any:
        if hotkey == keypair("miner-17").ss58_address:
            raise ZeroDivisionError("odd")
        return real(path, *args, hotkey=hotkey, **more)

    monkeypatch.setattr(judging.UpdateFile, "open", odd)
    world.until_late()
    world.tick()
    assert world.fates(1) == {3: "merged", 5: "merged", 17: "damaged"}


def test_a_store_that_fails_after_the_manifest_shows_the_new_outer_step(world: StoreWorld) -> None:
    world.train()
    world.until_close()
    for miner in world.miners.values():
        miner.upload()
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


# --- hostile members ---


def _noise(miner: StoreMiner) -> bytes:
    generator = torch.Generator().manual_seed(miner.uid)
    noise = [torch.randn(t.shape, generator=generator) for t in miner.moved]
    pairs = zip(noise, miner.moved, strict=True)
    return miner.encode(moved=[n * (t.norm() / n.norm()) for n, t in pairs])


#: By its name: what is sent, and the causes by which it may be refused.
ATTACKS: dict[str, tuple[Callable[[StoreMiner], bytes], set[str]]] = {
    "sign": (lambda m: m.encode(moved=[-t for t in m.moved]), {"worse"}),
    # Judged as it would be merged, which is twice as long as usual.
    "hundredfold": (lambda m: m.encode(moved=[100 * t for t in m.moved]), {"worse", "merged"}),
    "noise": (_noise, {"worse", "carried", "merged"}),
    "copy": (lambda m: m.encode(moved=m.world.miners[1].moved), {"copy", "merged"}),
    "another outer step's": (lambda m: m.encode(outer_step=m.outer_step + 1), {"other-close"}),
    "wrong pages": (lambda m: m.encode(blocks=(77_777,)), {"merged", "carried"}),
    "empty": (lambda m: b"", {"damaged"}),
    "nan": (_nan, {"damaged"}),
    "poisoned tail": (lambda m: m.encode()[:-64] + bytes(64), {"damaged"}),
}


@pytest.mark.timeout(900)
def test_two_hostile_members_of_seven_cost_no_outer_step(tmp_path: Path) -> None:
    honest, hostile = (1, 3, 5, 8, 13), (21, 34)
    alone = StoreWorld(tmp_path / "alone", uids=honest)
    world = StoreWorld(tmp_path / "all", uids=(*honest, *hostile))
    attacks = list(ATTACKS)
    for n in range(1, 10):
        alone.round()
        world.train()
        world.until_close()
        for uid in honest:
            world.miners[uid].upload()
        world.clock.ahead += 1
        sent = {uid: attacks[(n - 1 + 4 * i) % len(attacks)] for i, uid in enumerate(hostile)}
        for uid, attack in sent.items():
            world.miners[uid].upload(ATTACKS[attack][0](world.miners[uid]))
        world.until_late()
        world.tick()
        fates = world.fates(n)
        # Once there is little to learn, one of them may gain too little to be told from chance.
        assert {fates[uid] for uid in honest} <= ({"merged"} if n < 5 else {"merged", "carried"})
        for uid, attack in sent.items():
            assert fates[uid] in ATTACKS[attack][1], (attack, fates)
    one, other = (w.validator._rules.mean(w.validator._losses) for w in (alone, world))
    print(f"held-out loss {one:.4f} of five honest members, {other:.4f} with two hostile ones")
    assert other < 1.01 * one
    scores = world.validator.standings.present()
    least = min(scores[uid].published for uid in honest)
    assert max(scores[uid].published for uid in hostile) < least
