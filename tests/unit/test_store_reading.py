"""Test that a peer's upload is read whole, checked and bounded, also after an interruption."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from distributed_training.config.settings import StoreSettings
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import Metadata
from distributed_training.protocol.types import Revision
from distributed_training.store import bucket_reader, snapshot_folder, transfer
from distributed_training.store.base import ObjectInfo
from distributed_training.store.bucket_reader import BucketReader, StateUnavailable
from distributed_training.store.errors import (
    DeadlineError,
    IntegrityError,
    NoRoomError,
    ObjectMissingError,
    PreconditionError,
    StoreError,
    TransientError,
)
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.support_store import PEER_ID, publish, publish_state, write_snapshot

pytestmark = pytest.mark.timeout(30)
REVISION = Revision(5, 3, 50)
MINER_FILES = keys.data_files(1)


@pytest.fixture
def published(tmp_path: Path) -> MemoryObjectStore:
    store, settings = MemoryObjectStore(), StoreSettings(write_interval=timedelta(0))
    write_snapshot(tmp_path / "s", REVISION, world_size=1)
    journal = tmp_path / "uploads.json"
    assert publish(store, tmp_path / "s", settings=settings, journal=journal, revision=REVISION).ok
    return store


def remote(store: MemoryObjectStore) -> BucketReader:
    return BucketReader(store, large=timedelta(seconds=30), concurrency=2)  # of a busy disk


def test_fetch_gives_the_same_files_and_is_not_repeated(
    published: MemoryObjectStore, tmp_path: Path
) -> None:
    reader = remote(published)
    root = reader.metadata()
    assert root is not None
    assert root.revision == REVISION
    epoch = reader.metadata(3)
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


@pytest.mark.parametrize(
    "kind", ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"]
)
def test_nan_and_inf_are_found_in_every_kind_of_float(kind: str, tmp_path: Path) -> None:
    dtype, path = getattr(torch, kind), tmp_path / "w.safetensors"
    limits = [torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).tiny, 0.0]
    good = torch.tensor(limits, dtype=torch.float64).to(dtype)
    save_file({"w": good, "n": torch.full((4,), -1)}, path)
    bucket_reader.check_file(path)
    for value in (math.nan, math.inf, -math.inf)[: 1 if kind.endswith("fn") else 3]:
        save_file({"w": torch.tensor([0.0, value]).to(dtype)}, path)
        with pytest.raises(IntegrityError, match="NaN or Inf in 'w'"):
            bucket_reader.check_file(path)


def test_sizes_are_bounded_before_reading(
    published: MemoryObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_reader, "MOST_BYTES", 1000)
    with pytest.raises(StateUnavailable, match="more than the 1000 allowed"):
        remote(published).fetch(3, tmp_path / "g", MINER_FILES)


def patient_reader(store: MemoryObjectStore) -> BucketReader:
    """One range at a time, and time enough for a busy machine to sync each of them."""
    return BucketReader(store, large=timedelta(seconds=60), concurrency=1)


class SmallDisk:
    """A disk of ``size`` bytes that holds ``folder`` and nothing else."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size

    def free(self) -> int:
        used = 0
        for path in self.folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # a thread renamed it
                used += path.stat().st_blocks * 512 if path.is_file() else 0
        return self.size - used

    def usage(self, path: object) -> object:
        return shutil._ntuple_diskusage(self.size, 0, self.free())  # type: ignore[attr-defined]


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallDisk:
    """Room for the three states that the memory model counts, of 2 MiB each, and 10 % more.

    Ranges are of 64 KiB, so that a state has many.
    """
    disk = SmallDisk(tmp_path / "g", round(3.3 * 2**21))
    disk.folder.mkdir()
    monkeypatch.setattr(shutil, "disk_usage", disk.usage)
    monkeypatch.setattr(transfer, "RANGE", 2**16)
    monkeypatch.setattr(snapshot_folder, "DISK_RESERVE", 2**17)
    return disk


class Ranges:
    """Counts the ranges read, and fails from range ``most`` on."""

    def __init__(self, store: MemoryObjectStore) -> None:
        self.keys: list[str] = []
        self.most: float = math.inf
        store._before = self.before

    def before(self, operation: str, key: str) -> None:
        if operation == "get_range":
            if len(self.keys) >= self.most:
                raise StoreError("the connection is gone")
            self.keys.append(key)


def test_a_state_given_up_at_its_end_does_not_block_the_next_one(
    tmp_path: Path, small_disk: SmallDisk
) -> None:
    store, folder = MemoryObjectStore(), small_disk.folder
    ranges = Ranges(store)
    for outer_step in (4, 5, 6):
        publish_state(store, outer_step)
    patient_reader(store).fetch(4, folder)
    patient_reader(store).fetch(5, folder)
    ranges.most = len(ranges.keys) * 3 // 2 - 1
    with pytest.raises(StoreError, match="connection is gone"):
        patient_reader(store).fetch(6, folder)
    assert [path.name for path in folder.glob(".epoch-*")] == [".epoch-6.5.6.0"]
    ranges.most = math.inf
    files = publish_state(store, 7)
    fetched = patient_reader(store).fetch(7, folder)
    assert all((fetched / name).read_bytes() == data for name, data in files.items())
    assert not list(folder.glob(".epoch-*"))


def test_the_oldest_state_makes_room_and_only_where_that_is_enough(
    tmp_path: Path, small_disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    store, folder = MemoryObjectStore(), small_disk.folder
    ranges = Ranges(store)
    for outer_step in (4, 5, 6, 7):
        publish_state(store, outer_step)
    for outer_step in (4, 5, 6):
        patient_reader(store).fetch(outer_step, folder)
    patient_reader(store).fetch(7, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["epoch-5", "epoch-6", "epoch-7"]
    publish_state(store, 8, rows=1024)
    read = len(ranges.keys)
    with pytest.raises(NoRoomError, match=r"step 8: the rest needs 8.* MB .* without the older"):
        patient_reader(store).fetch(8, folder)
    assert len(ranges.keys) == read, "room is asked for before the first byte"
    assert {path.name for path in folder.glob("epoch-*")} == {"epoch-5", "epoch-6", "epoch-7"}


def test_downloaded_part_of_a_state_is_kept_while_the_disk_is_full(
    tmp_path: Path, small_disk: SmallDisk
) -> None:
    """Whole files, and ranges of the file under way; also when the disk fills up meanwhile."""
    store, folder = MemoryObjectStore(), small_disk.folder
    ranges = Ranges(store)
    files = publish_state(store, 6)

    def another_program_writes(operation: str, key: str) -> None:
        ranges.before(operation, key)
        if len(ranges.keys) == 25 and operation == "get_range":
            small_disk.size = 2**20

    store._before = another_program_writes
    for _ in range(3):
        with pytest.raises(NoRoomError, match=r"what came of it is kept: free the disk, lower"):
            patient_reader(store).fetch(6, folder)
    assert len(ranges.keys) < 30
    small_disk.size = 2**23
    fetched = patient_reader(store).fetch(6, folder)
    assert all((fetched / name).read_bytes() == data for name, data in files.items())
    assert len(ranges.keys) == sum(-(-len(data) // 2**16) for data in files.values())


def test_a_download_says_when_it_begins_and_ends_and_once_a_minute_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Or a first start on the public network looks as if it hung for 40 minutes."""
    caplog.set_level("INFO")
    real, later = time.monotonic, 0.0

    def before(operation: str, key: str) -> None:
        nonlocal later
        later += 8.0 * (operation == "get_range")

    monkeypatch.setattr(transfer, "RANGE", 2**18)
    monkeypatch.setattr(time, "monotonic", lambda: real() + later)
    store = MemoryObjectStore(before=before)
    publish_state(store, 56, rows=512)
    BucketReader(store, large=timedelta(hours=1), concurrency=1).fetch(56, tmp_path)
    first, *between, last = [r.getMessage() for r in caplog.records]
    assert first == "Downloading global state of outer step 56: 4.2 MB, 4.2 MB to come"
    assert len(between) == 2
    for text in between:
        form = r"\d\.\d of 4\.2 MB, 0\.0 MB/s, (\d min|less than a minute) left"
        assert re.fullmatch(rf"Downloading global state of outer step 56: {form}", text), text
    assert re.fullmatch(r"Downloaded global state of outer step 56 in 1[5-9]\d s", last)
    caplog.clear()
    remote(store).fetch(56, tmp_path)
    assert caplog.text == "", "it is there"


def test_no_remaining_time_is_shown_until_new_bytes_are_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    now = 0.0
    progress = transfer.Progress("Uploading", 100_000_000, clock=lambda: now)
    now = 100.0
    progress.add(0, held=40_000_000)
    assert not caplog.records
    progress.add(10_000_000)
    assert caplog.messages == ["Uploading: 0.1 of 0.1 GB, 0.1 MB/s, 8 min left"]


@pytest.mark.parametrize(
    "what", ["other files", "another revision", "withdrawn", "begun before the fetch"]
)
def test_a_state_published_again_while_it_is_fetched_is_not_taken(
    tmp_path: Path, what: str
) -> None:
    """Never half of one publication and half of another."""
    metadata = keys.epoch_key(4, keys.METADATA)

    def again(operation: str, key: str) -> None:
        if operation != "get_range" or not key.endswith(keys.OUTER_OPTIMIZER):
            return
        store._before = lambda operation, key: None
        if what == "another revision":
            store.put(metadata, Metadata.of(Revision(5, 4, 1), PEER_ID).to_json())
        elif what == "withdrawn":
            store.delete(metadata)
        elif what == "other files":
            publish_state(store, 4, text="again")
        else:  # its last file, read already
            store.put(keys.epoch_key(4, keys.CONFIG), b'{"inner_step": 0, "block_list": []}')

    store = MemoryObjectStore(before=again)
    publish_state(store, 4)
    with pytest.raises(StateUnavailable, match=r"published again while it was fetched: the next"):
        patient_reader(store).fetch(4, tmp_path)
    assert not (tmp_path / "epoch-4").exists()
    files = publish_state(store, 4, text="again")
    folder = patient_reader(store).fetch(4, tmp_path)
    assert {name: (folder / name).read_bytes() for name in files} == files


def test_half_of_one_object_is_never_joined_to_half_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted download whose object was replaced by one of equal size meanwhile."""
    monkeypatch.setattr(transfer, "RANGE", 1000)
    store, path = MemoryObjectStore(), tmp_path / "model"
    ranges = Ranges(store)
    store.put("model", bytes(4500))
    ranges.most = 3
    deadline = time.monotonic() + 60
    with pytest.raises(StoreError, match="connection is gone"):
        transfer.download(store, "model", path, limit=9999, deadline=deadline, concurrency=1)
    assert not path.exists()
    other = bytes(range(225)) * 20
    store.put("model", other)
    ranges.most = math.inf
    transfer.download(store, "model", path, limit=9999, deadline=deadline, concurrency=1)
    assert path.read_bytes() == other
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("times", [1, 2])
def test_an_object_replaced_between_two_ranges_is_read_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """The second replacement ends the read: the object changes faster than it can be read."""
    monkeypatch.setattr(transfer, "RANGE", 1000)
    ranges, path = 0, tmp_path / "model"

    def before(operation: str, key: str) -> None:
        nonlocal ranges
        ranges += operation == "get_range"
        if operation == "get_range" and ranges in (3, 6)[:times]:
            store.put(key, bytes([ranges]) * 4500)

    store = MemoryObjectStore(before=before)
    store.put("model", bytes(4500))
    wanted: Any = {"limit": 9999, "deadline": time.monotonic() + 60, "concurrency": 1}
    if times == 2:
        with pytest.raises(IntegrityError, match="replaced again and again"):
            transfer.download(store, "model", path, **wanted)
        assert not path.exists()
    else:
        transfer.download(store, "model", path, **wanted)
        assert path.read_bytes() == bytes([3]) * 4500


def test_a_state_published_again_under_the_same_revision_is_fetched_again(tmp_path: Path) -> None:
    """Also over a folder of a version that did not note the etags."""
    now = time.time() - 600
    store = MemoryObjectStore(clock=lambda: now)
    publish_state(store, 4)
    folder = remote(store).fetch(4, tmp_path)
    model, ranges = folder / keys.MODEL, Ranges(store)
    for etags, published in (("noted", now + 300), ("not noted", now + 900)):
        if etags == "not noted":
            (folder / ".etags.json").unlink()
        assert remote(store).fetch(4, tmp_path) == folder and not ranges.keys, etags
        now = published
        files = publish_state(store, 4, text=etags)
        assert remote(store).fetch(4, tmp_path) == folder
        assert model.read_bytes() == files[keys.MODEL], etags
        ranges.keys.clear()


@pytest.mark.parametrize("short", [1, 2])
def test_one_range_that_comes_short_throws_nothing_away(tmp_path: Path, short: int) -> None:
    store = MemoryObjectStore()
    whole, answers = store.get_range, [b"", b"x"][:short]

    def get_range(key: str, start: int, length: int, *, etag: str = "") -> bytes:
        if key.endswith(keys.MODEL) and answers:
            return answers.pop()
        return whole(key, start, length, etag=etag)

    files = publish_state(store, 4)
    store.get_range = get_range  # type: ignore[method-assign]
    if short == 1:
        folder = remote(store).fetch(4, tmp_path)
        assert (folder / keys.MODEL).read_bytes() == files[keys.MODEL]
        return
    with pytest.raises(StateUnavailable, match="bytes instead of"):
        remote(store).fetch(4, tmp_path)


def test_a_state_in_a_containers_image_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overlayfs renames no folder of a lower layer."""
    store = MemoryObjectStore()
    publish_state(store, 4)
    folder = remote(store).fetch(4, tmp_path)
    rename = Path.rename

    def of_overlayfs(path: Path, target: Path) -> Path:
        if path == folder:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", of_overlayfs)
    files = publish_state(store, 4, text="again")
    assert remote(store).fetch(4, tmp_path) == folder
    assert (folder / keys.MODEL).read_bytes() == files[keys.MODEL]
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_a_slow_bucket_that_answers_is_given_up_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    ranges: list[int] = []

    class Slow(MemoryObjectStore):
        """Each range takes a minute."""

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
            transfer.download(Slow(), "m", path, limit=1 << 40, deadline=until, concurrency=1)
        until = now + 150
    assert ranges == [n * transfer.RANGE for n in range(6)]  # it continued where it was


def test_a_single_file_has_the_callers_time_or_a_large_answers(
    published: MemoryObjectStore, tmp_path: Path
) -> None:
    reader, path = BucketReader(published, large=timedelta(seconds=-1)), tmp_path / "m"
    with pytest.raises(DeadlineError):
        reader.download(keys.ROOT_METADATA, path, limit=9999)
    reader.download(keys.ROOT_METADATA, path, limit=9999, deadline=time.monotonic() + 600)
    assert path.read_bytes() == published.get(keys.ROOT_METADATA, limit=9999)


def test_a_disk_that_fails_is_called_the_disk(
    published: MemoryObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")  # as pwrite does, without a name

    monkeypatch.setattr(transfer.os, "pwrite", fails)
    with pytest.raises(StoreError, match=r"^the disk: Input/output error$"):
        BucketReader(published).fetch(3, tmp_path / "g", MINER_FILES)


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
        reader.fetch(3, tmp_path / "g", MINER_FILES)


# --- one object ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "kind"), [("none", ObjectMissingError), ("big", IntegrityError)])
def test_missing_or_oversized_object_is_not_read(
    key: str, kind: type[StoreError], tmp_path: Path
) -> None:
    store = MemoryObjectStore()
    store.put("big", bytes(1000))
    reader = BucketReader(store)
    for call in (
        lambda: reader.read(key, limit=999),
        lambda: reader.download(key, tmp_path / "x", limit=999),
        lambda: reader.get(key, limit=999) or reader.open(key),
    ):
        with pytest.raises(kind, match=rf"{key}.*(is missing|no such object|more than)"):
            call()
    assert reader.head("none") is None and not list(tmp_path.iterdir())


def test_objects_come_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_reader, "RANGE", 1000)
    store, data = MemoryObjectStore(), os.urandom(2500)
    store.put("epoch-0/a", data)
    reader = BucketReader(store)
    info = reader.head("epoch-0/a")
    assert info is not None and info.size == 2500
    assert info.age_seconds is not None and 0 <= info.age_seconds < 60
    assert reader.get("epoch-0/a", limit=2500) == data
    assert reader.read("epoch-0/a", limit=2500) == data
    reader.download("epoch-0/a", tmp_path / "a", limit=2500)
    assert (tmp_path / "a").read_bytes() == data


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


def test_a_store_that_sends_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
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
