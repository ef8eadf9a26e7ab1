"""Test an interrupted upload, and ``scripts/abort_multipart_uploads.py`` as operators run it.

Members of both exchanges send uploads with the same code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distributed_training.localnet.services import ObjectStoreServer
from distributed_training.protocol.keys import upload_key
from tests.tools import forked
from tests.tools.support_store import new_bucket, settings_for

pytestmark = pytest.mark.timeout(200)
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "abort_multipart_uploads.py"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return forked.run(SCRIPT, *words, "--network", "local", environ={}, folder=folder)


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the keys of the test run, so that all keys come from the file."""
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
    assert len(store.list_multiparts()) == 2

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


_SENDS = """
import json, os, sys, time
from pathlib import Path
from distributed_training.config.settings import StoreSettings
from distributed_training.exchange import own_uploads
from distributed_training.exchange.base import Close
from distributed_training.store import transfer
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.store.base import Uplink

transfer.PART = 5 << 20
bucket, folder, part = sys.argv[1], Path(sys.argv[2]), S3ObjectStore.upload_part

def send_one(store, key, upload_id, number, data):
    if number > 1 and "whole" not in sys.argv:
        time.sleep(600)  # until it is killed
    etag = part(store, key, upload_id, number, data)
    print(f"sent {number}\\n", end="", flush=True)  # in one write: threads print at once
    return etag

S3ObjectStore.upload_part = send_one
store = S3ObjectStore.from_settings(
    StoreSettings(**json.loads(os.environ["SETTINGS"])), bucket=bucket, write=True
)
uploads = own_uploads.OwnUploads(store, folder, 7)
close = Close(3, 5, 0.0, 600.0)
if not uploads.path(close).exists():
    uploads.path(close).write_bytes(bytes(range(256)) * 50_000)
ended = uploads.send(close, 600.0, Uplink())
print("ended", ended.cause, flush=True)
"""


def test_an_upload_that_is_killed_in_mid_send_is_continued(
    server: ObjectStoreServer, tmp_path: Path
) -> None:
    """The next process sends only what is missing."""
    store, folder = new_bucket(server, settings_for(server)), tmp_path / "uploads"
    settings = {name.removeprefix("R2_").lower(): value for name, value in server.keys.items()}
    words = [sys.executable, "-c", _SENDS, store.bucket, str(folder)]
    environ = {**os.environ, "SETTINGS": json.dumps(settings)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environ) as sender:
        assert sender.stdout is not None
        assert sender.stdout.readline() == "sent 1\n"
        sender.kill()
    key = upload_key(7, 3, 5)
    [stuck] = store.list_multiparts()
    assert stuck.key == key and store.head(key) is None
    out = subprocess.run(
        [*words, "whole"], capture_output=True, text=True, env=environ, check=True, timeout=100
    ).stdout
    lines = out.splitlines()
    assert lines[-1] == "ended " and "sent 1" not in lines and "sent 2" in lines
    held = store.head(key)
    assert held is not None and held.size == 256 * 50_000
    assert store.list_multiparts() == []


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
