"""A founder and three joiners in places of their own, and an outsider, for three outer steps.

Seven minutes on a machine at rest. Kills of each kind of process are in test_kills.py.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from bench.kills import epoch_start, farthest
from distributed_training.chain.base import ChainError
from distributed_training.chain.client import SignedClient
from distributed_training.chain.identity import create_wallet
from distributed_training.chain.registry import RegistryChain
from distributed_training.common.ports import free_ports
from distributed_training.protocol.types import RoundRequest
from distributed_training.telemetry import read_events
from distributed_training.telemetry.neuron_state import NeuronState
from tests.tools.founded import Founded, Program, founded, outer_steps
from tests.tools.namespaces import Machine, sites
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
STEPS = 3
JOINERS = ("direct", "slow", "natted")
FIRST = 600.0  # seconds from ``init`` to the first outer step of all
STEP = 1200.0  # seconds; the longest without an outer step, on a busy machine
CALLS, PEERS = 8091, 8009  # ports
OUTER_CALLS, OUTER_PEERS = 18091, 18009  # the router's for them


def addresses(machine: Machine) -> list[str]:
    """The flags of a machine that others reach at its address, as the operator guide gives them."""
    flags = ["--preset", "local", "--axon.ip", "0.0.0.0", "--dht.listen_ip", "0.0.0.0"]
    flags += ["--axon.external_ip", machine.address, "--dht.ip", machine.address]
    if machine.name.endswith("natted"):
        flags += ["--axon.external_port", str(OUTER_CALLS)]
        flags += ["--dht.external_port", str(OUTER_PEERS)]
    return flags


@dataclass
class Run:
    """The network while it trains."""

    network: Founded
    programs: dict[str, Program]
    folders: dict[str, Path]
    taken: dict[int, dict[str, Any]] = field(default_factory=dict)  # by the validator, by number

    def look(self) -> None:
        """Read the events since the last look. No program may have ended."""
        self.taken = outer_steps(self.folders["validator"])
        for name, program in self.programs.items():
            assert program.status is None, (name, program.said[-3000:])

    def whole(self) -> int:
        """The newest outer step that validator and miners took part in."""
        steps = [n for n, e in self.taken.items() if len(e["participants"]) == len(JOINERS)]
        return max((n for n in steps if self.common(n)), default=0)

    def common(self, step: int) -> bool:
        return all(step in outer_steps(folder) for folder in self.folders.values())

    def settled(self, step: int) -> bool:
        """Return whether all miners train from the weights that the validator published."""
        miners = [NeuronState(self.folders[who]).catch_up() for who in JOINERS]
        for miner in miners:
            miner.close()
        return all((m.mode, m.outer_step) == ("training", step) for m in miners)

    def go_on(self, until: Callable[[], bool], what: str) -> None:
        wait_for(lambda: (self.look(), until())[1], what, STEPS * STEP, every=0.5)


def found(network: Founded) -> tuple[Run, str]:
    """Create a network and let three join it. Returns the registry's URL too."""
    machines = network.machines
    (port,) = free_ports(1)
    url, front = network.open_front(port)
    registry, validator = network.found(
        *("--miners", str(len(JOINERS))),
        host=machines["founder"].address,
        url=url,
        port=port,
        flags=addresses(machines["founder"]),
    )
    programs = {"registry": registry, "front": front, "validator": validator}
    programs |= {who: network.join(who, *addresses(machines[who])) for who in JOINERS}
    folders = {who: network.run_folder(who) for who in ("validator", *JOINERS)}
    return Run(network, programs, folders), url


def test_sites_train_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = {OUTER_CALLS: CALLS, OUTER_PEERS: PEERS}
    with sites(announced=inside) as machines, founded(tmp_path, machines) as network:
        began = time.monotonic()
        run, url = found(network)
        stranger = come_uninvited(network)
        run.go_on(lambda: run.whole() > 0, "a common outer step")
        first = time.monotonic() - began
        assert first < FIRST
        monkeypatch.setenv("SSL_CERT_FILE", network.more["SSL_CERT_FILE"])
        knock(network, url)
        run.go_on(lambda: run.whole() >= STEPS, "the last outer step")
        step = run.whole()
        run.programs.pop("validator").stop()  # first: no other round begins
        run.go_on(lambda: run.settled(step), "its weights at all miners")
        network.stop()
        show(run, step, first)
        got_nothing(run, stranger)


def show(run: Run, step: int, first: float) -> None:
    """Print the figures, and assert their limits."""
    events = list(read_events(run.folders["validator"] / "events.jsonl"))
    losses = [e for e in events if e["kind"] == "held_out"]
    weights = load_file(run.folders["validator"] / "global" / f"epoch-{step}" / "model.safetensors")
    apart = {
        who: farthest(epoch_start(run.folders[who] / "checkpoints", step), weights)
        for who in JOINERS
    }
    rounds = Counter(e["fault"] or "ok" for e in events if e["kind"] == "round")
    print(f"first common outer step {first:.0f} s after init; {step} outer steps, rounds {rounds}")
    print(f"held-out loss {losses[0]['before']:.4f} -> {losses[-1]['after']:.4f}, weights {apart}")
    assert losses[-1]["after"] < losses[0]["before"]
    assert all(distance <= 1e-5 for distance in apart.values()), apart
    ledger = json.loads((run.folders["validator"] / "ledger.json").read_text())
    rated = [uid for uid, place in ledger["board"].items() if place["sigma"] != 25 / 3]
    assert ledger["successful_rounds"] == step and len(rated) == len(JOINERS), ledger


# --- the stranger ---------------------------------------------------------------------------------


def come_uninvited(network: Founded) -> Program:
    """Be refused a uid, and start a peer that looks for a group of averaging until it is stopped.

    It has the network's file, a wallet and a machine of its own."""
    network.refuse("stranger")
    address = network.machines["stranger"].address
    return network.start("stranger", "swarm", network.file.name, address, home="stranger")


def knock(network: Founded, url: str) -> None:
    """Ask registry and miners for the members' answers, with the outsider's signature."""
    machine = network.machines["stranger"]
    wallet = create_wallet(network.folder / "stranger" / "wallets", "default")
    with machine.inside(), closing(RegistryChain(url=url, wallet=wallet)) as chain:
        assert chain.wait_ready(timedelta(seconds=30))
        miners = [n for n in chain.neurons() if n.port is not None]
        assert len(miners) == len(JOINERS) and chain.uid(wallet.ss58) is None  # public reads
        for miner in miners:
            socket.create_connection((miner.ip, miner.port), 10).close()
        client = SignedClient(wallet=wallet)
        alive = client.sweep_is_alive(miners, timedelta(seconds=10))
        called = client.sweep_all_reduce(miners, RoundRequest(wallet.ss58))
        assert {*alive.values(), *called.values()} == {None}
        for write in (
            chain.register,
            lambda: chain.commit("0" * 128),
            lambda: chain.serve(machine.address, CALLS),
            lambda: chain.set_weights({1: 1.0}),
            lambda: chain.enroll(wallet.ss58),
            lambda: chain.allow(wallet.ss58),
            lambda: chain.invite("0" * 64, uses=1, expires=time.time() + 60),
        ):
            with pytest.raises(ChainError):
                write()
        assert chain.uid(wallet.ss58) is None


def got_nothing(run: Run, stranger: Program) -> None:
    """No group of the outsider's peer, which was in the DHT, and its id in no round's group."""
    peer_id = re.findall("^peer (.+)", stranger.said, re.M)[0]
    known = [int(n) for n in re.findall(r"^alone, (\d+) peers", stranger.said, re.M)]
    print(f"the stranger looked for a group {len(known)} times and saw up to {max(known)} peers")
    assert len(known) >= STEPS and max(known) >= len(JOINERS), stranger.said
    assert "GROUP" not in stranger.said
    events = read_events(run.folders["validator"] / "events.jsonl")
    assert peer_id not in [p for e in events if e["kind"] == "round" for p in e["peers"]]
