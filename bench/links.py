"""Lines between peers of one machine: a network namespace for each, joined by a switch.

Each peer has an Ethernet of its own to a bridge, and an address of its own. The kernel shapes it to
a rate in both directions (tc's token bucket). Only bandwidth is shaped: netem's delay is not in
every kernel, and is not used. Needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_SUBNET = "10.217.0"
_CLONE_NEWNET = 0x40000000
_HEADERS = 1600  # bytes a bucket must hold at least: one whole frame
_QUEUE = "100ms"  # before a line; packets that would wait longer are lost
#: Loss-based, as most of the network's; bbr, which some machines use, leaves much of a line that
#: several peers share unused.
_CONGESTION = "net.ipv4.tcp_congestion_control=reno"


@dataclass(frozen=True)
class Counters:
    """Bytes on a peer's line so far, with all headers down to Ethernet."""

    sent: int
    received: int


class Links:
    """``rates``: Mbit/s of each peer's line. Use it as a context manager.

    Raises OSError or subprocess.CalledProcessError where namespaces cannot be made.
    """

    def __init__(self, rates: Sequence[float]) -> None:
        self._rates = rates
        self._tag = f"dtb{os.getpid() % 100_000}"
        self.addresses = [f"{_SUBNET}.{i + 1}" for i in range(len(rates))]

    def __enter__(self) -> Links:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _name(self, peer: int) -> str:
        return f"{self._tag}-{peer}"

    @property
    def _switch(self) -> str:
        return f"{self._tag}-switch"

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for i, rate in enumerate(self._rates):
            name, port = self._name(i), f"port{i}"
            _ip("netns", "add", name)
            there = ["peer", "name", "line", "netns", name]
            _ip("-n", self._switch, "link", "add", port, "type", "veth", *there)
            _ip("-n", name, "addr", "add", f"{self.addresses[i]}/24", "dev", "line")
            _run("ip", "netns", "exec", name, "sysctl", "-qw", _CONGESTION)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "line", "up")
            _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
            self.shape(i, rate)

    def shape(self, peer: int, rate: float) -> None:
        """Give a peer's line another rate, in Mbit/s and in both directions."""
        # What passes in 4 ms at least, since the kernel's timer is no finer on some machines.
        burst = max(_HEADERS * 10, int(rate * 1e6 / 8 * 0.004))
        bucket = [
            "tbf",
            "rate",
            f"{rate}mbit",
            "burst",
            str(burst),
            "latency",
            _QUEUE,
        ]
        for namespace, device in ((self._name(peer), "line"), (self._switch, f"port{peer}")):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket)

    @contextlib.contextmanager
    def inside(self, peer: int) -> Iterator[None]:
        """This thread, and the processes and threads that it starts, are at the peer's place."""
        with _namespace("/proc/thread-self/ns/net") as home:
            with _namespace(f"/run/netns/{self._name(peer)}") as there:
                _enter(there)
            try:
                yield
            finally:
                _enter(home)

    def counters(self) -> list[Counters]:
        said = _ip("-n", self._switch, "-j", "-s", "link", "show").stdout
        lines = {line["ifname"]: line["stats64"] for line in json.loads(said)}
        ports = [lines[f"port{i}"] for i in range(len(self._rates))]
        # What the switch receives is what the peer sent.
        return [Counters(port["rx"]["bytes"], port["tx"]["bytes"]) for port in ports]

    def close(self) -> None:
        for name in (*map(self._name, range(len(self._rates))), self._switch):
            if Path(f"/run/netns/{name}").exists():
                _ip("netns", "del", name)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True)


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return _run("ip", *arguments)


@contextlib.contextmanager
def _namespace(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _enter(descriptor: int) -> None:
    """Of the calling thread alone (os.setns comes with Python 3.12)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
