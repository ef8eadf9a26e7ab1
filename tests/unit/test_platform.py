"""No variable, disk or Python option of a platform may end one of our programs."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from pydantic import SecretStr

from distributed_training.config.settings import StoreSettings
from distributed_training.miner import __main__ as program
from distributed_training.miner import launcher
from distributed_training.miner.rank_group import rank_environment_defaults
from distributed_training.store.errors import PreconditionError
from distributed_training.store.folder import FolderStore
from distributed_training.store.s3 import S3ObjectStore, _session
from tests.tools.miner_parts import config_of

pytestmark = pytest.mark.timeout(120)

# --- variables ------------------------------------------------------------------------------------

JOBS = {
    "a PyTorchJob": {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
    "AzureML": {"RANK": "0", "LOCAL_RANK": "0", "NODE_RANK": "0", "WORLD_SIZE": "1"},
    "empty": {"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""},
    "an image": {"GLOO_SOCKET_IFNAME": "eth9", "NCCL_SOCKET_IFNAME": "eth9"},
    "a cluster": {"NCCL_COMM_ID": "a:1", "NCCL_NET": "IB", "GLOO_DEVICE_TRANSPORT": "x"},
    "half of torchrun": {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "1"},
}


@pytest.mark.parametrize("variables", JOBS.values(), ids=JOBS)
def test_variables_of_a_platform_are_ignored_with_one_line(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    started: list[Any] = []
    monkeypatch.setattr(program, "load_settings", lambda argv: config_of())
    monkeypatch.setattr(launcher, "launch", lambda config, **_: started.append(config) or 0)
    assert program.main([]) == 0
    (config,) = started
    (line,) = config.warnings
    for name, value in variables.items():
        assert f"{name}={value}" in line
        assert name not in os.environ
    assert "ignored" in line and "\n" not in line


def test_ranks_of_one_machine_meet_at_its_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """This also applies to the doctor's trial of the ranks."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    assert rank_environment_defaults(ranks=2)["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize("given", ["", "ib0", "^docker0"])
def test_ranks_of_torchrun_use_the_interface_to_node_0_or_the_one_that_was_given(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    chosen = dict.fromkeys(names, given) if given else {}
    others = {name: value for name, value in os.environ.items() if name not in names}
    place = {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "1"}
    monkeypatch.setattr(os, "environ", others | chosen | place)
    program.set_rank_environment()
    assert [os.environ[name] for name in names] == [given or "lo"] * 2


AWS = sorted(
    {
        environment
        for _, names, _, _ in botocore.session.Session.SESSION_VARIABLES.values()
        for environment in ([names] if isinstance(names, str) else names or [])
    }
    | {
        "AWS_S3_US_EAST_1_REGIONAL_ENDPOINT",
        "AWS_S3_USE_ARN_REGION",
        "AWS_S3_DISABLE_MULTIREGION_ACCESS_POINTS",
    }
)


@pytest.mark.parametrize("value", ["odd", "-1"])
def test_no_variable_of_another_program_ends_or_changes_the_store_s_client(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All variables are set at once, because they are read when the client is created."""
    for name in AWS:
        if name != "AWS_CA_BUNDLE":  # our own clients use it too
            monkeypatch.setenv(name, value)
    _session.cache_clear()
    secret = SecretStr("a" * 32)
    settings = StoreSettings(
        endpoint_url="http://127.0.0.1:9",
        write_access_key_id=secret,
        write_secret_access_key=secret,
    )
    store = S3ObjectStore.from_settings(settings, bucket="llama-test-1", write=True)
    _session.cache_clear()
    url = store.presign("get_object", "key", 60)
    assert url.startswith("http://127.0.0.1:9/llama-test-1/key?X-Amz-Algorithm=AWS4-HMAC-SHA256")
    assert store._client.meta.config.retries["total_max_attempts"] == 1


# --- python -OO -----------------------------------------------------------------------------------

COMMANDS = ["miner", "doctor", "join_command", "network_command", "status_command"]
COMMANDS += ["plan_command", "scoring.command", "scoring.export", "localnet.command"]

HELPS = """
import importlib, runpy, sys
found = {}
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    try:
        runpy.run_module("distributed_training." + name, run_name="__main__", alter_sys=True)
        found[name] = 0
    except SystemExit as ended:
        found[name] = ended.code or 0
    except BaseException as error:
        found[name] = repr(error)
import json
print(json.dumps(found))
"""


@pytest.mark.slow
def test_every_program_answers_help_without_docstrings() -> None:
    done = subprocess.run(
        [sys.executable, "-OO", "-c", HELPS, *COMMANDS, "__main__"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == dict.fromkeys([*COMMANDS, "__main__"], 0), done.stderr
    assert "None" not in done.stdout.split("\n")


# --- disks ----------------------------------------------------------------------------------------


@pytest.fixture(params=[errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get)
def no_links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: object, target: object, **_: object) -> None:
        raise OSError(request.param, os.strerror(request.param), str(source))

    monkeypatch.setattr(os, "link", link)


@pytest.mark.usefixtures("no_links")
def test_a_folder_without_hard_links_holds_objects_that_are_written_once(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, writes=True)
    store.put_new("uploads/1", b"first")
    with pytest.raises(PreconditionError):
        store.put_new("uploads/1", b"second")
    assert store.get("uploads/1", limit=10) == b"first"
    (tmp_path / "uploads/2").touch()  # left by a writer that was killed after taking the name
    store.put_new("uploads/2", b"first")
    assert store.get("uploads/2", limit=10) == b"first"
    assert [info.key for info in store.list_objects()] == ["uploads/1", "uploads/2"]
