"""No secret reaches a process that does not need it, started or forked."""

from __future__ import annotations

import pytest

from distributed_training.common.processes import is_secret, without_secrets

pytestmark = pytest.mark.timeout(30)


SECRETS = """
R2_WRITE_SECRET_ACCESS_KEY R2_ACCOUNT_ID AWS_PROFILE HF_TOKEN WANDB_API_KEY BT_PW__ROOT_WALLET
INFLUXDB_TOKEN LOKI_PASSWORD my_secret
"""
OTHERS = """
PATH PWD TOKENIZERS_PARALLELISM PYTHONHASHSEED CUDA_VISIBLE_DEVICES HOME BT_WALLET_NAME
DT_RUN_FOLDER HTTPS_PROXY NCCL_SOCKET_IFNAME MASTER_ADDR AWS_CA_BUNDLE
"""


def test_secrets_are_known_by_name_and_children_keep_what_they_need() -> None:
    assert [name for name in SECRETS.split() if not is_secret(name)] == []
    assert [name for name in OTHERS.split() if is_secret(name)] == []


def test_a_child_gets_the_secrets_it_is_meant_to_have() -> None:
    environ = {"HF_TOKEN": "h", "R2_ACCOUNT_ID": "a", "HOME": "/"}
    assert without_secrets(environ) == {"HOME": "/"}
    assert without_secrets(environ, keep=("HF_TOKEN",)) == {"HOME": "/", "HF_TOKEN": "h"}
