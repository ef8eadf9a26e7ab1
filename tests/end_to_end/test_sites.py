"""A founder and three joiners in places of their own, under kills of each process, and an outsider.

``DT_SITES_STEPS`` (12): outer steps that they take together. ``DT_SITES_SEED``: of the kills;
"none" for no kills. Three steps without kills take seven minutes, twelve with them half an hour.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from bench.kills import epoch_start, farthest, processes_in
from distributed_training.chain.base import ChainError
from distributed_training.chain.client import SignedClient
from distributed_training.chain.identity import load_wallet
from distributed_training.chain.registry import RegistryChain
from distributed_training.common.ports import free_ports
from distributed_training.common.processes import send
from distributed_training.config.settings import ChainSettings
from distributed_training.protocol.types import RoundRequest
from distributed_training.telemetry import read_events
from distributed_training.telemetry.neuron_state import NeuronState
from tests.tools.founded import Founded, Program, founded, outer_steps
from tests.tools.namespaces import Machine, sites
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]
STEPS = int(os.environ.get("DT_SITES_STEPS", "12"))
SEED = os.environ.get("DT_SITES_SEED", "25")
JOINERS = ("direct", "slow", "natted")
FIRST = 600.0  # seconds from ``init`` to the first outer step of all
EVERY = 20.0  # seconds between two kills, give or take half of it
STEP = 1200.0  # seconds; the longest without an outer step, on a busy machine
CALLS, PEERS = 8091, 8009  # ports
OUTER_CALLS, OUTER_PEERS = 18091, 18009  # the router's for them
MINER_KINDS = (
    "launcher", "fork server", "rank", "swarm host", "p2pd", "uploader", "data worker",
    "resource tracker",
)  # fmt: skip


def addresses(machine: Machine) -> list[str]:
    """The flags of a machine that others reach at its address, as the operator guide gives them."""
    flags = ["--preset", "local", "--axon.ip", "0.0.0.0", "--dht.listen_ip", "0.0.0.0"]
    flags += ["--axon.external_ip", machine.address, "--dht.ip", machine.address]
    if machine.name.endswith("natted"):
        flags += ["--axon.external_port", str(OUTER_CALLS)]
        flags += ["--dht.external_port", str(OUTER_PEERS)]
    return flags


@dataclass
class Standing:
    """Hold what the validator's ledger may not lose: uids, ratings, and successful rounds."""

    path: Path
    rounds: int = 0
    rated: dict[str, str] = field(default_factory=dict)  # hotkey by uid

    def look(self) -> None:
        try:
            ledger = json.loads(self.path.read_text())
        except FileNotFoundError:
            assert not self.rated, "the ledger is gone"
            return
        assert ledger["successful_rounds"] >= self.rounds, (ledger, self)
        self.rounds = ledger["successful_rounds"]
        hotkeys = {uid: entry["hotkey"] for uid, entry in ledger["entries"].items()}
        assert self.rated.items() <= hotkeys.items(), (ledger, self)
        for uid, place in ledger["board"].items():
            if place["sigma"] != 25 / 3:
                self.rated[uid] = hotkeys[uid]
            assert uid not in self.rated or place["sigma"] != 25 / 3, (ledger, self)


@dataclass
class Run:
    """The network while it trains; what ends is started again, as a service manager would."""

    network: Founded
    programs: dict[str, Program]
    folders: dict[str, Path]
    standing: Standing
    kills: list[tuple[str, str]] = field(default_factory=list)  # kind, whose
    restarts: Counter[str] = field(default_factory=Counter)
    taken: dict[int, dict[str, Any]] = field(default_factory=dict)  # by the validator, by number

    def tick(self) -> None:
        """Look at all, and start again what a kill or a fault ended."""
        self.standing.look()
        taken = outer_steps(self.folders["validator"])
        for step in sorted(taken.keys() - self.taken.keys()):
            print(f"{time.strftime('%H:%M:%S')} outer step {step}: {taken[step]}", flush=True)
        self.taken = taken
        if not self.network.store.child.running:
            with self.network.machines["founder"].inside():
                self.network.store.start()
        for name, program in self.programs.items():
            if program.status is not None:
                assert program.status in (1, -signal.SIGKILL), (name, program.said[-3000:])
                self.restarts[name] += 1
                program.start()

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

    def victims(self) -> Iterator[tuple[str, str]]:
        """Kind, and whose it is."""
        yield from ((kind, "founder") for kind in ("registry", "front", "object store"))
        yield from ((kind, "validator") for kind in ("validator", "swarm host", "p2pd"))
        yield from ((kind, who) for kind in MINER_KINDS for who in JOINERS)

    def kill(self, kind: str, whose: str, chosen: random.Random) -> bool:
        """Return whether there was such a process."""
        there: list[psutil.Process] = []
        with suppress(psutil.Error):
            there = self.running(kind, whose)
        if not there or not send(chosen.choice(there), signal.SIGKILL):
            return False
        self.kills.append((kind, whose))
        print(f"{time.strftime('%H:%M:%S')} killed {kind} of {whose}", flush=True)
        return True

    def running(self, kind: str, whose: str) -> list[psutil.Process]:
        if kind in self.programs:
            return [psutil.Process(self.programs[kind].process.pid)]
        if kind == "object store":
            return [psutil.Process(self.network.store.child.pid)]
        if whose != "validator":
            return processes_in(self.folders[whose]).get(kind, [])
        word = {"swarm host": "averager_process", "p2pd": "p2pd"}[kind]
        children = psutil.Process(self.programs["validator"].process.pid).children(recursive=True)
        return [p for p in children if word in " ".join(p.cmdline())]

    def go_on(self, until: Callable[[], bool], *, chosen: random.Random | None = None) -> None:
        """Until ``until()``, with kills of what ``chosen`` draws, each kind as often as another."""
        deck: list[tuple[str, str]] = []
        due = time.monotonic()

        def moved() -> bool:
            nonlocal due, deck
            newest = max(self.taken, default=0)
            self.tick()
            if chosen is not None and time.monotonic() > due:
                deck = deck or chosen.sample(all_ := list(self.victims()), len(all_))
                if self.kill(*deck.pop(), chosen):
                    due = time.monotonic() + EVERY * chosen.uniform(0.5, 1.5)
            return until() or max(self.taken, default=0) > newest

        while not until():
            wait_for(moved, f"an outer step after {sorted(self.taken)}", STEP, every=0.5)


def found(network: Founded) -> tuple[Run, str]:
    """Found a network and let three join it. Returns the registry's URL too."""
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
    return Run(network, programs, folders, Standing(folders["validator"] / "ledger.json")), url


def test_sites_train_together_under_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = {OUTER_CALLS: CALLS, OUTER_PEERS: PEERS}
    with sites(announced=inside) as machines, founded(tmp_path, machines) as network:
        began = time.monotonic()
        run, url = found(network)
        stranger = come_uninvited(network)
        run.go_on(lambda: run.whole() > 0)
        first = time.monotonic() - began
        print(f"first common outer step after {first:.0f} s", flush=True)
        assert first < FIRST
        monkeypatch.setenv("SSL_CERT_FILE", network.more["SSL_CERT_FILE"])
        knock(network, url)
        chosen = None if SEED == "none" else random.Random(int(SEED))
        run.go_on(lambda: max(run.taken) >= STEPS - 1, chosen=chosen)
        step = max(run.taken) + 1
        run.go_on(lambda: run.whole() >= step)
        step = run.whole()
        run.programs.pop("validator").stop()  # first: no other round begins
        run.go_on(lambda: run.settled(step))
        network.stop()
        run.standing.look()
        show(run, step, first)
        got_nothing(run, stranger)


def show(run: Run, step: int, first: float) -> None:
    """Print the figures; assert what must hold of them."""
    events = list(read_events(run.folders["validator"] / "events.jsonl"))
    losses = [e for e in events if e["kind"] == "held_out"]
    weights = load_file(run.folders["validator"] / "global" / f"epoch-{step}" / "model.safetensors")
    apart = {
        who: farthest(epoch_start(run.folders[who] / "checkpoints", step), weights)
        for who in JOINERS
    }
    rounds = Counter(e["fault"] or "ok" for e in events if e["kind"] == "round")
    print(f"first common outer step {first:.0f} s after init; {step} outer steps, rounds {rounds}")
    print(f"kills {Counter(kind for kind, _ in run.kills)}, starts again {run.restarts}")
    print(f"held-out loss {losses[0]['before']:.4f} -> {losses[-1]['after']:.4f}, weights {apart}")
    assert losses[-1]["after"] < losses[0]["before"]
    assert all(distance <= 1e-5 for distance in apart.values()), apart
    assert run.standing.rounds == step and len(run.standing.rated) == len(JOINERS)


# --- the stranger ---------------------------------------------------------------------------------


def come_uninvited(network: Founded) -> Program:
    """Be refused a uid, and start a peer that looks for a group of averaging until it is stopped.

    It has the network's file, a wallet and a machine of its own."""
    network.refuse("stranger")
    address = network.machines["stranger"].address
    return network.start("stranger", "swarm", network.file.name, address, home="stranger")


def knock(network: Founded, url: str) -> None:
    """Ask registry and miners for what only members get, with the outsider's signature."""
    machine = network.machines["stranger"]
    wallets = network.folder / "stranger" / ".bittensor" / "wallets"
    wallet = load_wallet(ChainSettings(wallet_path=str(wallets)))
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
