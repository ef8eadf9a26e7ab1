"""How a node finds its place on the subnet."""

from __future__ import annotations

import time
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_training.config import ConfigError
from distributed_training.config.chain import ChainSettings
from distributed_training.node import chain as node_chain
from distributed_training.node.failures import NetworkFailure
from tests.chain_memory import MemoryChain, MemoryLedger
from tests.chain_world import MINER

pytestmark = pytest.mark.timeout(30)


class Behind(MemoryChain):
    """A node that has not seen the registration yet: its first ``stale`` reads show nobody."""

    def __init__(self, *, stale: int, ledger: MemoryLedger) -> None:
        super().__init__(hotkey=MINER.ss58, ledger=ledger)
        self.stale = stale
        self.frozen = False
        self.newest_block_age = 0.0

    def clock(self) -> float:
        return time.time() - self.newest_block_age

    def uid(self, hotkey: str) -> int | None:
        uid = super().uid(hotkey)
        return None if self.reads() <= self.stale else uid

    def reads(self) -> int:
        if not self.frozen:
            self._read()
        return super().reads()


def joined(chain: MemoryChain, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(node_chain, "load_wallet", lambda settings: MINER)
    monkeypatch.setattr(node_chain, "follow_chain", lambda *_: chain)
    settings = ChainSettings(
        neurons_interval=timedelta(milliseconds=10), call_timeout=timedelta(milliseconds=100)
    )
    config: Any = SimpleNamespace(chain=settings, kind="miner")
    with ExitStack() as stack:
        return node_chain.join_subnet(config, stack).uid


def test_one_read_without_our_hotkey_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = MemoryLedger()
    uid = ledger.register(MINER.ss58)
    assert joined(Behind(stale=3, ledger=ledger), monkeypatch) == uid


def test_two_reads_without_our_hotkey_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"is not registered on subnet 38.*btcli"):
        joined(Behind(stale=0, ledger=MemoryLedger()), monkeypatch)


def test_old_blocks_without_our_hotkey_end_nobody_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 1, after which the miner starts again; a hotkey that old blocks do show is there."""
    chain = Behind(stale=0, ledger=MemoryLedger())
    chain.newest_block_age = 3600.0
    with pytest.raises(NetworkFailure, match=r"60 minutes behind .*--subtensor\.chain_endpoint"):
        joined(chain, monkeypatch)
    uid = chain.ledger.register(MINER.ss58)
    assert joined(chain, monkeypatch) == uid


def test_a_chain_that_is_read_once_only_is_asked_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain = Behind(stale=10**6, ledger=MemoryLedger())
    chain.frozen = True
    with pytest.raises(NetworkFailure, match="read once"):
        joined(chain, monkeypatch)
