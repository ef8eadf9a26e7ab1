"""Test the validator's program, with a chain and a store in memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distributed_training.chain.base import ChainError
from distributed_training.config import Config, ConfigError
from distributed_training.network import Network
from distributed_training.node.start import WrongPlace, exit_status_of, sole_user
from distributed_training.protocol import keys
from distributed_training.protocol.types import ExitStatus
from distributed_training.scoring.evaluator import evaluation_device
from distributed_training.telemetry import read_events
from distributed_training.validator import program
from distributed_training.validator.global_state import claim_global_bucket
from distributed_training.validator.program import ValidatorParts
from distributed_training.validator.store_rounds import StoreValidator
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.model_families import FAMILIES
from tests.tools.r2_keys import KEYS
from tests.tools.store_world import StoreWorld, keypair
from tests.tools.validator_world import (  # noqa: F401
    config_of,
    one_thread,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("own_logging")]


@pytest.fixture
def world(tmp_path: Path) -> StoreWorld:
    """Return a network in which nothing is published yet."""
    return StoreWorld(tmp_path / "unused", begun=False)


def run(world: StoreWorld, config: Config) -> int:
    """Run the program with the chain and the store of ``world``; return its exit status."""
    return program.run_validator(config, connect=lambda *_: world.parts())


def _config(tmp_path: Path, *flags: str, **model: Any) -> Config:
    return config_of(tmp_path / "run", *flags, signer=keypair("master"), **model)


def test_a_global_bucket_of_another_founder_is_not_changed() -> None:
    """Two founders chose the same name on the same store."""
    store: Any = MemoryObjectStore("lab")

    def network(master: str) -> Any:
        head = SimpleNamespace(name="lab", version=1)
        values = {"chain.master_hotkey": master}
        return SimpleNamespace(head=head, values=values, rules_id="aa")

    claim_global_bucket(store, network("first"))
    claim_global_bucket(
        store, network("first")
    )  # as after a restart, or with new rules by the same founder
    before = store.get(keys.NETWORK, limit=999)
    with pytest.raises(WrongPlace, match=r"bucket lab is another network's .* first, not") as end:
        claim_global_bucket(store, network("second"))
    assert exit_status_of(end.value) == ExitStatus.BAD_CONFIGURATION
    assert store.get(keys.NETWORK, limit=999) == before and "\n" not in str(end.value)


def test_a_signal_ends_it_with_status_0(
    world: StoreWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, ticked, tick = signal.getsignal(signal.SIGTERM), threading.Event(), StoreValidator.tick
    monkeypatch.setattr(StoreValidator, "tick", lambda self: (ticked.set(), tick(self)))

    def shoot() -> None:
        ticked.wait(100)
        os.kill(os.getpid(), signal.SIGTERM)

    shooter = threading.Thread(target=shoot)
    shooter.start()
    assert run(world, _config(tmp_path)) == 0
    shooter.join(10)
    assert signal.getsignal(signal.SIGTERM) == before
    assert "stop" in [event["kind"] for event in read_events(tmp_path / "run" / "events.jsonl")]
    assert keys.STATE in world.bucket.objects


def test_a_signal_during_the_start_ends_it(tmp_path: Path) -> None:
    def connect(config: Config, folder: Path, stack: ExitStack) -> ValidatorParts:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)  # a store that does not answer
        raise AssertionError("not interrupted")

    began = time.monotonic()
    assert program.run_validator(_config(tmp_path), connect=connect) == 0
    assert time.monotonic() - began < 25


def test_faults_and_bad_configuration_have_their_statuses(
    world: StoreWorld, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    world.bucket.down = True
    assert run(world, _config(tmp_path)) == 1
    config = _config(tmp_path)
    lost = replace(config.validator, model=tmp_path / "nothing")
    world.bucket.down = False
    config = replace(config, validator=lost)
    assert run(world, config) == 1, "its disk may be mounted later"
    shown = capfd.readouterr()
    assert "so nothing was published" in shown.out and "Traceback" not in shown.out + shown.err


@pytest.mark.parametrize("family", ["gemma 2", "gpt_oss", "granite"])
def test_a_model_that_is_not_computed_here_is_one_line_and_status_2(
    family: str,
    world: StoreWorld,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused, model = FAMILIES[family]
    monkeypatch.setattr(Network, "model", model)
    assert run(world, _config(tmp_path)) == 2, "pm2 would start it for ever"
    shown = capfd.readouterr()
    (line,) = [line for line in shown.out.splitlines() if "| ERROR |" in line]
    assert refused in line and "Traceback" not in shown.out + shown.err
    assert keys.STATE not in world.bucket.objects


@pytest.mark.parametrize("error", [ChainError("the chain is away"), OSError(28, "No space")])
def test_a_chain_or_a_disk_that_is_away_is_one_line_and_status_1(
    error: Exception, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def connect(config: Config, folder: Path, stack: ExitStack) -> ValidatorParts:
        raise error

    assert program.run_validator(_config(tmp_path), connect=connect) == 1
    assert f"| ERROR | {error}\n" in capfd.readouterr().out


def test_cuda_without_a_gpu_is_said_plainly() -> None:
    if torch.cuda.is_available():
        assert evaluation_device("cuda").type == "cuda"
        return
    with pytest.raises(ConfigError, match=r"--neuron\.device cpu"):
        evaluation_device("cuda")
    assert evaluation_device("auto").type == "cpu"


def test_a_wallet_whose_disk_is_late_leaves_the_start_to_pm2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With status 2, pm2 would not start the validator again once the disk is mounted."""
    from distributed_training.validator.__main__ import main

    monkeypatch.chdir(tmp_path)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    flags = ["--network", "local", "--dht.port", "0"]
    where = ["--wallet.path", str(tmp_path / "late"), "--neuron.run_folder", str(tmp_path / "run")]
    assert main([*flags, *where]) == 1
    assert "no hotkey at" in capfd.readouterr().out
    assert main([*flags, "--neuron.upload_steps", "0"]) == 2


def test_a_second_validator_of_one_run_folder_is_refused_and_changes_nothing(
    world: StoreWorld, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with sole_user(folder, "validator.lock", "validator"):
        assert run(world, _config(tmp_path)) == ExitStatus.FAULT
    assert f"a validator (pid ?) is running in {folder}" in capfd.readouterr().out
    assert not world.bucket.objects and not (folder / "ledger.json").exists()


AGAIN = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from distributed_training.validator import __main__

marks = Path(sys.argv[1])
def run_validator(config):
    with marks.open("a") as file:
        print(os.getpid(), file=file)
    return 5 if len(marks.read_text().split()) < 3 else 0

program = SimpleNamespace(run_validator=run_validator)
checks = SimpleNamespace(refuse_model=mock.Mock(), refuse_unknown_kinds=mock.Mock())
sys.modules["distributed_training.validator.program"] = program
sys.modules["distributed_training.health.machine"] = checks
with mock.patch("distributed_training.config.load_config"):
    sys.exit(__main__.main())
"""


def test_a_validator_starts_again_in_the_place_of_its_process(tmp_path: Path) -> None:
    """So pm2, systemd and dt-network run see neither an exit nor a failure."""
    program, marks = tmp_path / "again.py", tmp_path / "marks"
    program.write_text(AGAIN)
    words = [sys.executable, str(program), str(marks)]
    with subprocess.Popen(words, cwd=Path(__file__).parents[2]) as process:
        assert process.wait(60) == 0
    assert marks.read_text().split() == [str(process.pid)] * 3
