"""A node's own bucket is checked before anything depends on it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_training.chain.base import ChainUnavailable, Neuron
from distributed_training.config import ConfigError
from distributed_training.config.settings import StoreSettings
from distributed_training.node import buckets
from distributed_training.node.buckets import NoBucket, PeerBuckets, check_own, own_commitment
from distributed_training.node.start import NetworkFailure
from distributed_training.store.errors import (
    AccessDeniedError,
    BucketMissingError,
    ClockSkewError,
    StoreError,
    TransientError,
)
from tests.tools.chain_memory import MemoryChain, MemoryLedger
from tests.tools.chain_world import MINER
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.miner_parts import config_of


@pytest.mark.parametrize(
    ("problem", "end"),
    [
        (TransientError("503"), NetworkFailure),
        (ClockSkewError("an hour late"), NetworkFailure),
        (AccessDeniedError("403"), ConfigError),
        (BucketMissingError("404"), ConfigError),
    ],
)
def test_pm2_tries_only_passing_failures_again(problem: StoreError, end: type[Exception]) -> None:
    """pm2 starts again after NetworkFailure (status 1), not after ConfigError (2)."""

    def before(operation: str, key: str) -> None:
        raise problem

    with pytest.raises(end):
        check_own(MemoryObjectStore("bucket", before=before), timeout=timedelta(seconds=1))


def test_a_read_key_that_can_write_ends_the_start_for_good(monkeypatch) -> None:
    monkeypatch.setattr(buckets, "open_own", lambda *_, write: MemoryObjectStore("bucket"))
    settings = StoreSettings(
        account_id="a" * 32, read_access_key_id="b" * 32, read_secret_access_key="c" * 64
    )
    with pytest.raises(ConfigError, match="R2_READ_ACCESS_KEY_ID can write"):
        own_commitment(settings, "bucket")


def test_a_member_with_malformed_keys_costs_only_itself() -> None:
    """Read commitments for a store that all peers know, and for R2."""
    texts = {
        "aws": "AKIA7 secret/of+40",
        "r2": "a" * 32 + "b" * 32 + "c" * 64,
        "hostile": "k " * 10**6,
        "empty": " ",
    }
    chain: Any = SimpleNamespace(commitment=texts.get)
    found = {}
    for endpoint in ("http://127.0.0.1:1", None):
        readers = PeerBuckets(StoreSettings(endpoint_url=endpoint), chain)
        for uid, hotkey in enumerate([*texts, "absent"]):
            try:
                found[endpoint, hotkey] = readers.of_miner(Neuron(uid, hotkey)).name
            except NoBucket as error:
                assert len(str(error)) < 150 and "secret/" not in str(error)
    name = StoreSettings().global_model_name
    own, public = "http://127.0.0.1:1", None
    assert found == {
        (own, "aws"): f"{name}-000",
        (own, "r2"): f"{name}-001",
        (public, "r2"): f"{name}-001",
    }


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
