"""Etags that are no MD5, answers that contradict each other, bytes damaged on the way.

Whatever a store writes into its etags: what it accepted is not sent again, what is called uploaded
is there byte for byte, and what cannot succeed ends after the second time, with a line.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import random
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError
from pydantic import SecretStr

from distributed_training.config.settings import StoreSettings
from distributed_training.store import transfer
from distributed_training.store.errors import IntegrityError, StoreError, TakenError
from distributed_training.store.s3 import AccessKeys, S3ObjectStore
from distributed_training.store.transfer import multipart_etag, upload

pytestmark = pytest.mark.timeout(60)

PART = 1000
#: How a store writes the etag of bytes whose MD5 is known. ``asked``: not in the answer to a write.
STYLES = {
    "md5": lambda md5, asked: md5,
    "capitals": lambda md5, asked: md5.upper(),
    "weak": lambda md5, asked: f'W/"{md5}"',
    "opaque": lambda md5, asked: f"v1:{md5[::-1]}",
    "a hash of another kind": lambda md5, asked: hashlib.sha256(md5.encode()).hexdigest(),
    "another MD5": lambda md5, asked: hashlib.md5(md5.encode()).hexdigest(),
}
HOPELESS = ("another MD5",)


class Client:
    """botocore's client of a store. It refuses bytes of another MD5 than the one sent with them."""

    exceptions = SimpleNamespace(BucketAlreadyOwnedByYou=type("Owned", (Exception,), {}))

    def __init__(self, style: str, damages: int) -> None:
        self._style, self._damages = STYLES[style], damages
        self.objects: dict[str, tuple[bytes, str]] = {}
        self._parts: dict[int, bytes] = {}
        self.received = 0
        self.lost: list[str] = []

    def close(self) -> None: ...

    def _lose(self, operation: str) -> None:
        """Answer once that there is no such upload."""
        if operation in self.lost:
            self.lost.remove(operation)
            answer: Any = {"Error": {"Code": "NoSuchUpload"}, "ResponseMetadata": {}}
            raise ClientError(answer, operation)

    def _etag(self, md5: str, *, asked: bool) -> str:
        etag = self._style(md5, asked)
        return etag if etag.startswith("W/") else f'"{etag}"'

    def _take(self, body: Any, given: str) -> bytes:
        data = body if isinstance(body, bytes) else b"".join(iter(lambda: body.read(333), b""))
        self.received += len(data)
        if self._damages:
            self._damages -= 1
            data = bytes([data[0] ^ 1]) + data[1:]
        if base64.b64decode(given) != hashlib.md5(data).digest():
            answer: Any = {"Error": {"Code": "BadDigest"}, "ResponseMetadata": {}}
            raise ClientError(answer, "PutObject")
        return data

    def put_object(self, *, Key: str, Body: Any, ContentMD5: str, **_: Any) -> Any:
        data = self._take(Body, ContentMD5)
        self.objects[Key] = data, hashlib.md5(data).hexdigest()
        return {"ETag": self._etag(self.objects[Key][1], asked=False)}

    def head_object(self, *, Key: str, **_: Any) -> Any:
        if Key not in self.objects:
            answer: Any = {"Error": {"Code": "404"}, "ResponseMetadata": {"HTTPStatusCode": 404}}
            raise ClientError(answer, "HeadObject")
        data, md5 = self.objects[Key]
        now = datetime.now(UTC)
        return {
            "ContentLength": len(data),
            "ETag": self._etag(md5, asked=True),
            "LastModified": now,
            "ResponseMetadata": {"HTTPHeaders": {}},
        }

    def get_object(self, *, Key: str, Range: str, **_: Any) -> Any:
        first, last = (int(number) for number in Range.removeprefix("bytes=").split("-"))
        data = self.objects[Key][0][first : last + 1]
        return {"Body": io.BytesIO(data), "ContentLength": len(data)}

    def create_multipart_upload(self, **_: Any) -> Any:
        self._parts = {}
        return {"UploadId": "u"}

    def get_paginator(self, name: str) -> Any:
        pages = {"list_parts": self._all_parts, "list_multipart_uploads": self._all_uploads}
        return SimpleNamespace(paginate=pages[name])

    def _all_uploads(self, **_: Any) -> list[Any]:
        begun = {"Key": "k", "UploadId": "u", "Initiated": datetime.now(UTC)}
        return [{"Uploads": [begun] if self._parts else []}]

    def _all_parts(self, **_: Any) -> list[Any]:
        parts = (self.list_parts(PartNumberMarker=number - 1) for number in sorted(self._parts))
        return [{"Parts": [part for page in parts for part in page["Parts"]]}]

    def upload_part(self, *, PartNumber: int, Body: Any, ContentMD5: str, **_: Any) -> Any:
        self._lose("part")
        data = self._parts[PartNumber] = self._take(Body, ContentMD5)
        return {"ETag": self._etag(hashlib.md5(data).hexdigest(), asked=False)}

    def list_parts(self, *, PartNumberMarker: int, **_: Any) -> Any:
        number = PartNumberMarker + 1
        md5 = hashlib.md5(self._parts[number]).hexdigest()
        etag = self._etag(md5, asked=True)
        return {"Parts": [{"PartNumber": number, "Size": len(self._parts[number]), "ETag": etag}]}

    def complete_multipart_upload(self, *, Key: str, MultipartUpload: Any, **_: Any) -> Any:
        self._lose("complete")
        digests = b""
        for part in MultipartUpload["Parts"]:
            digest = hashlib.md5(self._parts[part["PartNumber"]])
            held = self._etag(digest.hexdigest(), asked=True).removeprefix("W/")
            assert part["ETag"] == held, "a store knows its own etags only"
            digests += digest.digest()
        md5 = f"{hashlib.md5(digests).hexdigest()}-{len(self._parts)}"
        self.objects[Key] = b"".join(self._parts[n] for n in sorted(self._parts)), md5
        return {"ETag": self._etag(md5, asked=False)}

    def abort_multipart_upload(self, **_: Any) -> Any:
        return {}


def store_of(client: Client) -> S3ObjectStore:
    store = S3ObjectStore(
        bucket="llama-007",
        endpoint_url="http://a",
        keys=AccessKeys(SecretStr("a"), SecretStr("b")),
        settings=StoreSettings(),
    )
    store._client = client
    return store


@pytest.fixture(autouse=True)
def one_part_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PART", PART)
    monkeypatch.setattr(transfer, "_CONCURRENT", 1)


def send(store: S3ObjectStore, path: Path, *, once: bool = False) -> int:
    return upload(store, "k", path, until=time.monotonic() + 30, once=once)


def test_accepted_object_is_there_and_was_sent_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "FIRST_WAIT", timedelta(milliseconds=1))
    dice, failed = random.Random(3), 0
    store = store_of(Client("md5", 0))
    for _ in range(80):
        style, damages = dice.choice(list(STYLES)), dice.choice([0, 0, 0, 1, 99])
        size = dice.choice([1, PART - 1, PART, PART + 1, 3 * PART, 4 * PART + 7])
        content, path = dice.randbytes(size), tmp_path / "model"
        path.write_bytes(content)
        client = store._client = Client(style, damages)  # a store of botocore's takes 10 ms
        if damages > 1 or style in HOPELESS:
            failed += 1
            with pytest.raises(IntegrityError, match="twice"):
                send(store, path)
            # Each part twice at most; the next ones may be under way as the first fails.
            assert client.received <= 2 * size, (style, damages)
            continue
        assert send(store, path) == size
        assert client.objects["k"][0] == content, (style, damages)
        assert client.received == size + damages * min(PART, size), (style, damages)
    assert 10 < failed < 70


@pytest.mark.parametrize("lost", ["part", "complete"])
@pytest.mark.parametrize("style", ["md5", "opaque"])
def test_one_answer_that_an_upload_is_gone_costs_nothing(
    tmp_path: Path, style: str, lost: str
) -> None:
    client, path = Client(style, 0), tmp_path / "model"
    client.lost = [lost]
    path.write_bytes(os.urandom(3 * PART))
    assert send(store_of(client), path) == 3 * PART
    assert client.objects["k"][0] == path.read_bytes()
    assert client.received == 3 * PART and not client.lost


def test_an_object_of_other_parts_is_sent_again(tmp_path: Path) -> None:
    """Its size is right, and its etag belongs to other parts: at Complete and when asked again."""
    client = Client("md5", 0)
    path = tmp_path / "model"
    path.write_bytes(os.urandom(3 * PART))
    complete, head = client.complete_multipart_upload, client.head_object

    def wrong(ask: Any) -> Any:
        return lambda **how: ask(**how) | {"ETag": f'"{"0" * 32}-3"'}

    client.complete_multipart_upload = wrong(complete)  # type: ignore[method-assign]
    send(store_of(client), path)  # only one answer is wrong
    client.head_object = wrong(head)  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="put the parts together wrongly"):
        send(store_of(client), path)
    assert multipart_etag([]) != "" == multipart_etag([*[SimpleNamespace(etag="v1")]])  # type: ignore[list-item]


def test_an_object_that_nobody_may_replace_is_read_back_where_its_etag_tells_nothing(
    tmp_path: Path,
) -> None:
    """Its etag has the form of one of parts, and is none of MD5s."""
    client, path = Client("opaque", 0), tmp_path / "model"
    for name in ("complete_multipart_upload", "head_object"):
        ask = getattr(client, name)
        answer = lambda ask=ask, **how: ask(**how) | {"ETag": f'"{"0" * 32}-3"'}
        setattr(client, name, answer)
    path.write_bytes(os.urandom(3 * PART))
    store = store_of(client)
    assert send(store, path, once=True) == 3 * PART
    assert send(store, path, once=True) == 0, "it is there"
    path.write_bytes(os.urandom(3 * PART))
    with pytest.raises(TakenError, match="holds other bytes"):
        send(store, path, once=True)
