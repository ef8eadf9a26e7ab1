"""The signed server beside a training that keeps every core busy.

    python -m bench.server                # three measurements, about six minutes
    python -m bench.server --seconds 5    # a quick look

1. IsAlive, p50 and p99 (wall time at a caller in another process), while training saturates the
   cores and an upload runs. Goal: p99 <= 250 ms; validators give up at 2.3 s.
2. Signed calls answered per second of CPU time of the server's process, training off.
   Goal: 500 per second on one core.
3. Training step time under unsigned junk (2,000 requests/s offered) and 1,000 idle connections, as
   a ratio to the same steps without, in blocks of 5 s arm after arm, each arm ``--seconds`` in all.
   Goal: <= 1.05. Training and server share one core (the hardest case: one thread of training); the
   senders have the other to themselves, as they would on a network, and never wait for an answer,
   so that their work is not counted as the server's. ``sink`` is the same load on a process that
   accepts and closes: what is left of it beside ``quiet`` is no server's fault. A validator calls
   IsAlive all the while, so that what it meets under junk is measured too.

Strangers come from other loopback addresses than the validator, as they would on a network.
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
from collections import deque
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from bittensor.sp_core import Keypair

from distributed_training.chain import auth
from distributed_training.chain.memory import MemoryChain, MemoryLedger
from distributed_training.chain.server import MinerCallbacks, SignedServer
from distributed_training.chain.wallet import Wallet
from distributed_training.config.chain import ChainSettings
from distributed_training.miner.process import die_with_parent

VALIDATORS = 50
SETTINGS = replace(ChainSettings(), axon_ip="127.0.0.1", axon_port=0)
JUNK = b"POST /AllReduce HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


def wallet(uri: str) -> Wallet:
    return Wallet(uri, uri, Keypair.create_from_uri(uri), None)


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


def start_server(settings: ChainSettings) -> SignedServer:
    ledger = MemoryLedger()
    miner = wallet("//miner")
    ledger.register(miner.ss58)
    for i in range(VALIDATORS):
        ledger.register(wallet(f"//validator{i}").ss58, stake=1e6, validator_permit=True)
    server = SignedServer(
        settings=settings,
        wallet=miner,
        chain=MemoryChain(hotkey=miner.ss58, ledger=ledger),
        master_hotkey=wallet("//validator0").ss58,
        miner=MinerCallbacks(lambda: 1, lambda request: None),
    )
    server.start()
    return server


# --- other processes ------------------------------------------------------------------------------


def call_is_alive(port: int, calls: list[bytes]) -> list[float]:
    """Seconds of each call, a new connection for each as dendrites do; -1 for a failed one."""
    seconds = []
    for raw in calls:
        started = time.perf_counter()
        answer = b""
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 3) as sock:
            sock.sendall(raw)
            while b"}" not in answer and (chunk := sock.recv(65536)):
                answer += chunk
        good = answer.startswith(b"HTTP/1.1 200")
        seconds.append(time.perf_counter() - started if good else -1.0)
    return seconds


def signed(sender: Wallet, receiver: str, *, close: bool) -> bytes:
    body = b"{}"
    headers = auth.sign_btauth(sender, path="/IsAlive", body=body, receiver=receiver)
    lines = [f"{k}: {v}" for k, v in headers.items()] + ["content-length: 2", "host: x"]
    if close:
        lines.append("connection: close")
    return ("POST /IsAlive HTTP/1.1\r\n" + "\r\n".join(lines) + "\r\n\r\n").encode() + body


def validator_by_arm(port: int, pause: float, arm: Any, done: Any, out: Connection) -> None:
    """The same until ``done``; the calls of each arm apart (-1: between two arms)."""
    as_sender()
    senders = [wallet(f"//validator{i}") for i in range(VALIDATORS)]
    receiver = wallet("//miner").ss58
    results: dict[int, list[float]] = {}
    i = 0
    while not done.is_set():
        during = arm.value
        call = signed(senders[i % VALIDATORS], receiver, close=True)
        results.setdefault(during, []).extend(call_is_alive(port, [call]))
        i += 1
        time.sleep(pause)
    out.send(results)


def validator(port: int, seconds: float, pause: float, out: Connection) -> None:
    """Calls one after another with ``pause`` between them."""
    senders = [wallet(f"//validator{i}") for i in range(VALIDATORS)]
    receiver = wallet("//miner").ss58
    results: list[float] = []
    end = time.monotonic() + seconds
    i = 0
    while time.monotonic() < end:
        call = signed(senders[i % VALIDATORS], receiver, close=True)
        results += call_is_alive(port, [call])
        i += 1
        time.sleep(pause)
    out.send(results)


def stream(port: int, seconds: float, start: int, out: Connection) -> None:
    """Signed calls over one kept connection as fast as they are answered."""
    senders = [wallet(f"//validator{i}") for i in range(start, start + 10)]
    receiver = wallet("//miner").ss58
    answered = 0
    end = time.monotonic() + seconds
    with socket.create_connection(("127.0.0.1", port), 5) as sock:
        while time.monotonic() < end:
            sock.sendall(signed(senders[answered % len(senders)], receiver, close=False))
            answer = b""
            while b"}" not in answer:
                answer += sock.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200"), answer
            answered += 1
    out.send(answered)


def as_sender() -> None:
    """Leave the first core to the training and the server, and end with the bench."""
    die_with_parent(signal.SIGKILL)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:] or cores)


class Burst:
    """Connections that are opened, sent something and dropped without ever waiting for one: what is
    offered does not depend on how the other side answers, or whether it does."""

    def __init__(self, port: int, patience: float) -> None:
        self._port = port
        self._patience = patience
        self._open: deque[tuple[float, socket.socket]] = deque()

    def offer(self, source: str, raw: bytes) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        try:
            # The port is chosen at the connect, among those free towards this one address.
            sock.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
            sock.bind((source, 0))
            sock.connect(("127.0.0.1", self._port))
        except BlockingIOError:
            pass  # under way; over loopback it is there at once or never
        except OSError:
            sock.close()
            return
        with suppress(OSError):
            sock.send(raw)
        self._open.append((time.monotonic(), sock))
        self.drop(self._patience)

    def drop(self, older: float) -> None:
        now = time.monotonic()
        while self._open and now - self._open[0][0] >= older:
            self._open.popleft()[1].close()


IP_BIND_ADDRESS_NO_PORT = 24


def junk(
    port: int, per_second: float, sources: list[str], active: Any, done: Any, sent: Any
) -> None:
    """Unsigned requests at a fixed rate while ``active``, each on a connection of its own."""
    as_sender()
    burst = Burst(port, 0.2)
    count = 0
    due = time.monotonic()
    while not done.is_set():
        if not active.is_set():
            burst.drop(0.0)
            active.wait(0.1)
            due = time.monotonic()
            continue
        due = max(due + 1 / per_second, time.monotonic() - 0.2)
        if (wait := due - time.monotonic()) > 0:
            time.sleep(wait)
        burst.offer(sources[count % len(sources)], JUNK)
        count += 1
        sent.value = count


def idle(port: int, connections: int, active: Any, done: Any) -> None:
    """Keep ``connections`` open while ``active``, from 50 addresses; open again what is closed."""
    as_sender()
    held: list[socket.socket] = []
    while not done.is_set():
        if not active.wait(0.1):
            for sock in held:
                sock.close()
            held.clear()
            continue
        alive = []
        for sock in held:
            try:
                if sock.recv(1):
                    alive.append(sock)
                else:
                    sock.close()
            except BlockingIOError:
                alive.append(sock)  # open, or still asking to be
            except OSError:
                sock.close()
        held = alive
        for i in range(connections - len(held)):
            sock = socket.socket()
            sock.setblocking(False)
            with suppress(OSError):
                sock.bind((f"127.0.3.{i % 50 + 1}", 0))
                sock.connect(("127.0.0.1", port))
            held.append(sock)
        time.sleep(1.0)


def trivial_sink(port: Any) -> None:
    """Accepts and closes, nothing else, on the senders' core: what the load costs the training when
    there is no server to speak of."""
    as_sender()
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port.value = listening.getsockname()[1]
    while True:
        connection, _ = listening.accept()
        connection.close()


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


def latency(seconds: float, nice: int) -> dict[str, Any]:
    context = mp.get_context("spawn")
    server = start_server(SETTINGS)
    os.setpriority(os.PRIO_PROCESS, server_thread(), nice)
    training = Training(os.cpu_count() or 1)
    done = context.Event()
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as drain:
        threading.Thread(target=sink, args=(drain,), daemon=True).start()
        helpers = [
            context.Process(target=upload, args=(folder, drain.getsockname()[1], done)),
            context.Process(target=validator, args=(server.port, seconds, 0.02, theirs)),
        ]
        for helper in helpers:
            helper.start()
        steps = []
        while not ours.poll():
            steps.append(training.step())
        results = ours.recv()
        done.set()
        for helper in helpers:
            helper.join(20)
    server.close()
    return {**summary(results), "training_steps": len(steps)}


def summary(results: list[float]) -> dict[str, float]:
    good = sorted(1e3 * s for s in results if s >= 0)
    return {
        "calls": len(results),
        "failed": len(results) - len(good),
        "p50_ms": round(statistics.median(good), 1),
        "p99_ms": round(good[int(0.99 * (len(good) - 1))], 1),
        "max_ms": round(good[-1], 1),
    }


def throughput(seconds: float) -> dict[str, Any]:
    context = mp.get_context("spawn")
    generous = replace(SETTINGS, requests_per_hotkey=1e6, requests_per_address=1e6)
    server = start_server(generous)
    pipes = [context.Pipe() for _ in range(2)]
    callers = [
        context.Process(target=stream, args=(server.port, seconds, 10 * i, pipes[i][1]))
        for i in range(2)
    ]
    before: float | None = None
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
        "accepted": server.counters()["accepted.IsAlive"],
    }


FEW = [f"127.0.2.{i}" for i in range(1, 9)]
MANY = [f"127.{8 + i % 200}.{i // 200 % 250}.{i // 50_000 + 1}" for i in range(200_000)]
ARMS = {"quiet": [], "sink": FEW, "server": FEW, "everywhere": MANY}


def server_thread() -> int:
    return next(t.native_id or 0 for t in threading.enumerate() if t.name == "signed-server")


def cpu_seconds(thread: int) -> float:
    """Time on a core of one thread of this process, all that the kernel did for it included."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def under_junk(seconds: float, block_seconds: float, nice: int) -> dict[str, Any]:
    """Blocks of steps, arm after arm until each had ``seconds``: quiet; the load on a sink in
    another process; the load on the server; the same with each junk request from another one of
    200,000 addresses. A ratio is the median of those of neighbouring blocks' median steps."""
    context = mp.get_context("spawn")
    cores = os.sched_getaffinity(0)
    done = context.Event()
    server = start_server(SETTINGS)
    thread = server_thread()
    os.setpriority(os.PRIO_PROCESS, thread, nice)
    sink_port = context.Value("i", 0)
    helpers = [context.Process(target=trivial_sink, args=(sink_port,), daemon=True)]
    helpers[0].start()
    while not sink_port.value:
        time.sleep(0.05)
    active, sent = {}, {}
    for name, sources in ARMS.items():
        if not sources:
            continue
        port = sink_port.value if name == "sink" else server.port
        active[name] = context.Event()
        sent[name] = [context.Value("i", 0) for _ in range(2)]
        for i, counter in enumerate(sent[name]):
            args = (port, 1000.0, sources[i::2], active[name], done, counter)
            helpers.append(context.Process(target=junk, args=args))
        helpers.append(context.Process(target=idle, args=(port, 1000, active[name], done)))
    arm = context.Value("i", -1)
    ours, theirs = context.Pipe()
    helpers.append(
        context.Process(target=validator_by_arm, args=(server.port, 0.05, arm, done, theirs))
    )
    for helper in helpers[1:]:
        helper.start()
    # All threads of this process: training, server.
    for task in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task), {min(cores)})
    training = Training(1)
    for _ in range(10):
        training.step()
    blocks: dict[str, list[float]] = {name: [] for name in ARMS}
    cpu = dict.fromkeys(ARMS, 0.0)
    lasted = dict.fromkeys(ARMS, 0.0)
    for _ in range(max(3, round(seconds / block_seconds))):
        for index, name in enumerate(ARMS):
            if name in active:
                active[name].set()
            arm.value = index
            steps = []
            began, before = time.monotonic(), cpu_seconds(thread)
            while time.monotonic() - began < block_seconds:
                steps.append(training.step())
            blocks[name].append(statistics.median(steps))
            cpu[name] += cpu_seconds(thread) - before
            lasted[name] += time.monotonic() - began
            arm.value = -1
            if name in active:
                active[name].clear()
            time.sleep(0.3)
    done.set()
    calls = ours.recv()
    for helper in helpers[1:]:
        helper.join(20)
    helpers[0].terminate()
    helpers[0].join(20)
    counts = dict(server.counters())
    server.close()
    os.sched_setaffinity(0, cores)

    def ratio(name: str, to: str) -> float:
        pairs = zip(blocks[name], blocks[to], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    return {
        "step_ms": {name: round(1e3 * statistics.median(b), 1) for name, b in blocks.items()},
        "ratio_to_quiet": {name: ratio(name, "quiet") for name in active},
        "ratio_to_sink": {name: ratio(name, "sink") for name in ("server", "everywhere")},
        "server_cpu_of_one_core": {name: round(cpu[name] / lasted[name], 4) for name in ARMS},
        "junk_offered_per_second": {
            name: round(sum(c.value for c in counters) / lasted[name])
            for name, counters in sent.items()
        },
        "validator_calls": {name: summary(calls[i]) for i, name in enumerate(ARMS)},
        "counters": {k: v for k, v in counts.items() if k.startswith("refused")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement's load")
    parser.add_argument("--only", choices=("latency", "throughput", "junk"))
    parser.add_argument("--nice", type=int, default=0, help="of the server's thread")
    options = parser.parse_args()
    if options.only in (None, "latency"):
        print("latency", json.dumps(latency(options.seconds, options.nice)), flush=True)
    if options.only in (None, "throughput"):
        print("throughput", json.dumps(throughput(min(20.0, options.seconds))), flush=True)
    if options.only in (None, "junk"):
        print("junk", json.dumps(under_junk(options.seconds, 5.0, options.nice)), flush=True)


if __name__ == "__main__":
    main()
