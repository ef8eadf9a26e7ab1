"""Measure a registry under attack, at a close, and as the store of a network.

    python -m bench.server                    about 3 minutes
    python -m bench.server --parts store      floods, close, store

*floods*: 2,000 clients send slow heads or bodies, or open connections, and 640 do not read; an
honest client asks meanwhile. *close*: 1,000 members ask for the URL of an upload at once. *store*:
a member sends and gets 1 GB in parts of 64 MB, next to the speed at which the same uvicorn serves a
file. Goals: answers within 1 s, all URLs within 10 s, 80 % of that speed.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
from bittensor_core import Keypair

from bench.common import parser, served, some_of, table
from distributed_training import network_command
from distributed_training.chain.auth import sign_btauth
from distributed_training.chain.identity import Wallet
from distributed_training.common.ports import free_ports
from distributed_training.config import rules_at
from distributed_training.founder import FounderPlan
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import State
from distributed_training.registry.store import Charter, Registry
from distributed_training.store.presigned import PART

PARTS = ("floods", "close", "store")
MEMBERS, UPLOAD = 1000, 1_000_000_000
STATE = b"GET /state HTTP/1.1\r\nhost: x\r\n"
FLOODS = (  # name, first bytes, clients, addresses
    ("nobody", b"", 0, 1),
    ("slow heads", STATE + b"x: ", 2000, 60),
    ("slow bodies", b"POST /access HTTP/1.1\r\ncontent-length: 200000\r\n\r\n", 2000, 60),
    ("connections of one address", b"", 2000, 1),
    ("clients that do not read", STATE + b"\r\n", 640, 64),
    ("heads of a megabyte", STATE + b"x: " + b"y" * 2**20, 200, 20),
)


def upload_of(member: int) -> str:
    """Return the key of a member's upload for the next close."""
    return keys.upload_key(member + 1, 7, 9)


class World:
    """A network with an embedded store, whose registry serves as a program."""

    def __init__(self, folder: Path) -> None:
        (port,) = free_ports(1)
        self.url, lab = f"http://127.0.0.1:{port}", folder / "lab"
        words = ["--name", "lab", "--registry", self.url, "--store", "embedded", "--set"]
        words += ["private=true", "--data-source", "stdlib", "--model", "4b"]
        assert not network_command.main(["init", str(lab), *words])
        config = rules_at(lab / "network.toml", "validator")
        assert config.network is not None
        from distributed_training.chain.identity import load_wallet

        self.master = load_wallet(
            replace(config.chain, wallet_path=str(lab / "wallets"), wallet_name="master")
        )
        self.members = [Wallet(Keypair.create_from_uri(f"//{n}"), None) for n in range(MEMBERS)]
        charter = Charter("lab", self.master.ss58, 256, "open")
        registry = Registry.at(lab / "registry", charter)
        with closing(registry), registry.change():
            registry.most_uids = MEMBERS + 1
            for member in self.members:
                registry.register(member.ss58)
                registry.commit(member.ss58, "0123456789abcdef" * 8)
        self.identity = charter.identity
        now = time.time()
        digest = "0" * 64
        state = State(config.swarm.run_id, 7, 9, now + 3600, 600.0, digest, (), now, now + 7200)
        self.bucket = lab / "store" / "lab"
        (self.bucket / keys.STATE).write_bytes(state.to_bytes(self.master.hotkey.sign))
        self.words = FounderPlan.of(lab, {}).words["registry"]

    @contextmanager
    def served(self) -> Iterator[psutil.Process]:
        with served(*self.words, "--requests-per-address", "1e6") as pid:
            yield psutil.Process(pid)

    async def ask(
        self,
        client: httpx.AsyncClient,
        member: int,
        do: str,
        key: str,
        size: int = 1,
        md5: Sequence[str] = (),
    ) -> dict[str, str]:
        """Return the URLs that a member gets for an object."""
        body = json.dumps({"do": do, "key": key, "size": size, "md5": md5}).encode()
        wallet = self.members[member]
        headers = sign_btauth(wallet, path="/access", body=body, receiver=self.identity)
        answer = await client.post(self.url + "/access", content=body, headers=headers)
        answer.raise_for_status()
        urls: dict[str, str] = answer.json()["result"]["urls"]
        return urls


def floods(world: World) -> Iterator[tuple[str, ...]]:
    """Yield what each flood costs: an honest client's answers, memory, and connections held."""
    port = int(world.url.rpartition(":")[2])
    for name, first, clients, addresses in FLOODS:
        with world.served() as process, ExitStack() as stack:
            before, took = process.memory_info().rss, []
            for number in range(clients):
                one = stack.enter_context(socket.socket())
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                one.settimeout(1.0)
                with suppress(OSError):
                    one.bind((f"127.8.{number % addresses}.7", 0))
                    one.connect(("127.0.0.1", port))
                    one.sendall(first)
            for _ in range(20):
                began = time.perf_counter()
                httpx.get(world.url + "/health", trust_env=False, timeout=60).raise_for_status()
                took.append(time.perf_counter() - began)
            grown = (process.memory_info().rss - before) / 2**20
            times = statistics.median(took), max(took)
            median, worst = (f"{1e3 * each:.0f} ms" for each in times)
            yield f"{clients} {name}" if clients else name, median, worst, f"{grown:.0f} MiB more"


def close(world: World) -> Iterator[tuple[str, ...]]:
    """Yield the seconds in which all members have the URL of an upload."""

    async def run() -> None:
        md5 = [hashlib.md5(b"x", usedforsecurity=False).hexdigest()]
        slots = asyncio.Semaphore(8)  # a request is signed when it is sent, and fresh for 10 s
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:

            async def one(member: int) -> None:
                async with slots:
                    await world.ask(client, member, "write", upload_of(member), 1, md5)

            await asyncio.gather(*map(one, range(MEMBERS)))

    with world.served() as process:
        began, used = time.perf_counter(), sum(process.cpu_times()[:2])
        asyncio.run(run())
        wall, cpu = time.perf_counter() - began, sum(process.cpu_times()[:2]) - used
    yield f"URLs of {MEMBERS} members", f"{wall:.1f} s", f"{cpu:.1f} s of CPU", "10 s"


FILE_SERVER = """
import sys, uvicorn
from starlette.responses import FileResponse
from starlette.routing import Route, Router
app = Router([Route("/file", lambda _: FileResponse(sys.argv[1]))])
uvicorn.run(app, port=int(sys.argv[2]), http="h11", log_level="error")
"""


@contextmanager
def plain_server(file: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Serve a file by uvicorn as it is."""
    (port,) = free_ports(1)
    command = [sys.executable, "-c", FILE_SERVER, str(file), str(port)]
    with subprocess.Popen(command) as process:
        try:
            while True:
                with suppress(OSError), closing(socket.create_connection(("127.0.0.1", port))):
                    break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/file", psutil.Process(process.pid)
        finally:
            process.terminate()


def store(world: World) -> Iterator[tuple[str, ...]]:
    """Yield speed and CPU of 1 GB from the same uvicorn as a file, and down and up."""
    data, count = os.urandom(PART), -(-UPLOAD // PART)
    plain = world.bucket / "outer" / "file"
    plain.parent.mkdir(parents=True, exist_ok=True)
    plain.write_bytes(data * count)
    md5 = hashlib.md5(data, usedforsecurity=False).digest()

    def down(url: str) -> None:
        with httpx.stream("GET", url, trust_env=False, timeout=600) as answer:
            answer.raise_for_status()
            assert sum(len(part) for part in answer.iter_raw()) == count * PART

    # A member's client sends pieces of a file. httpx copies the rest of a large one at each send.
    pieces = [data[at : at + 2**20] for at in range(0, PART, 2**20)]

    def up(urls: dict[str, str]) -> None:
        headers = {"content-md5": base64.b64encode(md5).decode(), "content-length": str(PART)}
        with httpx.Client(timeout=600, trust_env=False) as client:
            for url in urls.values():
                client.put(url, content=iter(pieces), headers=headers).raise_for_status()

    async def ask(do: str, key: str, *file: Any) -> dict[str, str]:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            return await world.ask(client, 0, do, key, *file)

    def measured(server: psutil.Process, work: Callable[[], None]) -> tuple[float, float]:
        began, used = time.perf_counter(), sum(server.cpu_times()[:2])
        work()
        return (
            count * PART / 1e6 / (time.perf_counter() - began),
            (sum(server.cpu_times()[:2]) - used) / (count * PART / 1e9),
        )

    with plain_server(plain) as (url, server):
        usual, cpu = measured(server, lambda: down(url))
        yield "1 GB of a file", f"{usual:.0f} MB/s", "100 %", f"{cpu:.1f} s of CPU"
    with world.served() as server:
        read = asyncio.run(ask("read", "outer/file"))["get_object"]
        parts = asyncio.run(ask("write", upload_of(0), count * PART, [md5.hex()] * count))
        for name, work in (("down", lambda: down(read)), ("up", lambda: up(parts))):
            speed, cpu = measured(server, work)
            yield f"1 GB {name}", f"{speed:.0f} MB/s", f"{speed / usual:.0%}", f"{cpu:.1f} s of CPU"


def main(argv: list[str] | None = None) -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--parts", type=some_of(PARTS), default=list(PARTS))
    given = arguments.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        world = World(Path(folder))
        for name in given.parts:
            table((name, "median", "worst", "and"), globals()[name](world))
    return 0


if __name__ == "__main__":
    sys.exit(main())
