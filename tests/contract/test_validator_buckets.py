"""The validator's bucket over S3 and its twin in memory keep the same contract."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

from validator_world import MemoryBucket

from distributed_training.localnet.object_store import ObjectStoreServer
from distributed_training.store import download, upload
from distributed_training.store.errors import TransientError
from distributed_training.store.interface import ObjectStore
from distributed_training.store.journal import Journal
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.validator.buckets import Bucket, BucketError
from distributed_training.validator.storage import StoreBucket
from tests.memory_store import MemoryObjectStore
from tests.support_store import settings_for

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStoreServer]:
    server = ObjectStoreServer(folder=tmp_path_factory.mktemp("store"))
    server.start()
    _store(server).create_bucket()
    yield server
    server.stop()


def _store(
    server: ObjectStoreServer, *, read_only: bool = False, **changes: object
) -> S3ObjectStore:
    bucket = str(changes.pop("bucket", "bucket"))
    return S3ObjectStore.from_settings(
        settings_for(server, **changes), bucket=bucket, write=not read_only
    )


def _s3(server: ObjectStoreServer, **changes: object) -> StoreBucket:
    store = _store(server, **changes)  # type: ignore[arg-type]
    return _bucket(store, small=timedelta(seconds=2))


def _bucket(store: ObjectStore, **more: Any) -> StoreBucket:
    journal = Journal(Path(tempfile.mkdtemp()) / "uploads.json")
    return StoreBucket(store, journal=journal, part_size=upload.LEAST_PART, **more)


@pytest.fixture(params=["memory", "store", "s3"])
def make(request: pytest.FixtureRequest) -> Callable[[], Bucket]:
    if request.param == "memory":
        return MemoryBucket
    if request.param == "store":
        return lambda: _bucket(MemoryObjectStore())
    server = request.getfixturevalue("server")
    return lambda: _s3(server)


def test_objects(make: Callable[[], Bucket], tmp_path: Path) -> None:
    bucket = make()
    assert bucket.head("epoch-0/none") is None and bucket.get("epoch-0/none", limit=5) is None
    with pytest.raises(BucketError):
        bucket.download("epoch-0/none", tmp_path / "x", limit=5)
    bucket.put("epoch-0/a", b"first")
    bucket.put("epoch-0/a", b"second")
    assert bucket.get("epoch-0/a", limit=6) == b"second"
    info = bucket.head("epoch-0/a")
    assert info is not None and info.size == 6 and abs(info.modified - time.time()) < 60
    bucket.download("epoch-0/a", tmp_path / "a", limit=6)
    assert (tmp_path / "a").read_bytes() == b"second"


def test_more_than_allowed_is_not_read(make: Callable[[], Bucket], tmp_path: Path) -> None:
    bucket = make()
    bucket.put("big", bytes(1000))
    with pytest.raises(BucketError, match="more than"):
        bucket.get("big", limit=999)
    with pytest.raises(BucketError, match="more than"):
        bucket.download("big", tmp_path / "big", limit=999)
    assert not list(tmp_path.iterdir())


def test_a_file_in_parts(make: Callable[[], Bucket], tmp_path: Path) -> None:
    bucket = make()
    data = os.urandom(1 << 20) * 12  # three parts
    (tmp_path / "up").write_bytes(data)
    bucket.upload("epoch-1/model.safetensors", tmp_path / "up")
    info = bucket.head("epoch-1/model.safetensors")
    assert info is not None and info.size == len(data)
    bucket.download("epoch-1/model.safetensors", tmp_path / "down", limit=len(data))
    assert (tmp_path / "down").read_bytes() == data


def test_pruning_leaves_the_newest(make: Callable[[], Bucket]) -> None:
    bucket = make()
    for n in (7, 8, 9, 10):
        bucket.put(f"epoch-{n}/config.json", b"{}")
    bucket.prune(newest=10, keep=2)
    left = [n for n in (7, 8, 9, 10) if bucket.head(f"epoch-{n}/config.json") is not None]
    assert left == [9, 10]


def test_a_read_key_reads_and_cannot_write(server: ObjectStoreServer) -> None:
    _s3(server).put("shared", b"x")
    reader = _s3(server, read_only=True)
    assert reader.get("shared", limit=1) == b"x"
    with pytest.raises(BucketError, match="refused"):
        reader.put("shared", b"y")


def test_wrong_keys_and_no_server_are_bucket_errors_without_secrets(
    server: ObjectStoreServer,
) -> None:
    wrong = _s3(server, write_secret_access_key=SecretStr("wrong-secret-wrong-secret"))
    with pytest.raises(BucketError) as caught:
        wrong.get("shared", limit=1)
    assert "wrong-secret" not in str(caught.value)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    gone = _s3(
        server,
        endpoint_url=f"http://127.0.0.1:{port}",
        connect_timeout=timedelta(seconds=1),
    )
    for call in (lambda: gone.head("a"), lambda: gone.put("a", b"")):
        with pytest.raises(BucketError):
            call()
    with pytest.raises(BucketError):
        _s3(server, bucket="no-such-bucket").put("a", b"")


def test_a_transfer_survives_a_store_that_stumbles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "LEAST_PART", 1000)
    monkeypatch.setattr(download, "RANGE", 1000)
    stumbles = {"put": 1, "upload_part": 2, "complete_multipart": 1, "get_range": 2, "get": 1}

    def before(operation: str, key: str) -> None:
        if stumbles.get(operation, 0):
            stumbles[operation] -= 1
            raise TransientError(f"{operation}: 503")

    bucket = _bucket(MemoryObjectStore(before=before))
    data = os.urandom(2500)
    (tmp_path / "up").write_bytes(data)
    bucket.upload("a", tmp_path / "up")
    bucket.download("a", tmp_path / "down", limit=2500)
    assert (tmp_path / "down").read_bytes() == data
    bucket.put("b", b"b")
    assert bucket.get("b", limit=1) == b"b"
    assert set(stumbles.values()) == {0}


def test_a_failed_upload_leaves_no_open_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "LEAST_PART", 1000)
    from distributed_training.store.errors import AccessDeniedError

    def before(operation: str, key: str) -> None:
        if operation == "complete_multipart":
            raise AccessDeniedError("refused")

    store = MemoryObjectStore(before=before)
    (tmp_path / "up").write_bytes(bytes(2500))
    with pytest.raises(BucketError, match="refused"):
        _bucket(store).upload("a", tmp_path / "up")
    assert store.list_multiparts() == [] and store.head("a") is None


def test_an_upload_that_was_cut_goes_on_and_one_of_an_older_step_is_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "LEAST_PART", 1000)
    parts: list[str] = []
    down = True

    def before(operation: str, key: str) -> None:
        if operation == "upload_part":
            parts.append(key)
        if operation == "complete_multipart" and down:
            raise TransientError("503")

    store = MemoryObjectStore(before=before)
    (tmp_path / "up").write_bytes(os.urandom(2500))
    bucket = _bucket(store, large=timedelta(seconds=0.1))
    for key in ("epoch-6/model", "epoch-7/model"):
        with pytest.raises(BucketError, match="503"):
            bucket.upload(key, tmp_path / "up")
    assert [u.key for u in store.list_multiparts()] == ["epoch-7/model"]
    down = False
    bucket.upload("epoch-7/model", tmp_path / "up")
    assert parts == 3 * ["epoch-6/model"] + 3 * ["epoch-7/model"], "no part is sent twice"
    assert store.get("epoch-7/model", limit=2500) == (tmp_path / "up").read_bytes()


@pytest.mark.parametrize("times", [1, 2])
def test_an_object_replaced_while_it_is_read_is_never_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    monkeypatch.setattr(download, "RANGE", 1000)
    store = MemoryObjectStore()
    store.put("a", bytes(2500))
    replaced, looked = 0, False
    lock = threading.RLock()

    def before(operation: str, key: str) -> None:
        nonlocal replaced, looked
        with lock:
            looked = looked or operation == "head"
            if operation == "get_range" and looked and replaced < times:
                replaced, looked = replaced + 1, False
                store.put("a", bytes([replaced]) * 2500)

    store._before = before
    bucket = StoreBucket(store)
    if times == 1:
        bucket.download("a", tmp_path / "down", limit=2500)
        assert (tmp_path / "down").read_bytes() == b"\x01" * 2500
        return
    with pytest.raises(BucketError, match="replaced again and again"):
        bucket.download("a", tmp_path / "down", limit=2500)
    assert not (tmp_path / "down").exists()
