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
from distributed_training.chain.registry import RegistryChain
from distributed_training.common.files import read_json_object
from distributed_training.common.ports import free_ports
from distributed_training.config import Config, ConfigError
from distributed_training.config.settings import ChainSettings, MinerSettings
from distributed_training.node import identity as node_chain
from distributed_training.node.start import NetworkFailure, NotRegistered
from distributed_training.registry.store import hash_of
from tests.tools.chain_memory import MemoryChain, MemoryLedger
from tests.tools.chain_server_thread import RegistryServer
from tests.tools.chain_world import MINER, PEER, VALIDATOR
from tests.tools.miner_parts import config_of
from tests.tools.network import network_file
from tests.tools.settings import load_config
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(30)


class Behind(MemoryChain):
    """A node that has not seen the registration yet: its first ``stale`` reads show nobody."""

    def __init__(self, *, stale: int, ledger: MemoryLedger) -> None:
        super().__init__(hotkey=MINER.ss58, ledger=ledger)
        self.stale = stale
        self.frozen = False
        self.newest_block_age = 0.0

    def _read(self) -> None:
        if not self.frozen or not self._counts["reads"]:
            super()._read()

    def clock(self) -> float:
        return time.time() - self.newest_block_age

    def uid(self, hotkey: str) -> int | None:
        uid = super().uid(hotkey)
        return None if self.reads() <= self.stale else uid

    def reads(self) -> int:
        self._read()
        return super().reads()


def subnet() -> MemoryLedger:
    ledger = MemoryLedger()
    ledger.register(VALIDATOR.ss58)
    return ledger


def joined(chain: MemoryChain, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(node_chain, "load_wallet", lambda settings: MINER)
    monkeypatch.setattr(node_chain, "follow_chain", lambda *_, **named: chain)
    settings = ChainSettings(
        neurons_interval=timedelta(milliseconds=10), call_timeout=timedelta(milliseconds=100)
    )
    config: Any = SimpleNamespace(
        chain=settings,
        kind="miner",
        miner=MinerSettings(master_ss58_address=VALIDATOR.ss58),
    )
    with ExitStack() as stack:
        return node_chain.join_subnet(config, stack).uid


def test_one_read_without_our_hotkey_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = subnet()
    uid = ledger.register(MINER.ss58)
    assert joined(Behind(stale=3, ledger=ledger), monkeypatch) == uid


def test_a_uid_that_the_networks_file_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger = subnet()
    ledger.most_uids = 1000
    ledger.register(MINER.ss58, uid=256)
    with pytest.raises(ConfigError, match=r"uid 256 and .* below 256 \(limits.max_uids"):
        joined(Behind(stale=0, ledger=ledger), monkeypatch)


def test_old_blocks_without_our_hotkey_end_nobody_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 1, after which the miner starts again; a hotkey that old blocks do show is there."""
    chain = Behind(stale=0, ledger=subnet())
    chain.newest_block_age = 3600.0
    with pytest.raises(NetworkFailure, match=r"60 minutes behind .*--subtensor\.chain_endpoint"):
        joined(chain, monkeypatch)
    uid = chain.ledger.register(MINER.ss58)
    assert joined(chain, monkeypatch) == uid


def test_a_chain_that_is_read_once_only_is_asked_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain = Behind(stale=10**6, ledger=subnet())
    chain.frozen = True
    with pytest.raises(NetworkFailure, match="read once"):
        joined(chain, monkeypatch)


@pytest.mark.parametrize("shown", ["nobody", "others, without the master hotkey"])
def test_a_list_that_cannot_be_the_subnets_ends_nobody_for_good(
    shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Behind(stale=0, ledger=MemoryLedger())
    if shown != "nobody":
        chain.ledger.register(PEER.ss58)
    asked: list[int] = []
    monkeypatch.setattr(chain, "ask_another", lambda: asked.append(1))
    with pytest.raises(NetworkFailure, match=r"shows no neurons, or not the master.*not known"):
        joined(chain, monkeypatch)
    assert asked
    chain.ledger.register(VALIDATOR.ss58)
    uid = chain.ledger.register(MINER.ss58)
    assert joined(chain, monkeypatch) == uid


class Kept:
    """A run folder with the chain's state of an hour ago, and no chain."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = folder / node_chain.STATE_FILE
        url = f"http://127.0.0.1:{free_ports(1)[0]}"
        self.config = self.at(url)
        self.folder = folder
        self.state = ChainState(
            chain=node_chain.chain_name(self.config.chain),
            at=time.time() - 3600,
            block=5000,
            neurons=(Neuron(uid=3, hotkey=MINER.ss58, ip="1.2.3.4", port=8091),),
            commitments={VALIDATOR.ss58: "keys"},
        )
        monkeypatch.setattr(node_chain, "load_wallet", lambda _: MINER)

    def at(self, url: str) -> Config:
        rules = {"chain.url": url}
        return config_of("--chain.start_timeout", "0.3", rules=rules, signer=VALIDATOR.hotkey)

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
        assert member.uid == 3 and chain.block() == 5000
        assert chain.age().total_seconds() == pytest.approx(3600, abs=60)
        assert chain.commitment(VALIDATOR.ss58) == "keys" and chain.reads() == 0
        assert "what the chain showed 60 minutes ago (block 5000)" in caplog.text
        node_chain.keep_state(chain, kept.config.chain, kept.folder)
        again = ChainState.load(kept.path, chain=kept.state.chain, hotkey=MINER.ss58)
        assert again == kept.state, "a state that was not read again keeps its age"


@pytest.mark.parametrize(
    "change",
    [
        {"at": time.time() - 25 * 3600},
        {"at": time.time() + 3600},  # then, or now, this machine's clock is wrong
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
            wait_for(lambda: member.chain.reads() > 0)
            assert member.chain.uid(MINER.ss58) is None
            assert member.chain.age().total_seconds() < 60
            assert member.chain.block() == 5000, "blocks never count backwards"
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
    """A founder whose clock is wrong: each write is signed with it, so that none counts twice."""
    with (
        RegistryServer(tmp_path) as server,
        closing(RegistryChain(url=server.url, wallet=VALIDATOR)) as founder,
    ):
        assert founder.wait_ready(timedelta(seconds=10))
        ours = SimpleNamespace(
            monotonic=time.monotonic,
            time=lambda: time.time() + apart,
            time_ns=lambda: time.time_ns() + round(apart * 1e9),
        )
        with monkeypatch.context() as wrong:
            wrong.setattr("distributed_training.chain.auth.time", ours)
            wrong.setattr("distributed_training.chain.registry.time", ours)
            with pytest.raises(ChainError, match=r"clock is [+-]600 s from .*timedatectl"):
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
                with pytest.raises(NotRegistered, match="dt-registry register --url"):
                    node_chain.join_subnet(config, stack)
        server.registry.expel(MINER.ss58)
        caplog.clear()
        with (
            ExitStack() as stack,
            pytest.raises(NotRegistered, match=r"the founder expelled hotkey .* expel --again"),
        ):
            node_chain.join_subnet(config, stack)
        assert "gave this hotkey no uid" not in caplog.text
