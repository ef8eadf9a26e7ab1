"""Check that while a clock is wrong, no call counts twice and no hotkey is locked out."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_training.chain.auth import BTAUTH_MAX_AGE, Claim, RefusedRequest, check_fresh
from distributed_training.chain.base import ChainError
from distributed_training.config import ConfigError
from distributed_training.protocol.metadata import LONGEST
from distributed_training.registry import store
from distributed_training.registry.store import CLOCK_SKEW, Charter, Registry, Replayed
from tests.tools.chain_memory import MemoryLedger
from tests.tools.chain_world import MINER, PEER, STRANGER, VALIDATOR

pytestmark = pytest.mark.timeout(120)
NS = 10**9
START = 1_790_000_000.0
DAY = 86400.0
WINDOW = BTAUTH_MAX_AGE + CLOCK_SKEW


class World:
    """A registry and its callers, each with its own clock.

    ``offsets``: seconds by which each clock is wrong, by hotkey or by the name ``registry``.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = START
        self.offsets = {"registry": 0.0, PEER.ss58: 0.0, MINER.ss58: 0.0}
        clock = SimpleNamespace(
            time=lambda: self.read("registry"),
            time_ns=lambda: round(self.read("registry") * NS),
            monotonic=lambda: self.now,
            strftime=time.strftime,
            gmtime=time.gmtime,
        )
        monkeypatch.setattr(store, "time", clock)
        self.folder = folder
        self.charter = Charter("x", VALIDATOR.ss58, most_uids=8, admission="open")
        self.accepted: list[tuple[str, int]] = []
        self.open()

    def read(self, who: str) -> float:
        return self.now + self.offsets[who]

    def open(self) -> None:
        self.registry = Registry.at(self.folder, self.charter)
        self.registry._db.execute("PRAGMA synchronous = OFF")  # no test cuts the power here

    def kill(self) -> None:
        """End the registry as SIGKILL does, so that nothing more is written."""
        self.registry._db.close()
        self.registry._lock_file.close()

    def call(self, hotkey: str, nonce: int) -> None:
        """Make a write as the service does. Raises Refused, Replayed."""
        claim = Claim(hotkey, "", nonce)
        check_fresh(claim, round(self.read("registry") * NS), skew=CLOCK_SKEW)
        self.registry.write(hotkey, nonce, lambda: self.registry.join(hotkey))
        self.accepted.append((hotkey, nonce))

    def sign(self, hotkey: str) -> None:
        self.call(hotkey, round(self.read(hotkey) * NS))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


JUMPS = [-400 * DAY, -DAY, -3600.0, -30.0, -5.0, 0.0, 3.0, 5.0, 30.0, 3600.0, DAY, 400 * DAY]
WHO = st.sampled_from([PEER.ss58, MINER.ss58])
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.sampled_from([0.5, 3.0, 9.0, 15.0, 3600.0, DAY])),
        st.tuples(st.just("all clocks"), st.sampled_from(JUMPS)),
        st.tuples(st.just("registry"), st.sampled_from(JUMPS)),
        st.tuples(WHO, st.sampled_from(JUMPS)),
        st.tuples(st.just("call"), WHO),
        st.tuples(st.just("replay"), st.integers(0, 50)),
        st.tuples(st.just("restart"), st.booleans()),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(EVENTS)
def test_no_call_counts_twice_and_nobody_is_locked_out_by_any_clock(
    events: list[tuple[str, object]],
) -> None:
    # Use memory, since a busy disk would take a minute for all syncs.
    with pytest.MonkeyPatch.context() as monkeypatch, TemporaryDirectory(dir="/dev/shm") as folder:
        world = World(Path(folder), monkeypatch)
        for kind, value in events:
            _play(world, kind, value)
        # All clocks are right now, so everybody can write as soon as old calls have expired. A
        # call from the future that becomes due just then delays its hotkey a moment longer.
        world.offsets = dict.fromkeys(world.offsets, 0.0)
        world.now += WINDOW + 0.5
        for hotkey in (PEER.ss58, MINER.ss58):
            try:
                world.sign(hotkey)
            except Replayed:
                world.now += CLOCK_SKEW
                world.sign(hotkey)
        _replay_all(world)
        world.kill()


def _play(world: World, kind: str, value: object) -> None:
    world.now += 0.01
    if kind == "pass":
        world.now += value
    elif kind == "all clocks":
        world.offsets = dict.fromkeys(world.offsets, value)
    elif kind in world.offsets:
        world.offsets[kind] = value
    elif kind == "call":
        with suppress(RefusedRequest, Replayed):
            world.sign(value)
    elif kind == "replay":
        _replay_all(world)
    else:
        world.registry.close() if value else world.kill()
        world.open()


def _replay_all(world: World) -> None:
    """Repeat each call, now and at the time of the registry's clock at which the call was fresh."""
    before = world.offsets["registry"]
    for hotkey, nonce in list(world.accepted):
        for offset in (before, nonce / NS - world.now):
            world.offsets["registry"] = offset
            with pytest.raises((RefusedRequest, Replayed)):
                world.call(hotkey, nonce)
    world.offsets["registry"] = before


def test_memory_for_a_hotkey_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_MOST_NONCES", 10)
    for _ in range(25):
        world.sign(PEER.ss58)
        world.now += 1
    (count,) = world.registry._one("SELECT count(*) FROM used")
    assert count == 10
    _replay_all(world)


def test_a_bounded_number_of_past_members_is_remembered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_MOST_GONE", 1)
    world.offsets[STRANGER.ss58] = 0.0
    for hotkey in (PEER.ss58, MINER.ss58, STRANGER.ss58):
        world.sign(hotkey)
        with world.registry.change():
            world.registry._remove(world.registry.uid_of(hotkey))
        world.now += 1
    # Hotkeys that come and go do not make a table grow, however long the process runs.
    left = world.registry._db.execute("SELECT hotkey FROM nonces ORDER BY nonce").fetchall()
    assert left == [(MINER.ss58,), (STRANGER.ss58,)]


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_the_answer_names_the_clock_and_by_how_much(world: World, ahead: float) -> None:
    world.offsets[PEER.ss58] = ahead
    with pytest.raises(RefusedRequest) as refused:
        world.sign(PEER.ss58)
    message = refused.value.fields["message"]
    side = "after" if ahead > 0 else "before"
    assert f"3600 s {side} this registry's time" in message and "timedatectl" in message
    # The same if the hotkey's own clock was set back within the window.
    world.offsets[PEER.ss58] = 3.0
    world.sign(PEER.ss58)
    world.offsets[PEER.ss58] = 0.0
    with pytest.raises(Replayed, match=r"3\.0 s later.*timedatectl"):
        world.sign(PEER.ss58)


EARLIER_TABLES = """
ALTER TABLE members RENAME TO kept;
CREATE TABLE neurons (
    uid INTEGER PRIMARY KEY, hotkey TEXT NOT NULL UNIQUE, ip TEXT NOT NULL, port INTEGER,
    stake REAL NOT NULL, permit INTEGER NOT NULL, incentive REAL NOT NULL DEFAULT 0,
    last_update INTEGER NOT NULL, since_block INTEGER NOT NULL, since REAL NOT NULL,
    commitment TEXT, earned REAL NOT NULL DEFAULT 0, counted REAL
);
CREATE TABLE weights (
    voter INTEGER, uid INTEGER, weight REAL NOT NULL, PRIMARY KEY (voter, uid)
) WITHOUT ROWID;
INSERT INTO neurons SELECT uid, hotkey, ip, port, 1.0, 0, 0.5, 9, 9, since, commitment, 0, 0
    FROM kept;
DROP TABLE kept;
PRAGMA user_version = 3;
"""


def test_a_file_of_the_edition_before_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    for hotkey in (PEER.ss58, MINER.ss58):
        world.sign(hotkey)
    world.registry.commit(PEER.ss58, "text")
    before = world.registry.view
    world.registry.close()
    with closing(sqlite3.connect(tmp_path / store.FILE)) as db:
        db.executescript(EARLIER_TABLES)
    store.backup(tmp_path / store.FILE, tmp_path / "old.db")
    world.open()
    assert world.registry.view.members == before.members
    # The previous edition can read the copy.
    with closing(sqlite3.connect(tmp_path / "schema-3.db")) as kept:
        assert kept.execute("PRAGMA user_version").fetchone() == (3,)
    _replay_all(world)
    world.now += WINDOW
    world.sign(PEER.ss58)
    world.registry.close()
    store.restore(tmp_path / "old.db", tmp_path)
    world.open()
    assert world.registry.uid_of(PEER.ss58) == 1


def test_a_file_of_0_2_0_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    world.registry.close()
    with closing(sqlite3.connect(tmp_path / store.FILE)) as db:
        db.execute("PRAGMA user_version = 1")
    content = (tmp_path / store.FILE).read_bytes()
    with pytest.raises(ConfigError, match=r"schema 1, not 5.* commit 10170bb9"):
        world.open()
    assert (tmp_path / store.FILE).read_bytes() == content


def test_the_list_of_members_stays_readable_with_all_commitments() -> None:
    """Each client reads at most 16 MiB, so a longer list would be refused by all members."""
    members = MemoryLedger()
    members.register("5" * 48)
    for text in ("\0" * LONGEST, "é" * 200, "k" * (LONGEST + 1), "a\nb"):
        with pytest.raises(ChainError, match="at most 1025 ASCII characters"):
            members.commit("5" * 48, text)
    members.commit("5" * 48, "\\" * LONGEST)
    assert 4096 * len(members.view.content) < 12 * 2**20
