"""The keeper with hosts that start as a test says; the swarm process's messages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_training.config.settings import SwarmSettings
from distributed_training.exchange.sn38 import averager_process, supervisor, swarm
from distributed_training.exchange.sn38.bounds import Known
from distributed_training.exchange.sn38.supervisor import (
    Beat,
    HostConfig,
    HostKeeper,
    Joined,
    Ready,
    SharedTensors,
    SwarmUnavailable,
    any_reachable,
    to_line,
)
from distributed_training.protocol.types import AllReduceError, AllReduceFault, RoundRequest
from tests.tools.swarm_world import joined
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(60)

MADDR = "/ip4/127.0.0.1/tcp/8000/p2p/12D3KooWHDMAeP3zKHrALtREoc2vfYQL7HhsMN7WBvft7hgBCRhK"
HOST_PROCESS = supervisor.HostProcess


class Host:
    """Act as a HostProcess for its keeper. ``outcome`` of the start: maddrs, or why it failed."""

    def __init__(self, outcome: list[str] | str | None) -> None:
        self.outcome, self.why, self.obstacle = outcome, "", ""
        self.ended = threading.Event()

    def alive(self) -> bool:
        return not self.ended.is_set()

    def wait_ready(self, timeout: float) -> Ready | None:
        if self.outcome is None:  # hangs
            self.ended.wait(timeout)
            return None
        if isinstance(self.outcome, str):
            self.why = self.outcome
            return None
        return Ready("peer", self.outcome)

    def end(self, why: str = "") -> None:
        self.why = self.why or why
        self.ended.set()

    close = end


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.hosts: list[Host] = []
        self.outcome: Callable[[HostConfig], Any] = lambda config: [MADDR]
        self.launch: Callable[[], object] = object
        self.failures: list[int] = []  # in a row, at each wait
        world = self

        class Backoff(supervisor.Backoff):
            def failed(self) -> timedelta:
                super().failed()
                world.failures.append(self.failures)
                return timedelta(0)

        def start(config: HostConfig, launch: object) -> Host:
            outcome = world.outcome(config)
            world.hosts.append(Host(outcome))
            return world.hosts[-1]

        monkeypatch.setattr(supervisor, "HostLaunch", lambda log: self.launch())
        monkeypatch.setattr(supervisor, "HostProcess", start)
        monkeypatch.setattr(supervisor, "Backoff", Backoff)
        monkeypatch.setattr(supervisor, "_LOOK", 0.01)
        monkeypatch.setattr(supervisor, "_START_ATTEMPTS", 1)
        self.folder = folder

    @contextmanager
    def keeper(self, **settings: Any) -> Iterator[HostKeeper]:
        memory = SharedTensors([(2,)])
        values = {"initial_peers": (MADDR,), "start_timeout": timedelta(seconds=30)}
        made = HostKeeper(SwarmSettings(**values | settings), memory, self.folder)
        try:
            yield made
        finally:
            made.close()
            memory.close()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    return World(monkeypatch, tmp_path)


def test_a_host_is_started_again_at_once_and_then_less_and_less_often(world: World) -> None:
    with world.keeper() as made:
        world.hosts[-1].end("killed")
        wait_for(lambda: joined(made), "it is started again")
        assert world.failures == [], "at once"


def test_a_peer_that_meets_nobody_starts_and_logs_why(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and once more when it has joined; it needs no other process for that."""
    program = Program()
    with world.keeper() as made, caplog.at_level("INFO"):
        made.host = host = HOST_PROCESS(made._config(), program)
        for obstacle in ("This machine's clock is 5 s ahead", ""):
            program._theirs.sendall(to_line(Joined(obstacle)))
            wait_for(lambda said=obstacle: host.obstacle == said, "the obstacle is known")
            assert made.alive() and joined(made) == (not obstacle)
        assert [line for line in caplog.messages if "clock" in line or "joined" in line] == [
            "This machine's clock is 5 s ahead; so this peer joins no round yet. Training "
            "continues, and it is tried again",
            "The swarm is joined",
        ]
        host.end()


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("the process", OSError(24, "Too many open files")),
        ("the process", RuntimeError("can't start new thread")),
        ("the sockets' folder", OSError(28, "No space left on device")),
    ],
    ids=str,
)
def test_a_machine_that_has_nothing_left_costs_time_only(
    world: World, where: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world.keeper() as made:
        tries = []

        def fails(*_: Any, **__: Any) -> Any:
            tries.append(time.monotonic())
            raise error

        with monkeypatch.context() as patch:
            if where == "the process":
                world.launch = fails
            else:
                patch.setattr(supervisor, "process_folder", fails)
            world.hosts[-1].end("killed")
            wait_for(lambda: len(tries) >= 3, "it is tried again and again")
        world.launch = object
        wait_for(lambda: joined(made), "it is there again")


class Program:
    """Act as a HostLaunch whose process is ready at once."""

    def __init__(self) -> None:
        self.connection, self._theirs = socket.socketpair()
        self.process = SimpleNamespace(pid=1, wait=lambda timeout: 0)
        self._theirs.sendall(to_line(Ready("peer", [MADDR])))

    def end(self) -> None:
        self._theirs.close()


def test_no_start_keeps_a_descriptor_or_a_folder(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that meets nobody for days is started again every two minutes."""
    monkeypatch.setattr(tempfile, "tempdir", str(world.folder))
    monkeypatch.setattr(supervisor, "HostProcess", HOST_PROCESS)
    world.launch = Program

    def open_in(folder: Path) -> list[str]:
        links = []
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                links.append(os.readlink(descriptor))
        return [link for link in links if link.startswith(f"{folder}/swarm-sockets-")]

    def full() -> object:
        raise OSError(24, "Too many open files")

    with world.keeper() as made:
        for _ in range(3):
            made.restart()
        assert len(open_in(world.folder)) == 1, "that of the process that runs"
        world.launch = full
        with pytest.raises(SwarmUnavailable):
            made.restart()
        assert open_in(world.folder) == [] == list(world.folder.glob("swarm-sockets-*"))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'["News", {}]', "cannot be read"),  # its program was updated on the disk
        (b'["Beat", {"met": 3}]', "cannot be read"),
        (b"{", "cannot be read"),
        (b'["Ended", {"detail": "p2pd is gone"}]', "p2pd is gone"),
    ],
)
def test_a_host_that_is_not_understood_or_cannot_go_on_counts_as_ended(
    world: World, line: bytes, why: str
) -> None:
    """It counts as ended at once, though its socket stays open."""
    program = Program()
    with world.keeper() as made:
        host = HOST_PROCESS(made._config(), program)
        program._theirs.sendall(line + b"\n")
        assert host.ended.wait(10) and why in host.why
        host.end()


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_host_whose_memory_grows_is_ended_with_the_figures(
    world: World, monkeypatch: pytest.MonkeyPatch, extra: int
) -> None:
    """Else the kernel would kill the ranks when the machine has no memory left."""
    program = Program()
    taken = [300_000_000]
    monkeypatch.setattr(supervisor, "anonymous_memory", lambda pid: taken[0])
    with world.keeper() as made:
        config = replace(made._config(), shapes=[[1000, 1000]])
        host = HOST_PROCESS(config, program)
        program._theirs.sendall(to_line(Beat(1)))
        wait_for(lambda: host.peers == 1, "a sign of life")
        # The averages for peers that average nothing are held until they have sent all.
        taken[0] += 512 * 2**20 + 8 * 65 * config.part_size + 2 * 4_000_000 + extra
        program._theirs.sendall(to_line(Beat(2)))
        wait_for(lambda: host.peers == 2, "another")
        if extra > 0:
            assert host.ended.wait(10) and "grew to 1117 MB" in host.why
        else:
            assert not host.ended.wait(0.1)
        host.end()


MEMORY = """
import mmap, os
from distributed_training.exchange.sn38 import supervisor
from distributed_training.exchange.sn38.supervisor import SharedTensors

before = supervisor.anonymous_memory(os.getpid())
own = mmap.mmap(-1, 64 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
own.write(b"x" * len(own))
shared = SharedTensors([(32 * 2**20,)])
shared.tensors[0].fill_(1.0)
print(supervisor.anonymous_memory(os.getpid()) - before)
shared.close()
"""


def test_memory_of_its_own_is_counted_and_shared_tensors_are_not() -> None:
    """In a process of its own: what tests before have left may be freed here at any moment."""
    found = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=50, check=True
    )
    own = 64 * 2**20
    assert own <= int(found.stdout) + 8 * 2**20 < own + 16 * 2**20
    with subprocess.Popen(["true"]) as child:
        child.wait()
        assert not supervisor.anonymous_memory(child.pid)


def test_malformed_hostname_is_not_reachable() -> None:
    assert not asyncio.run(any_reachable(["/dns4/a..b/tcp/80/p2p/x"], timeout=1))


def test_a_host_without_an_address_is_no_host(world: World) -> None:
    world.outcome = lambda config: []
    with pytest.raises(SwarmUnavailable, match="no TCP port"), world.keeper(dht_port=0):
        pass


def test_a_start_under_way_does_not_hold_up_the_stop(world: World) -> None:
    with world.keeper() as made:
        world.outcome = lambda config: None
        before = len(world.hosts)
        world.hosts[-1].end("killed")
        wait_for(lambda: made._starting is not None and world.hosts[-1].outcome is None, "a start")
        began = time.monotonic()
        made.close()
        assert time.monotonic() - began < 15  # of the 30 s that a start may take
        assert len(world.hosts) <= before + 1
        assert not any(host.alive() for host in world.hosts)


@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_a_start_holds_no_round_beyond_its_time(world: World, how: str) -> None:
    with world.keeper() as made:
        world.outcome = lambda config: None if how == "hangs" else "no port is free"
        world.hosts[-1].end("killed")
        began = time.monotonic()
        patience = 1.0 if how == "hangs" else 12.0
        with pytest.raises(AllReduceError) as raised, made.use(patience, threading.Event()):
            pass
        assert time.monotonic() - began < 20  # of the 30 s that a start may take
        assert raised.value.fault is AllReduceFault.SWARM_DOWN
        why = "not be started within 1 s" if how == "hangs" else "no port is free"
        assert why in str(raised.value)


def test_a_round_does_not_wait_for_the_back_off(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_LOOK", 60.0)
    with world.keeper() as made:
        world.hosts[-1].end("killed")
        with made.use(5.0, threading.Event()):
            assert joined(made)


def test_a_call_without_a_timeout_ends_with_the_rounds_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a round is allowed here: a lone miner would average for hours."""
    allowed: list[float] = []

    class Keeper:
        def __init__(self, *_: object) -> None: ...

        def use(self, seconds: float, cancelled: threading.Event) -> Any:
            allowed.append(seconds)
            raise AllReduceError(AllReduceFault.SWARM_DOWN)

    monkeypatch.setattr(swarm, "HostKeeper", Keeper)
    for configured, asked, expected in ((6 * 3600, None, 840), (40, None, 40), (40, 90, 90)):
        settings = SwarmSettings(round_timeout=timedelta(seconds=configured))
        peer = swarm.HivemindSwarm(settings=settings, schema=[("x", (1,))], run_folder=tmp_path)
        timeout = None if asked is None else timedelta(seconds=asked)
        with pytest.raises(AllReduceError):
            peer.average(RoundRequest("5V", timeout=timeout))
        assert allowed.pop() == pytest.approx(expected, abs=5)
        peer.memory.close()


def test_the_end_of_p2pd_is_reported_before_anything_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @contextlib.asynccontextmanager
    async def serving() -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.sleep(60)  # a task that waits for an answer through p2pd

    async def ended() -> int:
        return -9

    async def gone() -> None:
        raise EOFError

    async def addresses() -> list[str]:
        return [MADDR]

    def start_node(_: Any) -> Any:
        client = SimpleNamespace(identify=gone)
        p2p = SimpleNamespace(
            _child=SimpleNamespace(wait=ended),
            _client=client,
            known=Known(),
            list_peers=gone,
            forget_cancelled=lambda: None,
        )
        node = SimpleNamespace(p2p=p2p, peer_id="peer", get_visible_maddrs=addresses)
        return asyncio.sleep(0, node)

    averager = SimpleNamespace(serving=serving, daemon=None)
    monkeypatch.setattr(averager_process, "DTGradAverager", lambda *_: averager)
    monkeypatch.setattr(averager_process.Host, "_start_node", start_node)
    shared = SharedTensors([(2,)])
    config = SimpleNamespace(
        tensors=os.dup(shared.descriptor),
        shapes=[(2,)],
        parent=os.getppid(),
        initial_peers=[],
        identity=str(tmp_path / "identity.key"),
        prefix="run",
    )
    said: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    async def run() -> None:
        answers: Any = SimpleNamespace(write=said.put)
        host = averager_process.Host(config, asyncio.StreamReader(), answers)  # type: ignore[arg-type]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await host.run()

    asyncio.run(run())
    assert b"Ready" in said.get_nowait() and b"SIGKILL" in said.get_nowait()


def test_a_peer_asks_less_and_less_often_until_it_declares_itself_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += max(0.0, seconds)

    class Node:
        peer_id = "12D"
        asked: list[float] = []

        async def get(self, key: str, *, latest: bool) -> None:
            self.asked.append(now)

        async def store(self, *about: Any, **more: Any) -> bool:
            return True

    monkeypatch.setattr(averager_process, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(averager_process, "asyncio", SimpleNamespace(sleep=sleep))
    node: Any = Node()
    dht = averager_process._Dht(node)

    async def search(lookups: int) -> list[float]:
        """Seconds between the lookups that follow a declaration."""
        await dht.store(
            key="k", subkey=b"p", value=True, expiration_time=now + 9, return_future=True
        )
        node.asked.clear()
        for _ in range(lookups):
            await dht.get("k", latest=True, return_future=True)
        return [b - a for a, b in zip(node.asked, node.asked[1:], strict=False)]

    first = asyncio.run(search(8))
    assert node.asked[0] == 100.0, "the first search begins at once"
    waits = [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    for found, longest in zip([*first, *asyncio.run(search(4))], [*waits, *waits[:3]], strict=True):
        assert longest / 2 <= found + 1e-9 and found <= longest + 1e-9
