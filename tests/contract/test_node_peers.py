"""Another's bucket read with its committed keys: over S3 and in memory alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from distributed_training.common.ports import free_ports
from distributed_training.localnet.services import ObjectStoreServer
from distributed_training.store import bucket_reader
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.errors import (
    DeadlineError,
    IntegrityError,
    ObjectMissingError,
    PreconditionError,
    StoreError,
    TransientError,
)
from distributed_training.store.s3 import S3ObjectStore
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.support_store import settings_for

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStoreServer]:
    server = ObjectStoreServer(folder=tmp_path_factory.mktemp("store"))
    server.start()
    _store(server).create_bucket()
    yield server
    server.stop()


def _store(server: ObjectStoreServer, **changes: object) -> S3ObjectStore:
    settings = settings_for(server, **changes)
    return S3ObjectStore.from_settings(settings, bucket="bucket", write=True)


def _reader(store: S3ObjectStore) -> BucketReader:
    return BucketReader(store, small=timedelta(seconds=2))


@pytest.fixture(params=["memory", "s3"])
def make(request: pytest.FixtureRequest) -> Callable[[], Any]:
    if request.param == "memory":
        return MemoryObjectStore
    server = request.getfixturevalue("server")
    return lambda: _store(server)


def test_what_is_not_there(make: Callable[[], S3ObjectStore], tmp_path: Path) -> None:
    reader = _reader(make())
    assert reader.head("epoch-0/none") is None
    assert reader.get("epoch-0/none", limit=5) is None
    for call in (
        lambda: reader.read("epoch-0/none", limit=5),
        lambda: reader.open("epoch-0/none"),
        lambda: reader.download("epoch-0/none", tmp_path / "x", limit=5),
    ):
        with pytest.raises(ObjectMissingError, match="epoch-0/none"):
            call()


def test_more_than_allowed_is_not_read(make: Callable[[], S3ObjectStore], tmp_path: Path) -> None:
    store = make()
    store.put("big", bytes(1000))
    reader = _reader(store)
    for call in (
        lambda: reader.get("big", limit=999),
        lambda: reader.read("big", limit=999),
        lambda: reader.download("big", tmp_path / "big", limit=999),
    ):
        with pytest.raises(IntegrityError, match="more than"):
            call()
    assert not list(tmp_path.iterdir())


def test_wrong_keys_and_no_server_are_told_without_secrets(server: ObjectStoreServer) -> None:
    wrong = _reader(_store(server, write_secret_access_key=SecretStr("wrong-secret-wrong-secret")))
    with pytest.raises(StoreError) as caught:
        wrong.get("shared", limit=1)
    assert "wrong-secret" not in str(caught.value)
    (port,) = free_ports(1)
    gone = _store(
        server,
        endpoint_url=f"http://127.0.0.1:{port}",
        connect_timeout=timedelta(seconds=1),
    )
    with pytest.raises(DeadlineError):
        _reader(gone).head("a")


def test_a_store_that_stumbles_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_reader, "RANGE", 1000)
    stumbles = {"get_range": 2, "get": 1, "head": 1}

    def before(operation: str, key: str) -> None:
        if stumbles.get(operation, 0):
            stumbles[operation] -= 1
            raise TransientError(f"{operation}: 503")

    store, data = MemoryObjectStore(before=before), os.urandom(2500)
    store.put("a", data)
    reader = BucketReader(store)
    assert reader.read("a", limit=2500) == data and reader.get("a", limit=2500) == data
    assert set(stumbles.values()) == {0}


def test_one_that_sends_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little comes each time, it is over when the named time is."""
    monkeypatch.setattr(bucket_reader, "RANGE", 1)
    now = 0.0

    def before(operation: str, key: str) -> None:
        nonlocal now
        now += 1.0

    monkeypatch.setattr(bucket_reader.time, "monotonic", lambda: now)
    store = MemoryObjectStore(before=before)
    store.put("a", bytes(1000))
    with pytest.raises(DeadlineError, match="of 1000 bytes came in 30 s"):
        BucketReader(store, large=timedelta(seconds=30)).read("a", limit=1000)
    assert now < 60


def test_an_object_replaced_while_it_is_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_reader, "RANGE", 1000)
    ranges = []

    def before(operation: str, key: str) -> None:
        if operation == "get_range":
            ranges.append(key)
            if len(ranges) == 2:
                store.put("a", b"1" * 2500)

    store = MemoryObjectStore(before=before)
    store.put("a", bytes(2500))
    with pytest.raises(PreconditionError, match="changed"):
        BucketReader(store).read("a", limit=2500)
