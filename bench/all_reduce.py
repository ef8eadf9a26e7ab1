"""All-reduce over loopback: ours, stock hivemind with its defaults, and raw TCP.

    python -m bench.all_reduce --peers 2 --parameters 10 --repeats 3

Each peer is a process of its own; the three ways take turns, medians are printed with their ratio
to stock hivemind. Transfer is what the peers do after the group was found; matchmaking is apart.
``CPU`` is what the peers' processes used in a round, p2pd (hivemind's libp2p daemon, which encrypts
and frames) apart from Python (serialization, sums, asyncio), and their sum as a share of all cores
during the transfer: near 100 % the machine's processors, not the way, are what bounds a round.
Raw TCP moves what one all-reduce moves through one peer (2 (n-1)/n of the model out, as much in)
from n sending processes to n threads of one that receives, with no sums and no serialization.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil

from distributed_training.config.swarm import SwarmSettings
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


def main():
    peers, size, tensors, timeout, matchmaking, group = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dht = hivemind.DHT(initial_peers=peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    averager = DecentralizedAverager(
        averaged_tensors=[torch.randn(size // tensors) for _ in range(tensors)], dht=dht,
        start=True, prefix="bench", min_group_size=group, min_matchmaking_time=matchmaking)
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


def cpu_seconds() -> dict[str, float]:
    """Of this process's children and theirs, by kind."""
    used = {"p2pd": 0.0, "python": 0.0}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            kind = "p2pd" if "p2pd" in child.name() else "python"
            used[kind] += times.user + times.system
            if kind == "python":  # a round's averager is a process that its host has waited for
                used[kind] += times.children_user + times.children_system
    return used


class Ours:
    def __init__(self, folder: Path, peers: int, size: int, options: argparse.Namespace) -> None:
        settings = SwarmSettings(
            dht_port=0,
            dht_listen_ip="127.0.0.1",
            initial_peers=(),
            part_size=options.part_size,
            compression=options.compression,
        )
        self._swarms: list[HivemindSwarm] = []
        for i in range(peers):
            swarm = HivemindSwarm(
                settings=settings,
                schema=[(str(t), (size // TENSORS,)) for t in range(TENSORS)],
                run_folder=folder / str(i),
            )
            self._swarms.append(swarm)
            settings = replace(settings, initial_peers=tuple(self._swarms[0].visible_maddrs))

    def round(self) -> Sample:
        request = RoundRequest(
            caller="",
            received_at=0.0,
            timeout=timedelta(seconds=TIMEOUT),
            min_group_size=len(self._swarms),
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
    def __init__(self, folder: Path, peers: int, size: int) -> None:
        script = folder / "stock_peer.py"
        script.write_text(STOCK_PEER)
        self._peers: list[subprocess.Popen[str]] = []
        known: list[str] = []
        for _ in range(peers):
            order = json.dumps([known, size, TENSORS, TIMEOUT, PEER_MATCHMAKING, peers])
            process = subprocess.Popen(
                [sys.executable, str(script), order],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._peers.append(process)
            known = known or self._answer(process)

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
        assert all(int(s[2]) == len(self._peers) for s in samples), "a peer was left out"
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
    args = parser.parse_args()
    size = args.parameters * 1_000_000
    samples: dict[str, list[Sample]] = {"stock": [], "ours": [], "raw tcp": []}
    cpu: dict[str, list[list[float]]] = {"stock": [], "ours": []}
    with tempfile.TemporaryDirectory(prefix="bench-all-reduce-") as name:
        ours, stock = Ours(Path(name), args.peers, size, args), Stock(Path(name), args.peers, size)
        try:
            for _ in range(args.repeats):
                for way, swarm in (("stock", stock), ("ours", ours)):
                    before = cpu_seconds()
                    samples[way].append(swarm.round())
                    after = cpu_seconds()
                    cpu[way].append([max(0.0, after[k] - before[k]) for k in ("p2pd", "python")])
                samples["raw tcp"].append((0.0, raw_tcp(args.peers, size)))
        finally:
            ours.close()
            stock.close()
    base = statistics.median(t for _, t in samples["stock"])
    print(f"{args.peers} peers, {args.parameters} M fp32 parameters, {args.repeats} repeats")
    for way, taken in samples.items():
        matchmaking = statistics.median(m for m, _ in taken)
        transfer = statistics.median(t for _, t in taken)
        print(
            f"{way:8} transfer {transfer:7.2f} s  {4 * size / transfer / 1e6:8.0f} MB/s per peer"
            f"  {base / transfer:6.2f} x stock   matchmaking {matchmaking:5.2f} s"
        )
        if way in cpu:
            p2pd, python = (statistics.median(c[i] for c in cpu[way]) for i in (0, 1))
            share = (p2pd + python) / (transfer * len(os.sched_getaffinity(0)))
            print(
                f"{'':8} CPU p2pd {p2pd:.1f} s, python {python:.1f} s: "
                f"{100 * share:.0f} % of all cores during the transfer"
            )


if __name__ == "__main__":
    main()
