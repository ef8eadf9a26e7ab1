"""The local subnet's chain as a program: who may write, and what."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from bittensor import http_auth

from distributed_training.chain.base import ChainError
from distributed_training.chain.identity import Wallet, create_wallet
from distributed_training.chain.local import LocalChain
from tests.tools.chain_program import chain_program
from tests.tools.chain_server_thread import LocalChainServer
from tests.tools.chain_world import PEER, VALIDATOR
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(60)


@contextmanager
def chain_of(url: str, wallet: Wallet) -> Iterator[LocalChain]:
    chain = LocalChain(url=url, wallet=wallet, poll_interval=timedelta(milliseconds=20))
    try:
        assert chain.wait_ready(timedelta(seconds=30))
        yield chain
    finally:
        chain.close()


def test_a_stop_is_clean_and_the_start_needs_no_torch() -> None:
    with chain_program() as (_, process):
        process.terminate()
        assert process.wait(40) == 0
    code = "import sys, distributed_training.localnet.chain_server; print('torch' in sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50
    )
    assert loaded.stdout.strip() == "False"


@pytest.fixture
def server() -> Iterator[LocalChainServer]:
    with LocalChainServer() as made:
        yield made


def post(server: LocalChainServer, path: str, body: bytes, headers: dict[str, str]) -> int:
    return httpx.post(
        server.url + path, content=body, headers=headers, trust_env=False, verify=False
    ).status_code


def sign(wallet: Wallet, path: str, body: bytes) -> dict[str, str]:
    return http_auth.sign(wallet.hotkey, method="POST", path=path, body=body)


def test_only_the_hotkey_writes_for_itself(server: LocalChainServer) -> None:
    body = json.dumps({"text": "x"}).encode()
    with chain_of(server.url, PEER) as chain, chain_of(server.url, VALIDATOR) as other:
        chain.register()
        with pytest.raises(ChainError, match="not registered"):
            other.commit("y")
        assert post(server, "/commit", body, {}) == 401
        forged = sign(VALIDATOR, "/commit", body)
        forged["X-Bittensor-Hotkey"] = PEER.ss58
        assert post(server, "/commit", body, forged) == 401
        good = sign(PEER, "/commit", body)
        assert post(server, "/commit", body.replace(b"x", b"z"), good) == 401
        assert post(server, "/commit", body, good) == 200
        assert post(server, "/commit", body, good) == 401  # replayed
        wait_for(lambda: chain.commitment(PEER.ss58) == "x")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/serve", b'{"ip": "1.2.3.4", "port": 0}'),
        ("/serve", b'{"ip": "1.2.3.4", "port": NaN}'),
        ("/commit", b'{"text": 5}'),
        ("/commit", b"[]"),
        ("/weights", b'{"weights": {"0": -1}}'),
        ("/register", b'{"uid": 256}'),
    ],
)
def test_nonsense_is_refused(server: LocalChainServer, path: str, body: bytes) -> None:
    with chain_of(server.url, VALIDATOR) as chain:
        chain.register(stake=1.0, validator_permit=True)
    assert post(server, path, body, sign(VALIDATOR, path, body)) == 400


def test_weights_become_incentive(server: LocalChainServer, tmp_path: Path) -> None:
    miners = [create_wallet(tmp_path, f"m{i}") for i in range(2)]
    with chain_of(server.url, VALIDATOR) as chain:
        chain.register(uid=0, stake=10.0, validator_permit=True)
        for uid, miner in enumerate(miners, start=1):
            with chain_of(server.url, miner) as own:
                own.register(uid=uid)
        chain.set_weights({1: 3.0, 2: 1.0})
        wait_for(lambda: [n.incentive for n in chain.neurons()] == [0.0, 0.75, 0.25])


def test_a_uid_taken_over_deregisters_its_owner(server: LocalChainServer) -> None:
    with chain_of(server.url, PEER) as chain, chain_of(server.url, VALIDATOR) as other:
        chain.register(uid=3)
        other.register(uid=3)
        wait_for(lambda: chain.uid(PEER.ss58) is None)
        assert other.uid(VALIDATOR.ss58) == 3


def test_a_server_that_is_away_costs_only_age(server: LocalChainServer) -> None:
    with chain_of(server.url, PEER) as chain:
        chain.register(uid=3)
        server.stop()
        wait_for(lambda: chain.age() > timedelta(milliseconds=300))
        assert chain.uid(PEER.ss58) == 3
        server.start()
        wait_for(lambda: chain.age() < timedelta(milliseconds=200))
