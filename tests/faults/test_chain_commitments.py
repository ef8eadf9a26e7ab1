"""Entries that other hotkeys wrote: none hides a commitment or stops the block clock."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from distributed_training.chain import subtensor
from distributed_training.chain.base import ChainUnavailable
from distributed_training.chain.subtensor import BittensorChain
from tests.tools.chain_codec import EncodedSubstrate, encode
from tests.tools.chain_memory import MemoryLedger
from tests.tools.chain_substrate import QUICK_READS, LedgerSubstrate, commitment_entry
from tests.tools.chain_world import MINER, PEER, POOR, STRANGER, VALIDATOR
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(120)
LONG = timedelta(seconds=40)
SETTINGS = replace(QUICK_READS, call_timeout=timedelta(seconds=20))
TEXT = "m" * 128
KEYS = {"fields": [{"Raw128": "0x" + TEXT.encode().hex()}]}


@pytest.fixture(autouse=True)
def no_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITTENSOR_RUNTIME_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("BTCLI_TOKEN_SYMBOLS_CACHE", str(tmp_path / "symbols.json"))
    monkeypatch.setattr(subtensor, "FIRST_PAUSE", timedelta(milliseconds=5))
    monkeypatch.setattr(subtensor, "LONGEST_PAUSE", timedelta(milliseconds=20))


def subnet() -> MemoryLedger:
    """The master has committed; a peer has a uid and no commitment of the network's form."""
    ledger = MemoryLedger()
    for wallet in (MINER, VALIDATOR, PEER):
        ledger.register(wallet.ss58)
    ledger.commit(VALIDATOR.ss58, TEXT)
    return ledger


class Chain:
    """Both endpoints are one node. It is read from the first use of ``chain`` on."""

    def __init__(self, node: LedgerSubstrate) -> None:
        self.node = node

    @cached_property
    def chain(self) -> BittensorChain:
        return BittensorChain(settings=SETTINGS, wallet=MINER, substrate=lambda _: self.node)

    def look(self) -> None:
        """Wait until a look that began after this call has ended, and a block has passed."""
        for _ in range(2):
            self.node.ledger.advance()
            wait_for(lambda: self.chain.block() == self.node.ledger.height)

    def count(self, name: str) -> int:
        return self.chain.counters().get(name, 0)


@pytest.fixture
def made() -> Iterator[Chain]:
    made = Chain(LedgerSubstrate(subnet(), SETTINGS.netuid))
    yield made
    made.chain.close()


HOSTILE: dict[str, Any] = {
    "no hexadecimal number": {"info": {"fields": [{"Raw4": "0xzz"}]}},
    "a megabyte": {"info": {"fields": [{"Raw128": "0x" + "41" * 2**20}]}},
    "longer than it says": {"info": {"fields": [{"Raw3": "0x" + "41" * 128}]}},
    "an unknown field": {"info": {"fields": [{"Raw999": "0x41"}]}},
    "a hash": {"info": {"fields": [{"Sha256": "0x" + "41" * 32}]}},
    "timelocked": {
        "info": {"fields": [{"TimelockEncrypted": {"encrypted": "0xzz", "reveal_round": 5}}]}
    },
    "a unit": {"info": {"fields": ["ResetBondsFlag"]}},
    "two fields": {"info": {"fields": KEYS["fields"] * 2}},
    "no field": {"info": {"fields": []}},
    "no bytes": {"info": {"fields": [{"Raw0": []}]}},
    "no text": commitment_entry(b"\xff" * 128),
    "empty": {},
    "nothing": None,
    "a number": 5,
    "cannot be decoded": ValueError("no variant with index 255 in type 284"),
}


@pytest.mark.parametrize("entry", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_entry_hides_nothing(made: Chain, entry: Any) -> None:
    made.node.committed[PEER.ss58] = entry
    made.node.committed[STRANGER.ss58] = entry  # has no uid any more
    assert made.chain.wait_ready(LONG), "a start gets through"
    made.look()
    assert made.chain.commitment(VALIDATOR.ss58) == TEXT
    assert made.chain.commitment(PEER.ss58) is None
    assert entry is None or made.count("commitments_skipped") > 0
    made.node.ledger.register(POOR.ss58)
    made.node.ledger.commit(MINER.ss58, "new")
    wait_for(lambda: len(made.chain.neurons()) == 4)
    wait_for(lambda: made.chain.commitment(MINER.ss58) == "new")
    assert made.count("failures") == 0
    assert "RevealedCommitments" not in made.node.asked


def lost(error: str) -> BaseException:
    return {
        "decoder": ValueError("unexpected end of SCALE data"),
        "panic": type("PanicException", (BaseException,), {})("index out of bounds"),
        "node": RuntimeError("the node does not like this"),
    }[error]


@pytest.mark.parametrize("error", ["decoder", "panic", "node"])
@pytest.mark.parametrize(
    ("item", "part"), [("get_metagraph", "neurons"), ("CommitmentOf", "commitments")]
)
def test_neurons_and_commitments_fail_separately(
    made: Chain, caplog, item: str, part: str, error: str
) -> None:
    caplog.set_level(logging.WARNING)
    assert made.chain.wait_ready(LONG)
    made.node.broken[item] = lost(error)
    made.node.ledger.register(POOR.ss58)
    made.node.ledger.commit(VALIDATOR.ss58, "n" * 128)
    other = {
        "commitments": lambda: len(made.chain.neurons()) == 4,
        "neurons": lambda: made.chain.commitment(VALIDATOR.ss58) == "n" * 128,
    }
    wait_for(other[part])
    before = made.count(f"{part}_failed")
    for _ in range(5):
        made.look()
    wait_for(lambda: made.count(f"{part}_failed") > before)
    # The last known value stays, and one line names the read that failed.
    if part == "neurons":
        assert made.chain.uid(MINER.ss58) == 0 and len(made.chain.neurons()) == 3
    else:
        assert made.chain.commitment(VALIDATOR.ss58) == TEXT
    (line,) = caplog.messages
    assert f"({part}: " in line and "--subtensor.chain_endpoint" in line
    del made.node.broken[item]
    wait_for(lambda: len(made.chain.neurons()) == 4)
    wait_for(lambda: made.chain.commitment(VALIDATOR.ss58) == "n" * 128)


def test_a_start_needs_no_commitments_and_says_that_they_are_not_known(made: Chain) -> None:
    made.node.broken["CommitmentOf"] = lost("decoder")
    assert made.chain.wait_ready(LONG)
    made.look()
    assert made.chain.uid(MINER.ss58) == 0
    with pytest.raises(ChainUnavailable, match="commitments"):
        made.chain.commitment(VALIDATOR.ss58)
    del made.node.broken["CommitmentOf"]

    def known() -> bool:
        try:
            return made.chain.commitment(VALIDATOR.ss58) == TEXT
        except ChainUnavailable:
            return False

    wait_for(known)


def test_a_token_symbol_that_cannot_be_decoded_keeps_nobody_out(made: Chain) -> None:
    made.node.broken["TokenSymbol"] = ValueError("non-hexadecimal number found")
    assert made.chain.wait_ready(LONG)
    made.look()
    assert "TokenSymbol" in made.node.asked


# --- through the SDK's decoder -------------------------------------------------------------------

raw_fields = st.binary(max_size=128).map(lambda raw: {f"Raw{len(raw)}": raw})
others = st.one_of(
    st.just("None"),
    st.just("ResetBondsFlag"),
    st.binary(min_size=32, max_size=32).map(lambda raw: {"Sha256": raw}),
    st.binary(max_size=512).map(lambda raw: {"BigRaw": raw}),
    st.tuples(
        st.sampled_from(["TimelockEncrypted", "TimelockRevealFailed"]), st.binary(max_size=1024)
    ).map(lambda made: {made[0]: {"encrypted": made[1], "reveal_round": 7}}),
)
entries = st.lists(st.one_of(raw_fields, others), max_size=3).map(encode)
KNOWN = encode([{"Raw128": TEXT.encode()}])


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """An entry of which bytes were changed, cut off or appended."""
    whole = bytearray(draw(entries))
    for _ in range(draw(st.integers(1, 4))):
        whole[draw(st.integers(0, len(whole) - 1))] = draw(st.integers(0, 255))
    return bytes(whole[: draw(st.integers(0, len(whole)))]) + draw(st.binary(max_size=4))


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    made = Chain(EncodedSubstrate(subnet(), SETTINGS.netuid))
    assert made.chain.wait_ready(LONG)
    yield made
    made.chain.close()


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(stored=st.lists(st.one_of(entries, damaged(), st.binary(max_size=300)), max_size=3))
@example(stored=[encode([{"Raw4": b"0xzz"}])])
@example(stored=[encode([{"BigRaw": b"0xzz"}])])
@example(stored=[KNOWN + bytes(2**20)])
@example(stored=[KNOWN[:13] + b"\xff" + KNOWN[14:]])
@example(stored=[b""])
@example(stored=[encode([{"Raw128": b"\xff" * 128}])])
def test_no_entry_stops_the_clock_or_hides_a_commitment(encoded: Chain, stored) -> None:
    node, chain = encoded.node, encoded.chain
    assert isinstance(node, EncodedSubstrate)
    node.stored = dict(zip((PEER.ss58, STRANGER.ss58, MINER.ss58), stored, strict=False))
    text = f"{node.ledger.height:0128d}"
    node.ledger.commit(VALIDATOR.ss58, text)
    maps_read = node.maps_read
    node.ledger.advance()
    wait_for(lambda: chain.block() == node.ledger.height)
    wait_for(lambda: chain.commitment(VALIDATOR.ss58) == text)
    wait_for(lambda: node.maps_read > maps_read + 1)
    assert "RevealedCommitments" not in node.asked
    assert encoded.count("neurons_failed") == 0
    assert encoded.count("commitments_failed") == 0
