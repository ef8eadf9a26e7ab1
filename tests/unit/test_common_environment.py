"""No secret reaches a process that does not need it, started or forked."""

from __future__ import annotations

import pytest

from distributed_training.common.processes import is_secret, without_secrets

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
        "AWS_CA_BUNDLE",
    ],
)
def test_what_children_need_stays(name: str) -> None:
    assert not is_secret(name)


def test_a_child_gets_the_secrets_it_is_meant_to_have() -> None:
    environ = {"HF_TOKEN": "h", "R2_ACCOUNT_ID": "a", "HOME": "/"}
    assert without_secrets(environ) == {"HOME": "/"}
    assert without_secrets(environ, keep=("HF_TOKEN",)) == {"HOME": "/", "HF_TOKEN": "h"}
