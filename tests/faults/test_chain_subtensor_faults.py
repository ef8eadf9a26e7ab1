"""A chain that hangs, goes away, comes back or turns back its clock."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from distributed_training.chain import subtensor
from distributed_training.chain.base import ChainError
from distributed_training.chain.memory import MemoryLedger
from distributed_training.chain.subtensor import BittensorChain
from distributed_training.chain.wallet import create_wallet
from distributed_training.config.chain import ChainSettings
from tests.chain_substrate import LedgerSubstrate
from tests.chain_world import until

pytestmark = pytest.mark.timeout(60)
FIRST, SECOND = "ws://127.0.0.1:1", "ws://127.0.0.1:2"
QUICK = timedelta(milliseconds=20)
SETTINGS = replace(
    ChainSettings(),
    chain_endpoint=FIRST,
    fallback_endpoints=(SECOND,),
    poll_interval=QUICK,
    neurons_interval=QUICK,
    call_timeout=timedelta(milliseconds=200),
    write_timeout=timedelta(milliseconds=600),
)


class Nodes:
    def __init__(self, folder: Path) -> None:
        self.wallet = create_wallet(folder, "miner")
        self.ledger = MemoryLedger()
        self.ledger.register(self.wallet.ss58)
        self.first = LedgerSubstrate(self.ledger, SETTINGS.netuid)
        self.second = LedgerSubstrate(self.ledger, SETTINGS.netuid)
        nodes = {FIRST: self.first, SECOND: self.second}
        self.chain = BittensorChain(
            settings=SETTINGS, wallet=self.wallet, substrate=nodes.__getitem__
        )


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("BITTENSOR_RUNTIME_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(subtensor, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(subtensor, "LONGEST_PAUSE", 0.1)
    made = Nodes(tmp_path)
    yield made
    made.chain.close()


def test_a_silent_node_is_left_for_the_next_one(nodes: Nodes, caplog) -> None:
    assert nodes.chain.wait_ready(timedelta(seconds=5))
    caplog.set_level(logging.WARNING)
    before = nodes.second.connections
    nodes.first.silent = True
    until(lambda: nodes.second.connections > before)
    nodes.ledger.advance(10)
    until(lambda: nodes.chain.block() == nodes.ledger.height)
    (line,) = caplog.messages
    assert "--subtensor.chain_endpoint" in line and FIRST in line and "\n" not in line


def test_a_silent_chain_costs_readers_nothing(nodes: Nodes) -> None:
    assert nodes.chain.wait_ready(timedelta(seconds=5))
    nodes.first.silent = nodes.second.silent = True
    until(lambda: nodes.chain.age() > timedelta(milliseconds=500))
    started = time.monotonic()
    for _ in range(1000):
        nodes.chain.block()
        nodes.chain.uid(nodes.wallet.ss58)
    assert time.monotonic() - started < 0.5
    with pytest.raises(ChainError, match="no answer"):
        nodes.chain.commit("x")
    nodes.first.silent = nodes.second.silent = False
    nodes.ledger.advance()
    until(lambda: nodes.chain.block() == nodes.ledger.height)
    assert nodes.chain.age() < timedelta(seconds=1)
    nodes.chain.commit("x")
    assert nodes.chain.commitment(nodes.wallet.ss58) == "x"


def test_a_long_outage_is_told_once(nodes: Nodes, caplog) -> None:
    assert nodes.chain.wait_ready(timedelta(seconds=5))
    caplog.set_level(logging.WARNING)
    nodes.ledger.up = False
    until(lambda: nodes.chain.age() > timedelta(seconds=1))
    assert len(caplog.messages) == 1
    nodes.ledger.up = True
    until(lambda: nodes.chain.age() < timedelta(seconds=0.5))


def test_a_write_waits_for_the_connection(nodes: Nodes) -> None:
    assert nodes.chain.wait_ready(timedelta(seconds=5))
    nodes.first.silent = True
    until(lambda: nodes.second.connections)
    nodes.chain.serve("1.2.3.4", 8091)
    assert nodes.second.signers == [nodes.wallet.ss58]
    assert nodes.chain.neurons()[0].port == 8091


def test_a_reorganization_does_not_turn_the_clock_back(nodes: Nodes) -> None:
    assert nodes.chain.wait_ready(timedelta(seconds=5))
    nodes.ledger.advance(20)
    until(lambda: nodes.chain.block() == nodes.ledger.height)
    highest = nodes.chain.block()
    nodes.ledger.advance(-5)
    nodes.ledger.register("5FnaLnMQh6CD11QWFgekhqN7muSkfCnWvyLLx6XgXN67UvZW")
    until(lambda: len(nodes.chain.neurons()) == 2)  # it is read all the same
    assert nodes.chain.block() == highest
    nodes.ledger.advance(6)
    until(lambda: nodes.chain.block() == highest + 1)


def test_close_does_not_wait_for_a_silent_node(nodes: Nodes) -> None:
    assert nodes.chain.wait_ready(timedelta(seconds=5))
    nodes.first.silent = nodes.second.silent = True
    started = time.monotonic()
    nodes.chain.close()
    assert time.monotonic() - started < 3
    with pytest.raises(ChainError, match="closed"):
        nodes.chain.commit("x")
