"""A bucket that vanishes, and disks that are really full."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from distributed_training.localnet.services import ObjectStoreServer
from distributed_training.store import room
from distributed_training.store.errors import NoRoomError
from distributed_training.store.transfer import deadline_in, download
from tests.tools.small_disk import small_disk
from tests.tools.store_shim import Call, Shim
from tests.tools.support_store import Upload, new_bucket, server, settings_for

__all__ = ["server"]
pytestmark = pytest.mark.timeout(200)


def test_a_bucket_deleted_in_the_middle_of_an_upload(
    server: ObjectStoreServer, tmp_path: Path
) -> None:
    """Told apart from a passing fault at once; once the bucket is there again, so is the state."""
    sending = Upload(server, tmp_path, within=timedelta(seconds=80))
    direct = sending.bucket
    gone = threading.Event()

    def fault(call: Call) -> None:
        # Not at a part: SeaweedFS makes the bucket again for another one that is on its way.
        if call.what == "complete" and not gone.is_set():
            gone.set()
            for upload in direct.list_multiparts():
                direct.abort_multipart(upload.key, upload.upload_id)
            for item in direct.list_objects():
                direct.delete(item.key)
            direct._client.delete_bucket(Bucket=direct.bucket)

    with Shim(server.endpoint, fault) as shim:
        began = time.monotonic()
        report = sending.send(shim.endpoint)
        assert gone.is_set() and not report.ok
        assert time.monotonic() - began < 60, "it did not retry until its deadline of 80 s"
        assert f"bucket {direct.bucket} does not exist" in report.reason
        direct.create_bucket()
        sending.assert_whole(sending.send(shim.endpoint))


# --- full disks -----------------------------------------------------------------------------------


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
    monkeypatch.setattr(room, "DISK_RESERVE", 0)
    settings = settings_for(server)
    store = new_bucket(server, settings)
    content = os.urandom(12_000_000)
    store.put("model", content)
    disk = tmp_path / "disk"
    with small_disk(disk, megabytes=32) as small:
        if not small:
            pytest.skip("a small disk cannot be mounted here")
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
