"""Test ``python -m distributed_training doctor`` with faults around it, and its ``--probe``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from distributed_training.common.ports import free_ports
from distributed_training.config import ConfigError
from distributed_training.doctor import probe, probed, report
from tests.tools.network import network_file

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
EVERY = {
    "configuration", "torch", "gpu", "disk", "port dht.port", "clock", "network",
    "global state", "hotkey", "commitment", "bucket", "line", "tokenizer", "address", "data",
}  # fmt: skip


def doctor(
    *words: str, folder: Path, environ: dict[str, str] | None = None
) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Return the exit status, the checks by name, and the standard error."""
    clean = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "distributed_training", "doctor", "--json", *words],
        env=clean | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | (environ or {}),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    checks = json.loads(done.stdout)
    names = [check["name"] for check in checks]
    assert len(set(names)) == len(names) or {n for n in names if names.count(n) > 1} == {
        "configuration"
    }
    for check in checks:
        assert check["finding"] and "\n" not in check["finding"]
        assert check["remedy"] or check["status"] != "fail", check
    return done.returncode, {check["name"]: check for check in checks}, done.stderr


@pytest.mark.slow
def test_without_keys_network_and_gpu_each_check_says_why(tmp_path: Path) -> None:
    """A name below .invalid has no address, so the chain and the hub cannot be reached."""
    rules = {
        "chain.url": "https://nowhere.invalid:9944",
        "data.source": "hub",
        "model.parameters": 4_000_000_000,
        "store.endpoint": "http://127.0.0.1:1",
        "tokenizer.name": "dstrbtd/llama-1b",
    }
    status, checks, _ = doctor(
        f"--network={network_file(tmp_path / 'net', rules)}",
        "--dht.ip=8.8.4.4",  # without it, public services would be asked
        folder=tmp_path,
        environ={"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://nowhere.invalid"},
    )
    assert status == 1 and set(checks) == EVERY
    found = {name: check["status"] for name, check in checks.items()}
    for name in ("configuration", "hotkey", "tokenizer", "data"):
        assert found[name] == "fail", checks[name]
    left_out = {"clock", "network", "global state", "commitment", "bucket", "line"}
    for name in left_out:
        assert found[name] == "skip", checks[name]
    assert "--probe 8.8.4.4:8009" in checks["address"]["finding"]
    assert not (tmp_path / "runs").exists()


def test_a_port_that_nobody_listens_on_and_one_of_somebody_else() -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)) as server:

        def mumble() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"220 mail.example ESMTP\r\n")

        thread = threading.Thread(target=mumble)
        thread.start()
        check = probe("127.0.0.1", port, timeout=timedelta(seconds=20))
        thread.join()
        assert check.status == "warn" and check.remedy
    check = probe("127.0.0.1", port, timeout=timedelta(seconds=20))
    assert check.status == "fail" and "nothing listens" in check.finding
    check = probe("nowhere.invalid", 80, timeout=timedelta(seconds=20))
    assert check.status == "fail" and "cannot be dialled" in check.finding
    assert report([check], as_json=False) == 1


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("203.0.113.7", ("203.0.113.7", 8009)),
        ("[2001:db8::1]", ("2001:db8::1", 8009)),
        ("2001:db8::1", ("2001:db8::1", 8009)),
        ("host:48009", ("host", 48009)),
        ("[2001:db8::1]:48009", ("2001:db8::1", 48009)),
        *((text, None) for text in ("", "8091", ":80")),
        *((f"host:{port}", None) for port in ("", "0", "70000", "x", "1,2,3", "1,", "²")),
    ],
)
def test_a_peers_port_is_the_usual_one_unless_it_is_named(
    text: str, found: tuple[str, int] | None
) -> None:
    if found is None:
        with pytest.raises(ConfigError, match="HOST:PORT"):
            probed(text)
    else:
        assert probed(text) == found
