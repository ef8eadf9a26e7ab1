"""Whether a hotkey is still ours alone: deregistered, moved, mined twice, or merely reorganized."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from distributed_training.chain.registration import (
    Change,
    RegistrationEvent,
    RegistrationWatcher,
)
from tests.chain_memory import MemoryChain, MemoryLedger
from tests.chain_world import MINER
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(60)


class Watched:
    def __init__(self) -> None:
        self.ledger = MemoryLedger()
        self.uid = self.ledger.register(MINER.ss58)
        self.events: list[RegistrationEvent] = []
        self.lost: list[str] = []
        self.now = 0.0
        self.chain = MemoryChain(hotkey=MINER.ss58, ledger=self.ledger)
        self.watcher = RegistrationWatcher(
            chain=self.chain,
            hotkey=MINER.ss58,
            uid=self.uid,
            ours={"endpoint": ("1.2.3.4", 8091), "commitment": "ours"},
            on_event=self.events.append,
            on_lost=self.write_again,
            clock=lambda: self.now,
            interval=timedelta(milliseconds=10),
        )

    def write(self) -> None:
        self.chain.serve("1.2.3.4", 8091)
        self.chain.commit("ours")

    def write_again(self, what: str) -> None:
        self.lost.append(what)
        self.write()

    def looks(self, count: int = 5) -> list[Change]:
        events = [self.watcher.check() for _ in range(count)]
        return [event.change for event in events if event is not None]


def test_nothing_happens_while_all_is_well() -> None:
    watched = Watched()
    watched.chain.serve("9.9.9.9", 1)  # an endpoint of before this start is no second miner
    assert watched.looks() == []
    watched.chain.serve("1.2.3.4", 8091)
    watched.chain.commit("ours")
    assert watched.looks() == []
    watched.ledger.up = False  # nor is a chain that is away
    assert watched.looks() == []


def test_a_deregistration_is_reported_once() -> None:
    watched = Watched()
    assert watched.looks() == []
    watched.watcher.start()
    watched.ledger.deregister(MINER.ss58)
    (event,) = wait_for(lambda: watched.events)
    assert event.change is Change.DEREGISTERED and "btcli" in event.line
    watched.watcher.close()
    assert watched.looks() == []


def test_a_reorganization_is_no_deregistration() -> None:
    watched = Watched()
    for _ in range(3):
        watched.ledger.deregister(MINER.ss58)
        assert watched.looks(1) == []
        watched.ledger.register(MINER.ss58, uid=watched.uid)
        assert watched.looks(1) == []


def test_a_new_uid_is_followed() -> None:
    watched = Watched()
    watched.ledger.register(MINER.ss58, uid=41)
    event = next(e for e in (watched.watcher.check() for _ in range(3)) if e is not None)
    assert event.change is Change.UID_CHANGED and event.uid == 41
    assert watched.looks() == []


@pytest.mark.parametrize("how", ["endpoint", "commitment"])
def test_a_second_miner_overwrites_what_we_wrote(how: str) -> None:
    watched = Watched()
    watched.write()
    assert watched.looks() == []
    other = MemoryChain(hotkey=MINER.ss58, ledger=watched.ledger)
    if how == "endpoint":
        other.serve("5.6.7.8", 8091)
    else:
        other.commit("theirs")
    assert watched.looks() == [Change.DOUBLE]


class Fork:
    """The state of a ledger at one block, to go back to."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        self._kept = dict(ledger.entries), dict(ledger.commitments), ledger.height

    def reorganize(self) -> None:
        """What was written since is gone; other blocks stand in its place."""
        entries, commitments, height = self._kept
        self._ledger.entries, self._ledger.commitments = dict(entries), dict(commitments)
        self._ledger.advance(height - 1 - self._ledger.height)


@pytest.mark.parametrize("before", [None, ("9.9.9.9", 1)])
def test_what_a_reorganization_took_back_is_written_again(before, caplog) -> None:
    watched = Watched()
    if before is not None:  # an earlier run of ours
        watched.chain.serve(*before)
        watched.chain.commit("of another bucket")
    assert watched.looks() == []
    fork = Fork(watched.ledger)
    watched.ledger.advance(3)
    watched.write()
    assert watched.looks() == []
    highest = watched.chain.block()
    fork.reorganize()
    assert watched.looks(1) == [] and watched.lost == []  # may be a node that is behind
    assert watched.looks() == []
    assert "endpoint" in watched.lost and watched.events == []
    assert (watched.chain.neurons()[0].ip, watched.chain.neurons()[0].port) == ("1.2.3.4", 8091)
    assert watched.chain.commitment(MINER.ss58) == "ours"
    assert watched.chain.block() == highest > watched.ledger.height
    assert "writing it again" in caplog.text
    # After it a second miner is as visible as before.
    MemoryChain(hotkey=MINER.ss58, ledger=watched.ledger).serve("5.6.7.8", 8091)
    assert watched.looks() == [Change.DOUBLE]


def test_a_node_behind_for_one_read_changes_nothing() -> None:
    watched = Watched()
    fork = Fork(watched.ledger)
    watched.write()
    assert watched.looks() == []
    now = Fork(watched.ledger)
    for _ in range(4):
        fork.reorganize()
        assert watched.looks(1) == []
        now.reorganize()
        assert watched.looks(1) == []
    assert watched.lost == []


def test_two_miners_that_keep_putting_back_theirs_are_told_apart_from_reorganizations() -> None:
    watched = Watched()
    other = MemoryChain(hotkey=MINER.ss58, ledger=watched.ledger)
    other.serve("5.6.7.8", 8091)  # was there before us and does not stop
    assert watched.looks() == []
    watched.write()
    assert watched.looks() == []
    for times in (1, 2):
        other.serve("5.6.7.8", 8091)
        assert watched.looks() == []
        assert watched.lost == ["endpoint"] * times
    other.serve("5.6.7.8", 8091)
    assert watched.looks() == [Change.DOUBLE]


def test_a_reorganization_a_day_is_none_too_many() -> None:
    watched = Watched()
    watched.chain.serve("9.9.9.9", 1)
    watched.looks()
    watched.write()
    assert watched.looks() == []
    for _ in range(5):
        watched.now += 86_400
        me = watched.ledger.entries[watched.uid]
        watched.ledger.entries[watched.uid] = replace(me, ip="9.9.9.9", port=1)
        assert watched.looks() == []
    assert watched.lost == ["endpoint"] * 5


class Rarely(MemoryChain):
    """Shows what it read last; reads when told, as a chain that reads neurons every two minutes."""

    def _read(self) -> None:
        return None

    def read(self) -> None:
        super()._read()


def test_one_read_looked_at_twice_confirms_nothing() -> None:
    watched = Watched()
    chain = Rarely(hotkey=MINER.ss58, ledger=watched.ledger)
    watched.watcher._chain = chain
    for lasts in (1, 2):
        watched.ledger.deregister(MINER.ss58)
        for _ in range(lasts - 1):
            chain.read()
            assert watched.looks() == []
        chain.read()
        # However often one and the same answer is looked at.
        assert watched.looks(9) == ([] if lasts == 1 else [Change.DEREGISTERED])
        watched.ledger.register(MINER.ss58, uid=watched.uid)
        chain.read()
        assert watched.looks() == []
