"""A node's own bucket is checked before anything depends on it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from distributed_training.config import ConfigError
from distributed_training.config.settings import StoreSettings
from distributed_training.node import buckets
from distributed_training.node.buckets import check_own, own_commitment
from distributed_training.node.start import NetworkFailure
from distributed_training.store.errors import (
    AccessDeniedError,
    BucketMissingError,
    ClockSkewError,
    StoreError,
    TransientError,
)
from tests.tools.memory_store import MemoryObjectStore


@pytest.mark.parametrize(
    ("problem", "end"),
    [
        (TransientError("503"), NetworkFailure),
        (ClockSkewError("an hour late"), NetworkFailure),
        (AccessDeniedError("403"), ConfigError),
        (BucketMissingError("404"), ConfigError),
    ],
)
def test_only_what_passes_by_itself_is_tried_again_by_pm2(
    problem: StoreError, end: type[Exception]
) -> None:
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
