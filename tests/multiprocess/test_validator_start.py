"""The validator with everything real around it: object store, registry, wallet, text."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from bittensor_core import verify

from distributed_training.chain.identity import Wallet, create_wallet
from distributed_training.chain.registry import RegistryChain
from distributed_training.config import Config, load_config
from distributed_training.localnet.services import ObjectStoreServer
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Master, State
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.telemetry import read_events
from distributed_training.validator import program
from tests.tools.chain_program import chain_program
from tests.tools.chain_world import VALIDATOR
from tests.tools.network import network_file
from tests.tools.support_store import access_to
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("own_logging")]
STOPPED = 40.0  # seconds; at rest it takes two, and nothing that it waits for ends by itself


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStoreServer]:
    with ObjectStoreServer(folder=tmp_path / "store") as server:
        yield server


@pytest.fixture
def wallet(tmp_path: Path) -> Wallet:
    return create_wallet(tmp_path / "wallets", "validator")


@pytest.fixture
def chain_url(wallet: Wallet) -> Iterator[str]:
    with chain_program(master=wallet.ss58) as (url, _):
        yield url


def _config(
    tmp_path: Path, url: str, store: ObjectStoreServer, master: Wallet, patience: float = 30
) -> Config:
    rules = {"exchange": "store", "store.global_bucket": "global", "chain.url": url}
    words = {
        "neuron.page_port": "off",
        "neuron.run_folder": str(tmp_path / "run"),
        "network": network_file(tmp_path / "founder", rules, signer=master.hotkey),
        "wallet.path": str(tmp_path / "wallets"),
        "wallet.name": "validator",
        "wallet.hotkey": "default",
    }
    argv = [word for name, value in words.items() for word in (f"--{name}", value)]
    config = load_config("validator", argv, environ={}, dotenv=None, check=False)
    settings = dataclasses.replace(config.store, **access_to(store))
    chain = dataclasses.replace(config.chain, start_timeout=timedelta(seconds=float(patience)))
    return dataclasses.replace(config, store=settings, chain=chain)


def _run(config: Config, folder: Path, starts: int) -> tuple[int, float]:
    """Exit status, and seconds from SIGTERM to it."""
    shot: list[float] = []
    events = folder / "events.jsonl"

    def shoot() -> None:
        try:
            wait_for(
                lambda: events.exists() and len(list(read_events(events, "held_out"))) == starts,
                "the first look at the held-out loss",
                seconds=130,
            )
        finally:
            shot.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)

    shooter = threading.Thread(target=shoot)
    shooter.start()
    status = program.run_validator(config)
    shooter.join()
    return status, time.monotonic() - shot[0]


def test_a_validator_publishes_stops_and_continues(
    tmp_path: Path, store: ObjectStoreServer, chain_url: str, wallet: Wallet
) -> None:
    chain = RegistryChain(url=chain_url, wallet=wallet)
    chain.enroll(wallet.ss58, uid=200)
    config = _config(tmp_path, chain_url, store, wallet)
    S3ObjectStore.from_settings(config.store, bucket="global", write=True).create_bucket()
    run = tmp_path / "run"
    try:
        status, seconds = _run(config, run, 1)
        assert status == 0 and seconds < STOPPED
    finally:
        chain.close()
    reader = BucketReader(S3ObjectStore.from_settings(config.store, bucket="global", write=True))
    by = Master(config.swarm.run_id, wallet.ss58, verify)
    state = State.parse(reader.get(keys.STATE, limit=State.most_bytes) or b"", by)
    assert (state.outer_step, state.weights_at) == (0, (0,))
    start = next(read_events(run / "events.jsonl", "start"))
    assert (start["hotkey"], start["outer_step"]) == (wallet.ss58, 0)
    model = reader.head(keys.outer_key(0, keys.MODEL))
    assert model is not None and 1_000_000 < model.size / 4 < 2_000_000

    status, seconds = _run(config, run, 2)
    assert status == 0 and seconds < STOPPED
    starts = list(read_events(run / "events.jsonl", "start"))
    assert [e["resumed"] for e in starts] == [False, True]
    text = (run / "events.jsonl").read_text()
    assert not [value for name, value in store.keys.items() if "SECRET" in name and value in text]
    left = [p for p in psutil.process_iter() if str(run) in " ".join(_command(p))]
    assert not left


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_an_unregistered_hotkey_ends_the_start_with_that_reason(
    tmp_path: Path,
    wallet: Wallet,
    capfd: pytest.CaptureFixture[str],
) -> None:
    store = ObjectStoreServer(folder=tmp_path / "store")  # it is not asked
    with chain_program("--admission", "invited", master=VALIDATOR.ss58) as (url, _):
        assert program.run_validator(_config(tmp_path, url, store, VALIDATOR)) == 1
        assert program.run_validator(_config(tmp_path, url, store, wallet, "8")) == 1
    said = capfd.readouterr().out
    assert f"hotkey {wallet.ss58} is not registered at {url}" in said
    assert f"it was created by {VALIDATOR.ss58}, not by {wallet.ss58}" in said
