"""Measure what a registry costs when many miners poll it.

    python -m bench.registry                              about 2 minutes
    python -m bench.registry --pollers 100 --seconds 8    a quick look

A registry serves as a program with its own limits, with as many neurons as pollers. Each poller has
an address of its own (127.x.y.z). It asks as the real client does, every six seconds (half a
block) and a little out of step with the others. It keeps its connection and sends the ETag of the
list that it knows. Meanwhile a commitment is written every second, so that nearly each answer is
the whole list: the worst case. Two baselines: the same pollers with a connection for each poll; and
without the commitments, so that answers are 304.
Goal: at most 10 % of one core, and 99 of 100 answers within 50 ms.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import httpx
import psutil
from bittensor.sp_core import Keypair

from bench.common import parser, served, table
from distributed_training.chain.identity import Wallet
from distributed_training.chain.registry import KEPT, RegistryChain
from distributed_training.common.ports import free_ports
from distributed_training.config.settings import ChainSettings
from distributed_training.registry.store import Charter, Registry

INTERVAL = 6.0  # seconds between two polls of one miner, at 12 seconds per block
WARM = 8.0  # seconds in which all have asked once; not counted
MODES = (  # name, whether a poller keeps its connection, whether a commitment comes every second
    ("something new each second", True, True),
    ("a connection for each poll", False, True),
    ("nothing new", True, False),
)
FOUNDER = Wallet(Keypair.create_from_uri("//founder"), None)


@dataclass
class Measured:
    """Seconds of each answer, and what was read in all."""

    answers: list[float] = field(default_factory=list)
    received: int = 0
    failed: int = 0


def fill(folder: Path, neurons: int) -> None:
    """Create a registry with ``neurons`` miners that have an endpoint and a commitment."""
    charter = Charter(name="bench", master=FOUNDER.ss58, most_uids=4096, admission="open")
    with closing(Registry.at(folder, charter)) as registry, registry.change():
        for number in range(1, min(neurons, 4095) + 1):
            hotkey = f"5{number:047d}"
            registry.register(hotkey, uid=number)
            registry.serve(hotkey, f"203.0.{number // 256}.{number % 256}", 8091)
            registry.commit(hotkey, "0123456789abcdef" * 8)


async def poll(number: int, url: str, stop: float, measured: Measured, *, keeps: bool) -> None:
    """Poll as one miner until ``stop`` (``time.monotonic``). ``keeps`` its connection."""
    etag = ""
    address = f"127.{1 + number // 65536}.{number // 256 % 256}.{number % 256}"
    kept = httpx.Limits(max_keepalive_connections=int(keeps), keepalive_expiry=KEPT.total_seconds())
    transport = httpx.AsyncHTTPTransport(verify=False, local_address=address, limits=kept)
    async with httpx.AsyncClient(base_url=url, transport=transport) as client:
        await asyncio.sleep(random.uniform(0, INTERVAL))
        while time.monotonic() < stop:
            began = time.perf_counter()
            try:
                answer = await client.get("/state", headers={"if-none-match": etag})
            except httpx.HTTPError:
                measured.failed += 1
            else:
                measured.answers.append(time.perf_counter() - began)
                measured.received += len(answer.content)
                measured.failed += answer.status_code not in (200, 304)
                etag = answer.headers.get("etag", "")
            await asyncio.sleep(INTERVAL * random.uniform(0.9, 1.1))


async def write(chain: RegistryChain, stop: float) -> None:
    """Commit every second."""
    turn = 0
    while time.monotonic() < stop:
        await asyncio.to_thread(chain.commit, str(turn))
        turn += 1
        await asyncio.sleep(1.0)


async def serve(
    folder: Path, count: int, seconds: float, *, keeps: bool, commits: bool
) -> tuple[Measured, float]:
    """Return what ``count`` pollers measured, and the registry's share of one core."""
    (port,) = free_ports(1)
    url, measured = f"http://127.0.0.1:{port}", Measured()
    with (
        served("--port", str(port), "--folder", str(folder)) as pid,
        closing(RegistryChain(ChainSettings(registry_url=url), FOUNDER)) as chain,
    ):
        assert chain.wait_ready(timedelta(seconds=30))
        process, stop = psutil.Process(pid), time.monotonic() + WARM + seconds
        polls = asyncio.gather(*(poll(i, url, stop, measured, keeps=keeps) for i in range(count)))
        await asyncio.sleep(WARM)
        measured.answers.clear()
        measured.received = 0
        began, used = time.monotonic(), sum(process.cpu_times()[:2])
        tasks = [asyncio.create_task(write(chain, stop))] if commits else []
        await asyncio.sleep(seconds)
        share = (sum(process.cpu_times()[:2]) - used) / (time.monotonic() - began)
        await asyncio.gather(polls, *tasks)
        return measured, share


def main(argv: list[str] | None = None) -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--pollers", type=int, default=1000)
    arguments.add_argument("--seconds", type=float, default=30.0)
    given = arguments.parse_args(argv)
    print(f"{given.pollers} pollers, one poll in {INTERVAL:g} s each; {os.cpu_count()} cores")
    rows, first = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder), given.pollers)
        for name, keeps, commits in MODES:
            run = serve(Path(folder), given.pollers, given.seconds, keeps=keeps, commits=commits)
            measured, share = asyncio.run(run)
            first = first or share
            rows.append(
                (
                    *(name, f"{100 * share:.1f} %", f"{share / first:.1f}x"),
                    f"{1e3 * statistics.quantiles(measured.answers, n=100)[98]:.1f} ms",
                    f"{1e3 * statistics.median(measured.answers):.1f} ms",
                    f"{measured.received / 2**20:.1f} MiB",
                    *(len(measured.answers), measured.failed),
                )
            )
    table(("", "of one core", "ratio", "p99", "median", "received", "answers", "failed"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
