"""Test how a node finds its place on the subnet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_training.chain.base import ChainError, ChainState, Neuron
from distributed_training.common.files import read_json_object
from distributed_training.common.ports import free_ports
from distributed_training.config import Config, ConfigError
from distributed_training.node import identity as node_chain
from distributed_training.node.start import NetworkFailure, NotRegistered
from distributed_training.registry.store import hash_of
from tests.tools.chain_memory import MemoryChain, MemoryLedger
from tests.tools.chain_server_thread import RegistryServer
from tests.tools.chain_world import MINER, PEER, VALIDATOR, registry_at
from tests.tools.miner_parts import config_of, impatient
from tests.tools.network import network_file
from tests.tools.settings import load_config
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(30)


def test_a_uid_that_the_networks_file_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger = MemoryLedger()
    ledger.most_uids = 1000
    ledger.register(MINER.ss58, uid=256)
    chain = MemoryChain(hotkey=MINER.ss58, ledger=ledger)
    monkeypatch.setattr(node_chain, "load_wallet", lambda settings: MINER)
    monkeypatch.setattr(node_chain, "follow_chain", lambda *_, **named: chain)
    with (
        pytest.raises(ConfigError, match=r"uid 256 and .* below 256 \(limits.max_uids"),
        ExitStack() as stack,
    ):
        node_chain.join_subnet(config_of(), stack)


class Kept:
    """A run folder with the chain's state of an hour ago, while the chain does not answer."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = folder / node_chain.STATE_FILE
        url = f"http://127.0.0.1:{free_ports(1)[0]}"
        self.config = self.at(url)
        self.folder = folder
        self.state = ChainState(
            chain=node_chain.chain_name(self.config.chain),
            at=time.time() - 3600,
            neurons=(Neuron(uid=3, hotkey=MINER.ss58, ip="1.2.3.4", port=8091),),
            commitments={VALIDATOR.ss58: "keys"},
        )
        monkeypatch.setattr(node_chain, "load_wallet", lambda _: MINER)

    def at(self, url: str) -> Config:
        rules = {"chain.url": url}
        return impatient(config_of(rules=rules, signer=VALIDATOR.hotkey), start_timeout=0.3)

    @contextmanager
    def join(self) -> Iterator[node_chain.Member]:
        with ExitStack() as stack:
            yield node_chain.join_subnet(self.config, stack, folder=self.folder)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    return Kept(tmp_path, monkeypatch)


def test_a_start_while_the_chain_is_away_uses_its_last_state(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    kept.state.save(kept.path)
    with kept.join() as member:
        chain = member.chain
        assert member.uid == 3
        assert chain.age().total_seconds() == pytest.approx(3600, abs=60)
        assert chain.commitment(VALIDATOR.ss58) == "keys"
        assert "starting with what it showed 60 minutes ago" in caplog.text
        node_chain.keep_state(chain, kept.config.chain, kept.folder)
        again = ChainState.load(kept.path, chain=kept.state.chain, hotkey=MINER.ss58)
        assert again == kept.state, "a state that was not read again keeps its age"


@pytest.mark.parametrize(
    "change",
    [
        {"at": time.time() - 25 * 3600},
        {"at": time.time() + 3600},  # this machine's clock was wrong then, or is wrong now
        {"chain": "finney, netuid 38"},
        {"neurons": (Neuron(uid=3, hotkey=PEER.ss58),)},
    ],
    ids=["a day old", "of tomorrow", "another chain", "not registered"],
)
def test_saved_chain_state_that_is_old_or_foreign_is_not_used(
    change: dict[str, Any], kept: Kept
) -> None:
    replace(kept.state, **change).save(kept.path)
    with pytest.raises(NetworkFailure, match="did not answer within"), kept.join():
        pytest.fail("it has begun")


def test_an_endpoint_that_answers_replaces_the_kept_state(kept: Kept) -> None:
    server = RegistryServer()
    server.start()
    server.stop()
    kept.config = kept.at(server.url)
    replace(kept.state, chain=node_chain.chain_name(kept.config.chain)).save(kept.path)
    with kept.join() as member:
        assert member.chain.uid(MINER.ss58) == 3
        with server:
            wait_for(lambda: member.chain.counters().get("reads", 0) > 0)
            assert member.chain.uid(MINER.ss58) is None
            assert member.chain.age().total_seconds() < 60
            node_chain.keep_state(member.chain, kept.config.chain, kept.folder)
            content = read_json_object(kept.path)
            assert content is not None and [n["hotkey"] for n in content["neurons"]] == [
                VALIDATOR.ss58
            ]
            assert content["at"] > time.time() - 60


@pytest.mark.parametrize("apart", [600.0, -600.0])
def test_clocks_that_are_apart_are_named_and_nothing_is_lost(
    apart: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write is signed together with the founder's time, so that it cannot count twice."""
    with (
        RegistryServer(tmp_path) as server,
        closing(registry_at(server.url, VALIDATOR)) as founder,
    ):
        assert founder.wait_ready(timedelta(seconds=10))
        ours = SimpleNamespace(
            monotonic=time.monotonic,
            time=lambda: time.time() + apart,
            time_ns=lambda: time.time_ns() + round(apart * 1e9),
        )
        with monkeypatch.context() as wrong:
            wrong.setattr("distributed_training.chain.auth.time", ours)
            side = "after" if apart > 0 else "before"
            with pytest.raises(ChainError, match=f"signed 600 s {side} this .*timedatectl"):
                founder.commit("x" * 128)
        founder.commit("y" * 128)
        assert founder.commitment(VALIDATOR.ss58) == "y" * 128


def test_an_invitation_gives_a_uid_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_chain, "load_wallet", lambda _: MINER)
    with RegistryServer(tmp_path, admission="invited") as server:
        assert server.registry is not None
        server.registry.invite(hash_of("token"), 1, time.time() + 60)
        rules = {"chain.url": server.url}
        argv = ["--network", network_file(tmp_path / "net", rules, signer=VALIDATOR.hotkey)]
        for secret in ("wrong", "token"):
            environ = {"DT_INVITATION": secret}
            config = load_config("miner", argv, environ=environ, dotenv=None, check=False)
            with ExitStack() as stack:
                if secret == "token":
                    assert node_chain.join_subnet(config, stack).uid == 1
                    continue
                with pytest.raises(NotRegistered, match="dt-join INVITATION"):
                    node_chain.join_subnet(config, stack)
        server.registry.expel(MINER.ss58)
        caplog.clear()
        with (
            ExitStack() as stack,
            pytest.raises(NotRegistered, match=r"the founder expelled hotkey .* expel --again"),
        ):
            node_chain.join_subnet(config, stack)
        assert "gave this hotkey no uid" not in caplog.text
