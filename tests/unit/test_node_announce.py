"""Test that the miner writes again the values that a reorganization takes off the chain."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from distributed_training.chain import registration
from distributed_training.node import identity
from distributed_training.node.identity import Member
from distributed_training.protocol.types import ExitStatus
from tests.tools.chain_memory import MemoryChain, MemoryLedger
from tests.tools.chain_world import MINER, VALIDATOR
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(60)

TEXT = "a" * 32 + "b" * 32 + "c" * 64
ENDPOINT = ("1.2.3.4", 8091)
OFTEN = timedelta(milliseconds=5)


Stops = list[tuple[str, int]]


def registered() -> tuple[MemoryLedger, Member]:
    ledger = MemoryLedger()
    uid = ledger.register(MINER.ss58)
    return ledger, Member(MINER, MemoryChain(hotkey=MINER.ss58, ledger=ledger), uid)


@contextlib.contextmanager
def following(
    member: Member, *, commitment: str = "", moved: list[str] | None = None, **more: Any
) -> Iterator[Stops]:
    """Follow the registration often; why it was stopped, and with which status."""
    moved = [] if moved is None else moved
    stops: Stops = []
    usual: dict[str, Any] = {"belief": registration.Belief(), "public_ip": lambda: None}
    watcher = identity.follow_registration(
        member,
        endpoint=ENDPOINT,
        commitment=commitment,
        stop=lambda reason, status: stops.append((reason, status)),
        on_read=lambda: None,
        interval=OFTEN,
        moved=moved.append,
        **usual | more,
    )
    with contextlib.closing(watcher):
        yield stops


def test_endpoint_and_commitment_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "REWRITE_EVERY", 0.0)
    ledger, member = registered()
    chain, before = member.chain, ledger.save()
    identity.commit(member, TEXT)
    wait_for(lambda: ledger.commitments)
    identity.announce(member, *ENDPOINT)
    with following(member, commitment=TEXT) as stops:
        for _ in range(3):
            wait_for(
                lambda: chain.neurons()[0].port == 8091 and chain.commitment(MINER.ss58) == TEXT
            )
            written = len(ledger.writes)
            wait_for(lambda r=chain.reads(): chain.reads() > r + 20)
            assert len(ledger.writes) == written and stops == []  # nothing is written twice
            ledger.restore(before)
        wait_for(lambda: chain.neurons()[0].port == 8091 and chain.commitment(MINER.ss58) == TEXT)


def test_another_public_address_is_written_to_the_chain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(identity, "ASK_EVERY", OFTEN)
    ledger, member = registered()
    old, new = ENDPOINT[0], "9.8.7.6"
    # Not asked, a detour over another address, an answer that does not come, no descriptor to ask
    # with, and the change.
    full = OSError(24, "Too many open files")
    told = [None, old, "5.5.5.5", old, "5.5.5.5", None, "5.5.5.5", full, new, new]

    def on_chain() -> str:
        return member.chain.neurons()[0].ip

    identity.announce(member, *ENDPOINT)
    wait_for(lambda: on_chain() == old)

    def public_ip() -> str | None:
        answer = told.pop(0) if len(told) > 1 else told[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    moved: list[str] = []
    looks: list[object] = []  # of the watcher
    check = registration.RegistrationWatcher.check
    monkeypatch.setattr(
        registration.RegistrationWatcher, "check", lambda self: (looks.append(1), check(self))[1]
    )
    with following(member, public_ip=public_ip, moved=moved) as stops:
        wait_for(lambda: on_chain() == new)
        wait_for(lambda known=len(looks): len(looks) > known + 5)
        assert ledger.writes == [("serve", MINER.ss58)] * 2 and stops == []
        assert moved == [new]
        (line,) = [m for m in caplog.messages if "public address" in m]
        assert old in line and new in line and "--axon.external_ip" in line
        # A reorganization takes it back: it is the new one that is written again.
        MemoryChain(hotkey=MINER.ss58, ledger=ledger).serve(*ENDPOINT)
        wait_for(lambda: on_chain() == new)
        assert stops == []


def test_another_uid_ends_the_miner_for_a_new_start() -> None:
    ledger, member = registered()
    with following(member) as stops:
        ledger.register(MINER.ss58, uid=41)
        ((reason, status),) = wait_for(lambda: stops)
        assert status == ExitStatus.FAULT and "41" in reason


def test_refused_announcement_is_written_later_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger, member = registered()
    chain = member.chain
    chain.block()
    waits: dict[str, list[float]] = {"commitment": [], "endpoint": []}
    real = time.sleep

    def sleep(seconds: float) -> None:
        waits.get(threading.current_thread().name, []).append(seconds)
        if all(len(w) >= 9 for w in waits.values()):
            ledger.up = True
        real(0.005)

    monkeypatch.setattr(identity.time, "sleep", sleep)
    ledger.up = False
    identity.commit(member, TEXT)
    identity.announce(member, *ENDPOINT)
    wait_for(lambda: chain.commitment(MINER.ss58) == TEXT and chain.neurons()[0].port == 8091)
    assert waits["commitment"][:9] == [5, 10, 20, 40, 80, 160, 320, 600, 600]
    assert waits["endpoint"][:9] == [2, 4, 8, 16, 32, 64, 128, 256, 300]
    assert sorted(ledger.writes) == [("commit", MINER.ss58), ("serve", MINER.ss58)]


def test_of_two_endpoints_that_the_chain_refused_the_later_one_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger, member = registered()
    member.chain.block()
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


def test_a_deregistration_ends_the_ranks_for_a_start_that_waits() -> None:
    ledger, member = registered()
    ledger.register(VALIDATOR.ss58)
    with following(member, belief=registration.Belief(VALIDATOR.ss58, OFTEN)) as stops:
        ledger.deregister(MINER.ss58)
        ((reason, status),) = wait_for(lambda: stops)
        assert status == ExitStatus.FAULT and "btcli subnet register" in reason
