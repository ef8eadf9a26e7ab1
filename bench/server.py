"""Measure the signed server under attack, and a training that shares its core.

    python -m bench.server                                           about seven minutes
    python -m bench.server --block 1 --attacks chunks forged         a quick look

For each attack: a validator that is known calls IsAlive 20 times a second (p99, goal 50 ms;
failures, goal none), the training's step time as a ratio to the same steps without the attack (goal
1.05), growth of this process's memory. Windows with and without the attack alternate; a ratio is
the median of those of neighbouring windows' median steps. Wall times count only on an idle
machine; *by CPU* is the ratio that the server's share of the core implies. Training and server
share one core, the hardest case: one thread of training. The senders have the others, as they would
on a network.

Traffic goes to 127.0.0.0/8 only and ends with the bench. Each sender is bounded in rate and in
connections and never waits for an answer, so that what is offered does not depend on how the server
takes it. Attackers come from other loopback addresses than the validator, as they would on a
network; each window brings new ones, who are not yet known for what they are.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from bittensor.sp_core import Keypair

from bench.common import parser, table
from distributed_training.chain import auth
from distributed_training.chain.identity import Wallet
from distributed_training.chain.server import MinerCallbacks, SignedServer
from distributed_training.common.processes import die_with_parent
from distributed_training.config.settings import ChainSettings
from tests.tools.chain_memory import MemoryChain, MemoryLedger

SETTINGS = replace(ChainSettings(), axon_ip="127.0.0.1", axon_port=0)
SPAWN = mp.get_context("spawn")
PAIRS = 3  # of windows, for each attack
HOTKEYS = 50
IP_BIND_ADDRESS_NO_PORT = 24


def wallet(uri: str) -> Wallet:
    return Wallet(Keypair.create_from_uri(uri), None)


@cache
def hotkey(number: int) -> Wallet:
    """Registered; 0 is the master."""
    return wallet(f"//hotkey{number % HOTKEYS}")


@cache
def miner() -> Wallet:
    return wallet("//miner")


def request(headers: dict[str, str], body: bytes, path: str = "/IsAlive") -> bytes:
    lines = [f"{k}: {v}" for k, v in headers.items()] + [f"content-length: {len(body)}", "host: x"]
    return (f"POST {path} HTTP/1.1\r\n" + "\r\n".join(lines) + "\r\n\r\n").encode() + body


def signed(sender: Wallet, body: bytes = b"{}") -> bytes:
    """An IsAlive call."""
    headers = auth.sign_btauth(sender, path="/IsAlive", body=body, receiver=miner().ss58)
    return request(headers, body)


def forged(number: int) -> bytes:
    """Everything is right but the signature."""
    headers = {
        "bt_header_dendrite_hotkey": hotkey(number).ss58,
        "bt_header_axon_hotkey": miner().ss58,
        "bt_header_dendrite_nonce": str(time.time_ns()),
        "bt_header_dendrite_uuid": str(number),
        "bt_header_dendrite_signature": "0x" + random.randbytes(64).hex(),
        "timeout": "2.3",
    }
    return request(headers, b"{}", "/AllReduce")


def chunked(number: int) -> bytes:
    """A body of one-byte chunks, half of them under the name of a registered hotkey."""
    head = forged(number) if number % 2 else request({}, b"", "/AllReduce")
    head = head.partition(b"content-length")[0]
    return head + b"transfer-encoding: chunked\r\nhost: x\r\n\r\n" + b"1\r\nx\r\n" * 40_000


JUNK = request({}, b"{}", "/AllReduce")


def few(block: int, number: int) -> str:
    """One of eight addresses."""
    return f"127.{20 + block % 200}.2.{number % 8 + 1}"


def any_of(count: int) -> Callable[[int, int], str]:
    def source(block: int, number: int) -> str:
        at = number % count
        return f"127.{20 + block % 200}.{3 + at // 250}.{at % 250 + 1}"

    return source


def anybody(block: int, number: int) -> str:
    return f"127.{random.randrange(20, 220)}.{random.randrange(256)}.{random.randrange(1, 255)}"


def connection(source: str, port: int) -> socket.socket | None:
    """A connection under way; over loopback it is there at once or never."""
    sock = socket.socket()
    sock.setblocking(False)
    try:
        # The port is chosen at the connect, among those free towards this one address.
        sock.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
        sock.bind((source, 0))
        sock.connect(("127.0.0.1", port))
    except BlockingIOError:
        pass
    except OSError:
        sock.close()
        return None
    return sock


@dataclass
class Flood:
    """New connections at a rate, each for one payload, dropped after ``patience`` seconds."""

    per_second: float
    source: Callable[[int, int], str]
    payload: Callable[[int], bytes]
    patience: float = 0.2

    def __post_init__(self) -> None:
        self._open: deque[tuple[float, socket.socket]] = deque()
        self._number = 0
        self._due = 0.0

    def work(self, port: int, block: int) -> int:
        """Send for some milliseconds; return the connections that were opened."""
        now = time.monotonic()
        while self._open and now - self._open[0][0] >= self.patience:
            self._open.popleft()[1].close()
        self._due = max(self._due + 1 / self.per_second, now - 0.2)
        if (wait := self._due - now) > 0:
            time.sleep(wait)
        self._number += 1
        sock = connection(self.source(block, self._number), port)
        if sock is not None:
            with suppress(OSError):
                sock.send(self.payload(self._number))
            self._open.append((now, sock))
        return 1

    def stop(self) -> None:
        while self._open:
            self._open.popleft()[1].close()


def slow(number: int) -> bytes:
    """Half of a head, or a head that is right in all that can be seen without the body."""
    return forged(number)[:-1] if number % 2 else b"POST /IsAlive HTTP/1.1\r\nhost: "


RESTARTED = "junk, any address, 1,000/s, after a restart"
# Each for one process; two of them run at a time.
ATTACKS: dict[str, Callable[[], Flood]] = {
    "1-byte chunks, 8 addresses": lambda: Flood(50, few, chunked, patience=2.0),
    "64 KB bodies of registered hotkeys, 400/s": lambda: Flood(
        200, any_of(50), lambda i: signed(hotkey(i), b" " * 65536)
    ),
    "forged signatures, any address, 1,000/s": lambda: Flood(500, anybody, forged),
    "slow heads and bodies, 1,000 connections": lambda: Flood(125, any_of(50), slow, patience=4.0),
    "pipelined junk, 8 addresses": lambda: Flood(100, few, lambda i: JUNK * 200),
    "10,000 connections": lambda: Flood(
        1000, any_of(1000), lambda i: b"P" if i % 2 else b"", patience=5.0
    ),
    RESTARTED: lambda: Flood(500, anybody, lambda i: JUNK),
    "junk, 8 addresses, 2,000/s": lambda: Flood(1000, few, lambda i: JUNK),
    "junk, any address, 2,000/s": lambda: Flood(1000, anybody, lambda i: JUNK),
}


# --- the processes of senders and validator -------------------------------------------------------


def as_sender() -> None:
    """Leave the first core to the training and the server, and end with the bench."""
    die_with_parent(signal.SIGKILL)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:] or cores)


def attacker(port: int, attack: Any, block: Any, done: Any, offered: Any) -> None:
    """Carry out the attack of that index while there is one (-1: none)."""
    as_sender()
    makers = list(ATTACKS.values())
    sender: Flood | None = None
    while not done.is_set():
        wanted = attack.value
        if wanted >= 0:
            if sender is None:
                random.seed(os.getpid() + block.value)
                sender = makers[wanted]()
            offered.value += sender.work(port, block.value)
        elif sender is not None:
            sender.stop()
            sender = None
        else:
            time.sleep(0.01)


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


def validator(port: int, arm: Any, done: Any, out: Connection) -> None:
    """Call 20 times a second; send the seconds of each call by the value of ``arm``."""
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
        time.sleep(0.05)
    out.send(results)


# --- measurements ---------------------------------------------------------------------------------


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


def start_server(settings: ChainSettings, folder: Path) -> SignedServer:
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


@dataclass(frozen=True)
class Window:
    """``step``: its median seconds; ``cpu``: share of the core that the server took."""

    step: float
    cpu: float
    offered: float  # connections a second
    memory: int  # bytes, at the end


class Attacks:
    """The server and the training on the first core, attackers and the validator on the others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = start_server(SETTINGS, folder)
        port = self.server.port
        self.done = SPAWN.Event()
        self.attack, self.block = SPAWN.Value("i", -1), SPAWN.Value("i", 0)
        self.arm = SPAWN.Value("i", -1)
        self.offered = [SPAWN.Value("i", 0) for _ in range(2)]
        self.calls, theirs = SPAWN.Pipe()
        self.helpers = [
            SPAWN.Process(target=attacker, args=(port, self.attack, self.block, self.done, offered))
            for offered in self.offered
        ]
        self.helpers.append(
            SPAWN.Process(target=validator, args=(port, self.arm, self.done, theirs))
        )
        for helper in self.helpers:
            helper.start()
        first = min(os.sched_getaffinity(0))
        for task in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(task), {first})
        self.training = Training()
        self.window(0, 2.0)  # the validator becomes known

    def window(self, arm: int, seconds: float) -> Window:
        """Train for ``seconds``; the validator's calls count for ``arm``."""
        self.arm.value = arm
        steps = []
        began, before = time.monotonic(), cpu_seconds()
        offered = sum(each.value for each in self.offered)
        while time.monotonic() < began + seconds:
            steps.append(self.training.step())
        took = time.monotonic() - began
        self.arm.value = -1
        return Window(
            step=statistics.median(steps),
            cpu=(cpu_seconds() - before) / took,
            offered=(sum(each.value for each in self.offered) - offered) / took,
            memory=psutil.Process().memory_info().rss,
        )

    def measure(self, name: str, seconds: float) -> list[tuple[Window, Window]]:
        """Return pairs of windows, without the attack and with it."""
        index = list(ATTACKS).index(name)
        pairs = []
        for _ in range(PAIRS):
            quiet = self.window(0, seconds)
            if name == RESTARTED:
                time.sleep(0.3)  # a call under way
                port = self.server.port
                self.server.close()
                self.server = start_server(replace(SETTINGS, axon_port=port), self.folder)
            self.block.value += 1
            self.attack.value = index
            pairs.append((quiet, self.window(1 + index, seconds)))
            self.attack.value = -1
            time.sleep(0.5)
        return pairs

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


def served(calls: list[float]) -> tuple[str, str]:
    """Return the cells of latency and failures."""
    good = sorted(1e3 * s for s in calls if s >= 0) or [float("nan")]
    p50, p99 = statistics.median(good), good[int(0.99 * (len(good) - 1))]
    return f"{p50:.1f} / {p99:.1f} ms", f"{sum(s < 0 for s in calls)}/{len(calls)}"


def row(name: str, calls: list[float], pairs: list[tuple[Window, Window]]) -> tuple[str, ...]:
    quiet, attacked = zip(*pairs, strict=True)
    without, cpu = (statistics.mean(w.cpu for w in windows) for windows in (quiet, attacked))
    step = statistics.median(after.step / before.step for before, after in pairs)
    return (
        name,
        f"{statistics.mean(window.offered for window in attacked):.0f}",
        *served(calls),
        f"{step:.3f}",
        f"{(1 - without) / (1 - cpu):.3f}",
        f"{100 * cpu:.1f} %",
        f"{(attacked[-1].memory - attacked[0].memory) / 1e6:+.1f} MB",
    )


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--block", type=float, default=5.0, help="seconds of a window")
    arguments.add_argument(
        "--attacks", nargs="*", default=[""], help="words of the names of some", metavar="WORD"
    )
    options = arguments.parse_args(argv)
    wanted = [name for name in ATTACKS if any(word in name for word in options.attacks)]
    if not wanted:
        arguments.error(f"no attack has one of these words in its name: {'; '.join(ATTACKS)}")
    with tempfile.TemporaryDirectory() as folder:
        made = Attacks(Path(folder))
        measured = {name: made.measure(name, options.block) for name in wanted}
        calls = made.close()
    titles = ("attack", "offered/s", "IsAlive p50 / p99", "failed", "step ratio")
    rows: list[Sequence[object]] = [("none", "", *served(calls[0]), "1", "1", "", "")]
    for name, pairs in measured.items():
        rows.append(row(name, calls[1 + list(ATTACKS).index(name)], pairs))
    table((*titles, "by CPU", "server CPU", "memory"), rows)


if __name__ == "__main__":
    main()
