"""An interrupted upload, and ``scripts/abort_multipart_uploads.py`` as operators run it.

Members of both exchanges send by the same code.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from distributed_training.exchange import own_uploads
from distributed_training.exchange.base import Close
from distributed_training.localnet.services import ObjectStoreServer
from distributed_training.protocol import keys as places
from distributed_training.store.cleanup import claim_bucket
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.store.uplink import Uplink
from tests.tools import forked
from tests.tools.support_store import new_bucket, server, settings_for

__all__ = ["server"]
pytestmark = pytest.mark.timeout(200)
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "abort_multipart_uploads.py"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return forked.run(SCRIPT, *words, "--network", "sn38", environ={}, folder=folder)


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the tests' own away: all comes from the file."""
    for name in os.environ:
        if name.startswith(("R2_", "AWS_")):
            monkeypatch.delenv(name)


def test_lists_asks_and_aborts(server: ObjectStoreServer, tmp_path: Path) -> None:
    keys = {name: value for name, value in server.keys.items() if "READ" not in name}
    (tmp_path / ".env").write_text("".join(f"export {n}={value}\n" for n, value in keys.items()))
    store = new_bucket(server, settings_for(server))
    for key in ("epoch-3/model.safetensors", "epoch-4/model.safetensors"):
        upload_id = store.create_multipart(key)
        store.upload_part(key, upload_id, 1, b"x" * 1_500_000)

    young = run(tmp_path, store.bucket)
    assert (young.returncode, young.stderr) == (0, "")
    assert "No multipart uploads older than 1h 00m" in young.stdout

    listed = run(tmp_path, store.bucket, "--older-than", "0s", "--dry-run")
    assert listed.returncode == 0, listed.stderr
    assert listed.stdout.splitlines()[0].split() == ["KEY", "AGE", "PARTS", "SIZE", "UPLOAD", "ID"]
    assert "epoch-3/model.safetensors" in listed.stdout
    assert "1.5 MB" in listed.stdout
    assert "2 uploads, 3.0 MB" in listed.stdout
    assert "A miner is at work" not in listed.stdout
    assert len(store.list_multiparts()) == 2
    claim_bucket(store, "miner")
    listed = run(tmp_path, store.bucket, "--older-than", "0s", "--dry-run")
    assert f"A miner is at work in {store.bucket}" in listed.stdout

    unasked = run(tmp_path, store.bucket, "--older-than", "0s")
    assert unasked.returncode == 2
    assert "add --yes" in unasked.stderr
    assert len(store.list_multiparts()) == 2

    one = run(tmp_path, store.bucket, "--older-than", "0s", "--prefix", "epoch-3/", "--yes")
    assert one.returncode == 0
    assert "Aborted 1 upload" in one.stdout
    assert [u.key for u in store.list_multiparts()] == ["epoch-4/model.safetensors"]

    missing = run(tmp_path, "no-such-bucket-1", "--yes")
    assert missing.returncode == 1
    assert "bucket no-such-bucket-1 does not exist" in missing.stderr
    assert "check the name" in missing.stderr and "create it" not in missing.stderr
    for done in (young, listed, unasked, one, missing):
        assert keys["R2_WRITE_SECRET_ACCESS_KEY"] not in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


class Killed(BaseException):
    """The process ends here; nobody catches it."""


def test_an_upload_that_a_kill_interrupted_is_cleaned_up_and_sent_again_whole(
    server: ObjectStoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, close = 5 << 20, Close(3, 5, 0.0, 60.0)
    monkeypatch.setattr(own_uploads, "ONE_PIECE", part)
    names = {name: value for name, value in server.keys.items() if "READ" not in name}
    (tmp_path / ".env").write_text("".join(f"{n}={value}\n" for n, value in names.items()))
    store = new_bucket(server, settings_for(server, concurrency=1))
    uploads = own_uploads.OwnUploads(store, tmp_path / "uploads", 7)
    data = os.urandom(2 * part + 1)
    uploads.path(3, 5).write_bytes(data)
    real, sent = S3ObjectStore.upload_part, list[Any]()

    def upload_part(*given: Any, **named: Any) -> Any:
        if sent:
            raise Killed
        sent.append(real(*given, **named))
        return sent[0]

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(S3ObjectStore, "upload_part", upload_part)
        uploads.send(close, 60.0, Uplink())
    key = places.upload_key(7, 3, 5)
    assert [one.key for one in store.list_multiparts()] == [key]
    done = run(tmp_path, store.bucket, "--older-than", "0s", "--yes")
    assert done.returncode == 0 and "Aborted 1 upload" in done.stdout, done.stderr
    assert store.list_multiparts() == []
    again = own_uploads.OwnUploads(store, tmp_path / "uploads", 7)
    assert not again.send(close, 60.0, Uplink()).cause
    assert store.get(key, limit=len(data)) == data and store.list_multiparts() == []


def test_a_store_of_your_own_is_asked(tmp_path: Path) -> None:
    own = ("--plugins", "tests.toys.store", "--endpoint-url", "memory://")
    done = run(tmp_path, "some-bucket", *own)
    assert (done.returncode, done.stderr) == (0, "")
    assert "No multipart uploads older than" in done.stdout


def test_without_keys_it_says_which(tmp_path: Path) -> None:
    done = run(tmp_path, "some-bucket")
    assert done.returncode == 2
    assert "R2_WRITE_ACCESS_KEY_ID is not set" in done.stderr
    assert "Traceback" not in done.stderr
