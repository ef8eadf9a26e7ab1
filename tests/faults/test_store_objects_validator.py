"""Test the real validator with each fault of each object of its own store, at each moment.

What the master has signed stays valid, whatever the store shows. So in each case the validator
writes its copies again, or it exits with one line that names the remedy. No serial goes back.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from bittensor.sp_core import verify

from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Master, State
from distributed_training.validator import outer_steps
from distributed_training.validator.global_state import GlobalStateError
from distributed_training.validator.outer_steps import SERIALS, AnotherLeadsError, renewed
from tests.tools.store_world import PERIOD, StoreWorld, keypair
from tests.tools.validator_world import one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(300)

Stored = tuple[bytes, str, float]
HEAD, SETS = 5, (2, 4)  # after the rounds of the base; each second outer step has whole weights


@dataclass
class Base:
    """A world after some rounds; ``again`` resets bucket, disk and clock to that moment."""

    world: StoreWorld
    folder: Path
    objects: dict[str, Stored] = field(default_factory=dict)
    early: dict[str, Stored] = field(default_factory=dict)  # three outer steps earlier
    other: dict[str, Stored] = field(default_factory=dict)  # of another network
    at: float = 0.0  # that moment, by the store's clock
    count: int = 0

    def again(self) -> StoreWorld:
        world, disk = self.world, self.world.folder / "validator"
        world.closing.close()
        for name in ("head", "get", "put", "put_new"):  # methods that a fault has replaced
            world.bucket.__dict__.pop(name, None)
        world.bucket.objects.clear()
        world.bucket.objects.update(self.objects)
        shutil.rmtree(disk)
        shutil.copytree(self.folder, disk)
        world.clock.ahead = self.at - time.time()
        self.count += 1
        return world

    def empty(self) -> Path:
        return self.world.folder / f"empty-{self.count}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Base]:
    folder = tmp_path_factory.mktemp("world")
    world = StoreWorld(folder, weights_every=2)
    base = Base(world, folder / "kept")
    for step in range(HEAD):
        world.round()
        if step == 1:
            base.early = dict(world.bucket.objects)
    assert (world.state.outer_step, world.state.weights_at) == (HEAD, SETS)
    base.objects, base.at = dict(world.bucket.objects), world.clock()
    shutil.copytree(folder / "validator", base.folder)
    state = replace(world.state, run_id="another", serial=99)
    for key, (data, etag, at) in base.objects.items():
        signed = state.to_bytes(keypair("thief").sign) if key == keys.STATE else data[::-1]
        base.other[key] = signed, etag, at
    yield base
    world.closing.close()


def of(step: int, name: str) -> str:
    return keys.outer_key(step, name)


OBJECTS = {
    "state": keys.STATE,
    "head's manifest": of(HEAD, keys.MANIFEST),
    "manifest": of(HEAD - 1, keys.MANIFEST),
    "first manifest": of(0, keys.MANIFEST),
    "head's update": of(HEAD, keys.UPDATE),
    "update": of(HEAD - 1, keys.UPDATE),
    "older weights": of(SETS[0], keys.MODEL),
    "newest weights": of(SETS[1], keys.MODEL),
    "config": of(SETS[1], keys.CONFIG),
    "momentum": of(SETS[1], keys.OUTER_STATE),
}
#: Changes of one object's bytes. The etag stays, as on a failing disk.
FAULTS: dict[str, Callable[[Base, str], bytes | None]] = {
    "absent": lambda base, key: None,
    "flipped": lambda base, key: _flipped(base.objects[key][0]),
    "cut": lambda base, key: base.objects[key][0][:-9],
    "empty": lambda base, key: b"",
    "longer": lambda base, key: base.objects[key][0] + b" ",
    "too large": lambda base, key: bytes(5 << 20),
    "unsigned": lambda base, key: base.objects[key][0][:-146] + b"}",
    "another's": lambda base, key: base.objects[_neighbour(key)][0],
    "of another network": lambda base, key: base.other[key][0],
    "older": lambda base, key: base.early.get(key, base.objects[of(1, keys.MANIFEST)])[0],
}
MOMENTS = ("running", "own disk", "empty disk")
#: Members need these, and with an empty disk nobody has a copy, so one line names the command.
NEEDED = ("head's manifest", "manifest", "head's update")


def _flipped(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


def _neighbour(key: str) -> str:
    step, name = keys.parse_outer_key(key) or (HEAD, keys.STATE)
    if name in (keys.STATE, keys.MANIFEST, keys.UPDATE):
        return of(3, keys.UPDATE if name == keys.UPDATE else keys.MANIFEST)
    return of(2 if step == 4 else 4, name)


def _begin(base: Base, moment: str, fault: Callable[[StoreWorld], object]) -> StoreWorld:
    """Cause a fault while the validator runs or before it starts, and let it check its store."""
    world = base.again()
    if moment == "running":
        world.restarted()
        fault(world)
    else:
        fault(world)
        world.clock.ahead += PERIOD / 2 + 1  # an empty disk waits until a renewal is overdue
        world.restarted(folder=base.empty() if moment == "empty disk" else None)
    world.tick(16)
    return world


def _assert_sound(base: Base, world: StoreWorld, *, but: tuple[str, ...] = ()) -> None:
    """Assert that the store has all published objects, and a state that every member accepts."""
    before = _parse(base, base.objects[keys.STATE][0])
    world.state.check_after(before)
    assert world.state.head == before.head and world.state.expires > world.clock()
    for key in OBJECTS.values():
        if key != keys.STATE and key not in but:
            assert world.bucket.objects[key][0] == base.objects[key][0], key


def _parse(base: Base, data: bytes) -> State:
    master = base.world.master.ss58_address
    return State.parse(data, Master(base.world.run_id, master, verify))


@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_that_is_not_the_signed_one_is_written_again(
    base: Base, name: str, moment: str, each: bool
) -> None:
    """``each``: try all faults, or every third in turn, so that each fault meets each moment."""
    key = OBJECTS[name]
    turn = [*OBJECTS].index(name) + MOMENTS.index(moment)
    for at, (fault, change) in enumerate(FAULTS.items()):
        if not each and (at - turn) % 3:
            continue
        if (found := change(base, key)) == base.objects[key][0]:
            continue  # the fault changes nothing, since two configurations may be equal

        def damage(world: StoreWorld, found: bytes | None = found) -> None:
            _, etag, at = world.bucket.objects.pop(key)
            if found is not None:
                world.bucket.objects[key] = found, etag, at

        if moment == "empty disk" and name in NEEDED:
            with pytest.raises(GlobalStateError, match="run dt-network recover NETWORK") as end:
                _begin(base, moment, damage)
            assert len(str(end.value).splitlines()) == 1, fault
            continue
        world = _begin(base, moment, damage)
        assert world.validator.state.outer_step == HEAD, fault
        # Without a copy the validator cannot write it again, but other objects lead to the head.
        _assert_sound(base, world, but=(key,) if moment == "empty disk" else ())


# --- the whole store ---


def _restored(base: Base, world: StoreWorld) -> None:
    world.bucket.objects.clear()
    world.bucket.objects.update(base.early)


def _replaced(base: Base, world: StoreWorld) -> None:
    world.bucket.objects.clear()
    world.bucket.objects.update(base.other)


def _swapped(base: Base, world: StoreWorld) -> None:
    objects = world.bucket.objects
    for one, two in (("head's manifest", "manifest"), ("head's update", "update")):
        one, two = OBJECTS[one], OBJECTS[two]
        objects[one], objects[two] = objects[two], objects[one]


def _stale(base: Base, world: StoreWorld) -> None:
    """Answer every request for the state as 60 s ago."""
    shown = [(0.0, world.bucket.objects[keys.STATE])]
    real = {name: getattr(world.bucket, name) for name in ("head", "get", "put")}

    def put(key: str, data: Any) -> str:
        etag = str(real["put"](key, data))
        if key == keys.STATE:
            shown.append((world.clock(), world.bucket.objects[key]))
        return etag

    def late(name: str, key: str, **more: Any) -> Any:
        world.clock.ahead += 1
        if key != keys.STATE:
            return real[name](key, **more)
        present = world.bucket.objects[key]
        world.bucket.objects[key] = [o for at, o in shown if at <= world.clock() - 60][-1]
        try:
            return real[name](key, **more)
        finally:
            world.bucket.objects[key] = present

    world.bucket.put = put  # type: ignore[method-assign]
    world.bucket.head = lambda key: late("head", key)  # type: ignore[method-assign]
    world.bucket.get = lambda key, *, limit: late("get", key, limit=limit)  # type: ignore


def _differs(what: str, shows: Callable[[Base], Any]) -> Callable[[Base, StoreWorld], None]:
    """Let a replica with other content answer HEAD or GET of the state."""

    def fault(base: Base, world: StoreWorld) -> None:
        real = getattr(world.bucket, what)

        def answer(key: str, **more: Any) -> Any:
            return shows(base) if key == keys.STATE else real(key, **more)

        setattr(world.bucket, what, answer)

    return fault


def _drops(base: Base, world: StoreWorld) -> None:
    """Damage the state and an update, and confirm every second write without storing it."""
    world.bucket.objects[keys.STATE] = b"x", "x", world.clock()
    world.bucket.objects.pop(OBJECTS["head's update"], None)
    real, writes = world.bucket.put, [0]

    def put(key: str, data: Any) -> str:
        writes[0] += 1
        return "0" * 32 if writes[0] % 2 else real(key, data)

    world.bucket.put = put  # type: ignore[method-assign]


STORES: dict[str, Callable[[Base, StoreWorld], object]] = {
    "emptied": lambda base, world: world.bucket.objects.clear(),
    "restored": _restored,
    "of another network": _replaced,
    "swapped": _swapped,
    "60 s late": _stale,
    "HEAD finds nothing": _differs("head", lambda base: None),
    "GET finds nothing": _differs("get", lambda base: None),
    "GET finds an older one": _differs("get", lambda base: base.early[keys.STATE][0]),
    "confirms what it drops": _drops,
}


STORES_OF_EMPTY_DISK = ("restored", "of another network", "swapped", "60 s late")


@pytest.mark.parametrize("moment", MOMENTS[:2])
@pytest.mark.parametrize("name", STORES)
def test_a_store_that_fails_whole_neither_ends_nor_freezes_anything(
    base: Base, name: str, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = _begin(base, moment, lambda world: STORES[name](base, world))
    told = [r for r in caplog.records if r.levelname == "WARNING" and keys.STATE in r.getMessage()]
    assert len(told) <= 2, [record.getMessage() for record in told]
    for method in ("head", "get", "put"):
        world.bucket.__dict__.pop(method, None)
    world.tick(16)
    _assert_sound(base, world)
    # Training continues: members upload, and the next outer step follows.
    for miner in world.miners.values():
        miner.outer_step, miner.start = HEAD, [w.clone() for w in world.validator.state.weights]
    assert world.round().outer_step == HEAD + 1
    world.state.check_after(_parse(base, base.objects[keys.STATE][0]))


@pytest.mark.parametrize("name", STORES_OF_EMPTY_DISK)
def test_a_start_on_an_empty_disk_knows_only_the_store(
    base: Base, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(world: StoreWorld) -> None:
        STORES[name](base, world)

    if name in ("of another network", "swapped"):
        with pytest.raises(GlobalStateError, match="run dt-network recover NETWORK"):
            _begin(base, "empty disk", fault)
        return
    world = _begin(base, "empty disk", fault)
    assert world.validator.state.outer_step == (2 if name == "restored" else HEAD)
    if name == "restored":  # it looks like a network that stood still, so the validator warns
        assert "run dt-network recover NETWORK" in caplog.text
        assert world.state.serial > SERIALS


# --- large objects ---


def test_large_objects_are_read_only_when_members_stay_away(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outer_steps, "SMALL", 0)
    world, key = base.again(), OBJECTS["head's update"]
    world.restarted()
    world.tick(16)
    data, _, at = world.bucket.objects[key]
    world.bucket.objects[key] = _flipped(data), "another", at
    world.tick(16)
    assert world.bucket.objects[key][0] == data  # the changed etag showed it
    world.bucket.objects[key] = _flipped(data), world.bucket.objects[key][1], at
    world.tick(16)
    assert world.bucket.objects[key][0] != data
    world.until_late()
    world.tick()  # no upload came, and this object may be the cause
    assert world.bucket.objects[key][0] == data


def test_a_large_object_that_is_shown_late_is_not_sent_at_each_look(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outer_steps, "SMALL", 0)
    world, key, sent = base.again(), OBJECTS["head's update"], 0
    world.restarted()
    put = world.bucket.put

    def put_late(name: str, data: Any) -> Any:
        nonlocal sent
        if name != key:
            return put(name, data)
        sent += 1
        return "confirmed"

    monkeypatch.setattr(world.bucket, "put", put_late)
    world.bucket.objects.pop(key)
    for _ in range(32):
        world.validator.steps.restore_lost()
    assert sent == 1
    monkeypatch.setattr(outer_steps, "_AGAIN", 0.0)
    for _ in range(32):
        world.validator.steps.restore_lost()
    assert sent > 1


# --- who leads ---


def test_newcomer_waits_and_leads_once_a_renewal_is_overdue(base: Base) -> None:
    world = base.again()
    world.restarted()
    shown = world.state
    world.restarted(folder=base.empty())
    world.tick(3)
    assert world.state == shown  # the newcomer writes nothing
    world.clock.ahead += PERIOD / 2 + 1
    world.tick(2)
    assert world.state.written_at > shown.written_at and world.state.serial == shown.serial


def test_newcomer_that_looks_before_the_leader_stops(base: Base) -> None:
    world = base.again()
    world.restarted()
    first = world.validator
    world.closing.pop_all()  # both run
    world.restarted(folder=base.empty())

    def pass_period() -> None:
        for _ in range(30):
            world.clock.ahead += PERIOD / 30
            world.tick()
            first._looked = -100.0
            first.tick()

    with pytest.raises(AnotherLeadsError, match="with --take-over"):
        pass_period()


def test_newcomer_that_takes_over_ends_the_leader(base: Base) -> None:
    world, config = base.again(), base.world.config
    world.restarted()
    first = world.validator
    world.closing.pop_all()
    world.config = replace(config, validator=replace(config.validator, take_over=True))
    try:
        world.restarted(folder=base.empty())
    finally:
        world.config = config
    world.tick()
    first._looked = -100.0
    with pytest.raises(AnotherLeadsError, match=r"led at .* so this one stops"):
        first.tick()
    world.tick()


@pytest.mark.parametrize("empty", [False, True])
def test_own_disk_with_the_newest_state_leads_at_once(base: Base, empty: bool) -> None:
    world = base.again()
    if empty:  # another machine has led since, so our state is no longer the newest
        now = world.clock() + 1
        other = renewed(world.state, now=now, period=PERIOD).to_bytes(world.master.sign)
        world.bucket.put(keys.STATE, other)
    shown = world.state
    world.restarted()
    assert (world.state == shown) == empty
