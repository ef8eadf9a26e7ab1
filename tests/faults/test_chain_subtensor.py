"""Test the public chain in outages, with hostile members, and with impossible lists of members."""

from __future__ import annotations

import logging
import lzma
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from bittensor import calls
from bittensor._transport.codec import RuntimeCodec

from distributed_training.chain import subtensor
from distributed_training.chain.base import ChainError, ChainUnavailable
from distributed_training.chain.identity import create_wallet
from distributed_training.chain.subtensor import BittensorChain
from distributed_training.common.ports import free_ports
from tests.tools.chain_memory import MemoryLedger
from tests.tools.chain_substrate import QUICK, QUICK_READS, LedgerSubstrate, commitment_entry
from tests.tools.chain_world import PEER, VALIDATOR
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(60)
LONG = timedelta(seconds=20)
SOON = timedelta(milliseconds=200)
TEXT = "m" * 128
METADATA = Path(__file__).parents[1] / "vectors" / "subtensor_metadata.xz"


class World:
    """A subnet of the master (uid 0), us (1) and a peer (2), and chains that read it."""

    def __init__(self, folder: Path) -> None:
        self.wallet = create_wallet(folder, "me")
        self.ledger = MemoryLedger()
        for hotkey in (VALIDATOR.ss58, self.wallet.ss58, PEER.ss58):
            self.ledger.register(hotkey)
        self.ledger.commit(VALIDATOR.ss58, TEXT)
        self.node = LedgerSubstrate(self.ledger, QUICK_READS.netuid)
        self.now = 0.0
        self.settings = replace(QUICK_READS, call_timeout=LONG)
        self.opened: list[BittensorChain] = []

    def open(self, **changes: Any) -> BittensorChain:
        chain = BittensorChain(
            settings=replace(self.settings, **changes),
            wallet=self.wallet,
            master=VALIDATOR.ss58,
            substrate=None if "chain_endpoint" in changes else self.node,
            monotonic=lambda: self.now,
        )
        self.opened.append(chain)
        return chain

    def look(self, chain: BittensorChain) -> None:
        """Wait until a read that began after this call has succeeded."""
        wait_for(lambda before=chain.counters()["reads"]: chain.counters()["reads"] > before + 1)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("BITTENSOR_RUNTIME_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("BTCLI_TOKEN_SYMBOLS_CACHE", str(tmp_path / "symbols.json"))
    made = World(tmp_path)
    yield made
    for chain in made.opened:
        chain.close()
    threads = {thread.name for thread in threading.enumerate()}
    assert not threads & {"subtensor", "chain"}, "a chain that is closed has no thread"


def panics(world: World) -> None:
    panic = type("PanicException", (BaseException,), {})
    world.node.broken["get_metagraph"] = panic("index out of bounds")


def others(world: World) -> None:
    world.ledger.clear()
    world.ledger.register("5Other")


SCALE = ValueError("unexpected end\nof SCALE data")
TROUBLES: dict[str, tuple[Callable[[World], object], str]] = {
    "away": (lambda w: setattr(w.ledger, "up", False), "RpcConnectionError: connection refused"),
    "silent": (lambda w: setattr(w.node, "silent", True), "no answer from the chain within 0 s"),
    "panics": (panics, "PanicException: index out of bounds"),
    "scale": (lambda w: w.node.broken.update(get_metagraph=SCALE), "unexpected end of SCALE data"),
    "nobody": (lambda w: w.ledger.clear(), "it shows no members at all on subnet"),
    "others": (others, f"its list of members lacks the master hotkey {VALIDATOR.ss58}"),
}


@pytest.mark.parametrize(("trouble", "why"), TROUBLES.values(), ids=TROUBLES)
def test_trouble_leaves_the_last_known_state_and_one_line(
    trouble: Callable[[World], object], why: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    chain = world.open(call_timeout=SOON)
    assert chain.wait_ready(LONG)
    before, kept = chain.neurons(), world.ledger.save()
    world.now += 100.0
    trouble(world)
    wait_for(lambda: why in chain.trouble)
    failures = chain.counters()["failures"]
    wait_for(lambda: chain.counters()["failures"] > failures + 2)
    began = time.monotonic()
    assert chain.neurons() is before and chain.commitment(VALIDATOR.ss58) == TEXT
    assert chain.age() == timedelta(seconds=100)
    assert time.monotonic() - began < 0.1, "no read waits for the chain"
    (line,) = [m for m in caplog.messages if "cannot be read" in m]
    assert why in line and "training continues" in line and "--subtensor.chain_endpoint" in line
    world.ledger.up, world.node.silent = True, False
    world.node.broken.clear()
    world.ledger.restore(kept)
    wait_for(lambda: not chain.trouble)
    assert "answers again" in caplog.text and chain.age() == timedelta(0)
    # The call that answered last may not have closed its connection yet.
    wait_for(lambda: world.node.closed >= world.node.connections > 0)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_start_in_trouble_knows_nothing(trouble: str, world: World) -> None:
    TROUBLES[trouble][0](world)
    chain = world.open(call_timeout=SOON)
    wait_for(lambda: chain.trouble)
    assert not chain.wait_ready(QUICK)
    with pytest.raises(ChainUnavailable):
        chain.neurons()


def test_a_write_to_a_silent_chain_ends(world: World) -> None:
    chain = world.open(call_timeout=SOON)
    assert chain.wait_ready(LONG)
    world.node.silent = True
    with pytest.raises(ChainError, match=r"^commit: no answer from the chain within 0 s$"):
        chain.commit("text")
    chain.close()
    with pytest.raises(ChainError, match=r"^commit: the chain was closed$"):
        chain.commit("text")


def test_a_close_ends_what_waits(world: World) -> None:
    world.node.silent = True
    chain, failed = world.open(), list[str]()

    def write() -> None:
        with pytest.raises(ChainError) as caught:
            chain.commit("text")
        failed.append(str(caught.value))

    writer = threading.Thread(target=write)
    writer.start()
    began = time.monotonic()
    chain.close()
    writer.join(10)
    assert failed == ["commit: the chain was closed"] and time.monotonic() - began < 5


@pytest.mark.parametrize("mute", [False, True])
def test_an_endpoint_that_is_dead_or_mute_is_a_line(mute: bool, world: World) -> None:
    """The client's own websocket connects to a port where nobody listens, or nobody answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0) if mute else ("127.0.0.1", free_ports(1)[0]))
        if mute:
            listener.listen()
        url = f"ws://127.0.0.1:{listener.getsockname()[1]}"
        chain = world.open(chain_endpoint=url, call_timeout=timedelta(seconds=1))
        wait_for(lambda: chain.trouble)
        assert ("no answer from the chain within 1 s" in chain.trouble) == mute
        chain.close()


HOSTILE: dict[str, Any] = {
    "no hexadecimal number": {"info": {"fields": [{"Raw4": "0xzz"}]}},
    "a megabyte": {"info": {"fields": [{"Raw128": "0x" + "41" * 2**20}]}},
    "longer than it says": {"info": {"fields": [{"Raw3": "0x" + "41" * 128}]}},
    "an unknown field": {"info": {"fields": [{"Raw999": "0x41"}]}},
    "a hash": {"info": {"fields": [{"Sha256": "0x" + "41" * 32}]}},
    "timelocked": {"info": {"fields": [{"TimelockEncrypted": {"encrypted": "0xzz"}}]}},
    "a unit": {"info": {"fields": ["ResetBondsFlag"]}},
    "two fields": {"info": {"fields": [{"Raw1": "0x41"}] * 2}},
    "no field": {"info": {"fields": []}},
    "no bytes": {"info": {"fields": [{"Raw0": []}]}},
    "no text": commitment_entry(b"\xff" * 128),
    "empty": {},
    "nothing": None,
    "a number": 5,
    "a path": {"public_key": "../../etc/passwd" * 3, "algorithm": 0},
    "a short id": {"public_key": "12D3KooW", "algorithm": 0},
    "bytes": {"public_key": "0x" + "ff" * 64, "algorithm": 1},
}


@pytest.mark.parametrize("entry", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_entry_hides_nothing(entry: Any, world: World) -> None:
    for hotkey in (PEER.ss58, "5Stranger"):
        world.node.committed[hotkey] = world.node.certified[hotkey] = entry
    chain = world.open()
    assert chain.wait_ready(LONG), chain.trouble
    assert chain.commitment(VALIDATOR.ss58) == TEXT and chain.commitment(PEER.ss58) is None
    assert [n.peer for n in chain.neurons()] == ["", "", ""]


@pytest.mark.parametrize("item", ["CommitmentOf", "NeuronCertificates", "TokenSymbol"])
def test_a_map_that_cannot_be_read_hides_no_member(item: str, world: World) -> None:
    world.node.broken[item] = ValueError("no variant with index 255 in type 284")
    chain = world.open()
    assert chain.wait_ready(LONG), chain.trouble
    assert len(chain.neurons()) == 3
    if item == "CommitmentOf":
        with pytest.raises(ChainUnavailable, match="could not be read yet"):
            chain.commitment(VALIDATOR.ss58)
    world.node.broken.clear()
    world.look(chain)
    assert chain.commitment(VALIDATOR.ss58) == TEXT
    world.node.broken["CommitmentOf"] = RuntimeError("again")
    world.look(chain)
    assert chain.commitment(VALIDATOR.ss58) == TEXT, "the last known ones"


def test_a_real_runtime_knows_what_is_written_and_read() -> None:
    """The metadata of spec 461 come from the tests of bittensor 11.3.0 (Apache-2.0)."""
    codec = RuntimeCodec(
        lzma.decompress(METADATA.read_bytes()), spec_version=461, transaction_version=1
    )
    info = {"fields": [{"Raw128": TEXT.encode()}]}
    axon = {"version": 1, "ip": 5, "port": 8091, "ip_type": 4, "protocol": 4}
    axon |= {"placeholder1": 0, "placeholder2": 0}
    peer = "12D3KooWJ9mZ8yWcS1zbPvH3YyTAnx5nGcQBUd4MR9S3Mm1kE2rT"
    for call in (
        calls.Commitments.set_commitment(netuid=3, info=info),
        calls.SubtensorModule.serve_axon(netuid=3, **axon),
        calls.SubtensorModule.serve_axon_tls(netuid=3, **axon, certificate=b"\0" + peer.encode()),
    ):
        composed = codec.compose_call(call.module, call.function, call.params)
        assert codec.decode_call(codec.call_data(composed))["call_function"] == call.function
    for item, value, read in (
        (subtensor._COMMITMENTS, {"deposit": 0, "block": 5, "info": info}, TEXT),
        (subtensor._CERTIFICATES, {"public_key": peer.encode(), "algorithm": 0}, peer),
    ):
        kind = codec.storage_entry(*item).value_type
        text_of = {TEXT: subtensor._committed, peer: subtensor._peer_id}[read]
        assert text_of(codec.decode(kind, codec.encode(kind, value))) == read
