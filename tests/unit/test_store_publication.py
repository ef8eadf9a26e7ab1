"""Publication over the twin in memory: refused uploads, and the order of writes."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest
import torch
from pydantic import SecretStr

from distributed_training.common import files
from distributed_training.config.settings import StoreSettings
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import Metadata
from distributed_training.protocol.types import PublicationReport, Revision
from distributed_training.store import cleanup, uploader_process
from distributed_training.store.cleanup import Removed, prune_epochs
from distributed_training.store.errors import (
    IntegrityError,
    StoppedError,
    StoreError,
    TransientError,
)
from distributed_training.store.journal import Journal, Submission, UploadRecord, last_checked
from distributed_training.store.s3 import S3ObjectStore, endpoint_of
from distributed_training.store.snapshot_folder import prune_snapshots, wait_complete
from distributed_training.store.transfer import Retry
from distributed_training.store.uplink import Uplink
from distributed_training.store.uploader_process import Publication
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.support_store import (
    PEER_ID,
    assert_published,
    finish_rank,
    uploading,
    write_snapshot,
)
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(120)
REVISION = Revision(5, 3, 50)
MINER_FILES = keys.data_files(1)
SETTINGS = StoreSettings(
    age_limit=timedelta(seconds=60),
    snapshot_timeout=timedelta(seconds=0.3),
    write_interval=timedelta(0),
    part_size=5 * 2**20,
)


def run(
    store: MemoryObjectStore,
    folder: Path,
    revision: Revision = REVISION,
    *,
    world_size: int = 1,
    preview_delta: float | None = None,
    **changes: object,
) -> PublicationReport:
    submission = Submission(folder, revision, world_size, PEER_ID, preview_delta)
    return publisher(store, folder.parent, **changes).run(submission)


def publisher(store: MemoryObjectStore, folder: Path, **changes: object) -> Publication:
    settings = dataclasses.replace(SETTINGS, **changes)  # type: ignore[arg-type]
    return Publication(store, Journal(folder / "uploads.json"), settings, "me")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_data_then_epoch_metadata_then_root(tmp_path: Path, world_size: int) -> None:
    order: list[str] = []

    def before(operation: str, key: str) -> None:
        if operation in ("put", "complete_multipart"):
            order.append(key)

    store = MemoryObjectStore(before=before)
    files = write_snapshot(tmp_path / "s", REVISION, world_size=world_size)
    report = run(store, tmp_path / "s", world_size=world_size)
    assert report.ok, report.reason
    assert report.age_seconds is not None and -1 <= report.age_seconds < 600
    assert_published(store, REVISION, files)
    assert order[-2:] == ["epoch-3/metadata.json", "metadata.json"]
    assert {o.key for o in store.list_objects()} == {
        *(f"epoch-3/{name}" for name in keys.data_files(world_size)),
        "epoch-3/metadata.json",
        "metadata.json",
    }


@pytest.mark.parametrize("parts", keys.PARTS)
@pytest.mark.parametrize("content", ["scored", "all"])
def test_an_upload_holds_the_files_that_network_and_flags_ask_for(
    tmp_path: Path, parts: keys.Parts, content: keys.Parts
) -> None:
    store, wanted = MemoryObjectStore(), keys.data_files(2, parts)
    files = write_snapshot(tmp_path / "s", REVISION, world_size=2)
    for rank in range(2):
        names = [n for n in wanted if ("rank0002" in n) == bool(rank)]
        finish_rank(tmp_path / "s", rank, 2, names)
    for name in files.keys() - {*wanted}:
        files[name].unlink()
    report = run(store, tmp_path / "s", world_size=2, content=content)
    enough = {*keys.data_files(2, content)} <= {*wanted}
    assert report.ok == enough and report.model == (enough and parts != "scored")
    if not enough:
        assert "lacks model.safetensors" in report.reason or "lacks inner_opt" in report.reason
        return
    there = {o.key for o in store.list_objects()} - {"epoch-3/metadata.json", "metadata.json"}
    assert there == {f"epoch-3/{name}" for name in wanted}


def not_finite(folder: Path) -> None:
    path = folder / "rank-0.done.json"
    done = json.loads(path.read_text())
    done["files"][-1]["not_finite"] = "layer.weight"
    path.write_text(json.dumps(done))


def of_an_earlier_version(folder: Path) -> None:
    """Nobody knows whether it is finite; the miner writes another within minutes."""
    path = folder / "rank-0.done.json"
    path.write_text(path.read_text().replace('"not_finite": null', '"sha256": "0"'))


def cut_short(folder: Path) -> None:
    model = folder / keys.MODEL
    model.write_bytes(model.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (not_finite, "UPLOAD BLOCKED: NaN or Inf in 'layer.weight' of inner_optimizer.rank0001"),
        (of_an_earlier_version, "the next snapshot takes its place"),
        (cut_short, "another size"),
        (lambda folder: (folder / "rank-0.done.json").unlink(), "rank 0 did not finish"),
    ],
)
def test_a_spoilt_or_incomplete_snapshot_is_not_sent(
    tmp_path: Path, change: Callable[[Path], None], reason: str
) -> None:
    write_snapshot(tmp_path / "s", REVISION, world_size=1)
    change(tmp_path / "s")
    store = MemoryObjectStore()
    report = run(store, tmp_path / "s")
    assert not report.ok and reason in report.reason
    assert store.list_objects() == []


def test_a_snapshot_is_waited_for_until_its_last_rank_is_done_or_the_time_is_up(
    tmp_path: Path,
) -> None:
    write_snapshot(tmp_path, REVISION, world_size=2, late=frozenset({1}))
    with pytest.raises(IntegrityError, match="rank 1 did not finish"):
        wait_complete(tmp_path, 2, timeout=timedelta(0), uplink=Uplink())

    def asked() -> bool:
        finish_rank(tmp_path, 1, 2)
        return False

    minutes = timedelta(minutes=5)
    files = wait_complete(tmp_path, 2, timeout=minutes, uplink=Uplink(), give_up=asked)
    assert files.keys() == set(keys.data_files(2))


def test_the_gate_and_the_order_of_revisions(tmp_path: Path) -> None:
    store = MemoryObjectStore()
    zero = Revision(5, 4, 0)
    write_snapshot(tmp_path / "a", zero, world_size=1)
    refused = "UPLOAD BLOCKED: inner_step (0) < minimum (1)"
    assert refused in run(store, tmp_path / "a", zero).reason, "validators would not score it"
    write_snapshot(tmp_path / "b", REVISION, world_size=1, blocks=())
    assert "block list is empty" in run(store, tmp_path / "b").reason
    write_snapshot(tmp_path / "c", REVISION, world_size=1)
    assert store.list_objects() == []
    assert run(store, tmp_path / "c", preview_delta=0.2).ok  # warns only
    assert refused in run(store, tmp_path / "a", zero).reason
    root = Metadata.parse(store.get(keys.ROOT_METADATA, limit=9999) or b"")
    assert root.revision == REVISION


@pytest.mark.parametrize("what", ["lost", "of another size", "of equal size"])
@pytest.mark.parametrize("name", [keys.MODEL, keys.GRADIENTS])
def test_an_object_that_differs_from_the_sent_file_gets_no_metadata(
    tmp_path: Path, what: str, name: str
) -> None:
    """Another miner that uses this bucket writes between our last byte and our metadata."""
    changed: set[str] = set()

    def before(operation: str, key: str) -> None:
        if operation == "head" and key.endswith(name) and key not in changed:
            changed.add(key)
            data, _, modified = store._objects.pop(key)
            if what != "lost":
                other = data[::-1] if what == "of equal size" else data[1:]
                store._objects[key] = other, hashlib.md5(other).hexdigest(), modified

    store = MemoryObjectStore(before=before)
    write_snapshot(tmp_path / "s", REVISION, world_size=1)
    report = run(store, tmp_path / "s")
    assert "is not what was sent" in report.reason
    for key in (keys.ROOT_METADATA, keys.epoch_key(3, keys.METADATA)):
        assert store.get(key, limit=9999) is None


@pytest.mark.parametrize(
    "what", ["the next outer step", "other bytes of the same step", "the same bytes, expired"]
)
def test_parts_of_an_abandoned_upload_are_not_billed(tmp_path: Path, what: str) -> None:
    """A miner was killed before Complete; what it sends next is of another outer step, or, from a
    checkpoint, the same step with other weights, or the store has given the parts up meanwhile."""

    def killed(operation: str, key: str) -> None:
        if operation == "complete_multipart":
            publication.uplink.stop()
            raise TransientError("the process is gone")

    store = MemoryObjectStore(before=killed)
    write_snapshot(tmp_path / "a", REVISION, world_size=1, rows=1000)
    publication = publisher(store, tmp_path)
    with pytest.raises(StoppedError):
        publication.run(Submission(tmp_path / "a", REVISION, 1, PEER_ID))
    (left,) = store.list_multiparts()
    assert store.list_parts(left.key, left.upload_id)
    store._before = lambda operation, key: None
    revision = Revision(5, 4, 50) if what == "the next outer step" else REVISION
    folder = tmp_path / "b"
    if what == "the same bytes, expired":
        folder = (tmp_path / "a").rename(folder)
        files = {path.name: path for path in folder.iterdir() if path.name in keys.data_files(1)}
        store.abort_multipart(left.key, left.upload_id)
    else:
        weights = torch.full((64,), 0.5)
        files = write_snapshot(folder, revision, world_size=1, rows=1000, weights=weights)
    assert run(store, folder, revision).ok
    assert store.list_multiparts() == []
    assert_published(store, revision, files)


@pytest.mark.parametrize("inner_step", [55, 50])
def test_while_files_change_no_metadata_vouches_for_them(tmp_path: Path, inner_step: int) -> None:
    """Cut off between two files of a later step, or of the same one with other weights, to which
    a miner comes again that went back to its checkpoint: the metadata is gone, not wrong."""
    cut, vouched = False, list[bool]()

    def before(operation: str, key: str) -> None:
        if operation == "put" and not key.endswith(keys.METADATA):
            vouched.append(store.get("epoch-3/metadata.json", limit=9999) is not None)
            if cut and key.endswith(keys.GRADIENTS):
                raise StoreError("cut")

    store, again = MemoryObjectStore(before=before), Revision(5, 3, inner_step)
    write_snapshot(tmp_path / "a", REVISION, world_size=1)
    assert run(store, tmp_path / "a").ok
    files = write_snapshot(tmp_path / "b", again, world_size=1, weights=torch.full((64,), 0.5))
    cut = True
    assert run(store, tmp_path / "b", again).reason == "cut"
    assert store.get("epoch-3/metadata.json", limit=9999) is None
    cut = False
    assert run(store, tmp_path / "b", again).ok
    assert_published(store, again, files)
    assert len(vouched) > 2 * len(MINER_FILES) and not any(vouched)


def test_old_epochs_go_metadata_first(tmp_path: Path) -> None:
    deleted: list[str] = []

    def before(operation: str, key: str) -> None:
        if operation == "delete":
            deleted.append(key)

    store = MemoryObjectStore(before=before)
    for epoch in range(6):
        for name in ("config.json", "metadata.json", "model.safetensors"):
            store.put(f"epoch-{epoch}/{name}", b"x")
    store.put(keys.ROOT_METADATA, b"x")
    assert prune_epochs(store, newest=4, keep=3) == Removed(6)
    assert sorted(deleted[:2]) == ["epoch-0/metadata.json", "epoch-1/metadata.json"]
    assert {o.key.split("/")[0] for o in store.list_objects("epoch-")} == {
        f"epoch-{n}" for n in (2, 3, 4, 5)
    }
    for name in ("3.45.90", "3.50.91", "2.90.70", "4.5.99", "notes", "x.y.z"):
        (tmp_path / name).mkdir()
    prune_snapshots(tmp_path, before=tmp_path / "3.50.91", spare=[tmp_path / "2.90.70"])
    left = {"3.50.91", "2.90.70", "4.5.99", "notes", "x.y.z"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_a_disk_that_is_away_ends_neither_uploads_nor_the_cleanup(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryObjectStore()
    store.put("epoch-0/config.json", b"x")
    files = write_snapshot(tmp_path / "s", REVISION, world_size=1)
    away = tmp_path / ("x" * 300)  # no disk lists it
    with uploading(SETTINGS, store, tmp_path, away) as (loop, messages):
        loop.receive(Submission(tmp_path / "s", REVISION, 1, PEER_ID))
        wait_for(lambda: not store.list_objects("epoch-0"), seconds=60, what="the cleanup")
        reports = [m for m in messages if isinstance(m, PublicationReport)]
        assert [r.ok for r in reports] == [True] and "Old snapshots stay for now" in caplog.text
        assert_published(store, REVISION, files)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_crowded_bucket_is_cleaned_and_no_publication_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """800 stuck uploads at a store that answers one request in 25 with 500 or 503, and three of
    the uploads with nothing else."""
    caplog.set_level("INFO")
    monkeypatch.setattr(cleanup, "_RETRY", Retry(each=timedelta(seconds=4)))
    published = threading.Event()
    requests = itertools.count()
    held_up: list[str] = []
    refused = 0

    def before(operation: str, key: str) -> None:
        nonlocal refused
        if operation == "abort_multipart":
            if not published.is_set():
                held_up.append(key)
                assert published.wait(60), "the publication waits for the cleanup"
            if key.endswith(("/7", "/77", "/777")):
                raise TransientError("500 InternalError")
        if operation.endswith(("multipart", "multiparts")) and next(requests) % 25 == 0:
            refused += 1
            raise TransientError("503 ServiceUnavailable")

    old = time.time() - 2 * 3600
    store = MemoryObjectStore(clock=lambda: old)
    for number in range(800):
        store.create_multipart(f"epoch-1/{number}")
    store._before = before
    files = write_snapshot(tmp_path / "s", REVISION, world_size=1)
    with uploading(SETTINGS, store, tmp_path) as (loop, messages):
        wait_for(lambda: len(held_up) > 1, what="the cleanup under way")
        loop.receive(Submission(tmp_path / "s", REVISION, 1, PEER_ID))
        reports = wait_for(
            lambda: [m for m in messages if isinstance(m, PublicationReport)],
            seconds=60,
            what="a report",
        )
        assert reports[0].ok, reports[0].reason
        assert_published(store, REVISION, files)
        assert len(store._uploads) > 700, "the cleanup had not continued"
        published.set()
        wait_for(
            lambda: "3 stuck multipart uploads stay" in caplog.text,
            seconds=60,
            what="the end of the cleanup",
        )
        assert len(store._uploads) == 3
    assert refused > 25
    assert "Aborted 797 stuck multipart uploads" in caplog.text


def test_a_pause_takes_nothing_from_the_time_of_a_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of 1000 s in an upload that has 20 s, and one bad answer of the store after it."""
    real, later = time.monotonic, 0.0

    def before(operation: str, key: str) -> None:
        nonlocal later
        if operation == "upload_part" and not later:
            uplink.pause()
            later += 1000.0
            uplink.resume()
            raise TransientError("503 ServiceUnavailable")

    monkeypatch.setattr(time, "monotonic", lambda: real() + later)
    store = MemoryObjectStore(before=before)
    files = write_snapshot(tmp_path / "s", REVISION, world_size=1, rows=1000)
    publication = publisher(store, tmp_path)
    uplink = publication.uplink
    report = publication.run(Submission(tmp_path / "s", REVISION, 1, PEER_ID))
    assert report.ok, report.reason
    assert_published(store, REVISION, files)


def test_an_upload_over_a_slow_link_ends_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part succeeds, and takes 15 of the 20 seconds."""
    real, later, parts = time.monotonic, 0.0, 0

    def before(operation: str, key: str) -> None:
        nonlocal later, parts
        if operation == "upload_part":
            later, parts = later + 15.0, parts + 1

    monkeypatch.setattr(time, "monotonic", lambda: real() + later)
    store = MemoryObjectStore(before=before)
    write_snapshot(tmp_path / "s", REVISION, world_size=1, rows=2400)
    report = run(store, tmp_path / "s", age_limit=timedelta(seconds=20), concurrency=1)
    assert not report.ok and "part 3 of 4 was not sent in the time" in report.reason
    assert parts == 2 and store.list_objects("epoch-") == []


def test_an_upload_that_a_kill_left_without_its_record_ends_with_the_next(tmp_path: Path) -> None:
    """Killed between the store's answer to CreateMultipart and the journal's write."""
    store = MemoryObjectStore()
    files = write_snapshot(tmp_path / "s", REVISION, world_size=1, rows=1000)
    key = keys.epoch_key(REVISION.outer_step, keys.MODEL)
    lost = store.create_multipart(key)
    other = store.create_multipart(f"{key}.other")
    assert files and run(store, tmp_path / "s").ok
    assert [u.upload_id for u in store.list_multiparts()] == [other] != [lost]


@pytest.mark.parametrize("why", ["a pause", "a stop"])
def test_a_resumed_upload_survives_the_end_of_the_uplink_during_its_check(
    tmp_path: Path, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All parts lie at the store when a round begins, or the miner is restarted once more."""
    caplog.set_level("INFO")
    at: dict[str, Callable[[], None]] = {}  # what happens at an operation of the store

    def before(operation: str, key: str) -> None:
        at.pop(operation, lambda: None)()

    store = MemoryObjectStore(before=before)
    files = write_snapshot(tmp_path / "s", REVISION, world_size=1, rows=1000)
    submission = Submission(tmp_path / "s", REVISION, 1, PEER_ID)

    def start() -> Publication:
        return publisher(store, tmp_path)

    def killed() -> None:
        first.uplink.stop()
        raise TransientError("the process is gone")

    first = start()
    at["complete_multipart"] = killed
    with pytest.raises(StoppedError):
        first.run(submission)
    second = start()
    reports: list[PublicationReport] = []
    if why == "a stop":
        at["list_parts"] = second.uplink.stop
        with pytest.raises(StoppedError):
            second.run(submission)
        assert second.journal.pending == submission, "the next process continues it"
        second = start()
        reports.append(second.run(submission))
    else:
        at["list_parts"] = second.uplink.pause
        thread = threading.Thread(target=lambda: reports.append(second.run(submission)))
        thread.start()
        wait_for(lambda: reports or "parts kept" in caplog.text, what="the check")
        second.uplink.resume()
        thread.join(20)
    assert reports[0].ok, reports[0].reason
    assert "2 of 2 parts kept" in caplog.text, "nothing is sent again"
    assert_published(store, REVISION, files)


@pytest.mark.parametrize("at", ["complete_multipart", "put metadata.json", "put"])
def test_a_disk_that_is_full_once_all_was_sent_fails_no_upload(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its blocks would be given back, and listed again by the next one."""
    full = False

    def before(operation: str, key: str) -> None:
        nonlocal full
        full = full or at in (operation, f"{operation} {key}")

    def write_json(*arguments: object, **options: object) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*arguments, **options)  # type: ignore[arg-type]

    real = files.write_json
    monkeypatch.setattr(files, "write_json", write_json)
    store = MemoryObjectStore(before=before)
    written = write_snapshot(tmp_path / "s", REVISION, world_size=1, rows=1000)
    report = run(store, tmp_path / "s", preview_delta=-0.5)
    assert report.ok, report.reason
    assert full and "uploads.json was not written (No space left on device)" in caplog.text
    assert_published(store, REVISION, written)
    full, at = False, ""
    later = Revision(5, 4, 50)
    written = write_snapshot(tmp_path / "t", later, world_size=1, rows=1000)
    assert run(store, tmp_path / "t", later).ok, "the journal is as the full disk left it"
    assert_published(store, later, written)
    assert store.list_multiparts() == []


def test_a_thread_that_keeps_the_bucket_outlives_an_error_that_nobody_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread can be started, for a moment: Python raises a RuntimeError."""
    monkeypatch.setattr(uploader_process, "_DEFECT_WAIT", 0.01)
    failed: set[str] = set()

    def before(operation: str, key: str) -> None:
        if operation in ("put", "list_multiparts") and operation not in failed:
            failed.add(operation)
            raise RuntimeError("can't start new thread")

    store = MemoryObjectStore(before=before, clock=lambda: time.time() - 2 * 3600)
    store._uploads["old"] = ("epoch-0/a", 0.0, {})
    with uploading(SETTINGS, store, tmp_path):
        wait_for(lambda: cleanup.OWNER_KEY in store._objects, what="the claim")
        wait_for(lambda: not store._uploads, what="the cleanup")
    assert failed == {"put", "list_multiparts"}


def test_snapshots_nobody_writes_or_sends_go(tmp_path: Path) -> None:
    for name in ("4.5.7", "4.10.8", "4.15.9", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"x")
        for path in (tmp_path / name / "model.safetensors", tmp_path / name):
            os.utime(path, (0, 0))
    os.utime(tmp_path / "4.15.9" / "model.safetensors")  # is being written
    prune_snapshots(tmp_path, unused_for=timedelta(hours=1), spare=[tmp_path / "4.10.8"])
    assert {path.name for path in tmp_path.iterdir()} == {"4.10.8", "4.15.9", "notes"}


def test_only_the_peer_id_changes(tmp_path: Path) -> None:
    store = MemoryObjectStore()
    publication = publisher(store, tmp_path)
    publication.publish_peer_id("12D3abc")
    assert store.list_objects() == []
    store.put(keys.ROOT_METADATA, Metadata(5, 3, 50, PEER_ID).to_json())
    publication.publish_peer_id("12D3abc")
    assert Metadata.parse(store.get(keys.ROOT_METADATA, limit=999) or b"") == Metadata(
        5, 3, 50, "12D3abc"
    )


@pytest.mark.parametrize("delta", [-0.5, None])
def test_the_journal_keeps_whether_the_upload_was_checked(
    delta: float | None, tmp_path: Path
) -> None:
    write_snapshot(tmp_path / "s", REVISION, world_size=1)
    assert last_checked(tmp_path) is None
    report = run(MemoryObjectStore(), tmp_path / "s", preview_delta=delta)
    assert report.ok and report.checked == (delta is not None)
    assert last_checked(tmp_path) == (None if delta is None else REVISION.outer_step)


def test_the_journal_survives_and_a_damaged_one_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "x" / "uploads.json"
    journal = Journal(path)
    record = UploadRecord("b", "epoch-1/a", "id", 10, "sha", 5)
    journal.put(record)
    pending = Submission(Path("/s"), Revision(5, 1, 50), 1, PEER_ID, float("nan"))
    journal.set_pending(pending)
    again = Journal(path)
    assert again.pending is not None and repr(again.pending) == repr(pending)
    assert (again.uploads(), again.owned()) == ([record], {"id"})
    path.write_text(path.read_text()[:-20])
    fresh = Journal(path)
    assert fresh.uploads() == []
    assert path.with_name("uploads.json.damaged").exists()
    with pytest.raises(OSError):  # at the start, not amid an upload
        Journal(path / "in a file")


@pytest.mark.parametrize(
    ("jurisdiction", "host"),
    [("default", "r2"), ("eu", "eu.r2"), ("fedramp", "fedramp.r2"), ("us", "us.r2")],
)
def test_endpoints(jurisdiction: str, host: str) -> None:
    ours, theirs = "a" * 32, "b" * 32
    settings = StoreSettings(account_id=ours, jurisdiction=jurisdiction)
    assert endpoint_of(settings) == f"https://{ours}.{host}.cloudflarestorage.com"
    assert endpoint_of(settings, theirs) == f"https://{theirs}.r2.cloudflarestorage.com"
    local = StoreSettings(account_id=ours, endpoint_url="http://127.0.0.1:1")
    assert endpoint_of(local, theirs) == "http://127.0.0.1:1"
    with pytest.raises(ValueError, match="32 hexadecimal"):
        endpoint_of(StoreSettings(account_id="evil.example/"))


@pytest.mark.parametrize(
    ("addressing", "place"),
    [("path", "s3.example.org/bucket-007/a"), ("virtual", "bucket-007.s3.example.org/a")],
)
def test_a_bucket_is_named_where_the_networks_file_says(
    addressing: Literal["path", "virtual"], place: str
) -> None:
    settings = StoreSettings(
        endpoint_url="https://s3.example.org",
        region="eu-central-1",
        addressing=addressing,
        read_access_key_id=SecretStr("k"),
        read_secret_access_key=SecretStr("s"),
    )
    store = S3ObjectStore.from_settings(settings, bucket="bucket-007", write=False)
    where = {"Bucket": store.bucket, "Key": "a"}
    url = store._client.generate_presigned_url("get_object", Params=where)
    assert url.startswith(f"https://{place}?") and "eu-central-1" in url
