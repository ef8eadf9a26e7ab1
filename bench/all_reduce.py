"""All-reduce over loopback: ours, one of ours among stock peers, stock hivemind, and raw TCP.

    python -m bench.all_reduce --peers 2 --parameters 10 --repeats 3
    python -m bench.all_reduce --suite                  30 M and 100 M, 2 and 4 peers, with goals
    python -m bench.all_reduce --line 1000 --parameters 30     our peers on lines of 1 Gbit/s

Each peer is a process of its own; the ways take turns, medians are printed with their ratio to
stock hivemind. Transfer is what the peers do after the group was found; matchmaking is apart.
``CPU`` is what the peers' processes used in a round, p2pd (hivemind's libp2p daemon, which encrypts
and frames) apart from Python (serialization, sums, asyncio), with the ratio of CPU seconds to
stock's for as many bytes, and Python's minor page faults (first touches of fresh memory).
Raw TCP moves what one all-reduce moves through one peer (2 (n-1)/n of the model out, as much in)
from n sending processes to n threads of one that receives, with no sums and no serialization.

With ``--line`` our peers alone, each in a network namespace behind a line of so many Mbit/s in each
direction (``bench.links``; root): how much of the line a transfer fills, with and without headers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil

from bench.links import Links
from distributed_training.config.settings import SwarmSettings
from distributed_training.protocol.types import RoundRequest
from distributed_training.swarm import HivemindSwarm

PEER_MATCHMAKING = 3.0
TIMEOUT = 300.0
TENSORS = 20

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
        group_size = len(step.result())
        now = time.monotonic()
        print(json.dumps([(found or now) - started, now - (found or now), group_size]), flush=True)
    averager.shutdown()
    dht.shutdown()


main()
"""

Sample = tuple[float, float]  # matchmaking and transfer, seconds: the slowest peer's
USED = ("p2pd", "python", "faults")


def used() -> dict[str, float]:
    """By this process's children and theirs: CPU seconds by kind, Python's minor page faults."""
    total = dict.fromkeys(USED, 0.0)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            times = child.cpu_times()
            kind = "p2pd" if "p2pd" in child.name() else "python"
            total[kind] += times.user + times.system
            if kind == "python":  # field 10 of proc(5), the first after the name being the third
                fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
                total["faults"] += int(fields[7])
    return total


class Ours:
    def __init__(
        self,
        folder: Path,
        peers: int,
        size: int,
        options: argparse.Namespace,
        *,
        known: Sequence[str] = (),
        group: int | None = None,
        run_id: str = "ours",
        links: Links | None = None,
    ) -> None:
        """``group``: of how many peers a round is, if not all are of this object. ``links``: where
        each peer is, if not all are on loopback."""
        self._group = group or peers
        settings = SwarmSettings(
            dht_port=0,
            dht_listen_ip="127.0.0.1",
            initial_peers=tuple(known),
            run_id=run_id,
            part_size=options.part_size,
            compression=options.compression,
        )
        self._swarms: list[HivemindSwarm] = []
        for i in range(peers):
            with contextlib.nullcontext() if links is None else links.inside(i):
                if links is not None:
                    settings = replace(settings, dht_listen_ip=links.addresses[i])
                swarm = HivemindSwarm(
                    settings=settings,
                    schema=[(str(t), (size // TENSORS,)) for t in range(TENSORS)],
                    run_folder=folder / str(i),
                )
            self._swarms.append(swarm)
            known = known or self._swarms[0].visible_maddrs
            settings = replace(settings, initial_peers=tuple(known))

    def round(self) -> Sample:
        request = RoundRequest(
            caller="",
            timeout=timedelta(seconds=TIMEOUT),
            min_group_size=self._group,
            min_matchmaking_time=timedelta(seconds=PEER_MATCHMAKING),
        )
        samples: list[Sample] = []

        def run(swarm: HivemindSwarm) -> None:
            for i, buffer in enumerate(swarm.buffers):
                buffer.normal_().add_(i)
            result = swarm.average(request)
            assert result.matchmaking_seconds is not None and result.transfer_seconds is not None
            samples.append((result.matchmaking_seconds, result.transfer_seconds))

        threads = [threading.Thread(target=run, args=(swarm,)) for swarm in self._swarms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(samples) == len(self._swarms), "a peer failed"
        return max(m for m, _ in samples), max(t for _, t in samples)

    def close(self) -> None:
        for swarm in self._swarms:
            swarm.close()


class Stock:
    def __init__(
        self, folder: Path, peers: int, size: int, *, group: int, run_id: str = "stock"
    ) -> None:
        script = folder / "stock_peer.py"
        script.write_text(STOCK_PEER)
        self._group = group
        self._peers: list[subprocess.Popen[str]] = []
        self.known: list[str] = []
        for _ in range(peers):
            prefix = f"{run_id}_grad_averager"
            terms = [self.known, size, TENSORS, TIMEOUT, PEER_MATCHMAKING, group, prefix]
            order = json.dumps(terms)
            process = subprocess.Popen(
                [sys.executable, str(script), order],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._peers.append(process)
            self.known = self.known or self._answer(process)

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> list[str]:
        assert process.stdout is not None
        answer: list[str] = json.loads(process.stdout.readline())
        return answer

    def round(self) -> Sample:
        if not getattr(self, "_ready", False):
            for process in self._peers[1:]:
                self._answer(process)
            self._ready = True
        for process in self._peers:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        samples = [[float(x) for x in self._answer(p)] for p in self._peers]
        assert all(int(s[2]) == self._group for s in samples), "a peer was left out"
        return max(s[0] for s in samples), max(s[1] for s in samples)

    def close(self) -> None:
        for process in self._peers:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._peers:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Mixed:
    """One of ours among stock peers."""

    def __init__(self, folder: Path, peers: int, size: int, options: argparse.Namespace) -> None:
        self._stock = Stock(folder, peers - 1, size, group=peers, run_id="mixed")
        self._ours = Ours(
            folder, 1, size, options, known=self._stock.known, group=peers, run_id="mixed"
        )

    def round(self) -> Sample:
        with ThreadPoolExecutor(1) as pool:
            ours = pool.submit(self._ours.round)
            stock = self._stock.round()
            other = ours.result()
        return max(stock[0], other[0]), max(stock[1], other[1])

    def close(self) -> None:
        self._ours.close()
        self._stock.close()


RAW_SENDER = """
import socket, sys
port, size = int(sys.argv[1]), int(sys.argv[2])
block = bytearray(1 << 20)
with socket.create_connection(("127.0.0.1", port)) as wire:
    while size > 0:
        size -= wire.send(memoryview(block)[:size])
"""


def raw_tcp(peers: int, size: int) -> float:
    """Seconds for the bytes of one all-reduce, each peer's in a process of its own."""
    per_peer = int(4 * size * 2 * (peers - 1) / peers)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        senders = [
            subprocess.Popen([sys.executable, "-c", RAW_SENDER, port, str(per_peer)])
            for _ in range(peers)
        ]
        wires = [server.accept()[0] for _ in senders]
        started = time.monotonic()

        def drain(wire: socket.socket) -> None:
            buffer = bytearray(1 << 20)
            with wire:
                while wire.recv_into(buffer):
                    pass

        threads = [threading.Thread(target=drain, args=(wire,)) for wire in wires]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - started
        for sender in senders:
            sender.wait()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--parameters", type=int, default=10, help="millions")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--part-size", type=int, default=SwarmSettings().part_size)
    parser.add_argument("--compression", default="none", help="ours")
    parser.add_argument("--suite", action="store_true", help="the sizes with goals, as one table")
    parser.add_argument("--line", type=float, default=0.0, help="Mbit/s of each peer's own line")
    args = parser.parse_args()
    if args.suite:
        suite(args)
        return
    size = args.parameters * 1_000_000
    with tempfile.TemporaryDirectory(prefix="bench-all-reduce-") as name:
        if args.line:
            on_a_line(Path(name), size, args)
            return
        samples, costs = measure(Path(name), size, args)
    report(samples, costs, size, args)


def on_a_line(folder: Path, size: int, args: argparse.Namespace) -> None:
    """Our peers alone. What the line carried counts from its own counters."""
    payload = 4 * size * 2 * (args.peers - 1) / args.peers
    shares: list[tuple[float, float]] = []
    with ExitStack() as stack:
        links = stack.enter_context(Links([args.line] * args.peers))
        ours = Ours(folder, args.peers, size, args, links=links)
        stack.callback(ours.close)
        for number in range(args.repeats + 1):
            before = links.counters()
            _, transfer = ours.round()
            after = links.counters()
            carried = statistics.mean(b.sent - a.sent for a, b in zip(before, after, strict=True))
            could = args.line * 1e6 / 8 * transfer
            print(
                f"transfer {transfer:6.2f} s: {100 * carried / could:5.1f} % of the line carried, "
                f"{100 * payload / could:5.1f} % values" + ("" if number else " (not counted)"),
                flush=True,
            )
            shares.append((carried / could, payload / could))
    with_headers, values = (statistics.median(s) for s in zip(*shares[1:], strict=True))
    print(
        f"{args.peers} peers, {args.parameters} M parameters, lines of {args.line:.0f} Mbit/s: "
        f"{100 * with_headers:.1f} % of the line filled (goal 95), {100 * values:.1f} % with values"
    )


SUITE = ((30, 2, 3), (30, 4, 3), (100, 2, 2), (100, 4, 2))  # million parameters, peers, repeats


def suite(args: argparse.Namespace) -> None:
    lines = []
    for millions, peers, repeats in SUITE:
        args.parameters, args.peers, args.repeats = millions, peers, repeats
        with tempfile.TemporaryDirectory(prefix="bench-all-reduce-") as name:
            samples, costs = measure(Path(name), millions * 1_000_000, args)
        report(samples, costs, millions * 1_000_000, args)
        lines.append(suite_line(samples, costs, millions, peers))
    print(
        f"\n{'M values':>8} {'peers':>5} {'stock':>8} {'ours':>8} {'gain':>7} {'one of ours':>12} "
        f"{'gain':>7} {'CPU':>7} {'faults':>12}"
    )
    print("\n".join(lines))
    print(
        f"{'goal':>8} {'':5} {'':8} {'':8} {'>=1.3x':>7} {'':12} {'>=1.0x':>7} {'<=0.6x':>7}   "
        "(CPU: ours to stock's for as many bytes; faults: million, stock and ours)",
        flush=True,
    )


def suite_line(
    samples: dict[str, list[Sample]],
    costs: dict[str, list[dict[str, float]]],
    millions: int,
    peers: int,
) -> str:
    seconds = {way: statistics.median(t for _, t in taken) for way, taken in samples.items()}
    cpu = {way: statistics.median(c["p2pd"] + c["python"] for c in costs[way]) for way in costs}
    faults = {way: statistics.median(c["faults"] for c in costs[way]) / 1e6 for way in costs}
    stock, ours, one = seconds["stock"], seconds["ours"], seconds["one of ours"]
    return (
        f"{millions:8} {peers:5} {stock:6.2f} s {ours:6.2f} s {stock / ours:6.2f}x {one:10.2f} s "
        f"{stock / one:6.2f}x {cpu['ours'] / cpu['stock']:6.2f}x "
        f"{faults['stock']:5.2f} {faults['ours']:6.2f}"
    )


def measure(
    folder: Path, size: int, args: argparse.Namespace
) -> tuple[dict[str, list[Sample]], dict[str, list[dict[str, float]]]]:
    """Seconds, and what was used, by way and round."""
    ways: dict[str, Ours | Stock | Mixed] = {}
    samples: dict[str, list[Sample]] = {}
    costs: dict[str, list[dict[str, float]]] = {}
    with ExitStack() as stack:
        ways["stock"] = Stock(folder, args.peers, size, group=args.peers)
        stack.callback(ways["stock"].close)
        ways["ours"] = Ours(folder / "ours", args.peers, size, args)
        stack.callback(ways["ours"].close)
        ways["one of ours"] = Mixed(folder, args.peers, size, args)
        stack.callback(ways["one of ours"].close)
        for _ in range(args.repeats):
            for way, peers in ways.items():
                before = used()
                samples.setdefault(way, []).append(peers.round())
                after = used()
                cost = {what: max(0.0, after[what] - before[what]) for what in USED}
                costs.setdefault(way, []).append(cost)
            samples.setdefault("raw tcp", []).append((0.0, raw_tcp(args.peers, size)))
    return samples, costs


def report(
    samples: dict[str, list[Sample]],
    costs: dict[str, list[dict[str, float]]],
    size: int,
    args: argparse.Namespace,
) -> None:
    base = statistics.median(t for _, t in samples["stock"])
    stock_cpu = statistics.median(c["p2pd"] + c["python"] for c in costs["stock"])
    print(f"{args.peers} peers, {args.parameters} M fp32 parameters, {args.repeats} repeats")
    for way, taken in samples.items():
        matchmaking = statistics.median(m for m, _ in taken)
        transfer = statistics.median(t for _, t in taken)
        print(
            f"{way:11} transfer {transfer:7.2f} s  {4 * size / transfer / 1e6:8.0f} MB/s per peer"
            f"  {base / transfer:6.2f} x stock   matchmaking {matchmaking:5.2f} s"
        )
        if way in costs:
            p2pd, python, faults = (statistics.median(c[w] for c in costs[way]) for w in USED)
            print(
                f"{'':11} CPU p2pd {p2pd:.1f} s, python {python:.1f} s: "
                f"{(p2pd + python) / stock_cpu:.2f} x stock's; {faults / 1e6:.2f} M page faults"
            )


if __name__ == "__main__":
    main()
