"""A round of a member without a key: real store, real registry, URLs that it grants."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_training.exchange.base import Close, UploadEnded
from distributed_training.protocol import keys
from distributed_training.protocol.types import Base, Update
from distributed_training.registry import access
from tests.tools import store_network
from tests.tools.access_world import RUN_ID, AccessWorld
from tests.tools.chain_world import PEER, VALIDATOR
from tests.tools.store_network import Leader, Miner, Time, merged
from tests.tools.support_store import server
from tests.tools.waiting import wait_for

__all__ = ["server"]
pytestmark = pytest.mark.timeout(240)


class RealTime(Time):
    steady, store, unix = (staticmethod(f) for f in (time.monotonic, time.time, time.time))


@pytest.fixture
def world(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AccessWorld]:
    monkeypatch.setattr(access, "_STATE_KEPT", 0.0)
    monkeypatch.setattr(store_network, "RUN_ID", RUN_ID)
    monkeypatch.setattr(store_network, "MASTER", VALIDATOR.hotkey)
    monkeypatch.setattr(store_network, "UID", 1)
    with AccessWorld(server, tmp_path / "registry") as made:
        yield made


def test_a_member_without_a_key_takes_part_in_rounds(world: AccessWorld, tmp_path: Path) -> None:
    clock = RealTime()
    leader = Leader(world.owner, clock, VALIDATOR.hotkey)
    store = world.member(PEER)
    miner = Miner(store, tmp_path / "rounds", clock)
    miner.turn()
    assert miner.take_facts() == [] and miner.head == 0
    for outer_step in range(2):
        leader.serial += 1
        leader.closes_at = clock.store() - 1
        leader.put_state()
        close = leader.close

        def look() -> list[Any]:
            miner.rounds._next_look = 0.0  # now, not when the next look is due
            miner.turn()
            return miner.take_facts()

        assert [fact for fact in look() if isinstance(fact, Close)] == [close]
        digest = miner.upload(close, b"of outer step %d" % outer_step)
        [sent] = miner.take_facts()
        assert isinstance(sent, UploadEnded) and not sent.cause
        key = keys.upload_key(1, outer_step, close.serial)
        assert world.owner.get(key, limit=99) == b"of outer step %d" % outer_step
        leader.take_outer_step(merged=(merged(1, digest),))
        [*_, update] = look()
        assert isinstance(update, Update) and update.base is Base.MERGED
        assert update.path.read_bytes().startswith(b"update %06d" % (outer_step + 1))
        miner.rounds.applied(outer_step + 1)

    # Whoever lost the run folder has lost the note: the store keeps the first file all the same.
    leader.closes_at = clock.store() - 1
    leader.serial += 1
    leader.put_state()
    world.owner.put(keys.upload_key(1, 2, leader.serial), b"an earlier one")
    fresh = Miner(store, tmp_path / "fresh", clock, held=2)
    fresh.turn()
    assert leader.close in fresh.take_facts()
    fresh.upload(leader.close, b"another")
    [failed] = fresh.take_facts()
    assert isinstance(failed, UploadEnded) and "the first counts" in failed.cause
    assert "\n" not in failed.cause


def test_the_thread_follows_by_itself_and_ends_at_once(world: AccessWorld, tmp_path: Path) -> None:
    clock = RealTime()
    leader = Leader(world.owner, clock, VALIDATOR.hotkey)
    leader.take_outer_step()
    miner = Miner(world.member(PEER), tmp_path / "rounds", clock)
    miner.rounds.start(miner.on_event, outer_step=0, schema=[("w", (1000, 1000))])
    try:
        wait_for(lambda: any(isinstance(fact, Update) for fact in miner.facts), "the update")
    finally:
        began = time.monotonic()
        miner.rounds.stop()
    assert time.monotonic() - began < 5
    assert not miner.rounds._thread.is_alive()
