"""An interrupted upload, and ``scripts/abort_multipart_uploads.py`` as operators run it.

Members of both exchanges send by the same code.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from distributed_training.localnet.services import ObjectStoreServer
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
    assert len(store.list_multiparts()) == 2
    listed = run(tmp_path, store.bucket, "--older-than", "0s", "--dry-run")

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
