"""The signed server beside a training that keeps every core busy, and under attack.

    python -m bench.server                # everything, about twelve minutes
    python -m bench.server --seconds 5    # a quick look
    python -m bench.server --only attacks --attacks chunks forged

latency: IsAlive, p50 and p99 (wall time at a caller in another process), while training saturates
the cores and an upload runs. Goal: p99 <= 250 ms; validators give up at 2.3 s.

throughput: signed calls answered per second of CPU time of the server's process, training off, each
on a connection of its own. Goal: 500 per second on one core.

attacks: a table. For each attack of ``bench/strangers.py``: a validator that is known calls IsAlive
20 times a second (p99, goal 50 ms; failures, goal none), the training's step time as a ratio to the
same steps without the attack (goal 1.05), growth of this process's memory. Windows with and without
the attack alternate; a ratio is the median of those of neighbouring windows' median steps. On a
machine that other work keeps busy, wall times of steps say nothing. So a pair of windows counts for
"step ratio" only if other processes took at most 3 % of the core in both; pairs are added until
enough count or three times as many were tried, and the table says how many. "By CPU" is the ratio
that the server's share of the core implies, over all pairs. Training and server share one core, the
hardest case: one thread of training; the senders have the others, as they would on a network.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.strangers import ATTACKS, HOTKEYS, RESTARTED, as_sender, hotkey, miner, signed, stranger
from distributed_training.chain.server import MinerCallbacks, SignedServer
from distributed_training.common.processes import die_with_parent
from distributed_training.config.loader import Parser
from distributed_training.config.settings import ChainSettings
from tests.tools.chain_memory import MemoryChain, MemoryLedger

SETTINGS = replace(ChainSettings(), axon_ip="127.0.0.1", axon_port=0)
SPAWN = mp.get_context("spawn")
DISTURBED = 0.03  # of the core, taken by others: wall times of steps then say nothing
MOST_TRIES = 3


class Training:
    """Micro-batches of a small decoder block on all cores, in this process, as rank 0 does."""

    def __init__(self, threads: int) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(threads)
        self.layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        self.optimizer = torch.optim.AdamW(self.layer.parameters())
        self.batch = torch.randn(2, 256, 256)

    def step(self) -> float:
        """Seconds of one step of four micro-batches."""
        started = time.perf_counter()
        for _ in range(4):
            self.layer(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started


def start_server(settings: ChainSettings, folder: Path | None = None) -> SignedServer:
    ledger = MemoryLedger()
    ledger.register(miner().ss58)
    for i in range(HOTKEYS):
        ledger.register(hotkey(i).ss58, stake=1e6, validator_permit=True)
    server = SignedServer(
        settings=settings,
        wallet=miner(),
        chain=MemoryChain(hotkey=miner().ss58, ledger=ledger),
        master_hotkey=hotkey(0).ss58,
        miner=MinerCallbacks(lambda: 1, lambda request: None),
        folder=folder,
    )
    server.start()
    return server


# --- other processes ------------------------------------------------------------------------------


def call_is_alive(port: int, number: int) -> float:
    """Seconds of a call on a new connection, as dendrites make them; -1 if it failed."""
    raw = signed(hotkey(number))
    started = time.perf_counter()
    answer = b""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 3) as sock:
        sock.sendall(raw)
        while b"}" not in answer and (chunk := sock.recv(65536)):
            answer += chunk
    return time.perf_counter() - started if answer.startswith(b"HTTP/1.1 200") else -1.0


def validator(port: int, pause: float, arm: Any, done: Any, out: Connection) -> None:
    """Calls with ``pause`` between them; sends the seconds of each call by the value of ``arm``."""
    as_sender()
    results: dict[int, list[float]] = {}
    number = 0
    while not done.is_set():
        during = arm.value
        if during >= 0:
            seconds = call_is_alive(port, number)
            if arm.value == during:
                results.setdefault(during, []).append(seconds)
            number += 1
        time.sleep(pause)
    out.send(results)


def stream(port: int, seconds: float, start: int, out: Connection) -> None:
    """Calls one after the other, as fast as they are answered."""
    answered = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert call_is_alive(port, start + answered % 10) > 0
        answered += 1
    out.send(answered)


def upload(folder: str, port: int, done: Any) -> None:
    """Reads a file and sends it over loopback, hashing, at low priority: the uploader's load."""
    import hashlib

    die_with_parent(signal.SIGKILL)
    os.nice(10)
    path = Path(folder) / "weights"
    path.write_bytes(os.urandom(64 << 20))
    while not done.is_set():
        with socket.create_connection(("127.0.0.1", port)) as sock, open(path, "rb") as file:
            while (chunk := file.read(1 << 20)) and not done.is_set():
                hashlib.md5(chunk, usedforsecurity=False)
                sock.sendall(chunk)


def sink(listening: socket.socket) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection, suppress(OSError):
            while connection.recv(1 << 20):
                pass


# --- measurements ---------------------------------------------------------------------------------


def summary(results: list[float]) -> dict[str, float]:
    good = sorted(1e3 * s for s in results if s >= 0) or [float("nan")]
    return {
        "calls": len(results),
        "failed": sum(s < 0 for s in results),
        "p50_ms": round(statistics.median(good), 1),
        "p99_ms": round(good[int(0.99 * (len(good) - 1))], 1),
        "max_ms": round(good[-1], 1),
    }


def served(calls: list[float]) -> tuple[str, str]:
    told = summary(calls)
    return f"{told['p50_ms']} / {told['p99_ms']} ms", f"{told['failed']}/{told['calls']}"


def latency(seconds: float) -> dict[str, Any]:
    server = start_server(SETTINGS)
    training = Training(os.cpu_count() or 1)
    done, arm = SPAWN.Event(), SPAWN.Value("i", 0)
    ours, theirs = SPAWN.Pipe()
    steps = 0
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as drain:
        threading.Thread(target=sink, args=(drain,), daemon=True).start()
        helpers = [
            SPAWN.Process(target=upload, args=(folder, drain.getsockname()[1], done)),
            SPAWN.Process(target=validator, args=(server.port, 0.02, arm, done, theirs)),
        ]
        for helper in helpers:
            helper.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            training.step()
            steps += 1
        done.set()
        results = ours.recv()
        for helper in helpers:
            helper.join(20)
    server.close()
    return {**summary(results[0]), "training_steps": steps}


def throughput(seconds: float) -> dict[str, Any]:
    generous = replace(SETTINGS, requests_per_hotkey=1e6, requests_per_address=1e6)
    server = start_server(generous)
    server._trusted.add("127.0.0.1")
    pipes = [SPAWN.Pipe() for _ in range(2)]
    callers = [
        SPAWN.Process(target=stream, args=(server.port, seconds, 10 * i, pipes[i][1]))
        for i in range(2)
    ]
    for caller in callers:
        caller.start()
    # CPU time of this process is the server's: nothing else runs in it.
    before = time.process_time()
    answered = sum(ours.recv() for ours, _ in pipes)
    used = time.process_time() - before
    for caller in callers:
        caller.join(20)
    server.close()
    return {
        "answered_per_second": round(answered / seconds),
        "answered_per_cpu_second": round(answered / used),
    }


@dataclass
class Blocks:
    """What was measured of one attack, block by block."""

    quiet_steps: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)  # most of a core that they took in a pair
    quiet_cpu: list[float] = field(default_factory=list)  # the server's share of a core
    cpu: list[float] = field(default_factory=list)
    seconds: float = 0.0
    offered: int = 0
    memory: list[int] = field(default_factory=list)  # bytes, at the end of each attack's block
    refused: dict[str, int] = field(default_factory=dict)


class Attacks:
    """The server and the training on the first core, strangers and the validator on the others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = start_server(SETTINGS, folder)
        self.port = self.server.port
        self.done = SPAWN.Event()
        self.attack, self.block = SPAWN.Value("i", -1), SPAWN.Value("i", 0)
        self.arm = SPAWN.Value("i", -1)
        self.offered = [SPAWN.Value("i", 0) for _ in range(2)]
        self.calls, theirs = SPAWN.Pipe()
        self.helpers = [
            SPAWN.Process(target=stranger, args=(self.port, self.attack, self.block, self.done, o))
            for o in self.offered
        ]
        self.helpers.append(
            SPAWN.Process(target=validator, args=(self.port, 0.05, self.arm, self.done, theirs))
        )
        for helper in self.helpers:
            helper.start()
        self.core = min(os.sched_getaffinity(0))
        torch.set_num_threads(1)
        for task in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(task), {self.core})
        self.training = Training(1)
        self.run_block(0, 2.0)  # the validator becomes known

    def run_block(self, arm: int, seconds: float) -> tuple[float, float, float]:
        """Median step, the server's share of the core and that of other processes; the validator's
        calls count for ``arm``."""
        self.arm.value = arm
        steps = []
        began, before = time.monotonic(), cpu_seconds()
        busy, own = core_seconds(self.core), time.process_time()
        while time.monotonic() < began + seconds:
            steps.append(self.training.step())
        took = time.monotonic() - began
        others = (core_seconds(self.core) - busy - (time.process_time() - own)) / took
        self.arm.value = -1
        return statistics.median(steps), (cpu_seconds() - before) / took, others

    def restart(self) -> None:
        self.server.close()
        self.server = start_server(replace(SETTINGS, axon_port=self.port), self.folder)

    def measure(self, index: int, name: str, seconds: float, blocks: int) -> Blocks:
        found = Blocks()
        counters = self.server.counters()
        while undisturbed(found) < blocks and len(found.steps) < MOST_TRIES * blocks:
            step, cpu, others = self.run_block(0, seconds)
            found.quiet_steps.append(step)
            found.quiet_cpu.append(cpu)
            if name == RESTARTED:
                time.sleep(0.3)  # a call under way
                self.restart()
                counters = self.server.counters()
            self.block.value += 1
            offered, began = sum(o.value for o in self.offered), time.monotonic()
            self.attack.value = index
            step, cpu, also = self.run_block(1 + index, seconds)
            found.others.append(max(others, also))
            found.steps.append(step)
            found.cpu.append(cpu)
            found.seconds += time.monotonic() - began
            found.offered += sum(o.value for o in self.offered) - offered
            found.memory.append(psutil.Process().memory_info().rss)
            for key, count in self.server.counters().items():
                if key.startswith("refused") and count > counters.get(key, 0):
                    found.refused[key[8:]] = (
                        found.refused.get(key[8:], 0) + count - counters.get(key, 0)
                    )
            self.attack.value = -1
            time.sleep(0.5)
            counters = self.server.counters()
        return found

    def close(self) -> dict[int, list[float]]:
        """The validator's calls by arm."""
        self.done.set()
        calls: dict[int, list[float]] = self.calls.recv()
        for helper in self.helpers:
            helper.join(20)
        self.server.close()
        return calls


def cpu_seconds() -> float:
    """Time on a core of the server's thread so far, all that the kernel did for it included."""
    thread = next(t.native_id or 0 for t in threading.enumerate() if t.name == "signed-server")
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def core_seconds(core: int) -> float:
    """What all processes and the kernel have taken of a core (proc(5): user, nice, system, irq,
    softirq, steal)."""
    fields = next(
        line.split()
        for line in Path("/proc/stat").read_text().splitlines()
        if line.startswith(f"cpu{core} ")
    )
    return sum(int(fields[i]) for i in (1, 2, 3, 6, 7, 8)) / os.sysconf("SC_CLK_TCK")


def undisturbed(found: Blocks) -> int:
    return sum(others <= DISTURBED for others in found.others)


def ratio(found: Blocks) -> float:
    """Of a step's wall time to that of the quiet window beside it; NaN if all were disturbed."""
    pairs = zip(found.steps, found.quiet_steps, found.others, strict=True)
    counted = [a / b for a, b, others in pairs if others <= DISTURBED]
    return statistics.median(counted) if counted else float("nan")


def ratio_by_cpu(found: Blocks) -> float:
    """What a step would take more if nothing but server and training were on the core."""
    return (1 - statistics.mean(found.quiet_cpu)) / (1 - statistics.mean(found.cpu))


def attacks(seconds: float, block_seconds: float, wanted: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = Attacks(Path(folder))
        measured = {
            name: made.measure(index, name, block_seconds, max(3, round(seconds / block_seconds)))
            for index, name in enumerate(ATTACKS)
            if not wanted or any(word in name for word in wanted)
        }
        calls = made.close()
    titles = (
        "attack", "offered/s", "IsAlive p50 / p99", "failed", "step ratio", "pairs", "by CPU",
        "server CPU", "others", "memory",
    )  # fmt: skip
    row = (
        "| {:<43} | {:>9} | {:>17} | {:>8} | {:>10} | {:>7} | {:>6} | {:>10} | {:>6} | {:>8} |"
    ).format
    print(row(*titles))
    print(row(*("---" for _ in titles)))
    idle = statistics.mean(cpu for found in measured.values() for cpu in found.quiet_cpu)
    print(row("none", "", *served(calls[0]), "1", "", "1", f"{100 * idle:.1f} %", "", ""))
    for name, found in measured.items():
        print(
            row(
                name,
                round(found.offered / found.seconds),
                *served(calls[1 + list(ATTACKS).index(name)]),
                f"{ratio(found):.3f}",
                f"{undisturbed(found)} of {len(found.steps)}",
                f"{ratio_by_cpu(found):.3f}",
                f"{100 * statistics.mean(found.cpu):.1f} %",
                f"{100 * statistics.median(found.others):.0f} %",
                f"{(found.memory[-1] - found.memory[0]) / 1e6:+.1f} MB",
            )
        )
    for name, found in measured.items():
        print(name, json.dumps(found.refused))


def attack(word: str) -> str:
    """``type=`` of a word that stands in the name of at least one attack."""
    if not any(word in name for name in ATTACKS):
        raise argparse.ArgumentTypeError(
            f"no attack has {word!r} in its name: {'; '.join(ATTACKS)}"
        )
    return word


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement's load")
    parser.add_argument("--block", type=float, default=5.0, help="seconds of a block")
    parser.add_argument("--only", choices=("latency", "throughput", "attacks"))
    parser.add_argument(
        "--attacks", type=attack, nargs="*", default=[], help="words of the names of some"
    )
    options = parser.parse_args(argv)
    if options.only in (None, "latency"):
        print("latency", json.dumps(latency(options.seconds)), flush=True)
    if options.only in (None, "throughput"):
        print("throughput", json.dumps(throughput(min(20.0, options.seconds))), flush=True)
    if options.only in (None, "attacks"):
        attacks(options.seconds, options.block, options.attacks)


if __name__ == "__main__":
    main()
