"""Test the folder that a registry serves: its objects stay, and nothing else is read."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from distributed_training.chain.base import ChainError
from distributed_training.common.backoff import Buckets
from distributed_training.protocol import keys
from distributed_training.registry import access, files
from distributed_training.registry.files import PREFIX, ServedFolder
from distributed_training.registry.service import Limits
from distributed_training.store import presigned
from distributed_training.store.base import PartInfo, md5_of
from distributed_training.store.errors import (
    PreconditionError,
    StoreError,
    TransientError,
    UploadMissingError,
)
from distributed_training.store.s3 import base64_md5
from tests.tools import tls_proxy
from tests.tools.access_world import AccessWorld
from tests.tools.chain_world import PEER
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(120)
OURS = keys.upload_key(1, 3, 7)


@pytest.fixture
def folder(tmp_path: Path) -> ServedFolder:
    (tmp_path / "store" / "lab").mkdir(parents=True)
    return ServedFolder(tmp_path / "store" / "lab", url="http://127.0.0.1:1", secret=b"secret")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AccessWorld]:
    monkeypatch.setattr(access, "_STATE_KEPT", 0.0)
    with AccessWorld(None, tmp_path / "registry", limits=Limits()) as made:
        made.publish()
        yield made


def put_of(world: AccessWorld, data: bytes) -> tuple[str, dict[str, str]]:
    """Return a URL for our upload, and the header that it takes."""
    ask = {"do": "write", "key": OURS, "size": len(data), "md5": [md5_of(data)]}
    url = world.chain(PEER).access(ask)["urls"]["put_object"]
    return url, {"content-md5": base64_md5(md5_of(data))}


def put(url: str, data: bytes, headers: dict[str, str]) -> httpx.Response:
    return httpx.put(url, content=data, headers=headers, timeout=60, trust_env=False)


def test_an_object_is_written_once(world: AccessWorld) -> None:
    """A second content is refused before its body arrives."""
    url, headers = put_of(world, b"one")
    assert put(url, b"one", headers).status_code == 200
    again = put(url, b"one", headers)
    assert again.status_code == 412 and "PreconditionFailed" in again.text
    assert world.owner.get(OURS, limit=9) == b"one"
    assert not list(world.folder.rglob("*.new"))


@pytest.mark.parametrize("where", ["write", "sync", "name"])
def test_a_full_disk_is_507_and_loses_nothing(
    where: str, world: AccessWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*_: Any, **__: Any) -> None:
        raise full

    url, headers = put_of(world, b"x" * 1_500_000)
    with monkeypatch.context() as patch:
        if where == "write":
            patch.setattr(ServedFolder, "_receive", fail)
        elif where == "sync":
            patch.setattr(files.os, "fsync", fail)
        else:
            patch.setattr(files, "name_new", fail)
        answer = put(url, b"x" * 1_500_000, headers)
        assert answer.status_code == 507 and "InsufficientStorage" in answer.text
        member = world.member(PEER)
        with pytest.raises(TransientError, match="507"):
            member.put(OURS, b"x" * 1_500_000)
    assert world.owner.head(OURS) is None and not list(world.folder.rglob("*.new"))
    assert put(url, b"x" * 1_500_000, headers).status_code == 200


def test_no_path_leads_out_of_the_folder(world: AccessWorld, tmp_path: Path) -> None:
    """Not even a signed path does, because members choose the keys that are signed."""
    (tmp_path / "secret").write_text("secret")
    bucket = world.folder / "lab"
    (bucket / "link").symlink_to(tmp_path / "secret")
    (bucket / "up").symlink_to(tmp_path)
    served = ServedFolder(
        bucket, url=world.server.url, secret=files.read_secret(tmp_path / "registry")
    )
    for key in (
        "link",
        "up/secret",
        "../secret",
        "../../secret",
        "/etc/passwd",
        "a/../../x",
        ".",
        "",
    ):
        url = served.presign("get_object", key, 60)
        with closing(socket.create_connection(("127.0.0.1", world.server.port))) as sock:
            path = url.partition(str(world.server.port))[2]
            sock.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
        assert answer.split()[1] in (b"403", b"404", b"503"), (key, answer)
        assert b"secret\n" not in answer and b"root:" not in answer


def test_parts_are_put_together_once_and_left_ones_go(
    folder: ServedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = folder.create_multipart("uploads/1/big")
    held = folder._upload("uploads/1/big", upload)
    (held / "whole").write_bytes(b"a" * 10 + b"b" * 5 + b"of a larger part before")
    for number, data in ((1, b"a" * 10), (2, b"b" * 5)):
        (held / f"{number}-{len(data)}-{md5_of(data)}").touch()
    parts = folder.list_parts("uploads/1/big", upload)
    assert parts == [PartInfo(1, 10, md5_of(b"a" * 10)), PartInfo(2, 5, md5_of(b"b" * 5))]
    with pytest.raises(UploadMissingError):
        folder.list_parts("uploads/2/big", upload)
    assert folder.list_objects() == [], "nothing is seen before"
    etag = folder.complete_multipart("uploads/1/big", upload, parts)
    assert folder.head("uploads/1/big").etag == etag
    assert folder.get("uploads/1/big", limit=99) == b"a" * 10 + b"b" * 5
    assert folder.list_multiparts() == []
    other = folder.create_multipart("uploads/1/big")
    with pytest.raises(PreconditionError):
        folder.complete_multipart("uploads/1/big", other, [])
    monkeypatch.setattr(files, "_KEPT", -1.0)
    assert [m.upload_id for m in folder.list_multiparts("uploads/1/")] == [other]
    ServedFolder(folder._folder, url="http://127.0.0.1:1", secret=b"secret")
    assert folder.list_multiparts() == []


@pytest.mark.parametrize("fails", [False, True])
def test_two_who_ask_for_the_parts_of_one_upload_both_wait_for_the_disk(
    folder: ServedFolder, fails: bool
) -> None:
    upload, written = folder.create_multipart("uploads/1/big"), threading.Event()
    held, part = folder._upload("uploads/1/big", upload), PartInfo(1, 3, md5_of(b"abc"))

    def sync() -> None:
        assert written.wait(60)
        if fails:
            raise OSError(errno.EIO, "Input/output error")
        (held / f"{part.number}-{part.size}-{part.etag}").touch()

    folder._syncing[held, 1] = folder._syncs.submit(sync)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(folder.list_parts, "uploads/1/big", upload) for _ in range(2)]
        assert not wait(asked, timeout=0.2).done, "the disk has not answered"
        written.set()
        if fails:
            assert all(isinstance(each.exception(60), StoreError) for each in asked)
        else:
            assert [each.result(60) for each in asked] == [[part]] * 2
    assert folder.list_parts("uploads/1/big", upload) == ([] if fails else [part])


def test_an_upload_in_parts_survives_a_restart(
    world: AccessWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart, a registry asks only for the missing parts."""
    monkeypatch.setattr(presigned, "PART", 1000)
    data = bytes(range(250)) * 10
    md5 = [md5_of(data[at : at + 1000]) for at in (0, 1000, 2000)]
    ask = {"do": "write", "key": OURS, "size": len(data), "md5": md5}
    grant = world.chain(PEER).access(ask)
    assert sorted(grant["urls"]) == ["1", "2", "3"]
    header = {"content-md5": base64_md5(md5[1])}
    assert put(grant["urls"]["2"], data[1000:2000], header).headers["etag"] == f'"{md5[1]}"'
    world.server.stop()
    world.server.start()
    assert sorted(world.chain(PEER).access(ask)["urls"]) == ["1", "3"]
    assert world.member(PEER).put(OURS, data)
    assert world.owner.get(OURS, limit=9999) == data
    assert not list(world.folder.glob(".parts-*/*"))


def test_a_part_that_the_disk_does_not_take_is_asked_for_again(
    world: AccessWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member gets its answer before the part is on the disk."""
    monkeypatch.setattr(presigned, "PART", 1000)
    data = bytes(range(250)) * 8
    md5 = [md5_of(data[at : at + 1000]) for at in (0, 1000)]
    ask = {"do": "write", "key": OURS, "size": len(data), "md5": md5}
    chain = world.chain(PEER)
    urls = chain.access(ask)["urls"]

    def send(number: int) -> None:
        header = {"content-md5": base64_md5(md5[number - 1])}
        assert put(urls[str(number)], data[(number - 1) * 1000 :][:1000], header).is_success

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", fail)
        send(1)
        with pytest.raises(ChainError, match="Input/output error"):
            chain.access({**ask, "do": "complete"})
    send(2)
    assert sorted(chain.access(ask)["urls"]) == ["1"]
    send(1)
    assert chain.access({**ask, "do": "complete"})["etag"]
    assert world.owner.get(OURS, limit=9999) == data


def test_a_body_that_is_cut_off_leaves_nothing(world: AccessWorld) -> None:
    """tests/faults/test_hostile_clients.py sends a flood of slow clients."""
    data = b"x" * 100_000
    url, headers = put_of(world, data)
    path = url.partition(str(world.server.port))[2]
    head = f"PUT {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
    head += f"content-md5: {headers['content-md5']}\r\n\r\n"
    with closing(socket.create_connection(("127.0.0.1", world.server.port))) as client:
        client.sendall(head.encode() + data[:50])
        wait_for(lambda: bool(list(world.folder.rglob("*.new"))), "its file")
    wait_for(lambda: not list(world.folder.rglob("*.new")), "what it sent is gone")
    assert put(url, data, headers).status_code == 200


@pytest.mark.slow
def test_one_proxy_serves_registry_and_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through Caddy with TLS and ops/Caddyfile, an upload is sent in parts and read back."""
    size = presigned.PART + 6_000_000
    world = AccessWorld(
        None, tmp_path / "registry", parameters=2 * size, limits=Limits(proxy="127.0.0.1")
    )
    with tls_proxy.caddy(world.server.port, tmp_path) as (url, authority):
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority))
        world._keyed = replace(world._keyed, endpoint_url=url)
        world.settings = replace(world.settings, endpoint_url=url)
        with world:
            world.publish()
            member, data = world.member(PEER), os.urandom(1_000_000) * (size // 1_000_000)
            member.put(OURS, data)
            assert world.owner.get(OURS, limit=size) == data
            world.owner.put("outer/1/x", data)
            assert member.get("outer/1/x", limit=size) == data
            assert member.get_range("outer/1/x", 60_000_000, 9) == data[60_000_000:][:9]


def test_a_forged_url_is_counted_and_a_granted_one_is_not(world: AccessWorld) -> None:
    """Members download much, so only forged URLs count against the rate."""
    grant = world.chain(PEER).access({"do": "read", "key": keys.STATE})["urls"]["get_object"]
    with httpx.Client(trust_env=False, timeout=60) as client:
        forged = world.server.url + PREFIX + keys.STATE
        assert client.get(forged).status_code == 403
        world.server._service._addresses = Buckets(rate=0.001, burst=5)
        assert 429 in {client.get(forged).status_code for _ in range(20)}
        assert {client.get(grant).status_code for _ in range(20)} == {200}


class _Disk(io.RawIOBase):
    """A file whose disk does not answer until ``answers`` is set."""

    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.asked.set()
        assert self.answers.wait(60)
        return len(buffer)


def test_a_client_that_leaves_while_the_disk_hangs_keeps_nobody_waiting() -> None:
    disk = _Disk()
    file = io.BufferedReader(disk)
    # If the loop waits for the disk, the test fails instead of waiting forever.
    late = threading.Timer(20.0, disk.answers.set)

    async def leave() -> None:
        reading = asyncio.ensure_future(anext(files._pieces(file, 1 << 20)))
        await asyncio.to_thread(disk.asked.wait, 60)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert not disk.answers.is_set(), "the loop waited for the disk"
        disk.answers.set()

    late.start()
    try:
        asyncio.run(leave())
    finally:
        late.cancel()
        disk.answers.set()
    assert file.closed, "the end of the loop waits for its threads"
