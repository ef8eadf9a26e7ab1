"""Test whether a hotkey is still ours: deregistered, moved, reorganized."""

from __future__ import annotations

from datetime import timedelta

import pytest

from distributed_training.chain.registration import (
    ASK_ANOTHER,
    MISSING_FOR,
    MISSING_FOR_ALONE,
    Belief,
    Change,
    RegistrationEvent,
    RegistrationWatcher,
    WatcherCallbacks,
)
from tests.tools.chain_memory import MemoryChain, MemoryLedger
from tests.tools.chain_world import MINER, VALIDATOR

pytestmark = pytest.mark.timeout(60)


class Watched:
    def __init__(self, *, missing_for: timedelta = timedelta(0)) -> None:
        self.ledger = MemoryLedger()
        self.uid = self.ledger.register(MINER.ss58)
        self.ledger.register(VALIDATOR.ss58)
        self.events: list[RegistrationEvent] = []
        self.lost: list[str] = []
        self.now = 0.0
        self.chain = MemoryChain(hotkey=MINER.ss58, ledger=self.ledger)
        self.watcher = RegistrationWatcher(
            chain=self.chain,
            hotkey=MINER.ss58,
            uid=self.uid,
            ours={"endpoint": ("1.2.3.4", 8091), "commitment": "ours"},
            callbacks=WatcherCallbacks(self.events.append, self.write_again),
            belief=Belief(VALIDATOR.ss58, missing_for, "the command"),
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


def test_a_sound_registration_causes_no_event() -> None:
    watched = Watched()
    watched.chain.serve("9.9.9.9", 1)  # an endpoint from before this start was not lost
    assert watched.looks() == []
    watched.chain.serve("1.2.3.4", 8091)
    watched.chain.commit("ours")
    assert watched.looks() == []
    watched.ledger.up = False  # nor is a chain that is away
    assert watched.looks() == []


class Nodes(MemoryChain):
    """Two chain nodes, ``a`` and ``b``, each with a state of its own; one of them answers."""

    def __init__(self, a: MemoryLedger, b: MemoryLedger) -> None:
        super().__init__(hotkey=MINER.ss58, ledger=a)
        self.nodes = {"a": a, "b": b}
        self.down: set[str] = set()
        self.asked = 0

    def answered_by(self) -> str:
        return next(name for name, ledger in self.nodes.items() if ledger is self.ledger)

    def endpoints(self) -> int:
        return len(self.nodes)

    def ask_another(self) -> None:
        self.asked += 1
        other = "b" if self.answered_by() == "a" else "a"
        if other not in self.down:
            self.ledger = self.nodes[other]


def two_nodes() -> tuple[Watched, Nodes]:
    """A watcher with the product's patience, and the nodes that it looks at."""
    watched = Watched(missing_for=MISSING_FOR)
    other = MemoryLedger()
    other.restore(watched.ledger.save())
    chain = Nodes(watched.ledger, other)
    watched.watcher._chain = watched.watcher._missing._chain = chain
    assert watched.looks() == []
    return watched, chain


def play(watched: Watched, span: timedelta, *, step: float = 30.0) -> list[Change]:
    """Look every ``step`` seconds for as long as ``span``."""
    seen, until = [], watched.now + span.total_seconds()
    while watched.now < until:
        watched.now += step
        seen += watched.looks(1)
    return seen


@pytest.mark.parametrize("nobody", [True, False])
def test_a_list_that_cannot_be_the_subnets_deregisters_nobody(
    nobody: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A node with a broken state, or a field that a runtime upgrade renamed: no neurons at all, or
    some, without the master hotkey. It lasts a day, on both nodes."""
    watched, chain = two_nodes()
    for ledger in chain.nodes.values():
        ledger.clear()
        if not nobody:
            ledger.register("5Other", uid=5)
    assert play(watched, timedelta(days=1)) == []
    assert chain.asked > 100, "another node may be sound"
    assert caplog.text.count("its list is not used") == 1
    watched.ledger.register(MINER.ss58, uid=41)
    chain.ledger, chain.down = watched.ledger, {"b"}
    assert play(watched, timedelta(minutes=2)) == [Change.UID_CHANGED]


def test_a_node_that_lost_our_hotkey_is_outvoted_by_one_that_shows_it() -> None:
    watched, chain = two_nodes()
    watched.ledger.deregister(MINER.ss58)
    assert play(watched, timedelta(hours=12)) == []
    assert chain.answered_by() == "b" and chain.asked == 1
    chain.ledger = chain.nodes["a"]  # the connection to b is lost, again and again
    for _ in range(40):
        assert play(watched, timedelta(minutes=3)) == []
        chain.ledger = chain.nodes["a"]


@pytest.mark.parametrize(
    ("answering", "after"), [(2, MISSING_FOR), (1, MISSING_FOR_ALONE)], ids=["two", "one"]
)
def test_a_deregistration_is_believed_when_it_lasts_and_two_nodes_say_it(
    answering: int, after: timedelta, caplog: pytest.LogCaptureFixture
) -> None:
    watched, chain = two_nodes()
    for ledger in chain.nodes.values():
        ledger.deregister(MINER.ss58)
    if answering == 1:
        chain.down = {"b"}
    assert play(watched, after - timedelta(minutes=1)) == []
    assert caplog.text.count("does not show hotkey") == 1
    assert play(watched, timedelta(minutes=3)) == [Change.DEREGISTERED]
    assert chain.asked <= after / ASK_ANOTHER + 2


def test_the_time_without_our_hotkey_begins_again_when_it_was_shown() -> None:
    watched, chain = two_nodes()
    for _ in range(5):
        for ledger in chain.nodes.values():
            ledger.deregister(MINER.ss58)
        assert play(watched, MISSING_FOR - timedelta(minutes=2)) == []
        for ledger in chain.nodes.values():
            ledger.register(MINER.ss58, uid=watched.uid)
        assert play(watched, timedelta(minutes=1)) == []


def test_an_expulsion_is_believed_at_once_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(missing_for=MISSING_FOR)
    watched.write()
    assert watched.looks() == []
    watched.ledger.deregister(MINER.ss58)
    monkeypatch.setattr(watched.chain, "expelled", lambda hotkey: hotkey == MINER.ss58)
    events = [watched.watcher.check() for _ in range(5)]
    (event,) = [event for event in events if event is not None]
    assert event.change is Change.EXPELLED and watched.lost == []
    assert "the founder expelled hotkey" in event.line and "expel --again" in event.line
    assert "the command" not in event.line


def test_a_new_uid_is_followed() -> None:
    watched = Watched()
    watched.ledger.register(MINER.ss58, uid=41)
    event = next(e for e in (watched.watcher.check() for _ in range(3)) if e is not None)
    assert event.change is Change.UID_CHANGED and "is uid 41 now" in event.line
    assert watched.looks() == []


class Fork:
    """The state of a ledger at one block, to go back to."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        self._kept = ledger.save(), ledger.height

    def reorganize(self) -> None:
        """Drop the writes since then; other blocks take their place."""
        state, height = self._kept
        self._ledger.restore(state)
        self._ledger.advance(height - 1 - self._ledger.height)


@pytest.mark.parametrize("before", [None, ("9.9.9.9", 1)])
def test_commitment_lost_in_a_reorganization_is_written_again(before, caplog) -> None:
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


def test_two_miners_with_one_hotkey_write_in_turn_seldom(caplog) -> None:
    watched = Watched()
    other = MemoryChain(hotkey=MINER.ss58, ledger=watched.ledger)
    watched.write()
    assert watched.looks() == []
    for _ in range(60):  # minutes
        other.serve("5.6.7.8", 8091)
        assert play(watched, timedelta(minutes=1)) == []
    assert 5 <= len(watched.lost) <= 6 and watched.events == []
    assert "a second miner with this hotkey" in caplog.text


class Rarely(MemoryChain):
    """Shows its last read; reads on demand, as a chain that reads neurons every two minutes."""

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
