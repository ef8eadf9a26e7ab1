#!/usr/bin/env python3
"""What a registry costs when many miners poll it, and how that grows.

    python -m bench.registry [--pollers 1000] [--seconds 30]

A registry serves as a program, with as many neurons as pollers. Each poller asks as the real
client does: every six seconds (half a block), a little out of step with the others, on a connection
of its own, with the version that it knows. Meanwhile the validator sets weights once a minute,
which changes every row, and a commitment is written every second. The baseline is the same pollers
without a version, so that each answer is the whole state. Goal: at most 10 % of one core, and 99 of
100 answers within 50 ms.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from bittensor.sp_core import Keypair

from distributed_training.chain.http_server import Head
from distributed_training.chain.identity import Wallet
from distributed_training.chain.registry import RegistryChain
from distributed_training.common.ports import free_ports, listen
from distributed_training.registry.service import Limits, Service
from distributed_training.registry.store import Registry, new_charter

INTERVAL = 6.0  # seconds between two polls of one miner, at 12 seconds a block
WEIGHTS_EVERY = 60  # seconds
WARM = 8.0  # seconds in which all have asked once; not counted
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
    charter = new_charter(
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


async def poll(port: int, stop: float, measured: Measured, *, knows: bool) -> None:
    """One miner until ``stop`` (``time.monotonic``)."""
    query = ""
    await asyncio.sleep(random.uniform(0, INTERVAL))
    while time.monotonic() < stop:
        began = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                f"GET /state{query} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\naccept: */*\r\n"
                "accept-encoding: gzip, deflate\r\nconnection: keep-alive\r\n"
                "user-agent: python-httpx/0.28.1\r\n\r\n".encode()
            )
            answer = await reader.read()
            writer.close()
        except OSError:
            measured.failed += 1
        else:
            measured.answers.append(time.perf_counter() - began)
            measured.received += len(answer)
            head, _, body = answer.partition(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                measured.failed += 1
            elif knows:
                start, version = _known(body)
                query = f"?since={version}&start={start}"
        await asyncio.sleep(INTERVAL * random.uniform(0.9, 1.1))


def _known(body: bytes) -> tuple[str, int]:
    """What a poller remembers; its own work for the rows is not this bench's."""
    fields = json.loads(body.partition(b', "rows"')[0].rstrip(b"}") + b"}")
    return fields["start"], fields["version"]


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


def serve(folder: Path, count: int, seconds: float, *, knows: bool) -> tuple[Measured, float]:
    """What ``count`` pollers measured, and the registry's share of one core."""
    (port,) = free_ports(1)
    flags = ("--requests-per-address", "100000", "--port", str(port), "--folder", str(folder))
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
                used = psutil.Process(process.pid)
                return asyncio.run(_both(used, chain, port, count, seconds, knows))
        finally:
            process.terminate()


async def _both(
    process: psutil.Process,
    chain: RegistryChain,
    port: int,
    count: int,
    seconds: float,
    knows: bool,
) -> tuple[Measured, float]:
    measured = Measured()
    stop = time.monotonic() + WARM + seconds
    tasks = [poll(port, stop, measured, knows=knows) for _ in range(count)]
    polls = asyncio.gather(*tasks)
    await asyncio.sleep(WARM)
    measured.answers.clear()
    measured.received = 0
    began, used = time.monotonic(), sum(process.cpu_times()[:2])
    writes = asyncio.create_task(write(chain, count, stop))
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
        known = Head("GET", f"/state?since={view.version}&start={registry.start}", {}, "")
        new = Head("GET", "/state", {}, "")
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
        for name, knows in (("with the version they know", True), ("without (baseline)", False)):
            measured, share = serve(folder / "served", given.pollers, given.seconds, knows=knows)
            shares.append(share)
            print(
                f"  {name}: {100 * share:.1f} % of one core, p99 {1e3 * measured.p99:.1f} ms, "
                f"median {1e3 * statistics.median(measured.answers):.1f} ms, "
                f"{len(measured.answers)} answers, {measured.received / 2**20:.1f} MiB, "
                f"{measured.failed} failed"
            )
        print(f"  the version saves {100 * (1 - shares[0] / shares[1]):.0f} % of the work\n")
        print("neurons   unchanged ms      whole ms     whole KiB     commit ms    weights ms")
        for size in SIZES:
            print(growth(folder / str(size), size), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
