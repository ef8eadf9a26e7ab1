"""Test a miner's start with its own bucket while services outside do not answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distributed_training.chain.base import ChainUnavailable
from distributed_training.node import buckets
from distributed_training.node.start import NetworkFailure
from tests.tools.chain_memory import MemoryChain, MemoryLedger
from tests.tools.chain_world import MINER
from tests.tools.miner_parts import config_of

OURS = "our read keys"


@pytest.mark.parametrize("shown", [OURS, None, "other read keys", ChainUnavailable("not yet")])
def test_a_start_in_an_outage_uses_the_keys_that_the_chain_shows_and_no_others(
    shown: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chain = MemoryChain(hotkey=MINER.ss58, ledger=(ledger := MemoryLedger()))
    ledger.register(MINER.ss58)

    def away(*given: object, **named: object) -> Any:
        raise NetworkFailure("the store is away")

    def commitment(hotkey: str) -> Any:
        if isinstance(shown, Exception):
            raise shown
        return shown

    monkeypatch.setattr(buckets, "open_own", away)
    monkeypatch.setattr(buckets, "commitment_text", lambda settings: OURS)
    monkeypatch.setattr(chain, "commitment", commitment)
    if shown == OURS:
        settings = replace(config_of().store, bucket_name="other")
        assert buckets.check_as_member(settings, chain, MINER.ss58, "mine") == OURS
        assert "R2_BUCKET_NAME is other, but uploads go to mine" in caplog.text
        assert "Bucket mine does not answer (the store is away)" in caplog.text
    else:
        with pytest.raises(NetworkFailure, match="the store is away"):
            buckets.check_as_member(config_of().store, chain, MINER.ss58, "mine")
