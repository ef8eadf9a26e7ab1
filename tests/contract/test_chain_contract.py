"""Test what all chains have in common: memory, a registry, and Subtensor through the SDK."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest

from distributed_training.chain.base import Chain, ChainError, ChainUnavailable, find
from distributed_training.chain.identity import Wallet, create_wallet
from distributed_training.chain.kinds import chain_kind
from distributed_training.chain.registry import RegistryChain
from distributed_training.chain.subtensor import BittensorChain
from distributed_training.config.settings import ChainSettings
from distributed_training.telemetry.metrics import CHAIN_COUNTS
from tests.tools.chain_memory import MemoryChain, MemoryLedger
from tests.tools.chain_server_thread import RegistryServer
from tests.tools.chain_substrate import QUICK, QUICK_READS, LedgerSubstrate
from tests.tools.chain_world import registry_at
from tests.tools.notebook import running_loop
from tests.tools.waiting import wait_for
from tests.toys import chain as toy

pytestmark = pytest.mark.timeout(60)
LONG = timedelta(seconds=10)
SETTINGS = replace(QUICK_READS, call_timeout=LONG)
PEER = "12D3KooWJ9mZ8yWcS1zbPvH3YyTAnx5nGcQBUd4MR9S3Mm1kE2rT"


@dataclass
class Setup:
    chain: Chain  # the validator's, which has uid 0
    me: Wallet
    other: Wallet  # uid 1, a miner
    other_chain: Chain
    down: Callable[[], None]
    up: Callable[[], None]
    deregister_other: Callable[[], None]


@pytest.fixture(autouse=True, params=["script", "notebook"])
def caller(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test as in a script and as in a notebook, whose thread already runs a loop."""
    with running_loop() if request.param == "notebook" else nullcontext():
        yield


@pytest.fixture
def setup(made: Setup) -> Setup:
    """Wait until both chains have answered."""
    for chain in (made.chain, made.other_chain):
        assert chain.wait_ready(timedelta(seconds=10))
    return made


@pytest.fixture(params=["memory", "registry", "subtensor"])
def made(request, tmp_path: Path, monkeypatch) -> Iterator[Setup]:
    monkeypatch.setenv("BITTENSOR_RUNTIME_CACHE_DIR", str(tmp_path / "cache"))
    me, other = (create_wallet(tmp_path / "wallets", name) for name in ("me", "other"))
    if request.param == "registry":
        server = RegistryServer(tmp_path / "registry", master=me.ss58)
        server.start()
        mine = registry_at(server.url, me, me.ss58, poll_interval=QUICK)
        others = registry_at(server.url, other, poll_interval=QUICK)
        others.register()

        def gone() -> None:
            server.registry.expel(other.ss58)

        yield Setup(mine, me, other, others, server.stop, lambda: server.start(), gone)
        mine.close()
        others.close()
        server.stop()
        return
    ledger = MemoryLedger()
    ledger.register(me.ss58, validator_permit=True)
    ledger.register(other.ss58)
    chains: list[Chain] = []
    for wallet in (me, other):
        if request.param == "memory":
            monkeypatch.setattr(toy, "LEDGER", ledger)
            settings = ChainSettings(kind="memory")
            chains.append(chain_kind(settings).open(settings, wallet, None))
        else:
            substrate = LedgerSubstrate(ledger, SETTINGS.netuid)
            chains.append(BittensorChain(settings=SETTINGS, wallet=wallet, substrate=substrate))
    yield Setup(
        chains[0],
        me,
        other,
        chains[1],
        lambda: setattr(ledger, "up", False),
        lambda: setattr(ledger, "up", True),
        lambda: ledger.deregister(other.ss58),
    )
    for chain in chains:
        chain.close()


def reads_of(chain: Chain) -> int:
    """Return how many reads were made. A chain in memory makes one whenever it is asked."""
    chain.neurons()
    return chain.counters()["reads"]


def test_registered_neurons(setup: Setup) -> None:
    wait_for(lambda: setup.chain.uid(setup.other.ss58) == 1)
    first, second = setup.chain.neurons()
    assert (first.uid, first.hotkey, first.validator_permit) == (0, setup.me.ss58, True)
    assert (second.uid, second.port, second.validator_permit) == (1, None, False)
    assert setup.chain.uid(setup.me.ss58) == 0
    assert setup.chain.uid("5EnC86fRRRoaXUZvkrDFYpAihuyEAp3wGkY5r3Gak1kPTDVP") is None


def test_the_age_is_that_of_the_last_read(setup: Setup) -> None:
    assert setup.chain.age() < timedelta(seconds=5)


def test_the_neurons_are_one_object_until_something_changes(setup: Setup) -> None:
    wait_for(lambda: len(setup.chain.neurons()) == 2)
    before, read = setup.chain.neurons(), reads_of(setup.chain)
    wait_for(lambda: reads_of(setup.chain) > read + 3)
    assert setup.chain.neurons() is before


def test_reads_are_counted_also_when_nothing_changes(setup: Setup) -> None:
    seen: list[int] = []
    setup.chain.on_read = lambda: seen.append(setup.chain.counters()["reads"])
    wait_for(lambda: (setup.chain.neurons(), len(seen) > 2)[1])
    assert seen == sorted(set(seen))
    counted = {f"chain_{name}_total" for name in setup.chain.counters()}
    assert counted <= CHAIN_COUNTS.keys(), "each says in the metrics what it means"


def test_commitments(setup: Setup) -> None:
    assert setup.chain.commitment(setup.me.ss58) is None
    text = "0123456789abcdef" * 8
    setup.chain.commit(text)
    assert setup.chain.commitment(setup.me.ss58) == text
    wait_for(lambda: setup.other_chain.commitment(setup.me.ss58) == text)
    with pytest.raises(ChainError):
        setup.chain.commit("x" * 1026)
    assert setup.chain.commitment(setup.me.ss58) == text


@pytest.mark.parametrize("ip", ["10.1.2.3", "2001:db8::7"])
@pytest.mark.parametrize("peer", ["", PEER])
def test_addresses_of_peers(setup: Setup, ip: str, peer: str) -> None:
    setup.other_chain.serve(ip, 8091, peer)

    def seen() -> bool:
        found = find(setup.chain.neurons(), setup.other.ss58)
        return found is not None and (found.ip, found.port, found.peer) == (ip, 8091, peer)

    wait_for(seen)


def test_weights_need_a_permit(setup: Setup) -> None:
    setup.chain.set_weights({1: 0.7})
    if isinstance(setup.chain, RegistryChain):
        return  # a registry has no weights
    with pytest.raises(ChainError):
        setup.other_chain.set_weights({0: 1.0})


def test_a_deregistered_hotkey(setup: Setup) -> None:
    wait_for(lambda: setup.chain.uid(setup.other.ss58) == 1)
    setup.deregister_other()
    wait_for(lambda: setup.chain.uid(setup.other.ss58) is None)
    with pytest.raises(ChainError):
        setup.other_chain.commit("x")


def test_a_chain_that_goes_down_keeps_its_last_state_and_comes_back(setup: Setup) -> None:
    wait_for(lambda: len(setup.chain.neurons()) == 2)
    neurons = setup.chain.neurons()
    setup.down()
    with pytest.raises(ChainError):
        setup.chain.commit("y")
    # The last known state is still there, without a wait.
    assert list(setup.chain.neurons()) == list(neurons)
    setup.up()
    read = reads_of(setup.chain)
    wait_for(lambda: reads_of(setup.chain) > read)

    def written() -> bool:
        try:
            setup.chain.commit("z")
        except ChainError:
            return False
        return True

    wait_for(written)
    assert setup.chain.commitment(setup.me.ss58) == "z"


def test_a_chain_that_never_answers(tmp_path: Path) -> None:
    dead = registry_at("http://127.0.0.1:1", None, poll_interval=QUICK)
    ledger = MemoryLedger()
    ledger.up = False
    substrate = LedgerSubstrate(ledger, SETTINGS.netuid)
    chains: list[Chain] = [
        dead,
        MemoryChain(hotkey="", ledger=ledger),
        BittensorChain(settings=SETTINGS, wallet=None, substrate=substrate),
    ]
    for chain in chains:
        assert not chain.wait_ready(timedelta(milliseconds=100))
        assert chain.age() == timedelta.max
        for read in (chain.neurons, lambda c=chain: c.uid("x")):
            with pytest.raises(ChainUnavailable):
                read()
        chain.close()
