"""A chain that hangs, goes away, comes back or turns back its clock."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_training.chain import subtensor
from distributed_training.chain.base import ChainError
from distributed_training.chain.identity import create_wallet
from distributed_training.chain.registration import (
    MISSING_FOR,
    MISSING_FOR_ALONE,
    Belief,
    Change,
    RegistrationWatcher,
    WatcherCallbacks,
)
from distributed_training.chain.subtensor import ASK_AGAIN, BittensorChain, NewestBlocks
from distributed_training.config.settings import ChainSettings
from tests.tools.chain_memory import MemoryLedger
from tests.tools.chain_substrate import FIRST, QUICK, QUICK_READS, SECOND, LedgerSubstrate
from tests.tools.chain_world import VALIDATOR
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(150)
SETTINGS = replace(
    QUICK_READS, call_timeout=timedelta(seconds=1), write_timeout=timedelta(seconds=5)
)


class FastClock:
    """Minutes pass in milliseconds: a pause ends at once and the time has gone by all the same.

    ``busy``: blocks are made meanwhile, on ``nodes``.
    """

    def __init__(self, *, busy: bool = False) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []
        self.busy = busy
        self.nodes: list[LedgerSubstrate] = []

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if self.busy:
            for ledger in {id(node.ledger): node.ledger for node in self.nodes}.values():
                ledger.advance()
        self.now += seconds
        self.pauses.append(seconds)
        await asyncio.sleep(0.001)


class Nodes:
    """Two endpoints, the first of which is asked first. ``behind``: seconds that each of them is
    behind the clock; one that is has a ledger of its own, without our hotkey."""

    def __init__(
        self, folder: Path, settings: ChainSettings, clock: Any, behind: tuple[float, float]
    ) -> None:
        self.wallet = create_wallet(folder, "miner")
        self.ledger = MemoryLedger()
        self.ledger.register(self.wallet.ss58)
        self.first = LedgerSubstrate(self.ledger, SETTINGS.netuid)
        self.second = LedgerSubstrate(self.ledger, SETTINGS.netuid)
        nodes = {FIRST: self.first, SECOND: self.second}
        for node, seconds in zip(nodes.values(), behind, strict=True):
            if seconds:
                node.newest_block_age = seconds
                node.ledger = MemoryLedger(block=self.ledger.height - round(seconds / 12))
                node.ledger.register(VALIDATOR.ss58)
        self.clock = clock
        clock.nodes = [self.first, self.second]
        self.chain = BittensorChain(
            settings=settings,
            wallet=self.wallet,
            substrate=nodes.__getitem__,
            monotonic=clock.monotonic,
            sleep=clock.sleep,
        )


Make = Callable[..., Nodes]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> Iterator[Make]:
    """Makes :class:`Nodes` that are read every six seconds of a clock that runs fast, and waits
    until they have been."""
    monkeypatch.setenv("BITTENSOR_RUNTIME_CACHE_DIR", str(tmp_path / "cache"))
    caplog.set_level(logging.WARNING)
    made: list[Nodes] = []

    def make(*, clock: Any = None, behind=(0.0, 0.0), **changes: Any) -> Nodes:
        settings = replace(SETTINGS, **{"poll_interval": timedelta(seconds=6), **changes})
        made.append(Nodes(tmp_path, settings, clock or FastClock(), behind))
        assert made[-1].chain.wait_ready(timedelta(seconds=40))
        return made[-1]

    yield make
    for nodes in made:
        nodes.chain.close()


@pytest.fixture
def nodes(make: Make, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Nodes in real time."""
    monkeypatch.setattr(subtensor, "FIRST_PAUSE", timedelta(seconds=0.02))
    monkeypatch.setattr(subtensor, "LONGEST_PAUSE", timedelta(seconds=0.1))
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=asyncio.sleep)
    return make(clock=clock, poll_interval=QUICK)


@contextmanager
def watched(nodes: Nodes) -> Iterator[list[Change]]:
    """Watch the first uid; yield the changes that are reported."""
    changes: list[Change] = []
    watcher = RegistrationWatcher(
        chain=nodes.chain,
        hotkey=nodes.wallet.ss58,
        uid=0,
        callbacks=WatcherCallbacks(lambda event: changes.append(event.change)),
        belief=Belief(),
        ours={},
        interval=timedelta(milliseconds=2),
        clock=nodes.clock.monotonic,
    )
    watcher.start()
    try:
        yield changes
    finally:
        watcher.close()


def test_a_write_to_a_silent_chain_fails_in_time(nodes: Nodes) -> None:
    nodes.first.silent = nodes.second.silent = True
    with pytest.raises(ChainError, match="no answer"):
        nodes.chain.commit("x")
    nodes.first.silent = nodes.second.silent = False
    nodes.ledger.advance()
    wait_for(lambda: nodes.chain.block() == nodes.ledger.height)
    wait_for(lambda: nodes.chain.age() < timedelta(seconds=0.5))
    nodes.chain.commit("x")
    assert nodes.chain.commitment(nodes.wallet.ss58) == "x"


def test_a_write_waits_for_the_connection(nodes: Nodes) -> None:
    nodes.first.silent = True
    wait_for(lambda: nodes.second.connections)
    nodes.chain.serve("1.2.3.4", 8091)
    assert nodes.second.signers == [nodes.wallet.ss58]
    assert nodes.chain.neurons()[0].port == 8091


def test_a_reorganization_does_not_turn_the_clock_back(nodes: Nodes) -> None:
    nodes.ledger.advance(20)
    wait_for(lambda: nodes.chain.block() == nodes.ledger.height)
    highest = nodes.chain.block()
    nodes.ledger.advance(-5)
    nodes.ledger.register("5FnaLnMQh6CD11QWFgekhqN7muSkfCnWvyLLx6XgXN67UvZW")
    wait_for(lambda: len(nodes.chain.neurons()) == 2)  # it is read all the same
    assert nodes.chain.block() == highest
    nodes.ledger.advance(6)
    wait_for(lambda: nodes.chain.block() == highest + 1)


def test_close_does_not_wait_for_a_silent_node(nodes: Nodes) -> None:
    nodes.first.silent = nodes.second.silent = True
    nodes.chain.close()
    assert not nodes.chain._thread.is_alive()
    with pytest.raises(ChainError, match="closed"):
        nodes.chain.commit("x")


def test_a_chain_away_for_an_hour_comes_back_with_few_lines(make: Make, caplog) -> None:
    """The pauses, intervals and log lines of the public network's settings; only time is faster."""
    public = ChainSettings()
    nodes = make(poll_interval=public.poll_interval, neurons_interval=public.neurons_interval)
    chain, pauses = nodes.chain, nodes.clock.pauses
    caplog.set_level(logging.INFO)
    last = chain.block()
    nodes.ledger.up = False
    wait_for(lambda: chain.age() > timedelta(hours=1))
    assert chain.block() == last and chain.uid(nodes.wallet.ss58) == 0
    # Both endpoints at each length of pause, which grows to a minute.
    away = [p for p in pauses if p != public.poll_interval.total_seconds()]
    assert away[:12] == [1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 32, 32] and set(away[12:]) == {60}
    # A line every five minutes, with the age of what is known; not one for each attempt.
    # The clock runs on, so there are as many as fit between two looks at it.
    five, before = timedelta(minutes=5), chain.age()
    lines = [m for m in caplog.messages if "continues with the state of" in m]
    assert before / five - 2 <= len(lines) <= chain.age() / five + 2 < len(away)
    assert "--subtensor.chain_endpoint" in lines[0] and "\n" not in lines[0]
    ages = [int(m.partition("state of ")[2].split()[0]) for m in lines]
    assert ages == sorted(ages) and ages[-1] > 3000
    failures = chain.counters()["failures"]
    assert failures >= len(away)

    nodes.ledger.advance(300)  # an hour's blocks
    nodes.ledger.register(VALIDATOR.ss58)
    nodes.ledger.up = True
    wait_for(lambda: chain.block() == last + 300)
    wait_for(lambda: len(chain.neurons()) == 2)
    assert chain.age() < timedelta(minutes=1)
    assert chain.counters()["failures"] <= failures + 2  # one may have been under way
    assert "Chain at" in caplog.messages[-1]
    chain.commit("after the storm")
    assert chain.counters()["writes"] == 1

    nodes.ledger.up = False  # the next outage starts with short pauses again
    known = len(pauses)
    wait_for(lambda: len([p for p in pauses[known:] if p != 6.0]) >= 3)
    assert next(p for p in pauses[known:] if p != 6.0) == 1


def test_deregistered_while_the_chain_was_away(make: Make) -> None:
    nodes = make()
    with watched(nodes) as changes:
        nodes.ledger.up = False
        wait_for(lambda: nodes.chain.age() > timedelta(minutes=10))
        assert changes == []  # a chain that is away says nothing about us
        nodes.ledger.register(VALIDATOR.ss58, uid=0)
        nodes.ledger.up = True
        wait_for(lambda: changes)
    assert changes == [Change.DEREGISTERED]


def test_a_node_that_stopped_long_ago_says_nothing_about_us(make: Make) -> None:
    nodes = make(behind=(0.0, 6000.0))  # our hotkey was not there yet
    chain, ours = nodes.chain, nodes.wallet.ss58
    with watched(nodes) as changes:
        nodes.ledger.up = False
        known = nodes.second.connections
        # However long nobody better answers.
        wait_for(lambda: chain.age() > timedelta(hours=1) and nodes.second.connections > known + 2)
        assert changes == [] and chain.uid(ours) == 0
        # A chain that was itself set back makes new blocks.
        highest = chain.block()
        nodes.second.newest_block_age = 0.0
        wait_for(lambda: chain.uid(ours) is None)
        wait_for(lambda: changes)
        assert chain.block() == highest


@pytest.fixture
def minutes_pass(make: Make) -> Make:
    """Makes nodes that all make blocks: one that synchronizes never stands still."""

    def made(*, behind: tuple[float, float], more: tuple[str, ...] = (SECOND,)) -> Nodes:
        settings = {"neurons_interval": timedelta(seconds=120), "fallback_endpoints": more}
        return make(clock=FastClock(busy=True), behind=behind, **settings)

    return made


def test_a_start_does_not_believe_a_node_that_is_behind(minutes_pass, caplog) -> None:
    nodes = minutes_pass(behind=(6000.0, 0.0))
    assert nodes.chain.block() > nodes.first.ledger.height + 400
    assert nodes.chain.uid(nodes.wallet.ss58) == 0 and nodes.chain.uid(VALIDATOR.ss58) is None
    (line,) = caplog.messages
    assert FIRST in line and "100 minutes behind this machine's clock" in line


@pytest.mark.parametrize(
    ("behind", "newest"),
    [((6000.0, 9000.0), FIRST), ((9000.0, 6000.0), SECOND), ((6000.0, 6030.0), "ws://")],
)
def test_when_all_nodes_are_behind_the_newest_is_believed(
    minutes_pass, caplog, behind: tuple[float, float], newest: str
) -> None:
    nodes = minutes_pass(behind=behind)
    line = next(m for m in caplog.messages if "No chain node that answers" in m)
    assert newest in line and "timedatectl" in line and "--subtensor.chain_endpoint" in line
    # Nor is there a dance between two that are as good: the others are asked now and then.
    began = nodes.clock.now
    wait_for(lambda: nodes.clock.now > began + 3600)
    said = [m for m in caplog.messages if "No chain node that answers" in m]
    looks = (nodes.clock.now - 1000.0) / ASK_AGAIN.total_seconds() + 1
    assert len(said) <= looks and all(newest in m for m in said)
    assert nodes.first.connections + nodes.second.connections <= 3 * looks
    assert nodes.chain.age() < timedelta(minutes=5)


def test_an_only_node_that_is_behind_is_believed_at_once(minutes_pass, caplog) -> None:
    nodes = minutes_pass(behind=(6000.0, 0.0), more=())
    assert nodes.first.connections == 1 and len(caplog.messages) == 1


def test_a_node_whose_client_cannot_be_made_has_nothing_newer(minutes_pass) -> None:
    minutes_pass(behind=(6000.0, 0.0), more=("ws://127.0.0.1:3",))  # waits for it


def test_endpoint_state_of_days_ago_is_no_answer() -> None:
    now = 1e6
    nodes = NewestBlocks(clock=lambda: now, monotonic=lambda: now)
    for endpoint, other in ((FIRST, SECOND), (SECOND, FIRST)):
        nodes.asking(endpoint)
        nodes.check(endpoint, now - 3, {other})
    now += 5 * 86400
    with pytest.raises(ChainError, match="180 minutes behind"):  # the first may be better now
        nodes.check(SECOND, now - 3 * 3600, {FIRST})
    nodes.asking(FIRST)  # and does not answer
    nodes.check(SECOND, now - 3 * 3600, {FIRST})


def test_a_node_that_is_behind_is_left_when_another_has_caught_up(minutes_pass) -> None:
    nodes = minutes_pass(behind=(6000.0, 9000.0))
    assert nodes.chain.uid(nodes.wallet.ss58) is None
    nodes.second.ledger, nodes.second.newest_block_age = nodes.ledger, 0.0
    wait_for(lambda: nodes.chain.uid(nodes.wallet.ss58) == 0)
    assert nodes.chain.block() > nodes.first.ledger.height + 400


def test_a_node_that_falls_behind_is_left_for_the_next(minutes_pass) -> None:
    nodes = minutes_pass(behind=(0.0, 0.0))
    assert nodes.second.connections == 0
    nodes.first.newest_block_age = 700.0
    wait_for(lambda: nodes.second.connections)
    height = nodes.ledger.height
    wait_for(lambda: nodes.chain.block() > height)


def test_a_node_whose_block_stands_still_is_left_for_the_next(make: Make, caplog) -> None:
    nodes = make()
    moving = nodes.second.ledger = MemoryLedger(block=nodes.ledger.height)
    moving.register(nodes.wallet.ss58)
    moving.advance(40)
    wait_for(lambda: nodes.chain.block() == moving.height)
    assert nodes.clock.now - 1000.0 >= subtensor.STANDSTILL
    assert any(f"stands still at {nodes.ledger.height}" in m for m in caplog.messages)


def test_a_node_without_neurons_is_no_answer_and_another_one_is(make: Make, caplog) -> None:
    """The SDK makes an empty list of a field that the answer lacks."""
    nodes = make()
    chain, ours = nodes.chain, nodes.wallet.ss58
    assert chain.answered_by() == FIRST
    nodes.first.ledger = MemoryLedger(block=nodes.ledger.height)
    wait_for(lambda: chain.answered_by() == SECOND)
    assert chain.uid(ours) == 0
    nodes.second.ledger = nodes.first.ledger  # and now there is no other
    failures = chain.counters()["failures"]
    wait_for(lambda: chain.counters()["failures"] > failures + 5)
    assert chain.uid(ours) == 0, "the last list that was one"
    assert "shows no neuron at all on subnet" in caplog.text


def test_two_nodes_disagree_and_the_other_one_is_asked(make: Make) -> None:
    """One node's answer, however often, is no deregistration while another one shows us."""
    nodes = make()
    chain, clock, ours = nodes.chain, nodes.clock, nodes.wallet.ss58
    assert chain.endpoints() == 2
    nodes.first.ledger = MemoryLedger(block=nodes.ledger.height)
    nodes.first.ledger.register(VALIDATOR.ss58)
    with watched(nodes) as changes:
        wait_for(lambda: chain.answered_by() == SECOND)
        until = clock.now + 2 * MISSING_FOR_ALONE.total_seconds()
        wait_for(lambda: clock.now > until)
        # Its block stands still, so the first one is asked in between.
        wait_for(lambda: chain.uid(ours) == 0)
        assert changes == []
        nodes.ledger.register(VALIDATOR.ss58, uid=0)  # now the other one says it too
        began = clock.now
        wait_for(lambda: changes)
    assert changes == [Change.DEREGISTERED]
    assert clock.now - began >= MISSING_FOR.total_seconds()
