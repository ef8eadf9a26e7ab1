"""The validator's bucket over S3 and its twin in memory keep the same contract."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

from validator_world import MemoryBucket

from distributed_training.localnet.object_store import ObjectStoreServer
from distributed_training.validator.buckets import Bucket, BucketError
from distributed_training.validator.s3 import S3Bucket, _client

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStoreServer]:
    server = ObjectStoreServer(folder=tmp_path_factory.mktemp("store"))
    server.start()
    c = server.credentials
    _client(server.endpoint, c.write_key, c.write_secret, 20.0, 3).create_bucket(Bucket="bucket")
    yield server
    server.stop()


def _s3(server: ObjectStoreServer, *, read_only: bool = False, **changes: object) -> S3Bucket:
    c = server.credentials
    options: dict = {
        "endpoint": server.endpoint,
        "bucket": "bucket",
        "access_key_id": c.read_key if read_only else c.write_key,
        "secret_access_key": SecretStr(c.read_secret if read_only else c.write_secret),
        **changes,
    }
    return S3Bucket(**options)


@pytest.fixture(params=["memory", "s3"])
def make(request: pytest.FixtureRequest) -> Callable[[], Bucket]:
    if request.param == "memory":
        return MemoryBucket
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
    data = os.urandom(1 << 20) * 70  # three parts
    (tmp_path / "up").write_bytes(data)
    bucket.upload("epoch-1/model.safetensors", tmp_path / "up")
    info = bucket.head("epoch-1/model.safetensors")
    assert info is not None and info.size == len(data)
    bucket.download("epoch-1/model.safetensors", tmp_path / "down", limit=len(data))
    assert (tmp_path / "down").read_bytes() == data


def test_a_read_key_reads_and_cannot_write(server: ObjectStoreServer) -> None:
    _s3(server).put("shared", b"x")
    reader = _s3(server, read_only=True)
    assert reader.get("shared", limit=1) == b"x"
    with pytest.raises(BucketError, match=r"AccessDenied|403"):
        reader.put("shared", b"y")


def test_wrong_keys_and_no_server_are_bucket_errors_without_secrets(
    server: ObjectStoreServer,
) -> None:
    wrong = _s3(server, secret_access_key=SecretStr("wrong-secret-wrong-secret"))
    with pytest.raises(BucketError) as caught:
        wrong.get("shared", limit=1)
    assert "wrong-secret" not in str(caught.value)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    gone = _s3(
        server,
        endpoint=f"http://127.0.0.1:{port}",
        attempts=1,
        timeout=timedelta(seconds=2),
    )
    for call in (lambda: gone.head("a"), lambda: gone.put("a", b"")):
        with pytest.raises(BucketError):
            call()
    with pytest.raises(BucketError):
        _s3(server, bucket="no-such-bucket").put("a", b"")
