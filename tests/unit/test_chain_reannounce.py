"""What a reorganization takes off the chain is put back by the miner itself."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from distributed_training.chain import registration
from distributed_training.chain.memory import MemoryChain, MemoryLedger
from distributed_training.miner import network
from distributed_training.miner.network import DEREGISTERED, FAULT, Outside, _commit
from tests.chain_world import MINER, until

pytestmark = pytest.mark.timeout(60)

CONFIG: Any = SimpleNamespace(
    chain=SimpleNamespace(external_port=None),
    store=SimpleNamespace(
        account_id="a" * 32,
        read_access_key_id=SecretStr("b" * 32),
        read_secret_access_key=SecretStr("c" * 64),
    ),
)


def outside_of(chain: MemoryChain, uid: int, text: str) -> Outside:
    nothing: Any = None
    return Outside(
        config=CONFIG,
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


def test_endpoint_and_commitment_come_back_and_a_second_miner_does_not_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Outside, "_registration_interval", lambda self: timedelta(milliseconds=5))
    ledger = MemoryLedger()
    uid = ledger.register(MINER.ss58)
    chain = MemoryChain(hotkey=MINER.ss58, ledger=ledger)
    before = dict(ledger.entries)
    text = _commit(CONFIG, chain, MINER)
    until(lambda: ledger.commitments)
    outside = outside_of(chain, uid, text)
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


def test_another_uid_ends_the_miner_for_a_new_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outside, "_registration_interval", lambda self: timedelta(milliseconds=5))
    ledger = MemoryLedger()
    uid = ledger.register(MINER.ss58)
    chain = MemoryChain(hotkey=MINER.ss58, ledger=ledger)
    stops: list[tuple[str, int]] = []
    with ExitStack() as stack:
        outside_of(chain, uid, "").follow_registration(
            8091, lambda reason, status: stops.append((reason, status)), stack
        )
        ledger.register(MINER.ss58, uid=41)
        ((reason, status),) = until(lambda: stops)
        assert status == FAULT and "41" in reason


def test_what_the_chain_does_not_take_is_written_later_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger = MemoryLedger()
    uid = ledger.register(MINER.ss58)
    chain = MemoryChain(hotkey=MINER.ss58, ledger=ledger)
    chain.block()
    waits: dict[str, list[float]] = {"commitment": [], "announce": []}
    real = time.sleep

    def sleep(seconds: float) -> None:
        waits.get(threading.current_thread().name, []).append(seconds)
        if all(len(w) >= 9 for w in waits.values()):
            ledger.up = True
        real(0.005)

    monkeypatch.setattr(network.time, "sleep", sleep)
    ledger.up = False
    text = _commit(CONFIG, chain, MINER)
    outside_of(chain, uid, text).announce(8091)
    until(lambda: chain.commitment(MINER.ss58) == text and chain.neurons()[0].port == 8091)
    assert waits["commitment"][:9] == [5, 10, 20, 40, 80, 160, 320, 600, 600]
    assert waits["announce"][:9] == [2, 4, 8, 16, 32, 64, 128, 256, 300]
    assert sorted(ledger.writes) == [("commit", MINER.ss58), ("serve", MINER.ss58)]
