"""What a peer published is read: whole, checked, bounded, also after an interruption."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from distributed_training.config.store import StoreSettings
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import Metadata
from distributed_training.protocol.types import Revision
from distributed_training.store import download, remote_state
from distributed_training.store.errors import DeadlineError, StoreError, TransientError
from distributed_training.store.journal import Journal, Submission
from distributed_training.store.publication import Publication
from distributed_training.store.remote_state import RemoteState, StateUnavailable
from distributed_training.store.s3 import ObjectInfo
from tests.memory_store import MemoryObjectStore
from tests.support_store import PEER_ID, write_snapshot

pytestmark = pytest.mark.timeout(30)
REVISION = Revision(5, 3, 50)
MINER_FILES = keys.data_files(1)


@pytest.fixture
def published(tmp_path: Path) -> MemoryObjectStore:
    store = MemoryObjectStore()
    write_snapshot(tmp_path / "s", REVISION, world_size=1)
    journal, settings = (
        Journal(tmp_path / "uploads.json"),
        StoreSettings(write_interval=timedelta(0)),
    )
    publication = Publication(store, journal, settings, "me")
    assert publication.run(Submission(tmp_path / "s", REVISION, 1, PEER_ID)).ok
    return store


def remote(store: MemoryObjectStore) -> RemoteState:
    return RemoteState(store=store, deadline=timedelta(seconds=2), concurrency=2)


def test_fetch_gives_the_same_files_and_is_not_repeated(
    published: MemoryObjectStore, tmp_path: Path
) -> None:
    reader = remote(published)
    root = reader.metadata()
    assert root is not None
    assert root.revision == REVISION
    epoch = reader.epoch_metadata(3)
    assert epoch is not None and epoch.revision == REVISION
    assert reader.age(3) is not None
    folder = reader.fetch(3, tmp_path / "g", MINER_FILES)
    for name in MINER_FILES:
        assert (folder / name).read_bytes() == (tmp_path / "s" / name).read_bytes()
    stamp = (folder / keys.MODEL).stat().st_mtime_ns
    assert reader.fetch(3, tmp_path / "g", MINER_FILES) == folder
    assert (folder / keys.MODEL).stat().st_mtime_ns == stamp
    assert [p.name for p in (tmp_path / "g").iterdir()] == ["epoch-3"]
    with pytest.raises(StateUnavailable, match="no whole outer step 9"):
        reader.fetch(9, tmp_path / "g")


def header(field: str, value: str) -> Callable[[bytes], bytes]:
    """A safetensors file whose header says something else of its first tensor."""

    def change(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        text = re.sub(
            rf'("{field}":)\[[^]]*\]', rf"\g<1>{value}", data[8 : 8 + length].decode(), count=1
        )
        return len(text).to_bytes(8, "little") + text.encode() + data[8 + length :]

    return change


@pytest.mark.parametrize(
    ("key", "change", "text"),
    [
        ("epoch-3/model.safetensors", lambda d: d[:-5], "not a whole safetensors file"),
        ("epoch-3/model.safetensors", lambda d: b"\xff" * 8 + d[8:], "header's length"),
        ("epoch-3/model.safetensors", lambda d: d[:-4] + b"\x00\x00\xc0\x7f", "NaN or Inf"),
        ("epoch-3/model.safetensors", header("shape", "[1e999]"), "not a whole safetensors file"),
        ("epoch-3/model.safetensors", header("shape", "[-8,-8]"), "impossible shape"),
        ("epoch-3/model.safetensors", header("data_offsets", "[0.0,256.0]"), "impossible shape"),
        ("epoch-3/gradients.pt", lambda d: d[: len(d) // 2], "not a whole .pt file"),
        ("epoch-3/config.json", lambda d: b"[]", "not a JSON object"),
        (
            "epoch-3/config.json",
            lambda d: d.replace(b'"inner_step": 50', b'"inner_step": 45'),
            "mixture",
        ),
        ("epoch-3/metadata.json", lambda d: b"{", "not JSON"),
    ],
)
def test_a_poisoned_object_is_refused_and_the_last_good_state_stays(
    published: MemoryObjectStore, tmp_path: Path, key: str, change: object, text: str
) -> None:
    good = remote(published).fetch(3, tmp_path / "g", MINER_FILES)
    held = {name: (good / name).read_bytes() for name in MINER_FILES}
    data = published.get(key, limit=1 << 30)
    assert data is not None
    published.put(key, change(data))  # type: ignore[operator]
    with pytest.raises(StateUnavailable, match=text):
        remote(published).fetch(3, tmp_path / "other", MINER_FILES)
    assert not (tmp_path / "other" / "epoch-3").exists()
    assert {name: (good / name).read_bytes() for name in MINER_FILES} == held


def test_a_pickle_that_would_run_code_does_not(
    published: MemoryObjectStore, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple:
            return os.system, (f"touch {marker}",)

    torch.save({"metadata": Evil()}, tmp_path / "evil.pt")
    published.put("epoch-3/gradients.pt", (tmp_path / "evil.pt").read_bytes())
    remote(published).fetch(3, tmp_path / "g", [keys.GRADIENTS])
    assert not marker.exists()


def test_sizes_are_bounded_before_reading(
    published: MemoryObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_state, "MOST_BYTES", 1000)
    with pytest.raises(StateUnavailable, match="more than the 1000 allowed"):
        remote(published).fetch(3, tmp_path / "g", MINER_FILES)


def test_an_interrupted_download_goes_on(tmp_path: Path) -> None:
    reads: list[str] = []

    def before(operation: str, key: str) -> None:
        if operation == "get_range":
            reads.append(key)
            if broken and len(reads) > 2:
                raise TransientError("cut")

    broken = True
    store = MemoryObjectStore(before=before)
    write_snapshot(tmp_path / "s", REVISION, world_size=1, rows=9000)
    data = (tmp_path / "s" / keys.MODEL).read_bytes()
    store.put("epoch-3/model.safetensors", data)
    store.put("epoch-3/metadata.json", Metadata.of(REVISION, PEER_ID).to_json())
    with pytest.raises(StoreError, match="cut"):
        remote(store).fetch(3, tmp_path / "g", [keys.MODEL])
    broken = False
    reads.clear()
    folder = remote(store).fetch(3, tmp_path / "g", [keys.MODEL])
    assert (folder / keys.MODEL).read_bytes() == data
    ranges = -(-len(data) // (16 * 1024 * 1024))
    assert len(reads) == ranges - 2


def test_a_slow_bucket_that_answers_is_given_up_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    ranges: list[int] = []

    class Slow(MemoryObjectStore):
        """Each range takes a minute."""

        def head(self, key: str) -> ObjectInfo:
            return ObjectInfo(key, 12 * download.RANGE, "e", 0.0)

        def get_range(self, key: str, start: int, length: int, *, etag: str = "") -> bytes:
            nonlocal now
            now += 60
            ranges.append(start)
            return bytes(length)

    class Clock:
        monotonic = staticmethod(lambda: now)

    monkeypatch.setattr(download, "time", Clock)
    until, path = now + 150, tmp_path / "m"
    for came in (3, 6):
        with pytest.raises(DeadlineError, match=f"{came * download.RANGE} of"):
            download.download(Slow(), "m", path, limit=1 << 40, deadline=until, concurrency=1)
        until = now + 150
    assert ranges == [n * download.RANGE for n in range(6)]  # it went on where it was


def test_a_bucket_that_only_fails_is_given_up_long_before_the_deadline(
    published: MemoryObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "NO_PROGRESS", timedelta(0))

    def fails(operation: str, key: str) -> None:
        if operation == "get_range":
            raise TransientError("500 InternalError")

    published._before = fails
    reader = RemoteState(store=published, deadline=timedelta(days=1))
    with pytest.raises(DeadlineError, match="500 InternalError"):
        reader.fetch(3, tmp_path / "g", MINER_FILES)
