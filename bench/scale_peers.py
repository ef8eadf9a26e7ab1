"""Rounds of real peers on shaped lines of this machine, measured for ``bench.scale``."""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from bench import scale_host
from bench.links import Links
from distributed_training.config.swarm import SwarmSettings
from distributed_training.protocol.types import AllReduceResult, RoundRequest
from distributed_training.swarm import HivemindSwarm
from distributed_training.swarm.host_process import HostLaunch

TENSORS = 8


@dataclass(frozen=True)
class Terms:
    """What the real rounds have in common."""

    values: int = 1_600_000  # float32
    rate: float = 6.0  # Mbit/s of each peer's line, in each direction
    matchmaking: float = 6.0  # seconds for which a group is gathered


@dataclass(frozen=True)
class Seen:
    """One round, or a median of several. Times in seconds; bytes and messages are a peer's mean."""

    peers: int
    matchmaking: float  # until the last peer knew its group
    transfer: float  # from then until the last had its average
    clock: float  # both
    bytes: float  # sent and received, with all headers, halved: what one direction carried
    messages: float  # of the DHT: find, store and ping, each with its answer


def measure(
    peers: int, rounds: int, terms: Terms, rates: Sequence[float] | None = None
) -> list[Seen]:
    """``rates``: of the peers' lines, if they are not all alike. A first round is not counted: it
    opens connections and, with unequal lines, measures the bandwidth that load balancing uses."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-scale-")))
        os.environ[scale_host.FOLDER] = str(folder)
        links = stack.enter_context(Links(rates or [terms.rate] * peers))
        swarms = _open(stack, links, folder, peers, terms)
        return [_round(swarms, links, folder, terms) for _ in range(rounds + 1)][1:]


def _open(
    stack: ExitStack, links: Links, folder: Path, peers: int, terms: Terms
) -> list[HivemindSwarm]:
    made: dict[int, HivemindSwarm] = {}

    def open_one(i: int, known: Sequence[str]) -> None:
        settings = SwarmSettings(
            dht_port=0, dht_listen_ip=links.addresses[i], initial_peers=tuple(known), run_id="scale"
        )
        with links.inside(i):
            made[i] = HivemindSwarm(
                settings=replace(settings, start_timeout=timedelta(minutes=3)),
                schema=[(str(t), (terms.values // TENSORS,)) for t in range(TENSORS)],
                run_folder=folder / f"peer{i}",
                launch=HostLaunch(folder / f"log{i}", module="bench.scale_host"),
            )

    open_one(0, ())
    stack.callback(made[0].close)
    others = [
        threading.Thread(target=open_one, args=(i, made[0].visible_maddrs)) for i in range(1, peers)
    ]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    for i in range(1, peers):
        stack.callback(made[i].close)
    return [made[i] for i in range(peers)]


def _round(swarms: Sequence[HivemindSwarm], links: Links, folder: Path, terms: Terms) -> Seen:
    request = RoundRequest(
        caller="",
        timeout=timedelta(minutes=5),
        min_group_size=len(swarms),
        min_matchmaking_time=timedelta(seconds=terms.matchmaking),
        request_timeout=timedelta(seconds=3),
    )
    results: list[AllReduceResult] = []

    def run(i: int) -> None:
        for buffer in swarms[i].buffers:
            buffer.fill_(float(i))
        started.wait()
        results.append(swarms[i].average(request))

    started = threading.Barrier(len(swarms))
    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(swarms))]
    before, asked = links.counters(), _messages(swarms, folder)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after, asked_then = links.counters(), _messages(swarms, folder)
    if len(results) < len(swarms) or any(len(r.peers) < len(swarms) for r in results):
        raise RuntimeError("a peer was left out of a round that was to be of all of them")
    moved = [
        (b.sent + b.received - a.sent - a.received) / 2 for a, b in zip(before, after, strict=True)
    ]
    matchmaking = max(r.matchmaking_seconds or 0.0 for r in results)
    clock = max(r.total_seconds for r in results)
    return Seen(
        peers=len(swarms),
        matchmaking=matchmaking,
        transfer=clock - matchmaking,
        clock=clock,
        bytes=statistics.mean(moved),
        messages=(asked_then - asked) / len(swarms),
    )


def _messages(swarms: Sequence[HivemindSwarm], folder: Path) -> int:
    hosts = [swarm._keeper.host for swarm in swarms]
    return sum(sum(scale_host.read(folder, host.pid).values()) for host in hosts if host)
