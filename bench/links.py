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
from collections.abc import Iterator, Mapping, Sequence
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
        names = [self._name(i) for i in range(len(self._rates))]
        for name in (self._switch, *names):
            ip("netns", "add", name)
        join("port", dict(zip(names, self.addresses, strict=True)), switch=self._switch)
        for i, (name, rate) in enumerate(zip(names, self._rates, strict=True)):
            run("ip", "netns", "exec", name, "sysctl", "-qw", _CONGESTION)
            self.shape(i, rate)

    def shape(self, peer: int, rate: float) -> None:
        """Give a peer's line another rate, in Mbit/s and in both directions."""
        for namespace, device in ((self._name(peer), "eth0"), (self._switch, f"port{peer}")):
            shape(namespace, device, rate)

    def inside(self, peer: int) -> contextlib.AbstractContextManager[None]:
        """This thread, and the processes and threads that it starts, are at the peer's place."""
        return inside(self._name(peer))

    def counters(self) -> list[Counters]:
        said = ip("-n", self._switch, "-j", "-s", "link", "show").stdout
        lines = {line["ifname"]: line["stats64"] for line in json.loads(said)}
        ports = [lines[f"port{i}"] for i in range(len(self._rates))]
        # What the switch receives is what the peer sent.
        return [Counters(port["rx"]["bytes"], port["tx"]["bytes"]) for port in ports]

    def close(self) -> None:
        for name in (*map(self._name, range(len(self._rates))), self._switch):
            if Path(f"/run/netns/{name}").exists():
                ip("netns", "del", name)


def join(
    bridge: str, addresses: Mapping[str, str], *, device: str = "eth0", switch: str | None = None
) -> None:
    """Give each namespace that there is its address, on a new ``device``, and a line from there to
    a new ``bridge``, in namespace ``switch`` or on this machine. Its ends there are called after
    the bridge, and numbered. Raises OSError or subprocess.CalledProcessError."""
    here = ["-n", switch] if switch else []
    ip(*here, "link", "add", bridge, "type", "bridge")
    ip(*here, "link", "set", bridge, "up")
    for i, (name, address) in enumerate(addresses.items()):
        there = ["peer", "name", device, "netns", name]
        ip(*here, "link", "add", f"{bridge}{i}", "type", "veth", *there)
        ip(*here, "link", "set", f"{bridge}{i}", "master", bridge, "up")
        ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
        for each in ("lo", device):
            ip("-n", name, "link", "set", each, "up")


def shape(namespace: str, device: str, rate: float) -> None:
    """Bound what leaves a namespace by a device to ``rate`` Mbit/s."""
    # What passes in 4 ms at least, since the kernel's timer is no finer on some machines.
    burst = max(_HEADERS * 10, int(rate * 1e6 / 8 * 0.004))
    bucket = f"tbf rate {rate}mbit burst {burst} latency {_QUEUE}".split()
    run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket)


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread, and the processes and threads that it starts, are in the namespace."""
    with _namespace("/proc/thread-self/ns/net") as home:
        with _namespace(f"/run/netns/{namespace}") as there:
            _enter(there)
        try:
            yield
        finally:
            _enter(home)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True)


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("ip", *arguments)


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
