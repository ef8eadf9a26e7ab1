"""Test how a member writes its values to the chain while the chain refuses them."""

from __future__ import annotations

import threading
import time

import pytest

from distributed_training.node import identity
from distributed_training.node.identity import Member
from tests.tools.chain_memory import MemoryChain, MemoryLedger
from tests.tools.chain_world import MINER
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(60)

TEXT = "a" * 32 + "b" * 32 + "c" * 64
ENDPOINT = ("1.2.3.4", 8091)


def registered() -> tuple[MemoryLedger, Member]:
    ledger = MemoryLedger()
    uid = ledger.register(MINER.ss58)
    return ledger, Member(MINER, MemoryChain(hotkey=MINER.ss58, ledger=ledger), uid)


def test_refused_announcement_is_written_later_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger, member = registered()
    chain = member.chain
    chain.neurons()
    waits: dict[str, list[float]] = {"commitment": [], "endpoint": []}
    real = time.sleep

    def sleep(seconds: float) -> None:
        waits.get(threading.current_thread().name, []).append(seconds)
        if all(len(w) >= 10 for w in waits.values()):
            ledger.up = True
        real(0.005)

    monkeypatch.setattr(identity.time, "sleep", sleep)
    ledger.up = False
    identity.commit(member, TEXT)
    identity.announce(member, *ENDPOINT)
    wait_for(lambda: chain.commitment(MINER.ss58) == TEXT and chain.neurons()[0].port == 8091)
    for seconds in waits.values():
        assert seconds[:10] == [2, 4, 8, 16, 32, 64, 128, 256, 512, 600]
    assert sorted(ledger.writes) == [("commit", MINER.ss58), ("serve", MINER.ss58)]


def test_of_two_endpoints_that_the_chain_refused_the_later_one_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger, member = registered()
    member.chain.neurons()
    real, over, refused = time.sleep, threading.Event(), []

    def sleep(seconds: float) -> None:
        thread = threading.current_thread()
        if thread.name != "endpoint":
            return real(seconds)
        refused.append(thread)
        over.wait(30) if thread is refused[0] else real(0.005)

    monkeypatch.setattr(identity.time, "sleep", sleep)
    ledger.up = False
    for number, ip in enumerate((ENDPOINT[0], "9.8.7.6")):
        identity.announce(member, ip, 8091)
        wait_for(lambda number=number: len(refused) > number)
    ledger.up = True
    wait_for(lambda: member.chain.neurons()[0].ip == "9.8.7.6")
    over.set()
    refused[0].join(30)
    assert member.chain.neurons()[0].ip == "9.8.7.6" and ledger.writes == [("serve", MINER.ss58)]
