"""Test uploads with etags that are not MD5s, contradictory answers, and damaged bytes.

Whatever a store's etags are, a part that it accepted is not sent again, an upload that succeeded
is there byte for byte, and damaged bytes end the upload with an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from distributed_training.store import transfer
from distributed_training.store.base import PartInfo, Section
from distributed_training.store.errors import (
    AccessDeniedError,
    IntegrityError,
    StoreError,
    TakenError,
    UploadMissingError,
)
from distributed_training.store.transfer import multipart_etag, upload
from tests.tools.memory_store import MemoryObjectStore

pytestmark = pytest.mark.timeout(60)

PART = 1000
#: How a store writes the etag of bytes whose MD5 is known.
STYLES = {
    "md5": lambda md5: md5,
    "capitals": lambda md5: md5.upper(),
    "opaque": lambda md5: f"v1:{md5[::-1]}",
    "a hash of another kind": lambda md5: hashlib.sha256(md5.encode()).hexdigest(),
}


class Store(MemoryObjectStore):
    """A store with its own kind of etags, which refuses the first ``damages`` bodies as damaged."""

    def __init__(self, style: str, damages: int = 0) -> None:
        super().__init__()
        self.style, self._damages = STYLES[style], damages
        self.received, self.lost = 0, ""

    def _take(self, data: bytes | Section) -> None:
        self.received += len(data)
        if self._damages:
            self._damages -= 1
            raise IntegrityError("other bytes arrived than were sent (400 BadDigest)")

    def _lose(self, operation: str) -> None:
        """Answer once that there is no such upload."""
        if self.lost == operation:
            self.lost = ""
            raise UploadMissingError("no such multipart upload")

    def _info(self, key: str) -> Any:
        found = super()._info(key)
        return dataclasses.replace(found, etag=self.style(found.etag))

    def get_range(self, key: str, start: int, length: int, *, etag: str = "") -> bytes:
        return super().get_range(key, start, length)

    def put(self, key: str, data: bytes | Section) -> str:
        self._take(data)
        return self.style(super().put(key, data))

    def upload_part(self, key: str, upload_id: str, number: int, data: bytes | Section) -> PartInfo:
        self._lose("part")
        self._take(data)
        found = super().upload_part(key, upload_id, number, data)
        return dataclasses.replace(found, etag=self.style(found.etag))

    def list_parts(self, key: str, upload_id: str) -> list[PartInfo]:
        found = super().list_parts(key, upload_id)
        return [dataclasses.replace(part, etag=self.style(part.etag)) for part in found]

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[PartInfo]) -> str:
        self._lose("complete")
        assert list(parts) == self.list_parts(key, upload_id), "a store knows its own etags only"
        held = super().list_parts(key, upload_id)
        return self.style(super().complete_multipart(key, upload_id, held))


@pytest.fixture(autouse=True)
def one_part_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PART", PART)
    monkeypatch.setattr(transfer, "CONCURRENT", 1)


def send(store: Store, path: Path, *, once: bool = False) -> int:
    return upload(store, "k", path, until=time.monotonic() + 30, once=once)


def content(store: Store) -> bytes | None:
    return store.get("k", limit=10**6)


def test_accepted_object_is_there_and_was_sent_once(tmp_path: Path) -> None:
    dice, failed = random.Random(3), 0
    for _ in range(80):
        style, damages = dice.choice(list(STYLES)), dice.choice([0, 0, 0, 1, 99])
        size = dice.choice([1, PART - 1, PART, PART + 1, 3 * PART, 4 * PART + 7])
        path, store = tmp_path / "model", Store(style, damages)
        path.write_bytes(dice.randbytes(size))
        if damages:
            failed += 1
            with pytest.raises(IntegrityError, match="other bytes arrived"):
                send(store, path)
            # No part is sent twice. The next parts may be under way when the first one fails.
            assert store.received <= size, (style, damages)
        if damages > 1:
            continue
        sent = send(store, path)
        assert content(store) == path.read_bytes(), (style, damages)
        # Other etags do not prove which bytes the store has.
        if damages and style in ("md5", "capitals"):
            assert store.received == size + min(PART, size), (style, damages)
        elif not damages:
            assert store.received == sent == size, style
    assert 10 < failed < 70


@pytest.mark.parametrize("lost", ["part", "complete"])
@pytest.mark.parametrize("style", ["md5", "opaque"])
def test_one_answer_that_an_upload_is_gone_costs_nothing(
    tmp_path: Path, style: str, lost: str
) -> None:
    store, path = Store(style), tmp_path / "model"
    store.lost = lost
    path.write_bytes(os.urandom(3 * PART))
    assert send(store, path) == 3 * PART
    assert content(store) == path.read_bytes()
    assert store.received == 3 * PART and not store.lost


def test_no_parts_are_left_where_the_store_refuses_to_join_them(tmp_path: Path) -> None:
    store, path = Store("md5"), tmp_path / "model"
    path.write_bytes(os.urandom(3 * PART))

    def refuse(*_: object) -> str:
        raise AccessDeniedError("403 of CompleteMultipartUpload")

    store.complete_multipart = refuse  # type: ignore[method-assign]
    with pytest.raises(AccessDeniedError):
        send(store, path)
    assert list(store.list_multiparts("")) == []


def of_other_parts(etag: str) -> str:
    """Return an etag that has the form of a multipart etag but belongs to other parts."""
    return "0" * 32 + "-3" if "-" in etag else etag


def test_an_object_of_other_parts_is_sent_again(tmp_path: Path) -> None:
    """The object has the right size, but its etag belongs to other parts, also when asked again."""
    store, path = Store("md5"), tmp_path / "model"
    path.write_bytes(os.urandom(3 * PART))
    complete = store.complete_multipart
    store.complete_multipart = lambda *given: of_other_parts(complete(*given))  # type: ignore[method-assign]
    send(store, path)  # only one answer is wrong
    store.style = of_other_parts
    with pytest.raises(StoreError, match="joined the parts incorrectly"):
        send(store, path)
    assert multipart_etag([]) != "" == multipart_etag(["v1"])


def test_an_object_that_nobody_may_replace_is_read_back_where_its_etag_tells_nothing(
    tmp_path: Path,
) -> None:
    store, path = Store("opaque"), tmp_path / "model"
    store.style = lambda etag: "0" * 32 + "-3"
    path.write_bytes(os.urandom(3 * PART))
    assert send(store, path, once=True) == 3 * PART
    assert send(store, path, once=True) == 0, "it is there"
    path.write_bytes(os.urandom(3 * PART))
    with pytest.raises(TakenError, match="holds other bytes"):
        send(store, path, once=True)
