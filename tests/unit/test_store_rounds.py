"""Test how a member follows rounds through the store, with a stand-in validator and clock."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bittensor.sp_core import Keypair

from distributed_training.exchange import own_uploads
from distributed_training.exchange.base import (
    Close,
    NetworkDiffers,
    StopRequested,
    UploadEnded,
)
from distributed_training.protocol import keys
from distributed_training.protocol.types import Base, ExitStatus, Update
from distributed_training.store import errors, transfer
from distributed_training.store.base import Uplink
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.store_network import (
    GRACE,
    PERIOD,
    UID,
    FaultyStore,
    Leader,
    Miner,
    Time,
    merged,
    refused,
)
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(60)
THIEF = Keypair.create_from_uri("//Charlie")


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def store(time: Time) -> FaultyStore:
    return FaultyStore(MemoryObjectStore(clock=time.store), time)


@pytest.fixture
def leader(store: FaultyStore, time: Time) -> Leader:
    return Leader(store, time)


@pytest.fixture
def miner(store: FaultyStore, leader: Leader, time: Time, tmp_path: Path) -> Miner:
    miner = Miner(store, tmp_path / "rounds", time)
    miner.turn()
    assert miner.take_facts() == [] and miner.head == 0
    return miner


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def send(leader: Leader, miner: Miner) -> tuple[Close, str]:
    """Reach the close and send the upload for it; return the close and the file's digest."""
    close = leader.close
    miner.pass_time(PERIOD)
    return close, miner.upload(close)


def test_rounds_follow_each_other(
    store: FaultyStore, leader: Leader, miner: Miner, time: Time
) -> None:
    assert miner.pass_time(PERIOD - 1) == [] and miner.head == 0
    for outer_step in range(3):
        close = leader.close
        assert miner.pass_time(2) == [close]
        digest = miner.upload(close)
        [sent] = miner.take_facts()
        assert isinstance(sent, UploadEnded) and sent.size == len(b"our upload")
        key = keys.upload_key(UID, outer_step, close.serial)
        assert store.get(key, limit=99) == b"our upload"

        manifest = leader.take_outer_step(merged=(merged(UID, digest),))
        [update] = miner.pass_time(5)
        assert miner.head == outer_step + 1
        assert isinstance(update, Update) and update.outer_step == outer_step + 1
        assert (update.base, update.cause) == (Base.MERGED, "")
        assert update.own_upload == miner.upload_path(close)
        assert update.weights == manifest.weights and update.inner_steps == 30 * (outer_step + 1)
        assert update.path.read_bytes().startswith(b"update %06d" % (outer_step + 1))
        miner.rounds.applied(outer_step + 1)
        assert miner.pass_time(leader.closes_at - time.store() - 1) == []


def test_missed_updates_are_applied_one_after_the_other(leader: Leader, miner: Miner) -> None:
    for _ in range(3):
        leader.take_outer_step()
    posted = miner.pass_time(60)
    for outer_step in (1, 2, 3):
        *_, update = posted
        assert (update.outer_step, update.base, update.cause) == (outer_step, Base.KEPT, "")
        # The next update is not posted before this one has been applied.
        assert miner.pass_time(60) == []
        posted = miner.apply(outer_step)
    assert posted == []


def test_an_update_that_could_not_be_applied_is_posted_again(leader: Leader, miner: Miner) -> None:
    leader.take_outer_step()
    [first] = miner.pass_time(60)
    assert miner.apply(0) == [first]


def test_update_for_weights_no_longer_held_is_not_posted(
    store: FaultyStore, leader: Leader, miner: Miner
) -> None:
    """The loop may roll back or load other weights while an update is being fetched."""
    for _ in range(3):
        leader.take_outer_step()

    def meanwhile(data: bytes) -> bytes:
        store.faults.clear()
        miner.rounds.applied(2)
        return data

    store.faults["get_range", keys.outer_key(1, keys.UPDATE)] = meanwhile
    [update] = miner.pass_time(60)
    assert isinstance(update, Update) and update.outer_step == 3


@pytest.mark.parametrize("fault", ["cut", "ignored", "gone"])
def test_an_update_that_cannot_be_had_is_gone_around_by_later_weights(
    leader: Leader, miner: Miner, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Its ranges are always wrong, or it does not exist."""
    monkeypatch.setattr(transfer, "NO_PROGRESS", timedelta(0))

    def answer(data: bytes) -> bytes:
        if fault == "ignored":
            raise errors.OtherBytesError("the store ignored the range")
        return data[:-1]

    leader.store.faults["get_range", keys.outer_key(1, keys.UPDATE)] = answer
    leader.take_outer_step()
    leader.take_outer_step(whole=True)
    if fault == "gone":
        leader.store.delete(keys.outer_key(1, keys.UPDATE))
    [weights] = miner.pass_time(60)
    assert isinstance(weights, Update) and weights.whole and weights.outer_step == 2
    assert fault != "gone" or "no such object" in weights.whole
    assert miner.rounds.held_weights() == weights.path.parent


def test_member_far_behind_gets_weights_and_then_the_updates(
    store: FaultyStore, leader: Leader, miner: Miner
) -> None:
    """The manifests are fetched in parallel, since thousands of requests would take long."""
    both = threading.Barrier(2)

    def meet(data: bytes) -> bytes:
        both.wait(30)
        return data

    for outer_step in (2, 3):
        store.faults["get", keys.outer_key(outer_step, keys.MANIFEST)] = meet
    # Whole weights are as large as 8 updates here, so they are smaller than 9 updates.
    for outer_step in range(1, 11):
        leader.take_outer_step(whole=outer_step == 9)
    [weights] = miner.pass_time(60)
    assert isinstance(weights, Update) and weights.whole and weights.outer_step == 9
    assert weights.path.read_bytes().startswith(b"model 000009")
    assert weights.weights == leader.chain[9].weights and "fewer bytes" in weights.whole
    assert not any(key.endswith(keys.UPDATE) for op, key in store.asked if op == "get_range")
    [update] = miner.apply(9)
    assert isinstance(update, Update) and update.outer_step == 10


def test_after_a_rewind_the_weights_are_fetched(leader: Leader, miner: Miner) -> None:
    leader.take_outer_step()
    miner.pass_time(30)
    miner.rounds.applied(1)
    leader.go_back(0)
    [weights] = miner.pass_time(30)
    assert isinstance(weights, Update) and weights.whole and weights.outer_step == 2
    # Otherwise training on the abandoned weights would be added to the restored ones.
    assert weights.base is Base.REFUSED and "went back to outer step 0" in weights.cause


def test_member_away_over_a_rewind_takes_its_weights_at_once(leader: Leader, miner: Miner) -> None:
    """Updates of the abandoned history would not lead to the network's head."""
    leader.take_outer_step()
    leader.take_outer_step(whole=True)
    leader.go_back(1)
    leader.take_outer_step()
    [weights] = miner.pass_time(30)
    assert isinstance(weights, Update) and weights.outer_step == 3
    assert weights.whole == weights.cause == "the network went back to outer step 1"
    assert weights.base is Base.REFUSED
    [update] = miner.apply(3)
    assert isinstance(update, Update) and update.outer_step == 4 and not update.whole
    assert update.base is Base.KEPT


def test_a_close_that_moved_voids_its_upload_and_is_followed_by_another(
    leader: Leader, miner: Miner, time: Time
) -> None:
    first = leader.close
    assert miner.pass_time(PERIOD + 1) == [first]
    digest = miner.upload(first)
    assert isinstance(miner.take_facts()[0], UploadEnded)
    leader.move_close()
    second = leader.close
    assert second.serial == first.serial + 1
    assert miner.pass_time(PERIOD + 10) == [second]
    assert miner.upload_path(second) != miner.upload_path(first)
    # It is too late for the first upload.
    miner.send(first)
    miner.turn()
    [failed] = miner.take_facts()
    assert isinstance(failed, UploadEnded) and failed.cause.startswith("void")
    leader.take_outer_step()
    [update] = miner.pass_time(10)
    assert isinstance(update, Update) and update.base is Base.KEPT and "void" in update.cause
    assert digest not in update.cause


def test_weights_that_skip_our_upload_carry_its_fate(leader: Leader, miner: Miner) -> None:
    """Otherwise the next upload would contain movement that was already merged."""
    close, digest = send(leader, miner)
    for outer_step in range(1, 11):
        ours = (merged(UID, digest),) if outer_step == 1 else (merged(0, "f" * 64),)
        leader.take_outer_step(whole=outer_step == 10, merged=ours)
    weights = miner.pass_time(60)[-1]
    assert isinstance(weights, Update) and weights.whole and weights.outer_step == 10
    assert (weights.base, weights.own_upload) == (Base.MERGED, miner.upload_path(close))


def test_another_file_for_a_close_is_not_taken_for_the_upload_that_was_merged(
    leader: Leader, miner: Miner
) -> None:
    """A miner that lost its newest checkpoint may write another file for the same close."""
    close, digest = send(leader, miner)
    path = miner.upload_path(close)
    path.write_bytes(path.read_bytes() + b"another")
    leader.take_outer_step(merged=(merged(UID, digest),))
    update = miner.pass_time(10)[-1]
    assert (update.base, update.own_upload) == (Base.MERGED, None)


@pytest.mark.parametrize("newer", [True, False])
def test_weights_that_were_asked_for_are_fetched(leader: Leader, miner: Miner, newer: bool) -> None:
    """An update failed twice because our weights are not those of its outer step."""
    _, digest = send(leader, miner)
    leader.take_outer_step(whole=newer, merged=(merged(UID, digest),))
    assert isinstance(miner.pass_time(10)[-1], Update)
    [weights] = miner.apply(0, wants_weights=True)
    assert isinstance(weights, Update) and weights.whole and weights.outer_step == int(newer)
    assert weights.base is (Base.MERGED if newer else Base.KEPT)
    # Whole weights come only once; updates follow.
    assert [type(fact) for fact in miner.apply(weights.outer_step)] == ([] if newer else [Update])


def test_an_upload_is_counted_once_where_older_weights_were_taken(
    leader: Leader, miner: Miner
) -> None:
    """Otherwise the next upload would undo the movement of this one."""
    for outer_step in range(2):
        close = leader.close
        miner.pass_time(PERIOD)
        digest = miner.upload(close, b"%d" % outer_step)
        leader.take_outer_step(merged=(merged(UID, digest),))
        [*_, update] = miner.pass_time(10)
        assert isinstance(update, Update) and update.base is Base.MERGED
        if not outer_step:
            miner.rounds.applied(1)
    # The second update failed twice.
    [weights] = miner.apply(1, wants_weights=True)
    assert isinstance(weights, Update) and weights.whole
    assert (weights.outer_step, weights.base) == (0, Base.KEPT)
    for held, base in ((0, Base.KEPT), (1, Base.MERGED)):
        [update] = miner.apply(held)
        assert isinstance(update, Update) and (update.outer_step, update.base) == (held + 1, base)


@pytest.mark.parametrize(
    "verdict, base, cause",
    [
        ((), Base.KEPT, "not judged"),
        (("worse",), Base.REFUSED, "worse: a reason"),
        (("copy",), Base.KEPT, "copy: a reason"),
        (("late",), Base.KEPT, "late: a reason"),
        (("not-judged",), Base.KEPT, "not-judged: a reason"),
        (("damaged",), Base.KEPT, "damaged: a reason"),
    ],
)
def test_the_manifest_shows_the_fate_of_our_upload(
    leader: Leader, miner: Miner, verdict: tuple[str, ...], base: Base, cause: str
) -> None:
    close, digest = send(leader, miner)
    if {"late", "not-judged"} & {*verdict}:
        digest = ""  # the validator has not read the file
    others = (refused("late", "", uid=UID + 1), *(refused(each, digest) for each in verdict))
    leader.take_outer_step(refused=others)
    update = miner.pass_time(10)[-1]
    assert update.base is base and update.cause.startswith(cause)
    own = miner.upload_path(close) if base is Base.REFUSED else None
    assert update.own_upload == own


def test_an_upload_with_a_factor_of_0_is_carried_over(leader: Leader, miner: Miner) -> None:
    """Otherwise its movement would be lost, because no update contains it."""
    _, digest = send(leader, miner)
    ours = replace(merged(UID, digest), factor=0.0)
    leader.take_outer_step(merged=(ours, merged(UID + 1, "1" * 64)))
    update = miner.pass_time(10)[-1]
    assert (update.base, update.own_upload) == (Base.KEPT, None)
    assert update.cause.startswith("carried over")


def test_no_member_with_other_weights_is_asked_to_upload(
    store: FaultyStore, leader: Leader, time: Time, tmp_path: Path
) -> None:
    miner = Miner(store, tmp_path / "rounds", time, held=0)
    leader.take_outer_step()
    store.faults["head", keys.outer_key(1, keys.UPDATE)] = away(errors.RefusedError)
    assert miner.pass_time(PERIOD + GRACE) == [] and miner.head == 1
    # A member that gets the weights after the grace is too late.
    assert miner.apply(1) == []


def away(kind: type[errors.StoreError]) -> Callable[[Any], Any]:
    def fault(_: Any) -> Any:
        raise kind("503 SlowDown")

    return fault


# --- what is not taken ------------------------------------------------------------------------


#: Words of the warning -> a function that puts something else in place of the state.
REFUSED: dict[str, Callable[[Leader], object]] = {
    "not signed by the network's master": lambda leader: leader.put_state(THIEF, serial=9),
    "another history": lambda leader: leader.put_state(serial=9, head="0" * 64),
    "older": lambda leader: leader.put_state(serial=0),
    "has expired at 2027-01-15 07:59:59 UTC": lambda leader: leader.put_state(
        serial=9, expires=leader.time.store() - 1
    ),
    "does not end with a signature": lambda leader: leader.store.put(
        keys.STATE, leader.put_state(serial=9)[:200]
    ),
    "another network": lambda leader: leader.put_state(serial=9, run_id="other"),
    "is missing": lambda leader: leader.store.delete(keys.STATE),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_state_that_is_refused_costs_one_line_and_nothing_is_taken_or_lost(
    leader: Leader, miner: Miner, caplog: pytest.LogCaptureFixture, words: str
) -> None:
    close = leader.close
    REFUSED[words](leader)
    assert miner.pass_time(300) == []
    [line] = warnings(caplog)
    assert words in line and "\n" not in line
    assert miner.rounds.next_close == close
    leader.serial = 20
    leader.move_close()
    assert miner.pass_time(leader.closes_at - leader.time.store() + 1) == [leader.close]
    assert warnings(caplog) == [line]


def test_a_newcomer_takes_nothing_where_manifests_do_not_lead_to_the_head(
    leader: Leader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leader.take_outer_step()
    leader.put_state(serial=9, head="0" * 64)
    miner = Miner(leader.store, tmp_path / "rounds", leader.time)
    with pytest.raises(errors.StoreError, match="another history"):
        miner.rounds.fetch_newest()
    assert miner.pass_time(100) == [] and miner.head == 1
    [line] = warnings(caplog)
    assert "another history" in line


def test_a_head_that_changes_between_two_reads_is_not_taken(
    leader: Leader, store: FaultyStore, tmp_path: Path
) -> None:
    """The state's head is read first; the chain is then read again up to it."""
    ours = leader.take_outer_step()
    key = keys.outer_key(1, keys.MANIFEST)
    first = store.get(key, limit=10**5)
    leader.chain.pop()
    leader.publish_manifest(serial=99)
    answers = iter([first])
    store.faults["get", key] = lambda found: next(answers, found)
    leader.put_state(serial=9, head=ours.digest)
    miner = Miner(leader.store, tmp_path / "rounds", leader.time)
    assert miner.pass_time(100) == []


def test_a_manifest_is_not_asked_for_from_before_a_recovery(
    leader: Leader, store: FaultyStore, miner: Miner
) -> None:
    leader.recover(above=20, to=0)
    leader.move_close()
    miner.pass_time(60)
    assert miner.head == 21 and not store.asked["get", keys.outer_key(1, keys.MANIFEST)]


def test_older_bytes_of_a_cache_are_asked_for_again_at_the_next_turn(
    leader: Leader, store: FaultyStore, miner: Miner
) -> None:
    older = store.get(keys.STATE, limit=10**5)
    answers = iter([older])
    store.faults["get", keys.STATE] = lambda found: next(answers, found)
    leader.take_outer_step()
    miner.pass_time(60)
    assert miner.head == 1


@pytest.mark.parametrize("kind", [errors.AccessDeniedError, errors.TransientError,
                                  errors.BucketMissingError, errors.NotGrantedError])  # fmt: skip
@pytest.mark.parametrize("operation", ["head", "get"])
def test_a_store_that_is_away_costs_one_line(
    leader: Leader,
    miner: Miner,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[errors.StoreError],
    operation: str,
) -> None:
    monkeypatch.setattr("distributed_training.store.transfer.Uplink.sleep", stop_retrying)
    leader.take_outer_step()
    leader.store.faults[operation, keys.STATE] = away(kind)
    assert miner.pass_time(500) == []
    [line] = warnings(caplog)
    assert "The store cannot be read" in line and "503 SlowDown" in line
    # If the registry has granted no URL, nothing is known about the store.
    silent = (operation, kind) != ("head", errors.NotGrantedError)
    assert (miner.rounds.silent_since is not None) == silent
    # Now it answers, but with a state that is refused.
    leader.store.faults = {(kind, keys.STATE): lambda found: None for kind in ("head", "get")}
    assert miner.pass_time(30) == [] and miner.rounds.silent_since is None
    caplog.clear()
    leader.store.faults.clear()
    assert [type(fact) for fact in miner.pass_time(30)] == [Update]
    assert warnings(caplog) == []


def test_a_store_that_hangs_is_silent_before_it_fails(
    store: FaultyStore, leader: Leader, miner: Miner, time: Time
) -> None:
    seen = list[float | None]()

    def hang(found: Any) -> Any:
        seen.append(miner.rounds.silent_since)
        time.passed += 20.0
        seen.append(miner.rounds.silent_since)
        return found

    leader.take_outer_step()
    store.faults["head", keys.STATE] = hang
    miner.pass_time(31)
    silent, since = seen[:2]
    assert silent is None and since is not None and since > 50, seen
    assert miner.rounds.silent_since is None


def stop_retrying(uplink: object, seconds: float) -> None:
    raise errors.DeadlineError("503 SlowDown: did not succeed in time")


def test_an_upload_that_was_written_too_late_is_not_sent(
    store: FaultyStore, leader: Leader, miner: Miner, time: Time
) -> None:
    close = leader.close
    miner.pass_time(PERIOD + GRACE + 1)
    miner.upload(close)
    [fact] = miner.take_facts()
    assert isinstance(fact, UploadEnded) and fact.cause.startswith("late")
    assert store.get(keys.upload_key(UID, 0, close.serial), limit=99) is None


def test_files_that_no_checkpoint_needs_are_deleted(
    leader: Leader, miner: Miner, tmp_path: Path
) -> None:
    close = leader.close
    miner.pass_time(PERIOD)
    digest = miner.write_upload(close)
    # Left by ranks that were killed while writing.
    (tmp_path / "rounds" / "uploads" / "0.1.parts").mkdir()
    given_up = tmp_path / "rounds" / "updates" / ".1.safetensors.part"
    given_up.parent.mkdir()
    given_up.touch()
    miner.send(close)
    miner.turn()
    leader.take_outer_step(merged=(merged(UID, digest),))
    [*_, first] = miner.pass_time(10)
    assert isinstance(first, Update) and first.own_upload is not None
    miner.rounds.forget(0)
    assert first.path.exists() and first.own_upload.exists()
    # A miner that continues from a checkpoint of outer step 0 applies the update again.
    assert miner.apply(0) == [first]
    miner.rounds.forget(1)
    assert not first.path.exists() and not first.own_upload.exists() and not given_up.exists()


@pytest.mark.parametrize("kind", [errors.AccessDeniedError, errors.RefusedError])
@pytest.mark.parametrize("returns", [True, False])
def test_an_upload_that_is_refused_is_sent_until_the_grace_ends(
    leader: Leader,
    miner: Miner,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[errors.StoreError],
    returns: bool,
) -> None:
    waits: list[float] = []

    def wait(uplink: Uplink, seconds: float) -> None:
        waits.append(seconds)
        if returns and len(waits) == 3:
            leader.store.faults.clear()

    monkeypatch.setattr(Uplink, "sleep", wait)
    monkeypatch.setattr(own_uploads, "time", SimpleNamespace(monotonic=lambda: sum(waits)))
    close = leader.close
    miner.pass_time(PERIOD)
    digest = miner.write_upload(close)
    key = keys.upload_key(UID, 0, close.serial)
    leader.store.faults["head", key] = leader.store.faults["put", key] = away(kind)
    miner.send(close)
    miner.turn()
    [fact] = miner.take_facts()
    assert isinstance(fact, UploadEnded) and bool(fact.cause) != returns
    assert returns or sum(waits) <= GRACE
    [line] = warnings(caplog)
    assert "503 SlowDown; trying again soon" in line
    assert (leader.store.get(key, limit=99) is not None) == returns
    # If it was not sent, the next upload contains its movement, so nothing is lost.
    leader.take_outer_step(merged=(merged(UID, digest if returns else "e" * 64),))
    update = miner.pass_time(10)[-1]
    assert update.base is (Base.MERGED if returns else Base.KEPT)
    assert returns or update.cause == "not sent: 503 SlowDown"


def test_an_upload_has_ended_before_the_store_is_swept(
    leader: Leader, miner: Miner, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[list[Any]] = []
    sweep = lambda *_, **__: posted.append(list(miner.facts))
    monkeypatch.setattr(own_uploads, "sweep_uploads", sweep)
    miner.pass_time(PERIOD)
    miner.take_facts()
    miner.upload(leader.close)
    [[ended]] = posted
    assert isinstance(ended, UploadEnded) and not ended.cause


@pytest.mark.parametrize("away", [True, False])
@pytest.mark.parametrize("at", ["list_multiparts", "abort_multipart"])
def test_a_sweep_can_be_stopped_at_each_request(at: str, away: bool) -> None:
    """A stop in the middle of many aborts prevents those that have not begun."""
    uplink, aborts = Uplink(), list[str]()

    def before(operation: str, key: str) -> None:
        if operation == "abort_multipart":
            aborts.append(key)
        if operation == at and len(aborts) in (0, 20):
            uplink.stop()
            if away:
                raise errors.TransientError("503 SlowDown")

    store = MemoryObjectStore(before=before)
    for n in range(100):
        store.create_multipart(f"uploads/7/{n}")
    with pytest.raises(errors.StoppedError):
        transfer.sweep_uploads(store, prefix="", is_stuck=lambda one: True, uplink=uplink)
    least = 0 if at == "list_multiparts" else 20
    assert least <= len(aborts) < least + 10 and len(store._uploads) > 70


def test_a_miner_that_ends_for_good_after_an_upload_leaves_no_past_one(
    time: Time, tmp_path: Path
) -> None:
    begun, answers = threading.Event(), threading.Event()

    def before(operation: str, key: str) -> None:
        if operation == "delete":
            begun.set()
            answers.wait(30)

    store = FaultyStore(MemoryObjectStore(clock=time.store, before=before), time)
    leader = Leader(store, time)
    miner = Miner(store, tmp_path / "rounds", time)
    miner.pass_time(PERIOD)
    miner.upload(leader.close)
    leader.take_outer_step()
    miner.pass_time(10)
    miner.rounds.applied(1)
    miner.pass_time(PERIOD)
    miner.write_upload(leader.close)
    miner.send(leader.close)
    miner.rounds.turn()
    assert begun.wait(30)
    threading.Timer(0.2, answers.set).start()
    miner.rounds.stop()
    left = [info.key for info in store.list_objects(f"uploads/{UID}/")]
    assert left == [keys.upload_key(UID, 1, leader.close.serial)]


@pytest.mark.parametrize("size", [20, (5 << 20) + 7])  # the larger one is sent in parts
def test_progress_is_sent_in_place_of_the_last_and_ends_for_a_close(
    leader: Leader, miner: Miner, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PART", 5 << 20)

    def send_progress(data: bytes) -> UploadEnded:
        miner.write_upload(Close(0, 0), data)
        miner.send(Close(0, 0))
        wait_for(lambda: miner.facts, "the end of a progress upload")
        [fact] = miner.take_facts()
        assert isinstance(fact, UploadEnded) and fact.close == Close(0, 0)
        return fact

    key = keys.progress_key(UID)
    for text in (b"of 60 steps", b"of 120 steps"):
        sent = send_progress(text.ljust(size))
        assert (sent.cause, sent.size) == ("", size)
        assert leader.store.get(key, limit=size) == text.ljust(size)
    assert not miner.rounds._uploads.begun(leader.close), "the close has its own upload"
    # The store does not answer, and then the close comes.
    if size > transfer.PART:
        return  # FaultyStore cannot disturb the parts of a multipart upload
    leader.store.faults["put", key] = away(errors.TransientError)
    leader.store.faults["put", key].first = True  # type: ignore[attr-defined]
    miner.write_upload(Close(0, 0), b"of 180 steps")
    miner.send(Close(0, 0))
    [close] = miner.pass_time(PERIOD + 1)
    assert close == leader.close
    miner.upload(leader.close)
    wait_for(lambda: len(miner.facts) == 2, "the end of both")
    ended = {fact.close.serial: fact.cause for fact in miner.facts if isinstance(fact, UploadEnded)}
    overtaken = "the upload for a close comes first, and holds the same training"
    assert ended == {0: overtaken, leader.close.serial: ""}
    assert leader.store.get(key, limit=size) == b"of 120 steps".ljust(size)


def test_a_members_own_score_is_logged_when_a_manifest_brings_one(
    leader: Leader, miner: Miner, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    leader.take_outer_step(scores={UID: 0.25, UID + 1: 0.75})
    miner.pass_time(100)
    assert f"The score of uid {UID} after outer step 1 is 0.2500" in caplog.text
    miner.rounds.applied(1)
    leader.take_outer_step(scores={UID + 1: 1.0})
    miner.pass_time(100)
    assert caplog.text.count("The score of") == 1


@pytest.mark.parametrize("known", [True, False])
def test_two_valid_manifests_of_one_step_stop_everything_and_both_are_shown(
    leader: Leader, miner: Miner, tmp_path: Path, caplog: pytest.LogCaptureFixture, known: bool
) -> None:
    """The master's key has signed a second history, and the state continues from it."""
    leader.take_outer_step()
    miner.pass_time(60)
    miner.rounds.applied(1)
    ours = leader.chain.pop()
    leader.publish_manifest(serial=99)
    if not known:  # the state names only the next outer step, which follows it
        leader.publish_manifest()
    leader.move_close()
    posted = miner.pass_time(2 * PERIOD)
    [forked] = [fact for fact in posted if isinstance(fact, NetworkDiffers)]
    assert not [fact for fact in posted if isinstance(fact, (Close, Update))]
    lines = [line for line in warnings(caplog) if line == forked.cause]
    assert len(lines) == 1
    folder = tmp_path / "rounds" / "chain"
    both = {(folder / name).read_bytes() for name in ("1.json", "1.other.json")}
    assert len(both) == 2 and ours.to_bytes(leader.master.sign)[:60] in {b[:60] for b in both}
    # A written upload is not sent, and an event says so to the loop, which waits for its end.
    miner.send(Close(1, 3, 0.0, 60.0))
    miner.turn()
    assert miner.take_facts() == [UploadEnded(Close(1, 3), forked.cause)]
    # This holds after a restart too, until the founder recovers the network.
    again = Miner(leader.store, tmp_path / "rounds", leader.time)
    posted = again.pass_time(2 * PERIOD)
    assert [type(fact) for fact in posted] == [NetworkDiffers]


# --- time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("off", [-300.0, 300.0])
def test_closes_go_by_the_stores_clock(
    leader: Leader, tmp_path: Path, caplog: pytest.LogCaptureFixture, off: float
) -> None:
    leader.time.off = off
    caplog.set_level(logging.INFO)
    miner = Miner(leader.store, tmp_path / "rounds", leader.time)
    assert miner.pass_time(PERIOD - 1) == [] and miner.head == 0
    assert miner.pass_time(1.5) == [leader.close]
    [line] = warnings(caplog)
    assert re.search(r"clock is (299|300)\.5 s", line)
    assert ("ahead of" if off > 0 else "behind") in line
    assert miner.rounds.clock_offset == pytest.approx(off, abs=1)
    leader.time.off = 1.0
    miner.pass_time(60)
    assert len(warnings(caplog)) == 1 and "right again" in caplog.text


def test_the_store_is_asked_at_a_bounded_rate(
    store: FaultyStore, leader: Leader, miner: Miner, time: Time
) -> None:
    before = store.asked.total()
    for _ in range(20):  # however often something wakes the thread
        miner.rounds.applied(0)
        miner.turn()
    assert store.asked.total() == before
    miner.pass_time(PERIOD - 1)
    assert store.asked.total() - before <= PERIOD / 30 + 1
    # It asks every 5 s while it waits for the update, and every 30 s if that takes long.
    before = store.asked.total()
    miner.pass_time(GRACE + 600)
    assert store.asked.total() - before <= (GRACE + 600) / 5 + 3
    before = store.asked.total()
    miner.pass_time(3600)
    assert store.asked.total() - before <= 3600 / 30 + 1


def test_a_finished_network_says_so_once_and_asks_for_no_upload(
    leader: Leader, miner: Miner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leader.serial += 1
    leader.put_state(finished="12 outer steps")
    finished = StopRequested("the network is finished: 12 outer steps", ExitStatus.FINISHED)
    assert miner.pass_time(5 * PERIOD) == [finished]
    assert warnings(caplog) == []
    # A member that starts later gets the same event.
    late = Miner(leader.store, tmp_path / "late", miner.time)
    assert late.pass_time(60) == [finished]
