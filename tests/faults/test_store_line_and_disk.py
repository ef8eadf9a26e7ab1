"""A bad line under TCP, a bucket that vanishes, and disks that are really full."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from distributed_training.localnet.object_store import ObjectStoreServer
from distributed_training.protocol import keys
from distributed_training.protocol.types import Revision
from distributed_training.store import upload_rules
from distributed_training.store.s3 import NoRoomError, S3ObjectStore
from distributed_training.store.transfer import deadline_in, download
from distributed_training.store.uploader import Uploader
from tests.tools.store_shim import Call, Shim
from tests.tools.support_store import (
    PEER_ID,
    assert_published,
    digest,
    new_bucket,
    publish,
    server,
    settings_for,
    write_snapshot,
)
from tests.tools.waiting import wait_for

__all__ = ["server"]
pytestmark = pytest.mark.timeout(200)
REVISION = Revision(5, 4, 10)
ROOT = Path(__file__).parents[2]


class TcpProxy:
    """Passes bytes on. ``decide(connection number, bytes sent up)`` may say ``reset`` or ``stall``
    of a connection, again and again asked as bytes pass."""

    def __init__(self, target: str, decide: Callable[[int, int], str | None]) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._decide = decide
        self._stop = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self.resets = self.stalls = 0
        self.connections = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> TcpProxy:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(5)
        self._listener.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = self._listener.accept()
                number, self.connections = self.connections, self.connections + 1
                thread = threading.Thread(target=self._carry, args=(client, number), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _carry(self, client: socket.socket, number: int) -> None:
        upstream = socket.create_connection(self._target)
        up = 0
        with client, upstream, selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ, upstream)
            selector.register(upstream, selectors.EVENT_READ, client)
            while not self._stop.is_set():
                for key, _ in selector.select(0.05):
                    source, other = key.fileobj, key.data
                    assert isinstance(source, socket.socket)
                    with contextlib.suppress(OSError):
                        data = source.recv(65536)
                        if data:
                            other.sendall(data)
                            up += len(data) if source is client else 0
                            what = self._decide(number, up)
                            if what == "reset":
                                self.resets += 1
                                # Linger 0: the peer gets RST, not a polite end.
                                client.setsockopt(
                                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                                )
                                return
                            if what == "stall":
                                self.stalls += 1
                                self._stop.wait(60)
                                return
                            continue
                    return


@pytest.mark.parametrize("what", ["reset", "stall"])
def test_a_connection_that_dies_in_the_middle_of_a_part(
    server: ObjectStoreServer, tmp_path: Path, what: str
) -> None:
    """Three connections carry 2 MB of a 5 MiB part and then no more."""
    base = settings_for(server, read_timeout=timedelta(seconds=2))
    direct = new_bucket(server, base)
    files = write_snapshot(tmp_path / "s", REVISION, world_size=1, rows=2000)
    chosen: set[int] = set()

    def decide(number: int, up: int) -> str | None:
        if up > 2_000_000 and number not in chosen and len(chosen) < 3:
            chosen.add(number)
            return what
        return None

    with TcpProxy(server.endpoint, decide) as proxy:
        settings = dataclasses.replace(base, endpoint_url=proxy.endpoint)
        store = S3ObjectStore.from_settings(settings, bucket=direct.bucket, write=True)
        report = publish(store, tmp_path / "s", settings=settings, journal=tmp_path / "j.json")
        assert (proxy.resets, proxy.stalls) == ((3, 0) if what == "reset" else (0, 3))
    assert report.ok, report.reason
    assert_published(direct, REVISION, files)
    assert direct.list_multiparts() == []


def test_a_bucket_deleted_in_the_middle_of_an_upload(
    server: ObjectStoreServer, tmp_path: Path
) -> None:
    """Told apart from a passing fault at once; once the bucket is there again, so is the state."""
    base = settings_for(server, file_deadline=timedelta(seconds=80))
    direct = new_bucket(server, base)
    files = write_snapshot(tmp_path / "s", REVISION, world_size=1, rows=2000)
    gone = threading.Event()

    def fault(call: Call) -> None:
        if call.what == "part" and call.count == 2 and not gone.is_set():
            gone.set()
            for upload in direct.list_multiparts():
                direct.abort_multipart(upload.key, upload.upload_id)
            direct.delete([item.key for item in direct.list_objects()])
            direct._client.delete_bucket(Bucket=direct.bucket)

    with Shim(server.endpoint, fault) as shim:
        settings = dataclasses.replace(base, endpoint_url=shim.endpoint)
        store = S3ObjectStore.from_settings(settings, bucket=direct.bucket, write=True)
        began = time.monotonic()
        report = publish(store, tmp_path / "s", settings=settings, journal=tmp_path / "j.json")
        assert gone.is_set() and not report.ok
        assert time.monotonic() - began < 60, "it did not retry until its deadline of 80 s"
        assert f"bucket {direct.bucket} does not exist" in report.reason
        direct.create_bucket()
        again = publish(store, tmp_path / "s", settings=settings, journal=tmp_path / "j.json")
        assert again.ok, again.reason
    assert_published(direct, REVISION, files)
    assert direct.list_multiparts() == []


# --- full disks -----------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A tmpfs of that size; skips where it cannot be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    try:
        tried = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command here, so no small disk can be made")
    if tried.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {tried.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, *, leave: int) -> Path:
    """Until ``leave`` bytes are free."""
    path = folder / "fill"
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    with path.open("wb") as file:
        file.write(b"x" * max(0, free - leave))
    return path


def test_a_full_disk_ends_a_download_and_the_last_good_file_stays(
    server: ObjectStoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was room when it began; something else filled the disk meanwhile, reserve and all."""
    monkeypatch.setattr(upload_rules, "DISK_RESERVE", 0)
    settings = settings_for(server)
    store = new_bucket(server, settings)
    content = os.urandom(12_000_000)
    store.put("model", content)
    with small_disk(tmp_path / "disk", 32) as disk:
        (disk / "model").write_bytes(b"last good")
        fetch = store.get_range
        filled: list[Path] = []

        def get_range(*arguments: Any, **fields: Any) -> bytes:
            data = fetch(*arguments, **fields)
            if not filled:
                filled.append(fill(disk, leave=1_000_000))
            return data

        store.get_range = get_range  # type: ignore[method-assign]
        deadline = deadline_in(timedelta(seconds=150))
        with pytest.raises(NoRoomError, match="no room to download model"):
            download(store, "model", disk / "model", limit=10**8, deadline=deadline)
        assert (disk / "model").read_bytes() == b"last good"
        filled[0].unlink()
        download(store, "model", disk / "model", limit=10**8, deadline=deadline)
        assert (disk / "model").read_bytes() == content
        assert sorted(p.name for p in disk.iterdir()) == ["model"]


def test_a_full_disk_under_the_journal_fails_the_publication_and_not_the_uploader(
    server: ObjectStoreServer, tmp_path: Path
) -> None:
    settings = settings_for(server)
    store = new_bucket(server, settings)
    files = write_snapshot(tmp_path / "s", REVISION, world_size=1, rows=1600)
    with small_disk(tmp_path / "disk", 4) as disk:
        publisher = Uploader(settings=settings, bucket=store.bucket, folder=disk)
        try:
            wait_for((disk / "uploads.json").exists, what="the journal")
            pid, filler = publisher.pid, fill(disk, leave=0)
            publisher.submit(tmp_path / "s", REVISION, 1, peer_id=PEER_ID)
            (report,) = wait_for(publisher.reports, what="the report")
            assert not report.ok
            assert "No space left on device" in report.reason and str(disk) in report.reason
            assert "free the disk" in report.reason
            assert store.get(keys.ROOT_METADATA, limit=9999) is None
            filler.unlink()
            publisher.submit(tmp_path / "s", REVISION, 1, peer_id=PEER_ID)
            (report,) = wait_for(publisher.reports, what="the second report")
            assert report.ok, report.reason
            assert publisher.pid == pid, "the uploader went on"
        finally:
            publisher.close()
    assert_published(store, REVISION, files)
    assert store.list_multiparts() == []


SNAPSHOT = """
import sys, json
from pathlib import Path
import torch, torch.distributed as dist
sys.path.insert(0, {root!r})
from tests.tools.training_world import finished, tiny, train, trainer
from distributed_training.common.processes import leave
from distributed_training.protocol.types import Progress

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
made = trainer(model=tiny(hidden=128, intermediate=512, layers=4))
losses = [r.loss for r in train(made, 0, 2)]
disk, filler = Path(sys.argv[1]), Path(sys.argv[1]) / "fill"
free = __import__("os").statvfs(disk)
filler.write_bytes(b"x" * (free.f_bavail * free.f_frsize - 1_000_000))
said = []
for attempt in range(2):
    handle = made.snapshot(disk / "4.2", progress=Progress(4, 2, 2, [7]), block=9, last_loss=1.0)
    losses += [r.loss for r in train(made, 2 + attempt, 3 + attempt)]
    try:
        finished(handle)
        said.append("written")
    except OSError as error:
        said.append(str(error))
    filler.unlink(missing_ok=True)
print(json.dumps([said, losses]))
leave(0)
"""


def test_a_full_disk_under_a_snapshot_is_its_error_and_training_goes_on(tmp_path: Path) -> None:
    import json

    with small_disk(tmp_path / "disk", 48) as disk:
        script = SNAPSHOT.format(root=str(ROOT))
        done = subprocess.run(
            [sys.executable, "-c", script, str(disk)],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, done.stderr
        said, losses = json.loads(done.stdout.splitlines()[-1])
        assert "No space left on device" in said[0] and said[1] == "written"
        assert len(losses) == 4 and losses[-1] < losses[0]
        names = {path.name for path in (disk / "4.2").iterdir()}
        assert {"model.safetensors", "gradients.pt", "config.json"} <= names
        assert not any(name.startswith(".") for name in names)
        assert digest(disk / "4.2" / "model.safetensors")
