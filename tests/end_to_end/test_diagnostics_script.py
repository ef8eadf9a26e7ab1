"""scripts/diagnose.py as an operator runs it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.tools import forked
from tests.tools.r2_keys import KEYS

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).parents[2]
LOCAL = ["--network", "local", "--dht.port", "0", "--nproc_per_node", "1"]


def diagnose(
    *words: str,
    folder: Path,
    environ: dict[str, str] | None = None,
    offline: tuple[str, ...] = ("--offline",),
) -> subprocess.CompletedProcess[str]:
    where = ("--neuron.run_folder", str(folder / "run"))
    return forked.run(
        ROOT / "scripts" / "diagnose.py",
        *(*LOCAL, *offline, *words, *where),
        environ=KEYS if environ is None else environ,
        folder=folder,
    )


def test_a_machine_in_order(tmp_path: Path) -> None:
    done = diagnose(folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("configuration", "torch", "batch", "model", "disk", "port dht.port"):
        assert name in done.stdout
    assert "0 failed" in done.stdout.splitlines()[-1]
    assert not (tmp_path / "run").exists()  # looking changes nothing


def test_memory_that_does_not_fit_fails_and_disk_has_one_row(tmp_path: Path) -> None:
    huge = {
        "hidden_size": 16384,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "intermediate_size": 53248,
        "vocab_size": 128256,
    }
    (tmp_path / "huge.json").write_text(json.dumps(huge))
    done = diagnose("--json", "--model", "huge.json", folder=tmp_path)
    assert done.returncode == 1, done.stderr
    checks = {c["name"]: c for c in json.loads(done.stdout)}
    assert {n for n, c in checks.items() if c["status"] == "fail"} == {"host memory", "disk"}


def test_the_bucket_is_tried_with_both_keys(tmp_path: Path) -> None:
    from distributed_training.localnet.services import ObjectStoreServer
    from distributed_training.store.s3 import S3ObjectStore
    from tests.tools.support_store import settings_for

    server = ObjectStoreServer(folder=tmp_path / "store")
    server.start()
    try:
        settings = settings_for(server)
        S3ObjectStore.from_settings(settings, bucket="local-007", write=True).create_bucket()
        keys = {
            **server.keys,
            "BT_WALLET_PATH": str(tmp_path / "wallets"),  # none there: the hotkey's row fails
        }
        too_much = keys | {
            "R2_READ_ACCESS_KEY_ID": server.keys["R2_WRITE_ACCESS_KEY_ID"],
            "R2_READ_SECRET_ACCESS_KEY": server.keys["R2_WRITE_SECRET_ACCESS_KEY"],
        }
        wrong = keys | {"R2_WRITE_SECRET_ACCESS_KEY": "0" * 64}
        cases = [(keys, 7, "ok"), (keys, 8, "fail"), (too_much, 7, "fail"), (wrong, 7, "fail")]
        for environ, uid, wanted in cases:
            words = ("--json", "--uid", str(uid))
            done = diagnose(*words, folder=tmp_path, environ=environ, offline=())
            checks = {c["name"]: c for c in json.loads(done.stdout)}
            assert checks["bucket"]["status"] == wanted, checks["bucket"]
            assert keys["R2_WRITE_SECRET_ACCESS_KEY"] not in done.stdout + done.stderr
            assert checks["data"]["status"] == checks["tokenizer"]["status"] == "ok"
            failing = {name for name, check in checks.items() if check["status"] == "fail"}
            expected = {"hotkey"} | ({"bucket"} if wanted == "fail" else set())
            assert failing == expected | ({"configuration"} if environ is too_much else set())
            assert done.returncode == 1
        assert "R2_WRITE" in checks["bucket"]["finding"]
    finally:
        server.stop()
