"""The chain over a real websocket: connections that drop, hang, are refused, and move on."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from distributed_training.chain import subtensor
from distributed_training.chain.base import ChainUnavailable
from distributed_training.chain.subtensor import BittensorChain
from tests.tools.chain_memory import MemoryLedger
from tests.tools.chain_node import Node, NodeSubstrate
from tests.tools.chain_substrate import QUICK_READS
from tests.tools.chain_world import MINER, VALIDATOR
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(150)
SETTINGS = replace(QUICK_READS, call_timeout=timedelta(seconds=20))
IMPATIENT = timedelta(milliseconds=500)  # where a node hangs or is gone


class Network:
    def __init__(self) -> None:
        self.ledger = MemoryLedger()
        self.ledger.register(MINER.ss58)
        self.ledger.register(VALIDATOR.ss58, stake=1e6, validator_permit=True)
        self.ledger.commit(VALIDATOR.ss58, "where to read")
        self.nodes = [Node(self.ledger, SETTINGS.netuid) for _ in range(2)]
        self._chains: list[BittensorChain] = []

    def chain(
        self,
        *endpoints: str,
        substrate: Callable[[str], object] | None = NodeSubstrate,
        call_timeout: timedelta = SETTINGS.call_timeout,
    ) -> BittensorChain:
        first, *more = endpoints or [node.url for node in self.nodes]
        where = {"chain_endpoint": first, "fallback_endpoints": tuple(more)}
        settings = replace(SETTINGS, call_timeout=call_timeout, **where)
        chain = BittensorChain(settings=settings, wallet=MINER, substrate=substrate)
        self._chains.append(chain)
        return chain

    def ready(self, **how: Any) -> BittensorChain:
        chain = self.chain(**how)
        assert chain.wait_ready(timedelta(seconds=40))
        return chain

    def close(self) -> None:
        for chain in self._chains:
            chain.close()
        for node in self.nodes:
            node.close()


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    monkeypatch.setenv("BITTENSOR_RUNTIME_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(subtensor, "FIRST_PAUSE", timedelta(seconds=0.02))
    monkeypatch.setattr(subtensor, "LONGEST_PAUSE", timedelta(seconds=0.1))
    made = Network()
    yield made
    made.close()


def follows(network: Network, chain: BittensorChain) -> bool:
    network.ledger.advance()
    wait_for(lambda: chain.block() == network.ledger.height)
    return bool(wait_for(lambda: chain.age() < timedelta(seconds=2)))


def test_a_lost_connection_is_made_again(network: Network) -> None:
    chain = network.ready()
    for _ in range(3):
        before = sum(node.accepted for node in network.nodes)
        network.nodes[0].drop()
        network.nodes[1].drop()
        wait_for(lambda before=before: sum(node.accepted for node in network.nodes) > before)
        assert follows(network, chain)


@pytest.mark.parametrize("how", ["goes away", "hangs"])
def test_a_node_that_fails_is_left_for_the_next(network: Network, how: str, caplog) -> None:
    chain = network.ready(call_timeout=IMPATIENT)
    caplog.set_level(logging.WARNING, logger="distributed_training")
    if how == "hangs":  # connected, and not a word more
        network.nodes[0].silent = True
    else:
        network.nodes[0].stop()
    wait_for(lambda: network.nodes[1].accepted)
    assert follows(network, chain)
    assert chain.counters()["failures"] >= 1 and chain.counters()["connections"] >= 2
    line = next(m for m in caplog.messages if m.startswith("The chain at"))
    assert network.nodes[0].url in line and "--subtensor.chain_endpoint" in line
    # And back, when that one goes too.
    network.nodes[0].silent = False
    if how != "hangs":
        network.nodes[0].start()
    network.nodes[1].stop()
    known = network.nodes[0].accepted
    wait_for(lambda: network.nodes[0].accepted > known)
    assert follows(network, chain)


def test_a_first_endpoint_that_is_dead_or_mute_does_not_stop_the_start(network: Network) -> None:
    for node in network.nodes:
        node.stop()
    with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts, never shakes hands
        urls = [network.nodes[0].url, f"ws://127.0.0.1:{mute.getsockname()[1]}"]
        chain = network.chain(*urls, network.nodes[1].url, call_timeout=IMPATIENT)
        assert not chain.wait_ready(timedelta(milliseconds=300))  # nor the last one
        with pytest.raises(ChainUnavailable):
            chain.block()
        network.nodes[1].start()
        assert chain.wait_ready(timedelta(seconds=40))
        assert chain.uid(MINER.ss58) == 0


def test_the_sdk_by_itself_asks_for_the_metadata_and_is_not_waited_for(network: Network) -> None:
    """No substrate of ours in between: the SDK connects, asks for the runtime, and what this node
    cannot tell it is a failure of the node like any other."""
    chain = network.chain(substrate=None, call_timeout=IMPATIENT)
    wait_for(lambda: chain.counters().get("failures", 0) >= 2)
    assert all(node.accepted for node in network.nodes)
    asked = set(network.nodes[0].methods)
    assert asked & {"state_getRuntimeVersion", "state_getMetadata", "state_call"}, asked
    assert not chain.wait_ready(timedelta(0))
