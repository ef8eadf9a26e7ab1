"""The signed server under attack, beside a training that shares its core.

    python -m bench.server                                                 about ten minutes
    python -m bench.server --seconds 3 --block 1 --attacks chunks forged   a quick look

For each attack: a validator that is known calls IsAlive 20 times a second
(p99, goal 50 ms; failures, goal none), the training's step time as a ratio to the same steps
without the attack (goal 1.05), growth of this process's memory. Windows with and without the attack
alternate; a ratio is the median of those of neighbouring windows' median steps. On a machine that
other work keeps busy, wall times of steps say nothing. So a pair of windows counts for "step ratio"
only if other processes took at most 3 % of the core in both; pairs are added until enough count or
three times as many were tried, and the table says how many. "By CPU" is the ratio that the server's
share of the core implies, over all pairs. Training and server share one core, the hardest case: one
thread of training; the senders have the others, as they would on a network.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.strangers import ATTACKS, HOTKEYS, RESTARTED, as_sender, hotkey, miner, signed, stranger
from distributed_training.chain.server import MinerCallbacks, SignedServer
from distributed_training.config.loader import Parser
from distributed_training.config.settings import ChainSettings
from tests.tools.chain_memory import MemoryChain, MemoryLedger

SETTINGS = replace(ChainSettings(), axon_ip="127.0.0.1", axon_port=0)
SPAWN = mp.get_context("spawn")
DISTURBED = 0.03  # of the core, taken by others: wall times of steps then say nothing
MOST_TRIES = 3


class Training:
    """Micro-batches of a small decoder block on one thread of this process, as rank 0 does."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
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


# --- measurements ---------------------------------------------------------------------------------


def served(calls: list[float]) -> tuple[str, str]:
    """Return the cells of latency and failures."""
    good = sorted(1e3 * s for s in calls if s >= 0) or [float("nan")]
    p50, p99 = statistics.median(good), good[int(0.99 * (len(good) - 1))]
    return f"{p50:.1f} / {p99:.1f} ms", f"{sum(s < 0 for s in calls)}/{len(calls)}"


@dataclass(frozen=True)
class Window:
    """``step``: its median seconds; ``cpu``, ``others``: shares of the core that the server and
    other processes took."""

    step: float
    cpu: float
    others: float
    seconds: float


@dataclass(frozen=True)
class Pair:
    """A window without the attack, and the one after it with the attack."""

    quiet: Window
    attacked: Window
    offered: float  # connections a second
    memory: int  # bytes, at the end
    refused: Counter[str]

    @property
    def undisturbed(self) -> bool:
        return max(self.quiet.others, self.attacked.others) <= DISTURBED


class Attacks:
    """The server and the training on the first core, outsiders and the validator on the others."""

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
        self.training = Training()
        self.run_block(0, 2.0)  # the validator becomes known

    def run_block(self, arm: int, seconds: float) -> Window:
        """Train for so long; the validator's calls count for ``arm``."""
        self.arm.value = arm
        steps = []
        began, before = time.monotonic(), cpu_seconds()
        busy, own = core_seconds(self.core), time.process_time()
        while time.monotonic() < began + seconds:
            steps.append(self.training.step())
        took = time.monotonic() - began
        others = (core_seconds(self.core) - busy - (time.process_time() - own)) / took
        self.arm.value = -1
        return Window(statistics.median(steps), (cpu_seconds() - before) / took, others, took)

    def restart(self) -> None:
        self.server.close()
        self.server = start_server(replace(SETTINGS, axon_port=self.port), self.folder)

    def measure(self, index: int, name: str, seconds: float, least: int) -> list[Pair]:
        """Return pairs of windows, ``least`` of them undisturbed unless others are too busy."""
        pairs: list[Pair] = []
        while sum(p.undisturbed for p in pairs) < least and len(pairs) < MOST_TRIES * least:
            quiet = self.run_block(0, seconds)
            if name == RESTARTED:
                time.sleep(0.3)  # a call under way
                self.restart()
            self.block.value += 1
            offered, refused = sum(o.value for o in self.offered), self._refused()
            self.attack.value = index
            attacked = self.run_block(1 + index, seconds)
            pairs.append(
                Pair(
                    quiet,
                    attacked,
                    offered=(sum(o.value for o in self.offered) - offered) / attacked.seconds,
                    memory=psutil.Process().memory_info().rss,
                    refused=self._refused() - refused,
                )
            )
            self.attack.value = -1
            time.sleep(0.5)
        return pairs

    def _refused(self) -> Counter[str]:
        counters = self.server.counters().items()
        kinds = {key[8:]: int(count) for key, count in counters if key.startswith("refused")}
        return Counter(kinds)

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
    """Return what processes and the kernel have taken of a core (proc(5): user, nice, system, irq,
    softirq, steal)."""
    fields = next(
        line.split()
        for line in Path("/proc/stat").read_text().splitlines()
        if line.startswith(f"cpu{core} ")
    )
    return sum(int(fields[i]) for i in (1, 2, 3, 6, 7, 8)) / os.sysconf("SC_CLK_TCK")


def ratio(pairs: Sequence[Pair]) -> float:
    """Of a step's wall time to that of the quiet window beside it; NaN if all were disturbed."""
    counted = [pair.attacked.step / pair.quiet.step for pair in pairs if pair.undisturbed]
    return statistics.median(counted) if counted else float("nan")


def ratio_by_cpu(pairs: Sequence[Pair]) -> float:
    """Return what a step would take more if nothing but server and training were on the core."""
    quiet, attacked = (
        statistics.mean(window.cpu for window in windows)
        for windows in zip(*((pair.quiet, pair.attacked) for pair in pairs), strict=True)
    )
    return (1 - quiet) / (1 - attacked)


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
    idle = statistics.mean(pair.quiet.cpu for pairs in measured.values() for pair in pairs)
    print(row("none", "", *served(calls[0]), "1", "", "1", f"{100 * idle:.1f} %", "", ""))
    for name, pairs in measured.items():
        others = [max(pair.quiet.others, pair.attacked.others) for pair in pairs]
        print(
            row(
                name,
                round(statistics.mean(pair.offered for pair in pairs)),
                *served(calls[1 + list(ATTACKS).index(name)]),
                f"{ratio(pairs):.3f}",
                f"{sum(pair.undisturbed for pair in pairs)} of {len(pairs)}",
                f"{ratio_by_cpu(pairs):.3f}",
                f"{100 * statistics.mean(pair.attacked.cpu for pair in pairs):.1f} %",
                f"{100 * statistics.median(others):.0f} %",
                f"{(pairs[-1].memory - pairs[0].memory) / 1e6:+.1f} MB",
            )
        )
    for name, pairs in measured.items():
        refused = sum((pair.refused for pair in pairs), Counter[str]())
        print(name, json.dumps(dict(refused)))


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
    parser.add_argument("--only", choices=("attacks",), help="there is nothing else")
    parser.add_argument(
        "--attacks", type=attack, nargs="*", default=[], help="words of the names of some"
    )
    options = parser.parse_args(argv)
    attacks(options.seconds, options.block, options.attacks)


if __name__ == "__main__":
    main()
