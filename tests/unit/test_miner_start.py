"""What a start does when the bucket or the global state cannot be had."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_training.config import ConfigError
from distributed_training.config.store import StoreSettings
from distributed_training.miner import global_start, network
from distributed_training.miner.global_watch import GlobalUnavailableError
from distributed_training.store.errors import (
    AccessDeniedError,
    ClockSkewError,
    StoreError,
    TransientError,
)
from distributed_training.store.memory import MemoryObjectStore

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("problem", "end"),
    [
        (TransientError("503"), network.NetworkFailure),
        (ClockSkewError("an hour late"), network.NetworkFailure),
        (AccessDeniedError("403"), ConfigError),
    ],
)
def test_only_what_passes_by_itself_is_tried_again_by_pm2(
    problem: StoreError, end: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """pm2 starts again after NetworkFailure (status 1), not after ConfigError (2)."""
    store = MemoryObjectStore("bucket")

    def head(key: str) -> None:
        raise problem

    store.head = head  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(store, "close", lambda: None, raising=False)
    monkeypatch.setattr(network, "_BUCKET_CHECK", timedelta(seconds=1))
    monkeypatch.setattr(network.S3ObjectStore, "from_settings", lambda *args, **more: store)
    config: Any = type("Config", (), {"store": StoreSettings(account_id="a")})
    with pytest.raises(end):
        network._check_bucket(config, "bucket")


def test_a_read_key_that_can_write_ends_the_start_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryObjectStore("bucket")
    monkeypatch.setattr(store, "close", lambda: None, raising=False)
    monkeypatch.setattr(network.S3ObjectStore, "from_settings", lambda *args, **more: store)
    config: Any = type("Config", (), {"store": StoreSettings(account_id="a")})
    with pytest.raises(ConfigError, match="R2_READ_ACCESS_KEY_ID can write"):
        network._check_read_key(config, "bucket")


def test_a_global_state_that_is_refused_is_downloaded_more_and_more_seldom(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = 0.0
    fetched: dict[int, list[float]] = {7: [], 8: []}

    def pause(wanted: Callable[[], bool]) -> None:
        nonlocal now
        now += 1.0

    class Bucket:
        def outer_step(self) -> int:
            if now < 2:
                raise GlobalUnavailableError("nothing there yet")
            return 7 if now < 1000 else 8

        def fetch(self, outer_step: int) -> Path:
            fetched[outer_step].append(now)
            if outer_step == 7 or len(fetched[8]) < 3:
                raise GlobalUnavailableError("NaN")
            return tmp_path

    monkeypatch.setattr(global_start, "_pause", pause)
    monkeypatch.setattr(global_start, "time", SimpleNamespace(monotonic=lambda: now))
    bucket: Any = Bucket()
    assert global_start.first_global_state(bucket, lambda: True) == (8, tmp_path)
    waits = [b - a for a, b in itertools.pairwise(fetched[7])]
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    assert fetched[8] == [1000, 1001, 1003], "another epoch is not held back"
