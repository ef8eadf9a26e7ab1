"""No secret reaches a process that does not need it, started or forked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distributed_training.common.environment import is_secret, without_secrets

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    "name",
    [
        "R2_WRITE_SECRET_ACCESS_KEY",
        "R2_ACCOUNT_ID",
        "AWS_PROFILE",
        "HF_TOKEN",
        "WANDB_API_KEY",
        "BT_PW__ROOT_WALLET",
        "INFLUXDB_TOKEN",
        "LOKI_PASSWORD",
        "my_secret",
    ],
)
def test_secrets_are_known_by_their_names(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "PWD",
        "TOKENIZERS_PARALLELISM",
        "PYTHONHASHSEED",
        "CUDA_VISIBLE_DEVICES",
        "HOME",
        "BT_WALLET_NAME",
        "DT_RUN_FOLDER",
        "HTTPS_PROXY",
        "NCCL_SOCKET_IFNAME",
        "MASTER_ADDR",
    ],
)
def test_what_children_need_stays(name: str) -> None:
    assert not is_secret(name)


def test_a_child_gets_the_secrets_it_is_meant_to_have() -> None:
    environ = {"HF_TOKEN": "h", "R2_ACCOUNT_ID": "a", "HOME": "/"}
    assert without_secrets(environ) == {"HOME": "/"}
    assert without_secrets(environ, keep=("HF_TOKEN",)) == {"HOME": "/", "HF_TOKEN": "h"}


_FORKS = """
import os, subprocess, sys
from distributed_training.common.environment import forget_secrets

forget_secrets(keep=("HF_TOKEN",))
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, open("/proc/self/environ", "rb").read())
    os._exit(0)
os.close(write)
os.wait()
with open(read, "rb") as forked:
    sys.stdout.buffer.write(open("/proc/self/environ", "rb").read() + forked.read())
sys.stdout.flush()
subprocess.run(["cat", "/proc/self/environ"], check=True)
"""


def test_what_a_process_forgot_stands_nowhere_in_proc() -> None:
    environ = {"A_FIRST": "1", "R2_WRITE_SECRET_ACCESS_KEY": "s3cret-value", "HF_TOKEN": "kept"}
    environ |= {"Z_LAST": "2", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", _FORKS],
        env=environ,
        capture_output=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert b"s3cret" not in done.stdout
    for kept in (b"A_FIRST=1", b"Z_LAST=2", b"HF_TOKEN=kept"):
        assert done.stdout.count(kept) == 3, "its own, its fork's, its child's"
