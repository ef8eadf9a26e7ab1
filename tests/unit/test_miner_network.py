"""Test a miner's start with its own bucket while services outside do not answer."""

from __future__ import annotations

from typing import Any

import pytest

from distributed_training.chain.base import ChainUnavailable
from distributed_training.miner import own_bucket
from distributed_training.miner.own_bucket import check_own_bucket
from distributed_training.node.identity import Member
from distributed_training.node.start import NetworkFailure
from tests.tools.chain_memory import MemoryChain, MemoryLedger
from tests.tools.chain_world import MINER
from tests.tools.miner_parts import config_of

pytestmark = pytest.mark.timeout(30)


class Outage:
    """A registered miner, and no store that answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ledger = MemoryLedger()
        uid = self.ledger.register(MINER.ss58)
        self.member = Member(MINER, MemoryChain(hotkey=MINER.ss58, ledger=self.ledger), uid)
        self.config = config_of()

        def away(*_: object, **named: object) -> None:
            raise NetworkFailure("the store is away")

        monkeypatch.setattr(own_bucket.buckets, "open_own", away)
        monkeypatch.setattr(own_bucket.buckets, "commitment_text", lambda _: "our read keys")

    def check(self) -> str:
        return check_own_bucket(self.config, self.member, "mine")


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> Outage:
    return Outage(monkeypatch)


def test_a_start_in_an_outage_uses_the_keys_that_the_chain_shows(
    outage: Outage, caplog: pytest.LogCaptureFixture
) -> None:
    outage.ledger.commit(MINER.ss58, "our read keys")
    assert outage.check() == "our read keys"
    assert "Bucket mine does not answer (the store is away)" in caplog.text


@pytest.mark.parametrize("committed", [None, "other read keys", "not read yet"])
def test_unchecked_keys_are_not_used_offline(
    committed: str | None, outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    if committed == "not read yet":

        def not_read(_: str) -> Any:
            raise ChainUnavailable("the commitments of the subnet could not be read yet")

        monkeypatch.setattr(outage.member.chain, "commitment", not_read)
    elif committed is not None:
        outage.ledger.commit(MINER.ss58, committed)
    with pytest.raises(NetworkFailure, match="the store is away"):
        outage.check()
