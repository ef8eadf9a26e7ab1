"""A round over the real wires: signed HTTP from the validator to miners, averaging over hivemind.

Only buckets and the chain are in memory; miners train the real small Llama.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed_training.chain.client import SignedClient
from distributed_training.chain.identity import create_wallet
from distributed_training.chain.server import MinerCallbacks, SignedServer
from distributed_training.config import Config
from distributed_training.config.settings import ChainSettings, SwarmSettings
from distributed_training.protocol.types import RoundRequest
from distributed_training.swarm.swarm import HivemindSwarm
from tests.tools.chain_memory import MemoryChain
from tests.tools.validator_world import PEER, TwinMiner, World, settings

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("forked_hosts")]

SWARM = SwarmSettings(
    dht_port=0,
    dht_listen_ip="127.0.0.1",
    initial_peers=(),
    run_id="validator_test",
    min_group_size=3,
    min_matchmaking_time=timedelta(seconds=2),
    request_timeout=timedelta(seconds=1),
    next_chunk_timeout=timedelta(seconds=5),
    allreduce_timeout=timedelta(seconds=20),
    round_timeout=timedelta(seconds=30),
    start_timeout=timedelta(seconds=30),
)


PATIENT = {
    "alive_wanted": 2,
    "alive_timeout": timedelta(seconds=5),
    "sweep_interval": timedelta(seconds=1),
    "sweep_patience": timedelta(seconds=20),
}


class WiredMiner:
    """A twin behind a real signed server, with a real peer of the swarm."""

    def __init__(
        self, twin: TwinMiner, wallet: Any, chain: MemoryChain, master: str, swarm: HivemindSwarm
    ) -> None:
        self.twin, self.swarm = twin, swarm
        twin.peer_id = swarm.peer_id
        self.done = threading.Event()
        self.server = SignedServer(
            settings=ChainSettings(axon_ip="127.0.0.1", axon_port=0),
            wallet=wallet,
            chain=chain,
            master_hotkey=master,
            miner=MinerCallbacks(lambda: twin.outer_step, self._called),
        )
        self.server.start()
        chain.serve("127.0.0.1", self.server.port)

    def _called(self, request: RoundRequest) -> None:
        threading.Thread(target=self._average, args=(request,), daemon=True).start()

    def _average(self, request: RoundRequest) -> None:
        for buffer, gradient in zip(self.swarm.buffers, self.twin.pseudo_gradient(), strict=True):
            buffer.copy_(gradient)
        self.swarm.average(request)
        self.twin.outer(self.swarm.buffers)
        self.server.round_ended()
        self.done.set()

    def close(self) -> None:
        self.server.close()
        self.swarm.close()


@pytest.fixture
def closing() -> Iterator[list[Any]]:
    things: list[Any] = []
    yield things
    for thing in reversed(things):
        thing.close()


class WiredWorld(World):
    """The validator signs its calls and averages for real."""

    def __init__(self, folder: Path, wallets: dict[int, Any]) -> None:
        self.wallets = wallets
        super().__init__(folder, settings(minimum_peers=3, alive_least=2, **PATIENT))

    def register(self) -> None:
        self.hotkeys = {uid: wallet.ss58 for uid, wallet in self.wallets.items()}
        super().register()
        ledger = self.chain_ledger
        for uid in self.uids:  # not served before their servers are up
            ledger.entries[uid] = replace(ledger.entries[uid], port=None)
        self.config: Config = replace(self.config, swarm=SWARM)

    def make_client(self) -> Any:
        return SignedClient(wallet=self.wallets[200])

    def make_swarm(self, schema: Any) -> Any:
        self.swarm = HivemindSwarm(settings=SWARM, schema=schema, run_folder=self.folder / "own")
        return self.swarm


def test_validator_and_miners_end_with_the_same_weights(tmp_path: Path, closing: list[Any]) -> None:
    wallets = {uid: create_wallet(tmp_path / "wallets", f"uid-{uid}") for uid in (200, 3, 17)}
    world = WiredWorld(tmp_path / "world", wallets)
    closing.append(world.closing)
    ledger = world.chain_ledger
    joined = replace(SWARM, initial_peers=tuple(world.swarm.visible_maddrs))
    world.validator.start(None, world.initial)
    wired = []
    for uid in world.uids:
        world.miners[uid] = TwinMiner(uid, world.validator.state)
        swarm = HivemindSwarm(
            settings=joined, schema=world.model.schema, run_folder=tmp_path / f"peer-{uid}"
        )
        chain = MemoryChain(hotkey=wallets[uid].ss58, ledger=ledger)
        wired.append(WiredMiner(world.miners[uid], wallets[uid], chain, wallets[200].ss58, swarm))
        closing.append(wired[-1])
    world.train_and_publish()

    assert world.validator.round(), [dict(m.server.counters()) for m in wired]
    event = world.events.of("round")[0]
    assert event["participants"] == list(world.uids) and len(event["peers"]) == 3
    assert PEER not in "".join(event["peers"])
    for miner in wired:
        assert miner.done.wait(20)
        for ours, theirs in zip(world.validator.state.weights, miner.twin.start, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    told = world.events.of("held_out")[-1]
    assert told["after"] < told["before"] - 0.1
    assert {u: e.all_reduce for u, e in world.validator.standings.entries.items()} == {3: 1, 17: 1}

    wired[0].server.close()  # not alive any more: the next round has nobody to wait for but one
    world.validator._rounds._settings = replace(world.config.validator, sweep_patience=timedelta(0))
    assert not world.validator.round()
    assert world.events.of("round")[-1]["fault"] == "NO_GROUP"
    assert world.validator.state.outer_step == 1
