"""Send what unknown callers may send to the signed server; for ``bench.server``.

Traffic goes to 127.0.0.0/8 only and ends with the bench. Each sender is bounded in rate and in
connections and never waits for an answer, so that what is offered does not depend on how the server
takes it. Outsiders come from other loopback addresses than the validator, as they would on a
network; each block of the measurement brings new ones, who are not yet known for what they are.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from bittensor.sp_core import Keypair

from distributed_training.chain import auth
from distributed_training.chain.identity import Wallet
from distributed_training.common.processes import die_with_parent

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


class Sender(Protocol):
    def work(self, port: int, block: int) -> int:
        """One slice of some milliseconds. Returns the connections that were opened."""
        ...

    def stop(self) -> None: ...


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


@dataclass
class Hold:
    """Keeps ``count`` connections open, opening ``per_second`` at most; each sends ``first`` and
    then one byte whenever it is looked at (``drip``)."""

    count: int
    per_second: float
    source: Callable[[int, int], str]
    first: Callable[[int], bytes]
    drip: bytes = b""

    def __post_init__(self) -> None:
        self._open: deque[socket.socket] = deque()
        self._number = 0

    def work(self, port: int, block: int) -> int:
        began = time.monotonic()
        opened = 0
        for _ in range(int(self.per_second * 0.05)):
            if len(self._open) >= self.count:
                break
            self._number += 1
            sock = connection(self.source(block, self._number), port)
            opened += 1
            if sock is None:
                continue
            with suppress(OSError):
                sock.send(self.first(self._number))
            self._open.append(sock)
        # A twentieth of them each time, so every one about once a second.
        for _ in range(len(self._open) // 20 + 1):
            if not self._open:
                break
            sock = self._open.popleft()
            try:
                if not sock.recv(1):
                    raise ConnectionResetError
            except BlockingIOError:
                with suppress(OSError):
                    sock.send(self.drip)
                self._open.append(sock)
            except OSError:
                sock.close()
        time.sleep(max(0.0, 0.05 - (time.monotonic() - began)))
        return opened

    def stop(self) -> None:
        while self._open:
            self._open.popleft().close()


def slow(number: int) -> bytes:
    """Half of a head, or a head that is right in all that can be seen without the body."""
    return forged(number)[:-1] if number % 2 else b"POST /IsAlive HTTP/1.1\r\nhost: "


# Each for one process; two of them run at a time.
ATTACKS: dict[str, Callable[[], Sender]] = {
    "1-byte chunks, 8 addresses": lambda: Flood(50, few, chunked, patience=2.0),
    "64 KB bodies of registered hotkeys, 400/s": lambda: Flood(
        200, any_of(50), lambda i: signed(hotkey(i), b" " * 65536)
    ),
    "forged signatures, any address, 1,000/s": lambda: Flood(500, anybody, forged),
    "slow heads and bodies, 1,000 connections": lambda: Hold(500, 500, any_of(50), slow, b"x"),
    "pipelined junk, 8 addresses": lambda: Flood(100, few, lambda i: JUNK * 200),
    "10,000 connections": lambda: Hold(5000, 1000, any_of(1000), lambda i: b"P" if i % 2 else b""),
    "junk, any address, 1,000/s, after a restart": lambda: Flood(500, anybody, lambda i: JUNK),
    "junk, 8 addresses, 2,000/s": lambda: Flood(1000, few, lambda i: JUNK),
    "junk, any address, 2,000/s": lambda: Flood(1000, anybody, lambda i: JUNK),
}
RESTARTED = "junk, any address, 1,000/s, after a restart"


def as_sender() -> None:
    """Leave the first core to the training and the server, and end with the bench."""
    die_with_parent(signal.SIGKILL)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:] or cores)


def stranger(port: int, attack: Any, block: Any, done: Any, offered: Any) -> None:
    """The process of a sender: the attack of that index while there is one (-1: none)."""
    as_sender()
    makers = list(ATTACKS.values())
    running, sender = -1, None
    while not done.is_set():
        wanted = attack.value
        if wanted != running and sender is not None:
            sender.stop()
            sender = None
        if wanted < 0:
            time.sleep(0.01)
        else:
            if sender is None:
                random.seed(os.getpid() + block.value)
                sender = makers[wanted]()
            offered.value += sender.work(port, block.value)
        running = wanted
    if sender is not None:
        sender.stop()
