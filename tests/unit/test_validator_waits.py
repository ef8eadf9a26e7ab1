"""Test that every wait of the validator for members, stores and texts ends."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed_training.protocol import keys
from distributed_training.protocol.pages import JUDGED_PAGES, block_at, place_of
from distributed_training.protocol.scoring import ScoreBoard
from distributed_training.scoring.evaluator import DataUnavailable, ShortText
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.errors import (
    AccessDeniedError,
    NoRoomError,
    StoreError,
    TransientError,
)
from distributed_training.validator import closes
from distributed_training.validator.errands import Errands
from distributed_training.validator.judging import UploadJudge
from tests.tools.store_world import PERIOD, StoreWorld
from tests.tools.validator_world import one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(120)

UIDS = (3, 5, 17)
_PATIENCE = 3.0  # seconds that fetching an upload may take; on a busy machine it takes a second
_hung = threading.Event()


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """End the hanging calls of a test together with the test."""
    _hung.clear()
    yield
    _hung.set()


def _fail(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


#: By name: what happens whenever a range of an upload is read.
FAULTS: dict[str, Callable[[], Any]] = {
    "refused": _fail(AccessDeniedError("the store answered 403 AccessDenied")),
    "archived": _fail(StoreError("the store answered 403 InvalidObjectState")),
    "5xx": _fail(TransientError("the store answered 503 SlowDown")),
    "reset": _fail(TransientError("no answer (ConnectionResetError)")),
    "hangs": lambda: _hung.wait(60),
    "disk": _fail(OSError(errno.EIO, "Input/output error")),
    "full": _fail(NoRoomError("no room to download it")),
    "library": _fail(KeyError("Body")),
}


def _uploaded(folder: Path, **how: Any) -> StoreWorld:
    world = StoreWorld(folder, uids=UIDS, **how)
    world.validator._patience, world.validator._look = _PATIENCE, closes.LOOK
    world.send()
    return world


def _spoil(world: StoreWorld, uids: tuple[int, ...], fault: Callable[[], Any]) -> None:
    bad = {world.miners[uid].key for uid in uids}

    def before(operation: str, key: str) -> None:
        if operation == "get_range" and key in bad:
            fault()

    for bucket in (world.bucket, *world.own.values()):
        bucket._before = before


@pytest.mark.parametrize(
    ("fault", "silent", "own"),
    [(fault, 1, False) for fault in FAULTS]
    + [(fault, n, False) for fault in ("refused", "hangs") for n in (2, 3)]
    + [("hangs", 1, True), ("refused", 2, True)],
)
def test_uploads_that_do_not_come_cost_only_their_members(
    tmp_path: Path, fault: str, silent: int, own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world = _uploaded(tmp_path, own=own)
    away, rest = UIDS[:silent], UIDS[silent:]
    _spoil(world, away, FAULTS[fault])
    began = time.monotonic()
    world.tick(2)
    assert world.state.outer_step == 0, "the grace is not over"
    assert set(world.validator._close.accepted) == set(rest)  # type: ignore[union-attr]
    world.end(2)
    if not rest:  # then the round waits half a period longer before the close moves
        assert world.state.serial == 1
        world.clock.ahead += PERIOD / 2
        world.tick(2)
        assert (world.state.outer_step, world.state.serial) == (0, 2), "the close moves"
    else:
        assert world.fates(1) == dict.fromkeys(rest, "merged") | dict.fromkeys(away, "not-judged")
        refused = world.manifest(1).refused
        assert all(one.reason.startswith("since ") and not one.digest for one in refused)
    assert time.monotonic() - began < 60
    said = [r.getMessage() for r in caplog.records if "could not be judged at" in r.getMessage()]
    assert len(said) == silent, "one line for each, and none for each try"
    assert all(f"uid {uid} " in " ".join(said) for uid in away)
    _hung.set()
    _spoil(world, (), FAULTS[fault])
    assert set(world.round().scores) == set(UIDS)
    assert set(world.fates(world.state.outer_step).values()) == {"merged"}


def test_uploads_of_a_store_that_lists_nothing_are_asked_for_one_by_one(tmp_path: Path) -> None:
    world = _uploaded(tmp_path)

    def before(operation: str, key: str) -> None:
        if operation == "list":
            raise StoreError("the store answered 403 AccessDenied")

    world.bucket._before = before
    world.tick()
    assert world.state.outer_step == 0
    world.end(2)
    assert set(world.fates(1).values()) == {"merged"}


def test_a_disk_with_room_for_two_uploads_takes_the_most_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = _uploaded(tmp_path)
    for uid, score in zip(UIDS, (0.2, 0.1, 0.3), strict=True):
        world.validator.standings.entries[uid].published = score
    real, others = BucketReader.download, threading.Barrier(2)

    def download(self: BucketReader, key: str, path: Path, **how: Any) -> Any:
        if key == world.miners[5].key:
            path.with_name(f".{path.name}.part").write_bytes(b"a part of it")
            raise NoRoomError(f"no room to download {key}")
        others.wait(20)  # both are fetched at the same time
        return real(self, key, path, **how)

    monkeypatch.setattr(BucketReader, "download", download)
    world.tick()
    close = world.validator._close
    assert close is not None and close.cramped, "one after the other from now on"
    later = world.clock() + PERIOD
    assert world.validator._most_trusted(close, later, UIDS) == [17, 3, 5]
    assert not [*(tmp_path / "validator" / "uploads").rglob(".*")], "its part takes no room"
    world.end()
    assert world.fates(1) == {17: "merged", 3: "merged", 5: "not-judged"}


def test_a_refused_upload_makes_room(tmp_path: Path) -> None:
    world = _uploaded(tmp_path)
    world.miners[17].upload(b"damaged")
    world.tick()
    folder = tmp_path / "validator" / "uploads"
    assert [path.name for path in folder.rglob("17.*")] == []


# --- text ---


@pytest.mark.parametrize("short", ["one of two", "all", "random", "random of all"])
def test_a_block_without_enough_text_is_left_out(tmp_path: Path, short: str) -> None:
    world = _uploaded(tmp_path)
    pages, random_text = world.pages, list[int]()
    if short == "one of two":
        world.miners[17].pages = (0, 2 * JUDGED_PAGES - 1)
    world.miners[17].upload()

    def some(uid: int, block: int) -> torch.Tensor:
        if place_of(block)[0] > 10_000 and not random_text:
            random_text.append(block)
        bad = {
            "one of two": uid == 17 and block == block_at(0, 0),
            "all": uid == 17 and place_of(block)[0] < 10_000,
            "random": uid == 17 and block in random_text,
            "random of all": block in random_text,
        }[short]
        if bad:
            raise ShortText(f"pages of uid {uid}, {place_of(block)} hold less than two sequences")
        return pages(uid, block)

    world.pages = some
    world.validator._draw = lambda _: type("Drawn", (), {"randrange": lambda *_: 20_000})()  # type: ignore[assignment]
    world.tick()
    assert world.state.outer_step == 1, "nobody is waited for"
    assert world.fates(1) == dict.fromkeys(UIDS, "merged")
    (event,) = (e for e in world.events.of("upload_scored") if e["uid"] == 17)
    assert ("assigned_page" in event) == (short != "all")
    assert event["random_page"] == JUDGED_PAGES * ("random" in short)
    if short == "all":  # then nothing was measured on assigned text
        assert world.validator.standings.board.assigned_score(17) == 0.0


def test_text_that_is_away_is_asked_for_less_and_less(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = _uploaded(tmp_path)
    pages, tries = world.pages, list[float]()

    def some(uid: int, block: int) -> torch.Tensor:
        if uid == 17:
            tries.append(world.clock())
            raise DataUnavailable("the source does not answer")
        return pages(uid, block)

    world.pages = some
    for _ in range(30):
        world.tick()
        world.clock.ahead += 2
    assert 3 <= len(tries) < 10
    assert caplog.text.count("could not be judged at") == 1
    world.end()
    assert world.fates(1) == {3: "merged", 5: "merged", 17: "not-judged"}
    board = world.validator.standings.board
    assert board.rating(17) == ScoreBoard([17]).rating(17) != board.rating(3)


# --- time ---


def test_judging_ends_half_a_period_after_the_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = _uploaded(tmp_path)
    for uid, score in zip(UIDS, (0.2, 0.1, 0.3), strict=True):
        world.validator.standings.entries[uid].published = score
    real = UploadJudge.judge
    monkeypatch.setattr(closes, "_TURN", 0.0)

    def slow(*args: Any, **how: Any) -> Any:
        world.clock.ahead += 0.45 * PERIOD
        return real(*args, **how)

    monkeypatch.setattr(UploadJudge, "judge", slow)
    world.until_late()
    states = []
    for _ in range(4):
        if world.state.outer_step:
            break
        world.tick()
        states.append(world.state)
        assert world.state.expires > world.clock() + PERIOD, "members never read that nobody leads"
    assert len({state.written_at for state in states}) > 1
    assert world.fates(1) == {17: "merged", 3: "merged", 5: "not-judged"}
    assert "Half a period was not enough" in caplog.text
    (refused,) = world.manifest(1).refused
    assert "half a period" in refused.reason and not refused.digest


def test_errands_of_the_silent_delay_no_other() -> None:
    asked, stop = Errands(), threading.Event()

    def task(uid: int) -> int:
        if uid < 40:
            _hung.wait(30)
        return uid

    began, found = time.monotonic(), dict[int, Any]()
    while 40 not in found and time.monotonic() < began + 20:
        found |= asked.run(task, range(41), within=0.1, patience=0.2, stop=stop)
        assert asked.unheard == (40 not in found)
    assert found == {40: 40}
    assert time.monotonic() - began < 10
    assert asked.silent(0.2) == {*range(40)}
    _hung.set()
    until = time.monotonic() + 10
    while len(found) < 41 and time.monotonic() < until:
        found |= asked.run(task, [], within=0.1, patience=60, stop=stop)
    assert found == {uid: uid for uid in range(41)}


def test_a_fetch_of_an_earlier_close_does_not_write_into_the_next(tmp_path: Path) -> None:
    world = _uploaded(tmp_path)
    _spoil(world, (5,), FAULTS["hangs"])
    world.end(2)
    assert world.fates(1)[5] == "not-judged"
    _spoil(world, (), FAULTS["hangs"])
    world.send()
    world.until_late()
    _hung.set()  # now the fetch for the first close ends
    world.tick(2)
    assert set(world.fates(2).values()) == {"merged"}
    assert keys.merged_key(2, 5) in world.bucket.objects
