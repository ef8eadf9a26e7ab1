"""Test that an object is read completely and within its limits, also after an interruption."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from distributed_training.store import transfer
from distributed_training.store.base import ObjectInfo
from distributed_training.store.bucket_reader import BucketReader, StateUnavailable
from distributed_training.store.errors import (
    DeadlineError,
    IntegrityError,
    ObjectMissingError,
    StoreError,
    TransientError,
)
from tests.tools.memory_store import MemoryObjectStore

pytestmark = pytest.mark.timeout(30)
KEY = "outer/3/model.safetensors"


@pytest.fixture(autouse=True)
def one_range_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CONCURRENT", 1)


@pytest.fixture
def published() -> MemoryObjectStore:
    store = MemoryObjectStore()
    store.put(KEY, bytes(range(250)) * 4)
    return store


def test_a_download_says_once_a_minute_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a first start would look as if it hung for 40 minutes."""
    caplog.set_level("INFO")
    real, later = time.monotonic, 0.0

    def before(operation: str, key: str) -> None:
        nonlocal later
        later += 8.0 * (operation == "get_range")

    monkeypatch.setattr(transfer, "RANGE", 2**18)
    monkeypatch.setattr(time, "monotonic", lambda: real() + later)
    store = MemoryObjectStore(before=before)
    store.put(KEY, bytes(2**22))
    BucketReader(store, large=timedelta(hours=1)).download(KEY, tmp_path / "model", limit=2**23)
    assert caplog.records
    for text in caplog.messages:
        form = r"\d\.\d MB of 4\.2 MB, 0\.0 MB/s, \d+ (s|min) left"
        assert re.fullmatch(rf"Downloading {KEY}: {form}", text), text


def test_half_of_one_object_is_never_joined_to_half_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object is replaced by one of equal size while its download is interrupted."""
    monkeypatch.setattr(transfer, "RANGE", 1000)
    ranges, most = 0, 3.0

    def before(operation: str, key: str) -> None:
        nonlocal ranges
        ranges += operation == "get_range"
        if ranges > most:
            raise StoreError("the connection is gone")

    store, path = MemoryObjectStore(before=before), tmp_path / "model"
    store.put("model", bytes(4500))
    deadline = time.monotonic() + 60
    with pytest.raises(StoreError, match="connection is gone"):
        transfer.download(store, "model", path, limit=9999, deadline=deadline)
    assert not path.exists()
    other = bytes(range(225)) * 20
    most = math.inf
    store.put("model", other)
    transfer.download(store, "model", path, limit=9999, deadline=deadline)
    assert path.read_bytes() == other
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_an_object_replaced_between_two_ranges_is_not_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "RANGE", 1000)
    ranges, path = 0, tmp_path / "model"

    def before(operation: str, key: str) -> None:
        nonlocal ranges
        ranges += operation == "get_range"
        if operation == "get_range" and ranges == 3:
            store.put(key, bytes([3]) * 4500)

    store = MemoryObjectStore(before=before)
    store.put("model", bytes(4500))
    wanted: Any = {"limit": 9999, "deadline": time.monotonic() + 60}
    with pytest.raises(IntegrityError, match="was replaced while it was read"):
        transfer.download(store, "model", path, **wanted)
    assert not path.exists()
    transfer.download(store, "model", path, **wanted)
    assert path.read_bytes() == bytes([3]) * 4500


def test_a_slow_bucket_that_answers_is_given_up_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    ranges: list[int] = []

    class Slow(MemoryObjectStore):
        """A store at which each range takes a minute."""

        def head(self, key: str) -> ObjectInfo:
            return ObjectInfo(key, 12 * transfer.RANGE, "e", 0.0)

        def get_range(self, key: str, start: int, length: int, *, etag: str = "") -> bytes:
            nonlocal now
            now += 60
            ranges.append(start)
            return bytes(length)

    class Clock:
        monotonic = staticmethod(lambda: now)

    monkeypatch.setattr(transfer, "time", Clock)
    until, path = now + 150, tmp_path / "m"
    for came in (3, 6):
        with pytest.raises(DeadlineError, match=f"{came * transfer.RANGE} of"):
            transfer.download(Slow(), "m", path, limit=1 << 40, deadline=until)
        until = now + 150
    # The second download continued where the first one stopped.
    assert ranges == [n * transfer.RANGE for n in range(6)]


def test_a_single_file_has_the_callers_time_or_a_large_answers(
    published: MemoryObjectStore, tmp_path: Path
) -> None:
    reader, path = BucketReader(published, large=timedelta(seconds=-1)), tmp_path / "m"
    with pytest.raises(DeadlineError):
        reader.download(KEY, path, limit=9999)
    reader.download(KEY, path, limit=9999, deadline=time.monotonic() + 600)
    assert path.read_bytes() == published.get(KEY, limit=9999)


def test_a_disk_that_fails_is_called_the_disk(
    published: MemoryObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")  # like pwrite, without the name of a file

    monkeypatch.setattr(transfer.os, "pwrite", fails)
    with pytest.raises(StoreError, match=r"^the disk: Input/output error$"):
        BucketReader(published).download(KEY, tmp_path / "g", limit=9999)


def test_a_bucket_that_only_fails_is_given_up_long_before_the_deadline(
    published: MemoryObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "NO_PROGRESS", timedelta(0))

    def fails(operation: str, key: str) -> None:
        if operation == "get_range":
            raise TransientError("500 InternalError")

    published._before = fails
    reader = BucketReader(published, large=timedelta(days=1))
    with pytest.raises(DeadlineError, match="500 InternalError"):
        reader.download(KEY, tmp_path / "g", limit=9999)


# --- one object ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "kind"), [("none", ObjectMissingError), ("big", IntegrityError)])
def test_missing_or_oversized_object_is_not_read(
    key: str, kind: type[StoreError], tmp_path: Path
) -> None:
    store = MemoryObjectStore()
    store.put("big", bytes(1000))
    reader = BucketReader(store)
    for call in (
        lambda: reader.download(key, tmp_path / "x", limit=999),
        lambda: reader.get(key, limit=999) or reader.download(key, tmp_path / "x", limit=999),
    ):
        with pytest.raises(kind, match=rf"{key}.*(is missing|no such object|more than)"):
            call()
    assert reader.head("none") is None and not list(tmp_path.iterdir())


def test_a_store_that_stumbles_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "RANGE", 1000)
    stumbles = {"get_range": 2, "get": 1, "head": 1}

    def before(operation: str, key: str) -> None:
        if stumbles.get(operation, 0):
            stumbles[operation] -= 1
            raise TransientError(f"{operation}: 503")

    store, data = MemoryObjectStore(before=before), os.urandom(2500)
    store.put("a", data)
    reader = BucketReader(store)
    reader.download("a", tmp_path / "a", limit=2500)
    assert (tmp_path / "a").read_bytes() == data and reader.get("a", limit=2500) == data
    assert set(stumbles.values()) == {0}


# --- the disk -----------------------------------------------------------------------------------


def test_a_full_disk_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    assert transfer.describe_full_disk(tmp_path / "not" / "there", 1) is None
    line = transfer.describe_full_disk(tmp_path, 10**18)
    assert "UPLOAD BLOCKED" in line
    assert "--neuron.run_folder" in line


def test_a_disk_that_does_not_answer_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question is asked on the thread that trains, so it must not raise."""

    def stale(path: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(shutil, "disk_usage", stale)
    line = transfer.describe_full_disk(tmp_path, 1)
    assert line is not None and "UPLOAD BLOCKED" in line and "does not answer" in line


def test_a_file_of_another_digest_is_deleted(published: MemoryObjectStore, tmp_path: Path) -> None:
    reader, path = BucketReader(published, large=timedelta(minutes=1)), tmp_path / "model"
    with pytest.raises(StateUnavailable, match="the manifest has 0000"):
        reader.fetch_signed(KEY, path, "0" * 64, limit=2000)
    assert not path.exists()
