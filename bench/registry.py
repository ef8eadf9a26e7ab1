"""Measure what a registry costs when many miners poll it, and how that grows.

    python -m bench.registry                              about 3 minutes
    python -m bench.registry --pollers 100 --seconds 8    a quick look

A registry serves as a program with its own limits, with as many neurons as pollers. Each poller has
an address of its own (127.x.y.z) and asks as the real client does, with the bytes of its requests:
every six seconds (half a block), a little out of step with the others, over a connection that it
keeps, with the version that it knows. Meanwhile the validator sets weights once a minute, which
changes every row, and a commitment is written every second. Two baselines: the same pollers with a
connection for each poll; and without a version, so that each answer is the whole state. Goal: at
most 10 % of one core, and 99 of 100 answers within 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import httpx
import psutil
from bittensor.sp_core import Keypair

from distributed_training.chain.http_server import Head
from distributed_training.chain.identity import Wallet
from distributed_training.chain.registry import KEPT, RegistryChain, State, state_path
from distributed_training.common.ports import free_ports, listen
from distributed_training.registry.service import Limits, Service
from distributed_training.registry.store import Charter, Registry

INTERVAL = 6.0  # seconds between two polls of one miner, at 12 seconds a block
WEIGHTS_EVERY = 60  # seconds
WARM = 8.0  # seconds in which all have asked once; not counted
MODES = (  # name, whether a poller keeps its connection, whether it knows a version
    ("as the client polls", True, True),
    ("a connection for each poll", False, True),
    ("without the version", True, False),
)
SIZES = (16, 64, 256, 1024, 4096)
FOUNDER = Wallet(Keypair.create_from_uri("//founder"), None)
COMMITMENT = "0123456789abcdef" * 8


@dataclass
class Measured:
    """Seconds of each answer, and what was read in all."""

    answers: list[float] = field(default_factory=list)
    received: int = 0
    failed: int = 0

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.answers, n=100)[98]


def fill(folder: Path, neurons: int) -> None:
    """Found a registry with ``neurons`` miners that have an endpoint and a commitment."""
    charter = Charter(
        name="bench",
        master=FOUNDER.ss58,
        seconds_per_block=12.0,
        most_uids=4096,
        admission="open",
    )
    with closing(Registry.at(folder, charter)) as registry, registry._change():
        for number in range(1, min(neurons, 4095) + 1):
            hotkey = f"5{number:047d}"
            registry.register(hotkey, uid=number)
            registry.serve(hotkey, f"203.0.{number // 256}.{number % 256}", 8091)
            registry.commit(hotkey, COMMITMENT)


@dataclass
class Poller:
    """One miner. ``keeps`` its connection; ``knows`` a version after its first answer."""

    number: int
    chain: RegistryChain  # whose requests it sends
    url: httpx.URL
    keeps: bool
    knows: bool
    streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = field(
        default=None, init=False
    )
    used: float = field(default=0.0, init=False)

    async def run(self, stop: float, measured: Measured) -> None:
        """Poll until ``stop`` (``time.monotonic``)."""
        seen: State | None = None
        await asyncio.sleep(random.uniform(0, INTERVAL))
        while time.monotonic() < stop:
            began = time.perf_counter()
            try:
                status, answer = await self._ask(self._request(state_path(seen)))
            except (OSError, asyncio.IncompleteReadError):
                self._close()
                measured.failed += 1
            else:
                measured.answers.append(time.perf_counter() - began)
                measured.received += len(answer)
                measured.failed += status != 200
                if self.knows:
                    seen = _known(answer)
            await asyncio.sleep(INTERVAL * random.uniform(0.9, 1.1))
        self._close()

    def _request(self, path: str) -> bytes:
        request = self.chain._client.build_request("GET", self.url.join(path))
        lines = [b"GET " + request.url.raw_path + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in request.headers.raw]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    async def _ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body, over the connection that is kept if it is still good."""
        if self.streams is not None and (
            self.streams[0].at_eof() or time.monotonic() - self.used > KEPT.total_seconds()
        ):
            self._close()
        if self.streams is None:
            address = (
                f"127.{1 + self.number // 65536}.{self.number // 256 % 256}.{self.number % 256}"
            )
            self.streams = await asyncio.open_connection(
                self.url.host, self.url.port, local_addr=(address, 0)
            )
        reader, writer = self.streams
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        lines = dict(line.split(b": ") for line in head.splitlines()[1:-1])
        body = await reader.readexactly(int(lines[b"content-length"]))
        if lines.get(b"connection") == b"close" or not self.keeps:
            self._close()
        self.used = time.monotonic()
        return int(head.split()[1]), body

    def _close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
        self.streams = None


def _known(body: bytes) -> State:
    """Return what a poller remembers; its own work for the rows is not this bench's."""
    return State(**json.loads(body.partition(b', "rows"')[0].rstrip(b"}") + b"}"))


async def write(chain: RegistryChain, uids: int, stop: float) -> None:
    """Commit every second, and set weights at the beginning of each minute."""
    turn = 0
    while time.monotonic() < stop:
        if turn % WEIGHTS_EVERY == 0:
            weights = {uid: float((uid + turn) % 7) for uid in range(1, uids)}
            await asyncio.to_thread(chain.set_weights, weights)
        await asyncio.to_thread(chain.commit, str(turn))
        turn += 1
        await asyncio.sleep(1.0)


def serve(folder: Path, count: int, seconds: float, **poller: bool) -> tuple[Measured, float]:
    """Return what ``count`` pollers measured, and the registry's share of one core."""
    (port,) = free_ports(1)
    flags = ("--port", str(port), "--folder", str(folder))
    command = [sys.executable, "-m", "distributed_training.registry", "serve", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            while not process.stdout.readline().startswith("READY"):
                if process.poll() is not None:
                    raise SystemExit("the registry did not start")
            url = f"http://127.0.0.1:{port}"
            chain = RegistryChain(url=url, wallet=FOUNDER, poll_interval=timedelta(seconds=6))
            with closing(chain):
                assert chain.wait_ready(timedelta(seconds=30))
                pollers = [Poller(i, chain, httpx.URL(url), **poller) for i in range(count)]
                return asyncio.run(_both(psutil.Process(process.pid), chain, pollers, seconds))
        finally:
            process.terminate()


async def _both(
    process: psutil.Process, chain: RegistryChain, pollers: list[Poller], seconds: float
) -> tuple[Measured, float]:
    measured = Measured()
    stop = time.monotonic() + WARM + seconds
    polls = asyncio.gather(*(poller.run(stop, measured) for poller in pollers))
    await asyncio.sleep(WARM)
    measured.answers.clear()
    measured.received = 0
    began, used = time.monotonic(), sum(process.cpu_times()[:2])
    writes = asyncio.create_task(write(chain, len(pollers), stop))
    await asyncio.sleep(seconds)
    share = (sum(process.cpu_times()[:2]) - used) / (time.monotonic() - began)
    await asyncio.gather(polls, writes)
    return measured, share


def milliseconds(action: Callable[[], object], times: int) -> float:
    """The median of ``times`` runs."""
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        action()
        spent.append(1e3 * (time.perf_counter() - began))
    return statistics.median(spent)


def growth(folder: Path, size: int) -> str:
    """One row of the table: work inside the registry, without HTTP."""
    fill(folder, size - 1)
    with closing(Registry(folder)) as registry:
        service = Service(registry, listen("127.0.0.1", 0), Limits())
        view = registry.view
        known = Head("GET", f"/state?since={view.version}&start={registry.start}", {}, True, "")
        new = Head("GET", "/state", {}, True, "")
        numbers = itertools.count()
        weights = [{uid: float(uid % (5 + i)) for uid in range(1, size)} for i in range(8)]

        def whole() -> bytes:
            registry.view.made.clear()
            return service._state(new)

        columns = (
            milliseconds(lambda: service._state(known), 200),
            milliseconds(whole, 20),
            len(whole()) / 1024,
            milliseconds(lambda: registry.commit(FOUNDER.ss58, str(next(numbers))), 20),
            milliseconds(lambda: registry.set_weights(FOUNDER.ss58, weights[next(numbers) % 8]), 8),
        )
        service.close()
    return f"{size:6}" + "".join(f"{value:14.3f}" for value in columns)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pollers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        print(f"{given.pollers} pollers, one poll in {INTERVAL:g} s each; {os.cpu_count()} cores")
        fill(folder / "served", given.pollers)
        shares = []
        for name, keeps, knows in MODES:
            measured, share = serve(
                folder / "served", given.pollers, given.seconds, keeps=keeps, knows=knows
            )
            shares.append(share)
            print(
                f"  {name}: {100 * share:.1f} % of one core ({share / shares[0]:.1f} x), "
                f"p99 {1e3 * measured.p99:.1f} ms, "
                f"median {1e3 * statistics.median(measured.answers):.1f} ms, "
                f"{len(measured.answers)} answers, {measured.received / 2**20:.1f} MiB, "
                f"{measured.failed} failed",
                flush=True,
            )
        print("neurons   unchanged ms      whole ms     whole KiB     commit ms    weights ms")
        for size in SIZES:
            print(growth(folder / str(size), size), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
