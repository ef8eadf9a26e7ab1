"""Time all-reduces over loopback: ours, and one of ours among stock peers, against hivemind's.

    python -m bench.all_reduce --suite                  30 M and 100 M, 2 and 4 peers, with goals
    python -m bench.all_reduce --peers 2 --parameters 10 --repeats 3        a quick look

Each peer is a process of its own; the ways take turns, medians are printed with their ratio to
stock hivemind. Transfer is what the peers do after the group was found, matchmaking what they do
before. ``CPU`` is what the peers' processes used in a round, p2pd (hivemind's libp2p daemon)
included, ours to stock's for as many bytes. ``4bit`` is ours with four bits a value, its bytes
(of a peer, sent and received) and times next to ours without.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from bench.common import parser, table
from distributed_training.config.settings import SwarmSettings
from distributed_training.exchange.sn38.swarm import HivemindSwarm
from distributed_training.protocol.types import RoundRequest

MATCHMAKING = 3.0
TIMEOUT = 300.0
TENSORS = 20
STOCK, OURS, ONE, FOUR = "stock", "ours", "one-of-ours", "4bit"
SUITE = ((30, 2, 3), (30, 4, 3), (100, 2, 2), (100, 4, 2))  # million parameters, peers, repeats

STOCK_PEER = """
import json, sys, time
import hivemind, torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage


class DTGradAverager(DecentralizedAverager):
    pass


def main():
    peers, size, tensors, timeout, matchmaking, group, prefix = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dht = hivemind.DHT(initial_peers=peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    averager = DTGradAverager(
        averaged_tensors=[torch.randn(size // tensors) for _ in range(tensors)], dht=dht,
        start=True, prefix=prefix, min_group_size=group, min_matchmaking_time=matchmaking)
    print(json.dumps([str(m) for m in dht.get_visible_maddrs()]), flush=True)
    for _ in sys.stdin:
        started, found = time.monotonic(), None
        step = averager.step(timeout=timeout, wait=False)
        while not step.done():
            if found is None and step.stage is AveragingStage.RUNNING_ALLREDUCE:
                found = time.monotonic()
            time.sleep(0.02)
        assert len(step.result()) == group, "a peer was left out"
        now = time.monotonic()
        print(json.dumps([(found or now) - started, now - (found or now)]), flush=True)
    averager.shutdown()
    dht.shutdown()


main()
"""

Sample = tuple[float, float, float, float]  # seconds of matchmaking, transfer, CPU; bytes a peer


class Way:
    """One group of ``stock`` hivemind peers and ``ours``, which ``name`` tells from others."""

    def __init__(self, name: str, folder: Path, size: int, *, stock: int, ours: int) -> None:
        self._stock: list[subprocess.Popen[str]] = []
        self._swarms: list[HivemindSwarm] = []
        self._group = stock + ours
        known: list[str] = []
        for _ in range(stock):
            prefix = f"{name}_grad_averager"
            terms = [known, size, TENSORS, TIMEOUT, MATCHMAKING, self._group, prefix]
            process = subprocess.Popen(
                [sys.executable, "-c", STOCK_PEER, json.dumps(terms)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._stock.append(process)
            known = known or _answer(process)
        for process in self._stock[1:]:
            _answer(process)
        for number in range(ours):
            swarm = HivemindSwarm(
                settings=SwarmSettings(
                    dht_port=0,
                    dht_listen_ip="127.0.0.1",
                    initial_peers=tuple(known),
                    run_id=name,
                    compression="4bit" if name == FOUR else "none",
                ),
                schema=[(str(t), (size // TENSORS,)) for t in range(TENSORS)],
                run_folder=folder / f"{name}-{number}",
            )
            self._swarms.append(swarm)
            known = known or list(swarm.visible_maddrs)

    def round(self) -> Sample:
        """Average once; the slowest peer's times."""
        before, moved = cpu_seconds(), moved_bytes()
        with ThreadPoolExecutor(self._group) as pool:
            ours = pool.map(self._average, self._swarms)
            for process in self._stock:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            times = [*map(_answer, self._stock), *ours]
        matchmaking, transfer = (max(each) for each in zip(*times, strict=True))
        return (
            *(matchmaking, transfer, cpu_seconds() - before),
            (moved_bytes() - moved) / self._group,
        )

    def _average(self, swarm: HivemindSwarm) -> list[float]:
        for number, buffer in enumerate(swarm.buffers):
            buffer.normal_().add_(number)
        result = swarm.average(
            RoundRequest(
                caller="",
                timeout=timedelta(seconds=TIMEOUT),
                min_group_size=self._group,
                min_matchmaking_time=timedelta(seconds=MATCHMAKING),
            )
        )
        assert result.matchmaking_seconds is not None and result.transfer_seconds is not None
        return [result.matchmaking_seconds, result.transfer_seconds]

    def close(self) -> None:
        for swarm in self._swarms:
            swarm.close()
        for process in self._stock:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._stock:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            process.kill()
            process.wait()


def _answer(process: subprocess.Popen[str]) -> Any:
    """Return the next line of a stock peer. Raises JSONDecodeError if it ended instead."""
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def cpu_seconds() -> float:
    """Return the CPU seconds of this process's children and theirs."""
    seconds = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            seconds += times.user + times.system
    return seconds


def moved_bytes() -> float:
    """Return the bytes that p2pds wrote: to the network, and what came from it to their peers."""
    return sum(
        child.io_counters().write_chars
        for child in psutil.Process().children(recursive=True)
        if child.name() == "p2pd"
    )


def measure(millions: int, peers: int, repeats: int) -> tuple[object, ...]:
    """Return the row of the table."""
    size = millions * 1_000_000
    samples: dict[str, list[Sample]] = {STOCK: [], OURS: [], ONE: [], FOUR: []}
    with tempfile.TemporaryDirectory(prefix="bench-") as name, contextlib.ExitStack() as stack:
        ways = {}
        for way, others in ((STOCK, peers), (OURS, 0), (ONE, peers - 1), (FOUR, 0)):
            ways[way] = Way(way, Path(name), size, stock=others, ours=peers - others)
            stack.callback(ways[way].close)
        for _ in range(repeats):
            for way, group in ways.items():
                samples[way].append(group.round())
    median = {
        way: [statistics.median(column) for column in zip(*taken, strict=True)]
        for way, taken in samples.items()
    }
    stock, ours, one, four = (median[way] for way in samples)
    return (
        *(millions, peers, f"{stock[1]:.2f} s", f"{ours[1]:.2f} s", f"{stock[1] / ours[1]:.2f}x"),
        *(f"{one[1]:.2f} s", f"{stock[1] / one[1]:.2f}x", f"{ours[2] / stock[2]:.2f}x"),
        *(f"{stock[0]:.1f} s", f"{ours[0]:.1f} s"),
        *(f"{four[1]:.2f} s", f"{four[1] / ours[1]:.2f}x"),
        *(f"{ours[3] / 1e6:.1f} MB", f"{four[3] / 1e6:.1f} MB", f"{four[3] / ours[3]:.3f}x"),
    )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--peers", type=int, default=2)
    arguments.add_argument("--parameters", type=int, default=10, help="millions")
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument(
        "--suite", action="store_true", help="the sizes with goals, as one table"
    )
    options = arguments.parse_args()
    cases = SUITE if options.suite else [(options.parameters, options.peers, options.repeats)]
    titles = ("M values", "peers", "stock", "ours", "gain", "one of ours", "gain", "CPU")
    more = ("matchmaking: stock", "ours", "4bit", "to ours", "bytes: ours", "4bit", "to ours")
    goal = ("goal", "", "", "", ">=1.3x", "", ">=1.0x", "<=0.6x", *[""] * 6, "<=0.14x")
    table((*titles, *more), [*(measure(*case) for case in cases), goal])


if __name__ == "__main__":
    main()
