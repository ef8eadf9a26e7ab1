"""Test that all kinds of stores behave alike: S3's client at a real server, a folder, plug-ins."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from distributed_training.config.settings import StoreSettings
from distributed_training.localnet.services import ObjectStoreServer
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import BucketCredentials
from distributed_training.store import folder
from distributed_training.store.base import MultipartStore, ObjectStore, Section, put_once
from distributed_training.store.bucket_reader import (
    WritableReadKeyError,
    check_read_key,
)
from distributed_training.store.errors import (
    AccessDeniedError,
    BucketMissingError,
    DeadlineError,
    IntegrityError,
    ObjectMissingError,
    PreconditionError,
    RefusedError,
    StoreError,
    TakenError,
    TransientError,
    UploadMissingError,
)
from distributed_training.store.folder import FolderStore
from distributed_training.store.opening import open_store
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.store.transfer import multipart_etag
from tests.tools.access_world import AccessWorld
from tests.tools.chain_world import PEER
from tests.tools.measured import open_below
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.support_store import (
    new_bucket,
    settings_for,
)
from tests.toys import store as toys

pytestmark = pytest.mark.timeout(60)
MIB = 1024 * 1024


#: Prefixes of others in the same bucket, which begin like ours or are the beginning of ours.
NEIGHBOURS = ("lab-0070", "lab-00", "lab")


def prefixed(kind: str, request: pytest.FixtureRequest) -> ObjectStore:
    """Open a prefix of a bucket with other prefixes, which must be unchanged after the test."""
    if kind == "folder":
        place = request.getfixturevalue("tmp_path")
        (place / "bucket").mkdir()
        settings, name = StoreSettings(endpoint_url=f"folder://{place}"), "bucket"
    else:
        server = request.getfixturevalue("server")
        settings = settings_for(server)
        name = new_bucket(server, settings).bucket
    others = [open_store(settings, f"{name}/{other}", write=True) for other in NEIGHBOURS]
    began = []
    for other in others:
        for key in OURS:
            other.put(key, b"theirs")
        if (parts := other.multipart()) is not None:
            began.append((parts, parts.create_multipart("big")))

    def unharmed() -> None:
        for other in others:
            held = {o.key: other.get(o.key, limit=9) for o in other.list_objects()}
            assert held == dict.fromkeys(OURS, b"theirs")
        for parts, upload in began:
            assert [u.upload_id for u in parts.list_multiparts()] == [upload]
            parts.abort_multipart("big", upload)

    request.addfinalizer(unharmed)
    return open_store(settings, f"{name}/lab-007", write=True)


#: Keys that the tests below write, delete or clean up.
OURS = ("a/b", "a/c", "d", "big", "epoch-1/metadata.json", "epoch-1/model.safetensors")


def read_as_member(kind: str, request: pytest.FixtureRequest) -> ObjectStore:
    """Open the store as members read it. Calls that they may not make go to its owner's client."""
    world = AccessWorld(
        None if "folder" in kind else request.getfixturevalue("server"),
        request.getfixturevalue("tmp_path") / "registry",
        prefix="lab" if kind.endswith(" prefix") else "",
    )
    request.addfinalizer(lambda: world.__exit__())
    world.__enter__()
    store: Any = world.member(PEER)
    for name in ("put", "put_new", "delete", "list_objects"):
        setattr(store, name, getattr(world.owner, name))
    return store


def made(kind: str, request: pytest.FixtureRequest) -> ObjectStore:
    if kind.startswith("access"):
        return read_as_member(kind, request)
    if kind.endswith(" prefix"):
        return prefixed(kind.removesuffix(" prefix"), request)
    if kind == "twin":
        return MemoryObjectStore()
    if kind == "s3":
        server = request.getfixturevalue("server")
        return new_bucket(server, settings_for(server))
    place = request.getfixturevalue("tmp_path")
    (place / "bucket").mkdir()
    place = {"folder": f"folder://{place}", "memory": "memory://"}[kind]
    return open_store(StoreSettings(endpoint_url=place), "bucket", write=True)


PREFIXED = ["s3 prefix"]


KINDS = ["s3", "twin", "folder", "memory", "folder prefix", "access", "access prefix"]
KINDS += ["access folder", "access folder prefix"]


@pytest.fixture(params=[*KINDS, *PREFIXED])
def store(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    yield made(request.param, request)
    toys.BUCKETS.clear()


@pytest.fixture(params=["s3", "twin", *PREFIXED])
def in_parts(request: pytest.FixtureRequest) -> MultipartStore:
    found = made(request.param, request).multipart()
    assert found is not None
    return found


def test_objects(store: ObjectStore) -> None:
    if type(store) is S3ObjectStore:
        store.create_bucket()  # a second call is not an error
    assert store.head("a/b") is None
    assert store.get("a/b", limit=10) is None
    etag = store.put("a/b", b"0123456789")
    info = store.head("a/b")
    assert (info.size, info.etag) == (10, etag)
    # Some stores round the time up, and a busy server reads its clock late.
    assert -5 <= info.age_seconds < 30
    assert store.get("a/b", limit=10) == b"0123456789"
    with pytest.raises(IntegrityError):
        store.get("a/b", limit=9)
    assert store.get_range("a/b", 3, 4, etag=etag) == b"3456"
    assert store.get_range("a/b", 8, 10) == b"89"
    with pytest.raises(PreconditionError):
        store.get_range("a/b", 0, 1, etag="0" * 32)
    with pytest.raises(ObjectMissingError):
        store.get_range("none", 0, 1)
    store.put("a/c", b"")
    store.put("d", b"x")
    assert [(o.key, o.size) for o in store.list_objects("a/")] == [("a/b", 10), ("a/c", 0)]
    assert len(store.list_objects("a/", most=2)) == 2
    with pytest.raises(StoreError, match="more than 1 objects"):
        store.list_objects("a/", most=1)
    for key in ("a/b", "a/b", "none"):
        store.delete(key)
    assert [o.key for o in store.list_objects()] == ["a/c", "d"]


def test_an_object_that_nobody_may_replace(store: ObjectStore, tmp_path: Path) -> None:
    """The first bytes stay, and writing the same bytes again is not an error."""
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    with path.open("rb") as handle:
        body = Section(handle.fileno(), 0, 10)
        etag = put_once(store, "a/b", b"0123456789")
        assert put_once(store, "a/b", body) == put_once(store, "a/b", b"0123456789") == etag
    for other in (b"0123456780", b"01234", b""):
        with pytest.raises(TakenError, match="nobody may replace"):
            put_once(store, "a/b", other)
    assert store.get("a/b", limit=10) == b"0123456789"
    if isinstance(store, FolderStore):
        assert [o.key for o in store.list_objects()] == ["a/b"], "and no temporary file is left"


@pytest.mark.parametrize("kind", ["s3", "folder"])
def test_the_store_itself_refuses_a_second_writer(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It even refuses a writer that looked before the first one wrote."""
    store: Any = made(kind, request)
    monkeypatch.setattr(S3ObjectStore, "head", lambda *_: None)
    store.put_new("a", b"first")
    with pytest.raises(PreconditionError):
        store.put_new("a", b"other")
    assert store.get("a", limit=9) == b"first"


def test_of_writers_at_one_moment_one_wins_in_a_folder(tmp_path: Path) -> None:
    """Of several writers that begin at the same moment, exactly one succeeds."""
    store = FolderStore(tmp_path, writes=True)
    contents = [b"%d" % n for n in range(8)]
    begin = threading.Barrier(len(contents))

    def write(content: bytes) -> bool:
        begin.wait(30)
        with contextlib.suppress(PreconditionError):
            store.put_new("a", content)
            return True
        return False

    with ThreadPoolExecutor(len(contents)) as pool:
        won = [c for c, did in zip(contents, pool.map(write, contents), strict=True) if did]
    assert [store.get("a", limit=9)] == won


def test_multipart(in_parts: MultipartStore, tmp_path: Path) -> None:
    store = in_parts
    data = os.urandom(12 * MIB)
    path = tmp_path / "file"
    path.write_bytes(data)
    upload_id = store.create_multipart("big")
    assert [u.upload_id for u in store.list_multiparts()] == [upload_id]
    assert store.list_multiparts("other") == []
    with path.open("rb") as handle:
        parts = [
            store.upload_part(
                "big",
                upload_id,
                n + 1,
                Section(handle.fileno(), n * 5 * MIB, min(5, 12 - 5 * n) * MIB),
            )
            for n in range(3)
        ]
    assert store.list_parts("big", upload_id) == parts
    assert store.head("big") is None
    etag = multipart_etag([part.etag for part in parts])
    assert store.complete_multipart("big", upload_id, parts) == etag
    info = store.head("big")
    assert (info.size, info.etag) == (len(data), etag)
    assert store.get("big", limit=len(data)) == data
    assert store.list_multiparts() == []
    other = store.create_multipart("big")
    store.upload_part("big", other, 1, data[:MIB])
    store.abort_multipart("big", other)
    with pytest.raises(UploadMissingError):
        store.upload_part("big", other, 2, data[:MIB])
    with pytest.raises(UploadMissingError):
        store.list_parts("big", other)
    with pytest.raises(UploadMissingError):
        store.complete_multipart("big", other, parts[:1])


def test_a_folder_takes_nothing_from_outside_and_nothing_without_its_disk(tmp_path: Path) -> None:
    place = StoreSettings(endpoint_url=f"folder://{tmp_path}")
    store = open_store(place, "bucket", write=True)
    for operation in (lambda: store.put("a", b"x"), lambda: store.list_objects()):
        with pytest.raises(BucketMissingError, match="make this folder, or mount its disk"):
            operation()
    (tmp_path / "bucket").mkdir()
    store.put("a", b"x")
    (tmp_path / "b").write_bytes(b"of another")
    (tmp_path / "bucket" / "link").symlink_to(tmp_path / "b")
    for key in ("../b", "../bucket/a", str(tmp_path / "b"), "link", "x//y", "./a", "a/", "", "\0"):
        for reads in (lambda key=key: store.get(key, limit=9), lambda key=key: store.head(key)):
            with pytest.raises(StoreError, match="not a key"):
                reads()
        with pytest.raises(StoreError, match="not a key"):
            store.put(key, b"x")
    os.mkfifo(tmp_path / "bucket" / "fifo")
    (tmp_path / "bucket" / "folder").mkdir()
    for key in ("fifo", "folder"):
        assert store.get(key, limit=9) is None, "and nobody waits for it"
    assert not open_below(tmp_path)
    assert [o.key for o in store.list_objects()] == ["a"]
    reader = open_store(place, "bucket")
    with pytest.raises(AccessDeniedError):
        reader.put("a", b"y")
    check_read_key(reader, timeout=timedelta(seconds=1))
    for name in ("../other", ".hidden", ""):
        with pytest.raises(ValueError, match="bucket name"):
            open_store(place, name)
    for place in ("folder://data/buckets", "folder://"):
        with pytest.raises(ValueError, match="use folder:///PLACE"):
            open_store(StoreSettings(endpoint_url=place), "bucket", write=True)


def test_an_object_of_a_folder_is_read_as_it_was_when_its_reading_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path, writes=True)
    before = store.put("a", b"short")
    fstat = os.fstat

    def replaced(handle: int) -> os.stat_result:
        monkeypatch.setattr(folder, "os", os)
        store.put("a", b"longer and another")
        return fstat(handle)

    monkeypatch.setattr(folder, "os", SimpleNamespace(**vars(os) | {"fstat": replaced}))
    assert store.get("a", limit=99) == b"short"
    before = store.put("a", b"short")
    monkeypatch.setattr(folder, "os", SimpleNamespace(**vars(os) | {"fstat": replaced}))
    assert store.get_range("a", 0, 99, etag=before) == b"short"


def test_leftovers_of_killed_uploaders_in_a_folder_are_removed(tmp_path: Path) -> None:
    new, old = (tmp_path / "bucket" / "epoch-3" / f".gradients.pt.{n}.tmp" for n in (1, 2))
    new.parent.mkdir(parents=True)
    for path in (new, old):
        path.write_bytes(b"half")
    os.utime(old, times=(0, 0))
    place = StoreSettings(endpoint_url=f"folder://{tmp_path}")
    open_store(place, "bucket")
    assert old.exists(), "a reader changes nothing"
    store = open_store(place, "bucket", write=True)
    assert new.exists() and not old.exists() and store.list_objects() == []


def test_a_folder_whose_disk_is_full_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *, new: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder, "atomic_file", full)
    with pytest.raises(RefusedError, match=r"No space left.*free some space on that disk"):
        FolderStore(tmp_path, writes=True).put("a", b"x")


def test_a_missing_bucket_is_named(server: ObjectStoreServer) -> None:
    store = S3ObjectStore.from_settings(settings_for(server), bucket="not-there-1", write=True)
    for operation in (
        lambda: store.put("a", b"x"),
        lambda: store.get("a", limit=1),
        lambda: store.list_objects(),
        lambda: store.create_multipart("a"),
    ):
        with pytest.raises(BucketMissingError, match="bucket not-there-1 does not exist"):
            operation()


def test_a_reading_key_cannot_write_and_the_line_says_which_permission(
    server: ObjectStoreServer,
) -> None:
    settings = settings_for(server)
    writer = new_bucket(server, settings)
    writer.put("a", b"x")
    reader = S3ObjectStore.from_settings(settings, bucket=writer.bucket, write=False)
    assert reader.get("a", limit=1) == b"x"
    assert reader.list_objects()[0].key == "a"
    for operation in (
        lambda: reader.put("a", b"y"),
        lambda: reader.delete("a"),
        lambda: reader.create_multipart("b"),
    ):
        with pytest.raises(AccessDeniedError, match="R2_READ_ACCESS_KEY_ID lacks the permission"):
            operation()
    assert reader.get("a", limit=1) == b"x"


def test_a_read_key_that_can_write_is_found_before_it_is_published(
    server: ObjectStoreServer,
) -> None:
    settings = settings_for(server)
    bucket = new_bucket(server, settings)
    reader = S3ObjectStore.from_settings(settings, bucket=bucket.bucket, write=False)
    check_read_key(reader, timeout=timedelta(seconds=10))

    with pytest.raises(WritableReadKeyError, match=r"R2_READ_ACCESS_KEY_ID can write.*committed"):
        check_read_key(bucket, timeout=timedelta(seconds=10))
    assert bucket.list_objects() == [], "what was tried leaves nothing behind"

    wrong = settings_for(server, read_secret_access_key=SecretStr("0" * 64))
    reader = S3ObjectStore.from_settings(wrong, bucket=bucket.bucket, write=False)
    with pytest.raises(AccessDeniedError, match="copy R2_READ_ACCESS_KEY_ID"):
        check_read_key(reader, timeout=timedelta(seconds=10))


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(TransientError("503"), DeadlineError), (RefusedError("storage cap, 503"), RefusedError)],
)
def test_without_a_clear_refusal_the_read_key_counts_as_one_that_can_write(
    answer: StoreError, kind: type[StoreError]
) -> None:
    def before(operation: str, key: str) -> None:
        if operation == "put":
            raise answer

    with pytest.raises(kind, match="503"):
        check_read_key(MemoryObjectStore(before=before), timeout=timedelta(seconds=0.2))


def test_a_wrong_secret_has_its_own_error_that_does_not_show_it(server: ObjectStoreServer) -> None:
    settings = settings_for(server, write_secret_access_key=None)
    with pytest.raises(ValueError, match="R2_WRITE_SECRET_ACCESS_KEY is not set"):
        S3ObjectStore.from_settings(settings, bucket="b", write=True)
    wrong = settings_for(server, write_secret_access_key=SecretStr("wrong-secret-value"))
    store = S3ObjectStore.from_settings(wrong, bucket="not-there-2", write=True)
    with pytest.raises(AccessDeniedError) as caught:
        store.put("a", b"x")
    assert "copy R2_WRITE_ACCESS_KEY_ID" in str(caught.value)
    assert "wrong-secret-value" not in repr(caught.value)
    assert caught.value.__cause__ is None


def test_a_networks_file_names_a_bucket_or_a_prefix_of_one() -> None:
    """A member's bucket is named by its uid, and both kinds of names can be opened."""
    for good in ("llama-4b-ws-4", "shared/lab", "a-3/" + "x" * 59):
        assert StoreSettings(global_model_name=good).global_model_name == good
        open_store(
            StoreSettings(endpoint_url="http://127.0.0.1:1"),
            keys.miner_bucket(good, 7),
            credentials=BucketCredentials("", "k", "s"),
        ).close()
    for bad in ("/lab", "shared/", "a/b/c", "shared//lab", "../lab", "Shared/lab", "x" * 60):
        with pytest.raises(ValueError):
            StoreSettings(global_model_name=bad)
    for bad in ("shared/", "shared/../lab", "shared/lab/7", "shared/Lab", "/lab"):
        with pytest.raises(ValueError, match="is not a bucket name"):
            S3ObjectStore.from_settings(
                StoreSettings(
                    endpoint_url="http://127.0.0.1:1",
                    write_access_key_id=SecretStr("k"),
                    write_secret_access_key=SecretStr("s"),
                ),
                bucket=bad,
                write=True,
            )
