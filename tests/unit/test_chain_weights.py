"""Weights on a subnet of one's own, plain or sealed, in the calls of a real runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bittensor import timelock
from bittensor._transport.storage import decode_storage_value
from bittensor.result import ExtrinsicResult

from distributed_training.chain.base import ChainError
from distributed_training.chain.identity import create_wallet
from distributed_training.chain.subtensor import BittensorChain
from distributed_training.config.settings import ChainSettings
from tests.tools.chain_codec import EncodedSubstrate, codec
from tests.tools.chain_memory import MemoryLedger

pytestmark = pytest.mark.timeout(60)
NETUID = 3


class RuntimeSubstrate(EncodedSubstrate):
    """Answers for storage with what is in ``storage``, else with the runtime's default; takes calls
    that its metadata can encode. ``calls``: name and arguments, as a node decodes them."""

    def __init__(self, **storage: Any) -> None:
        super().__init__(MemoryLedger(), NETUID)
        self.storage = {"MinAllowedWeights": 1, **storage}
        self.calls: list[tuple[str, dict[str, Any]]] = []

    async def query(self, module: str, item: str, params: Any = None, **_: Any) -> Any:
        if module != "SubtensorModule" or item == "Uids":
            return await super().query(module, item, params)
        entry = codec().storage_entry(module, item)  # raises for an item it does not have
        return self.storage.get(item, decode_storage_value(codec(), entry, None))

    async def submit(self, call: Any, keypair: Any, **_: Any) -> ExtrinsicResult:
        composed = codec().compose_call(call.module, call.function, call.params)
        node = codec().decode_call(codec().call_data(composed))
        self.calls.append(
            (node["call_function"], {a["name"]: a["value"] for a in node["call_args"]})
        )
        self.signers.append(keypair.ss58_address)
        return ExtrinsicResult(success=True, message="Success")


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setenv("BITTENSOR_RUNTIME_CACHE_DIR", str(tmp_path / "cache"))
    wallet = create_wallet(tmp_path, "validator")
    settings = replace(ChainSettings(), netuid=NETUID, chain_endpoint="ws://127.0.0.1:1")
    chains = []

    def at(node: RuntimeSubstrate) -> BittensorChain:
        node.ledger.register(wallet.ss58, stake=1e6, validator_permit=True)
        node.ledger.register("5Other")
        chain = BittensorChain(settings=settings, wallet=wallet, substrate=lambda _: node)
        chains.append(chain)
        return chain

    yield at
    for chain in chains:
        chain.close()


def test_weights_are_sealed_where_the_subnet_wants_it(opened: Callable[..., Any]) -> None:
    """Until the drand round that the call names nobody can read them, the validator neither."""
    node = RuntimeSubstrate(CommitRevealWeightsEnabled=True, RevealPeriodEpochs=1, Tempo=360)
    opened(node).set_weights({0: 0.25, 1: 0.75})
    ((name, call),) = node.calls
    assert name == "commit_timelocked_mechanism_weights" and node.signers == [
        node.ledger.neurons[0].hotkey
    ]
    assert (call["netuid"], call["mecid"], call["commit_reveal_version"]) == (NETUID, 0, 4)
    ahead = call["reveal_round"] - timelock.current_round()
    assert 0 < ahead * timelock.QUICKNET_PERIOD <= 3 * 360 * 12
    opened(again := RuntimeSubstrate(**node.storage)).set_weights({0: 0.25, 1: 0.75})
    assert len(call["commit"]) > 200 and again.calls[0][1]["commit"] != call["commit"]


def test_weights_are_plain_where_it_does_not(opened: Callable[..., Any]) -> None:
    node = RuntimeSubstrate(CommitRevealWeightsEnabled=False)
    opened(node).set_weights({0: 0.25, 1: 0.75})
    ((name, call),) = node.calls
    assert name == "set_mechanism_weights" and call["dests"] == [0, 1]
    assert call["weights"] == [21845, 65535] and call["version_key"] == 0


@pytest.mark.parametrize(
    ("storage", "why"),
    [
        ({"WeightsSetRateLimit": 100, "LastUpdate": [990, 0]}, "rate limit is 100 blocks. Retry"),
        ({"MinAllowedWeights": 3}, "3"),
    ],
)
def test_refused_weights_are_a_line_with_the_reason(
    storage: dict[str, Any], why: str, opened: Callable[..., Any]
) -> None:
    node = RuntimeSubstrate(**storage)
    with pytest.raises(ChainError, match=why):
        opened(node).set_weights({0: 0.25, 1: 0.75})
    assert not node.calls
