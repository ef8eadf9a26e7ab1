"""Real peers of a swarm over loopback, and rounds of several at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from distributed_training.config.settings import SwarmSettings
from distributed_training.exchange.sn38.supervisor import HostKeeper, RoundOrder
from distributed_training.exchange.sn38.swarm import HivemindSwarm
from distributed_training.protocol.types import AllReduceError, AllReduceResult, RoundRequest

if TYPE_CHECKING:
    from hivemind.p2p import PeerID

    from distributed_training.exchange.sn38.wire import Stream

ROOT = Path(__file__).parents[2]
Shapes = Sequence[tuple[int, ...]]
Outcome = AllReduceResult | AllReduceError

SMALL: Shapes = [(60, 50), (7,), (3, 4, 5)]
#: Large enough that a transfer can be caught in the middle.
LARGE: Shapes = [(1000, 1000)] * 24

SETTINGS = SwarmSettings(
    dht_port=0,
    dht_listen_ip="127.0.0.1",
    initial_peers=(),
    run_id="test",
    start_timeout=timedelta(seconds=30),
)
REQUEST = RoundRequest(
    caller="5V",
    timeout=timedelta(seconds=12),
    min_group_size=2,
    min_matchmaking_time=timedelta(seconds=1.5),
    request_timeout=timedelta(seconds=1.2),
    allreduce_timeout=timedelta(seconds=8),
    next_chunk_timeout=timedelta(seconds=2),
)


#: The same to a swarm process.
ORDER = RoundOrder(
    number=1,
    weight=1.0,
    timeout=15,
    min_group_size=2,
    min_matchmaking_time=1.5,
    request_timeout=1.2,
    allreduce_timeout=6,
    next_chunk_timeout=3,
    bandwidth=None,
)


def everybody(peers: Sequence[object], seconds: float = 60) -> RoundRequest:
    """A round that takes place with all of them, however slow the machine is, or not at all."""
    return replace(
        REQUEST,
        timeout=timedelta(seconds=seconds),
        allreduce_timeout=timedelta(seconds=seconds - 10),
        next_chunk_timeout=timedelta(seconds=10),
        min_group_size=len(peers),
    )


def open_swarm(
    folder: Path, shapes: Shapes, known: Sequence[str] = (), settings: SwarmSettings = SETTINGS
) -> HivemindSwarm:
    return HivemindSwarm(
        settings=replace(settings, initial_peers=tuple(known)),
        schema=[(str(i), shape) for i, shape in enumerate(shapes)],
        run_folder=folder,
    )


@contextmanager
def open_swarms(
    folder: Path, count: int, shapes: Shapes, settings: SwarmSettings = SETTINGS
) -> Iterator[list[HivemindSwarm]]:
    """Peers that know each other. The first is the one through which the others join."""
    made: dict[int, HivemindSwarm] = {}
    with ExitStack() as stack:

        def make(i: int, known: Sequence[str]) -> None:
            made[i] = open_swarm(folder / str(i), shapes, known, settings)
            stack.callback(made[i].close)

        make(0, settings.initial_peers)
        others = [
            threading.Thread(target=make, args=(i, made[0].visible_maddrs)) for i in range(1, count)
        ]
        for thread in others:
            thread.start()
        for thread in others:
            thread.join(120)
        assert len(made) == count
        yield [made[i] for i in range(count)]


class Rounds:
    """A round of several peers at once, each in a thread as the miner does it.

    Peer i's buffers hold i + 1 before it, unless ``fill`` is false.
    """

    def __init__(
        self, *swarms: HivemindSwarm, request: RoundRequest = REQUEST, fill: bool = True
    ) -> None:
        self.outcomes: dict[HivemindSwarm, Outcome] = {}
        self.seconds: dict[HivemindSwarm, float] = {}
        self._request = request
        for i, swarm in enumerate(swarms):
            for buffer in swarm.buffers if fill else ():
                buffer.fill_(float(i + 1))
        self._threads = [threading.Thread(target=self._run, args=(s,), daemon=True) for s in swarms]
        for thread in self._threads:
            thread.start()

    def _run(self, swarm: HivemindSwarm) -> None:
        started = time.monotonic()
        try:
            self.outcomes[swarm] = swarm.average(self._request)
        except AllReduceError as error:
            self.outcomes[swarm] = error
        self.seconds[swarm] = time.monotonic() - started

    def join(self) -> dict[HivemindSwarm, Outcome]:
        for thread in self._threads:
            thread.join(90)
        assert not any(thread.is_alive() for thread in self._threads), "a round did not end"
        return self.outcomes


def assert_good_round(*swarms: HivemindSwarm, seconds: float = 60) -> None:
    """Let all find each other and average, in the round after whatever happened."""
    rounds = Rounds(*swarms, request=everybody(swarms, seconds))
    expected = sum(range(1, len(swarms) + 1)) / len(swarms)
    for swarm, outcome in rounds.join().items():
        assert isinstance(outcome, AllReduceResult), outcome
        assert set(outcome.peers) == {s.peer_id for s in swarms}
        assert not outcome.partial
        assert outcome.local_norm and outcome.average_norm
        for buffer in swarm.buffers:
            assert torch.allclose(buffer, torch.full_like(buffer, expected))


class LinePeer:
    """A program of ``tests/tools`` that takes a line for each round and answers with one.

    ``log``: for its standard error. ``prefix``: command that starts it elsewhere.
    """

    def __init__(
        self, program: str, log: Path, *arguments: str, prefix: Sequence[str] = ()
    ) -> None:
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, str(ROOT / "tests" / "tools" / program), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def begin(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def stream_pair(own: PeerID, other: PeerID) -> Iterator[tuple[Stream, Stream]]:
    """Both ends of a stream between two peers: ours, and the other one's. In a running loop."""
    from distributed_training.exchange.sn38.wire import Stream  # hivemind is heavy

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield Stream(ours, other), Stream(theirs, own)


def joined(keeper: HostKeeper) -> bool:
    """Return whether its process runs and has met another peer."""
    host = keeper.host
    return host is not None and host.alive() and not host.obstacle


def host_pid(swarm: HivemindSwarm) -> int:
    host = swarm._keeper.host
    assert host is not None
    return host._process.pid


def processes(swarm: HivemindSwarm) -> dict[str, psutil.Process]:
    """The host and what it started, by name."""
    host = psutil.Process(host_pid(swarm))
    children = {process.name(): process for process in host.children(recursive=True)}
    return {"host": host} | children


def signal_host(swarm: HivemindSwarm, number: signal.Signals) -> None:
    """To the host and p2pd at once: as if the machine had gone."""
    os.killpg(host_pid(swarm), number)
