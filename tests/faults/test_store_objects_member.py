"""Test a member against each fault of each object of the store, while it runs, starts and joins.

The member neither ends nor freezes, accuses nobody, and uses the next valid object. Once the owner
of an object has written it again, or the founder has recovered the network, the member reaches the
network's head and sends its uploads.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bittensor.sp_core import Keypair
from bittensor_core import verify

from distributed_training.exchange.base import Close, NetworkDiffers, StopRequested
from distributed_training.miner.network_watch import NetworkWatch
from distributed_training.network import Shown
from distributed_training.node.start import WrongPlace
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Master
from distributed_training.protocol.types import Update
from distributed_training.registry import access
from distributed_training.store import errors
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.validator.global_state import claim_global_bucket
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.outer_steps import RUN_ID
from tests.tools.store_network import MASTER, PERIOD, UID, FaultyStore, Leader, Miner, Time

pytestmark = pytest.mark.timeout(120)

HELD = 3  # the member's outer step when the fault occurs
MOST_LINES = 8  # warnings in all the simulated hours of a case
Objects = dict[str, tuple[bytes, str, float]]


class World:
    """A network at outer step 3, with whole weights of 0, and a member that follows it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.time = Time()
        self.memory = MemoryObjectStore(clock=self.time.store)
        self.store = FaultyStore(self.memory, self.time)
        self.leader = Leader(self.store, self.time)
        self.miner = Miner(self.store, folder / "member", self.time)
        self.applied: list[Update] = []
        self.sent: list[tuple[int, int]] = []
        self.held = 0
        for _ in range(HELD):
            self.leader.take_outer_step()
            self.follow(60)
        assert self.held == HELD
        self.early = self.copy()  # the content of a backup
        self.chain, self.serial = list(self.leader.chain), self.leader.serial

    def copy(self) -> Objects:
        return dict(self.memory._objects)

    def put_back(self, objects: Objects) -> None:
        self.memory._objects.clear()
        self.memory._objects.update(objects)

    def data(self, key: str) -> bytes:
        return self.memory._objects[key][0]

    def begin(self, moment: str) -> None:
        """Let the member continue, or replace it by a new process or by a newcomer."""
        if moment == "starting":
            self.miner = Miner(self.store, self.folder / "member", self.time, held=self.held)
        elif moment == "joining":
            self.miner = Miner(self.store, self.folder / "newcomer", self.time, held=-1)
            self.held, self.sent = -1, []

    def follow(self, seconds: float) -> None:
        """Do what the loop of a miner does for ``seconds``."""
        until = self.time.passed + seconds
        while self.time.passed < until:
            if self.held < 0:
                try:
                    found = self.miner.rounds.fetch_newest()
                except errors.StoreError:
                    self.time.passed += 30.0
                    continue
                self.held = self.miner.rounds._held = found.outer_step
            for fact in self.miner.pass_time(min(15.0, until - self.time.passed)):
                assert not isinstance(fact, (NetworkDiffers, StopRequested)), fact
                if isinstance(fact, Update):
                    assert fact.path.exists() and fact.outer_step > self.held
                    self.applied.append(fact)
                    self.held = fact.outer_step
                    self.miner.rounds.applied(fact.outer_step)
                elif isinstance(fact, Close):
                    last = self.sent[-1] if self.sent else (-1, -1)
                    assert fact.serial > last[1], "no serial goes back, nor an outer step"
                    assert fact.outer_step >= last[0] and fact.outer_step == self.held
                    self.miner.write_upload(fact)
                    self.miner.send(fact)
                    self.sent.append((fact.outer_step, fact.serial))


def damage(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


def unsigned(data: bytes) -> bytes:
    """Return the data with a signature that is not valid."""
    return data[:-20] + bytes(b ^ 1 if b != ord('"') else b for b in data[-20:-2]) + data[-2:]


#: Fault -> a function of the world and the key that returns what replaces the object.
FAULTS: dict[str, Callable[[World, str], bytes | None]] = {
    "absent": lambda world, key: None,
    "older": lambda world, key: world.early.get(key, world.early[keys.STATE])[0],
    "damaged": lambda world, key: damage(world.data(key)),
    "unsigned": lambda world, key: unsigned(world.data(key)),
    "too large": lambda world, key: world.data(key) + bytes(5 * 2**20),
    "another's": lambda world, key: world.data(
        keys.outer_key(2, keys.UPDATE if key.endswith(keys.UPDATE) else keys.MANIFEST)
    ),
}
OBJECTS = {
    "state": keys.STATE,
    "head manifest": keys.outer_key(7, keys.MANIFEST),
    "manifest": keys.outer_key(4, keys.MANIFEST),
    "update": keys.outer_key(4, keys.UPDATE),
    "weights": keys.outer_key(5, keys.MODEL),
    "config": keys.outer_key(5, keys.CONFIG),
}
MOMENTS = ("running", "starting", "joining")
CASES = list(itertools.product(OBJECTS, FAULTS, MOMENTS))


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Collect the warnings, and assert that they are few and that none accuses anybody."""
    found: list[str] = []
    yield found
    found += [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(found) <= MOST_LINES, found
    for line in found:
        assert "\n" not in line and "two manifests" not in line and "please report" not in line


def move_on(world: World, steps: int = 4, **changes: Any) -> None:
    """Take outer steps that the member does not follow, the second one with whole weights."""
    for number in range(steps):
        world.leader.take_outer_step(whole=number == 1, **changes)


@pytest.mark.parametrize("what, fault, moment", CASES)
def test_a_bad_object_costs_nothing_but_itself(
    what: str, fault: str, moment: str, tmp_path: Path, lines: list[str]
) -> None:
    world, key = World(tmp_path), OBJECTS[what]
    move_on(world)
    good, bad = world.data(key), FAULTS[fault](world, key)
    assert bad != good, "else the case would say nothing"
    if bad is None:
        world.memory.delete(key)
    else:
        world.memory.put(key, bad)
    world.begin(moment)
    world.follow(PERIOD)
    if what not in ("state", "head manifest"):
        assert world.held == 7, "whole weights, or the updates, lead around it"
    # Nobody repairs past objects, but the owner of the state and the head writes them again.
    elif moment != "joining":
        assert world.held == HELD
    world.memory.put(key, good)
    world.leader.move_close()
    world.follow(2 * PERIOD)
    assert world.held == 7
    assert world.sent[-1:] == [(7, world.leader.serial)]


def stale(world: World, key: str, until: float) -> None:
    """Let reads of a key return its earlier content up to ``until``."""
    before = world.early.get(key)

    def get(found: Any) -> Any:
        late = world.time.passed < until
        return (None if before is None else before[0]) if late else found

    def head(found: Any) -> Any:
        if world.time.passed >= until or found is None:
            return found
        return None if before is None else type(found)(**{**vars(found), "etag": before[1]})

    world.store.faults["get", key] = get
    world.store.faults["head", key] = head


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("what", OBJECTS)
def test_a_store_that_answers_late_is_waited_for_without_a_warning_of_the_state(
    what: str, moment: str, tmp_path: Path, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    move_on(world)
    stale(world, OBJECTS[what], world.time.passed + 60)
    world.begin(moment)
    world.follow(2 * PERIOD)
    assert world.held == 7 and world.sent
    assert "older than one seen" not in caplog.text


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("answers", ["head old, get new", "head new, get old", "head none"])
def test_head_and_get_may_come_from_two_replicas(
    answers: str, moment: str, tmp_path: Path, lines: list[str]
) -> None:
    world = World(tmp_path)
    if answers == "head none":
        world.store.faults["head", keys.STATE] = lambda found: None
    else:
        stale(world, keys.STATE, world.time.passed + 600)
        del world.store.faults["get" if answers == "head old, get new" else "head", keys.STATE]
    move_on(world)
    world.begin(moment)
    world.follow(2 * PERIOD)
    if answers == "head new, get old":
        world.leader.move_close()
        world.follow(2 * PERIOD)
    assert world.held == 7 and world.sent


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("others", ["nobody", "the validator", "validator and members"])
@pytest.mark.parametrize("left", ["a backup", "nothing"])
def test_members_continue_after_a_recovery(
    left: str, others: str, moment: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The bucket is restored to outer step 3, or emptied, while members are at outer step 7.

    Before the founder notices, nobody writes to it, or only the validator, or the validator with
    new members, so that there are two histories.
    """
    world = World(tmp_path)
    move_on(world)
    world.follow(2 * PERIOD)
    assert world.held == 7
    old_root = world.copy()
    world.put_back(world.early if left == "a backup" else {})
    if left == "a backup":
        world.leader.chain, world.leader.serial = list(world.chain), world.serial
        world.leader.weights_at = (0,)
    else:
        world.leader.chain, world.leader.serial = [], 1
        world.leader.publish_manifest(total_tokens=3)
    if others != "nobody":
        world.leader.move_close()
    world.begin(moment if left == "a backup" or others != "nobody" else "running")
    forked = others == "validator and members"
    if forked:
        for _ in range(2):
            world.leader.take_outer_step(total_tokens=5)
    facts: list[Any] = []
    if moment == "joining":
        world.follow(PERIOD)
    else:
        facts = world.miner.pass_time(PERIOD)
        assert not [fact for fact in facts if isinstance(fact, (Update, StopRequested))]
    # Two manifests of one outer step exist only if outer steps were taken again.
    accused = [fact for fact in facts if isinstance(fact, NetworkDiffers)]
    assert not accused or forked or (left == "nothing" and others != "nobody")
    world.leader.recover(above=20, to=0)
    rounds = world.miner.rounds
    if accused:
        posted = world.miner.pass_time(60)
        assert NetworkDiffers("", forked=True) in posted
        [update] = [fact for fact in posted if isinstance(fact, Update)]
        world.held = update.outer_step
        rounds.applied(world.held)
    world.follow(2 * PERIOD)
    assert world.held == 21 and world.sent[-1] == (21, world.leader.serial)
    if moment != "joining":
        hints = [r.getMessage() for r in caplog.records if "dt-network recover" in r.getMessage()]
        assert hints or (others == "nobody" and left == "nothing")
    # States signed before the recovery are refused, even if somebody with the store's key replays
    # them.
    world.leader.take_outer_step()
    world.follow(PERIOD)
    now = world.copy()
    for replayed in (world.early, old_root):
        world.put_back({**now, keys.STATE: replayed[keys.STATE]})
        world.follow(PERIOD)
        assert world.held == 22
    world.put_back(now)
    world.leader.recover(above=30, to=22)
    world.follow(60)
    # The state of an earlier recovery.
    world.put_back({**world.copy(), keys.STATE: now[keys.STATE]})
    world.follow(PERIOD)
    assert world.held == 31 and not rounds._chain.forked


@pytest.mark.parametrize("lasts, puts", [(math.inf, 2), (60.0, 1)])
def test_an_upload_that_the_store_confirmed_and_lost_is_sent_again(
    lasts: float, puts: int, tmp_path: Path
) -> None:
    """It is not sent again if the store only lags behind."""
    world = World(tmp_path)
    world.leader.serial += 1
    world.leader.put_state(grace=600.0)
    key = keys.upload_key(UID, HELD, world.leader.serial)
    world.follow(world.leader.closes_at - world.time.store() + 1)
    assert world.sent[-1] == (HELD, world.leader.serial)
    data = world.data(key)
    if math.isinf(lasts):
        world.memory.delete(key)
    else:
        until = world.time.passed + lasts
        world.store.faults["head", key] = lambda i: i if world.time.passed >= until else None
    world.follow(300)
    assert world.data(key) == data and world.store.asked["put", key] == puts
    world.follow(200)
    assert world.store.asked["put", key] == puts


# --- network.json ---------------------------------------------------------------------------------

THIEF = Keypair.create_from_uri("//Charlie")


def network(version: int = 1, master: str = MASTER.ss58_address) -> Any:
    return SimpleNamespace(
        place="lab/network.toml",
        head=SimpleNamespace(name="lab", version=version, format=2),
        values={"chain.master_hotkey": master, "run_id": RUN_ID},
        rules_id=f"rules{version}",
    )


def statement(signer: Keypair | None, **changes: Any) -> bytes:
    shown = dataclasses.replace(Shown.of(network()), network=RUN_ID if signer else None)
    sign = None if signer is None else signer.sign
    return dataclasses.replace(shown, **changes).to_bytes(sign)


class NetworkWorld:
    """Hold a bucket with the validator's statement of version 2, and a member of ``version``."""

    def __init__(self, version: int = 2) -> None:
        self.memory = MemoryObjectStore()
        self.member: Any = SimpleNamespace(
            hotkey=MASTER.ss58_address, wallet=SimpleNamespace(hotkey=MASTER)
        )
        self.claim()
        self.good = self.memory.get(keys.NETWORK, limit=9999)
        self.posted: list[Any] = []
        self.start(version)

    def claim(self, version: int = 2) -> None:
        claim_global_bucket(self.memory, network(version), member=self.member)

    def start(self, version: int) -> None:
        reader = BucketReader(self.memory)
        self.watch = NetworkWatch(reader, network(version), None, self.posted.append)

    def look(self) -> list[str]:
        """Compare once, and return the problems that are posted."""
        self.posted.clear()
        self.watch.compare()
        return [event.cause for event in self.posted]


MEANINGLESS = {
    "absent": None,
    "damaged": lambda good: damage(good),
    "half": lambda good: good[:50],
    "too large": lambda good: good + b" " * 5000,
    "another's": lambda good: b'{"run_id": "aa"}',
    "unsigned": lambda good: statement(None),
    "another signature": lambda good: unsigned(good),
    "unsigned version": lambda good: statement(None, version=999_999),
    "unsigned master": lambda good: statement(None, master=THIEF.ss58_address),
    "a thief's": lambda good: statement(THIEF, version=2, run_id="rules2"),
    "a thief's version": lambda good: statement(THIEF, version=9, master=THIEF.ss58_address),
    "another network's": lambda good: statement(MASTER, version=9, network="other"),
}


@pytest.mark.parametrize("moment", ["running", "starting"])
@pytest.mark.parametrize("fault", [*MEANINGLESS, "older"])
def test_a_statement_that_the_master_did_not_sign_means_nothing(fault: str, moment: str) -> None:
    """No bad verdict follows, and the validator writes the statement again."""
    world = NetworkWorld()
    assert world.look() == []
    make = MEANINGLESS.get(fault)
    if fault == "older":
        world.memory.put(keys.NETWORK, statement(MASTER))
    elif make is None:
        world.memory.delete(keys.NETWORK)
    else:
        world.memory.put(keys.NETWORK, make(world.good))
    if moment == "starting" and fault != "older":
        world.start(2)
    assert world.look() == []
    world.memory.put(keys.STATE, signed_state())
    world.claim()
    assert Shown.parse(world.memory.get(keys.NETWORK, limit=9999) or b"").counts_for(network())
    assert world.look() == []
    world.claim(3)
    assert "at version 3" in world.look()[0]
    assert world.look() == [], "once"
    world.memory.put(keys.NETWORK, statement(None, version=2, run_id="rules2"))
    assert world.look() == [], "what is not signed does not take it back either"
    world.memory.put(keys.NETWORK, statement(MASTER))
    assert world.look() == [], "an older word is no correction"


def signed_state() -> bytes:
    return Leader(MemoryObjectStore(), Time()).put_state()


def test_a_bucket_that_another_master_has_claimed_first_is_left(tmp_path: Path) -> None:
    world = NetworkWorld()
    theirs = statement(THIEF, master=THIEF.ss58_address, network="other")
    world.memory.put(keys.NETWORK, theirs)
    with pytest.raises(WrongPlace):
        world.claim()
    assert world.memory.get(keys.NETWORK, limit=9999) == theirs
    # If the state is ours, somebody with the store's key has forged that statement.
    world.memory.put(keys.STATE, signed_state())
    world.claim()
    assert world.look() == []


def test_a_sound_statement_is_not_written_again() -> None:
    world, written = NetworkWorld(), list[str]()
    world.memory._before = lambda operation, key: written.append(operation)
    world.claim()
    assert "put" not in written


# --- the registry ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
def test_the_registry_hands_out_urls_by_the_newest_state_that_it_has_seen(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_STATE_KEPT", 0.0)
    world = World(tmp_path)
    move_on(world)
    store: Any = world.store
    store.presign = lambda operation, key, seconds, **more: f"https://{key}"
    master = Master(RUN_ID, MASTER.ss58_address, verify)
    registry = access.Access(store, master=master, largest_upload=1000, clock=world.time.store)

    def grants(outer_step: int, serial: int) -> bool:
        key = keys.upload_key(4, outer_step, serial)
        return bool(registry.grant(4, "write", key, 1, ("0" * 32,))["urls"])

    good, close = world.data(keys.STATE), world.leader.close
    assert grants(close.outer_step, close.serial)
    bad = FAULTS[fault](world, keys.STATE)
    if bad is None:
        world.memory.delete(keys.STATE)
    else:
        world.memory.put(keys.STATE, bad)
    assert grants(close.outer_step, close.serial)
    world.memory.put(keys.STATE, good)
    world.leader.recover(above=40, to=7)
    assert grants(41, world.leader.serial)
