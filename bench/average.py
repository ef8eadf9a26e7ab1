"""Time an all-reduce of peer processes against stock hivemind's, and measure a peer's memory.

    python -m bench.average --members 3 --parameters 30 --repeats 4

Members average the values of an upload over loopback in float16, without the validator. The two
ways take turns. Transfer is from the found group to the last value, the median of all members and
rounds. Memory is the largest that the processes of one member have together, p2pd included; what
each value takes of it follows from a round of twice as many.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from hivemind.p2p import P2P

from bench.common import parser, proportional_bytes, table
from distributed_training.common.processes import ChildProcess, kill_tree
from distributed_training.exchange.hivemind import Answer, Order, Ready, Settings, start_peer
from distributed_training.protocol.types import Schema
from distributed_training.protocol.update_file import Header, UpdateLayout, finish, write_rows

TENSORS, COLUMNS, SIZE, GATHER = 30, 1000, 1e-5, 3.0

STOCK_PEER = """
import json, sys, time
import hivemind, torch
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import Float16Compression


class Averager(DecentralizedAverager):
    async def _run_allreduce_inplace_(self, *given, **named):
        began = time.monotonic()
        await super()._run_allreduce_inplace_(*given, **named)
        with open(times, "a") as file:
            file.write(f"{time.monotonic() - began:.3f}\\n")


peers, tensors, size, group, gather, times = json.loads(sys.argv[1])
torch.set_num_threads(1)
dht = hivemind.DHT(initial_peers=peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
averager = Averager(
    averaged_tensors=[torch.randn(size) for _ in range(tensors)], dht=dht, start=True, prefix="p",
    min_group_size=group, min_matchmaking_time=gather, request_timeout=gather / 4,
    compression=Float16Compression())
print(json.dumps([str(m) for m in dht.get_visible_maddrs()]), flush=True)
for _ in sys.stdin:
    averager.step(timeout=200, allow_retries=False)
    print("done", flush=True)
"""


def write_upload(path: Path, schema: Schema) -> None:
    """Write an upload of random values, 4 bits each."""
    header = Header(
        kind="upload", run_id="bench", outer_step=1, serial=1, hotkey="x" * 40, start="0" * 64,
        codec="4-bit", inner_steps=1, tokens=1,
    )  # fmt: skip
    layout = UpdateLayout.of(schema, header)
    for index, (_, shape) in enumerate(schema):
        write_rows(path, layout, index, 0, torch.randn(shape) * SIZE)
    finish(path, layout, lambda message: bytes(64))


class Ours:
    """The peer processes of ``members``, which average a model of ``TENSORS`` tensors."""

    def __init__(self, folder: Path, members: int, rows: int) -> None:
        schema = tuple((f"w{i}", (rows, COLUMNS)) for i in range(TENSORS))
        self.values, self._serial = TENSORS * rows * COLUMNS, 0
        self._upload, self.times = folder / "upload", folder / "ours"
        self._ready, self._answers = dict[int, Ready](), dict[int, Answer]()
        write_upload(self._upload, schema)
        os.environ["DT_BENCH_TIMES"] = str(self.times)
        self.peers = [self._start(folder / str(i), i, schema) for i in range(members)]
        while len(self._ready) < members:
            time.sleep(0.05)

    def _start(self, folder: Path, i: int, schema: Schema) -> ChildProcess:
        folder.mkdir()
        identity = str(folder / "identity.key")
        P2P.generate_identity(identity)
        return start_peer(
            Settings(schema, "bench", identity, "127.0.0.1", 0, gather=GATHER),
            ready=lambda ready: self._ready.update({i: ready}),
            answered=lambda answer: self._answers.update({i: answer}),
            module="bench.timed_peer",
        )

    def round(self) -> None:
        self._answers.clear()
        self._serial += 1
        at, usual = time.time() + 10, SIZE * self.values**0.5  # the files are decoded by then
        found = [
            (ready.peer_id, ready.address.rpartition("/p2p/")[0], i)
            for i, ready in sorted(self._ready.items())
        ]
        for i, peer in enumerate(self.peers):
            others = tuple(found[:i] + found[i + 1 :])
            peer.send(Order(self._serial, at, at + 300, others, "", usual, str(self._upload), ""))
        while len(self._answers) < len(self.peers):
            time.sleep(0.05)
        for answer in self._answers.values():
            if answer.failed:
                sys.exit(f"our all-reduce failed: {answer.failed}")

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


class Stock:
    """As many peers of stock hivemind."""

    def __init__(self, folder: Path, members: int, rows: int) -> None:
        self.times, self.peers, first = folder / "stock", [], list[str]()
        for _ in range(members):
            given = json.dumps([first, TENSORS, rows * COLUMNS, members, GATHER, str(self.times)])
            peer = subprocess.Popen(
                [sys.executable, "-c", STOCK_PEER, given],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            assert peer.stdout is not None
            found = json.loads(peer.stdout.readline())
            first = first or found
            self.peers.append(peer)

    def round(self) -> None:
        for peer in self.peers:
            assert peer.stdin is not None
            peer.stdin.write("go\n")
            peer.stdin.flush()
        for peer in self.peers:
            assert peer.stdout is not None
            if peer.stdout.readline() != "done\n":
                sys.exit("the all-reduce of stock hivemind failed")

    def close(self) -> None:
        for peer in self.peers:
            kill_tree(peer.pid)


def most_memory(folder: Path, members: int, rows: int) -> int:
    """Return the most bytes that the processes of one member have in a round."""
    folder.mkdir()
    ours, most, over = Ours(folder, members, rows), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.2):
            most = max(most, proportional_bytes(ours.peers[0].pid))

    threading.Thread(target=watch, daemon=True).start()
    ours.round()
    over.set()
    ours.close()
    return most


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--members", type=int, default=3)
    options.add_argument("--parameters", type=int, default=30, help="in millions")
    options.add_argument("--repeats", type=int, default=4)
    given = options.parse_args()
    rows = max(1, given.parameters * 1_000_000 // TENSORS // COLUMNS)
    with tempfile.TemporaryDirectory() as name:
        # Apart from the timed rounds: to look at a process's memory holds it up.
        half, whole = (most_memory(Path(name) / f"of-{n}", given.members, n * rows) for n in (1, 2))
        ours = Ours(Path(name), given.members, rows)
        ways = ours, Stock(Path(name), given.members, rows)
        for _ in range(given.repeats):
            for way in ways:
                way.round()
        medians = [statistics.median(map(float, way.times.read_text().split())) for way in ways]
        for way in ways:
            way.close()
    head = ("members", "values", "ours", "stock", "ratio", "memory", "of twice as many", "a value")
    row = (
        given.members, f"{ours.values / 1e6:.0f} M", f"{medians[0]:.2f} s", f"{medians[1]:.2f} s",
        f"{medians[0] / medians[1]:.2f}", f"{half / 1e6:.0f} MB", f"{whole / 1e6:.0f} MB",
        f"{(whole - half) / ours.values:.1f} bytes",
    )  # fmt: skip
    table(head, [row, (*[""] * 4, "<= 1.1", "", "", "<= 9")])


if __name__ == "__main__":
    main()
