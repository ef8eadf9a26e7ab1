"""What a reorganization takes off the chain is put back by the miner itself."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from distributed_training.chain import registration
from distributed_training.chain.memory import MemoryChain, MemoryLedger
from distributed_training.miner.network import DEREGISTERED, Outside, _commit
from tests.chain_world import MINER, until

pytestmark = pytest.mark.timeout(60)


def test_endpoint_and_commitment_come_back_and_a_second_miner_does_not_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Outside, "_registration_interval", lambda self: timedelta(milliseconds=5))
    ledger = MemoryLedger()
    uid = ledger.register(MINER.ss58)
    chain = MemoryChain(hotkey=MINER.ss58, ledger=ledger)
    config: Any = SimpleNamespace(
        chain=SimpleNamespace(external_port=None),
        store=SimpleNamespace(
            account_id="a" * 32,
            read_access_key_id=SecretStr("b" * 32),
            read_secret_access_key=SecretStr("c" * 64),
        ),
    )
    before = dict(ledger.entries)
    text = _commit(config, chain, MINER)
    until(lambda: ledger.commitments)
    nothing: Any = None
    outside = Outside(
        config=config,
        folder=Path("unused"),
        wallet=MINER,
        chain=chain,
        uid=uid,
        ip="1.2.3.4",
        commitment=text,
        bucket="",
        global_bucket=nothing,
        global_outer_step=0,
        global_folder=Path("unused"),
        model_config={},
        tokenizer_path=Path("unused"),
        eos_id=0,
        published_at=None,
    )
    stops: list[tuple[str, int]] = []
    with ExitStack() as stack:
        outside.announce(8091)
        outside.follow_registration(
            8091, lambda reason, status: stops.append((reason, status)), stack
        )
        for _ in range(registration.TAKEN_BACK_AT_MOST):
            until(lambda: chain.neurons()[0].port == 8091 and chain.commitment(MINER.ss58) == text)
            written = len(ledger.writes)
            until(lambda r=chain.reads(): chain.reads() > r + 20)
            assert len(ledger.writes) == written and stops == []  # nothing is written twice
            ledger.entries, ledger.commitments = dict(before), {}
        until(lambda: chain.neurons()[0].port == 8091 and chain.commitment(MINER.ss58) == text)
        MemoryChain(hotkey=MINER.ss58, ledger=ledger).serve("5.6.7.8", 8091)
        ((reason, status),) = until(lambda: stops)
        assert status == DEREGISTERED and "--wallet.hotkey" in reason
