"""Machines of one test: network namespaces joined by a bridge, each with one address.

:func:`machines` are next to each other. :func:`sites` are founder, joiners and an outsider of one
network, each at a place of another kind.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import pytest

_CLONE_NEWNET = 0x40000000
_HEADERS = 1600  # bytes a bucket must hold at least: one whole frame
_QUEUE = "100ms"  # before a network link; packets that would wait longer are lost


class Machine:
    """One namespace. ``address`` is that of its only interface but loopback."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address

    @property
    def prefix(self) -> list[str]:
        """Goes before a command that is to run there."""
        return ["ip", "netns", "exec", self.name]

    def inside(self) -> AbstractContextManager[None]:
        """This thread, and the processes and threads that it starts, are there."""
        return inside(self.name)

    def unplug(self) -> None:
        """Lose all that it sends and is sent from here on, without a word."""
        ip("-n", self.name, "link", "set", "eth0", "down")

    def plug(self) -> None:
        ip("-n", self.name, "link", "set", "eth0", "up")


@contextmanager
def machines(
    count: int, *, network: str = "10.0.0", rate: str | None = None
) -> Iterator[list[Machine]]:
    """``network``: of their addresses. ``rate``: at which each sends, as tc writes it. Skips the
    test, with the reason, where namespaces cannot be made."""
    tag = f"dt{os.getpid() % 100000}"
    made = [Machine(f"{tag}n{i}", f"{network}.{i + 1}") for i in range(count)]
    try:
        try:
            for machine in made:
                ip("netns", "add", machine.name)
            join(f"{tag}v", {m.name: m.address for m in made})
            for machine in made if rate else ():
                bucket = f"tbf rate {rate} burst 64kb latency 200ms".split()
                run("tc", "-n", machine.name, "qdisc", "add", "dev", "eth0", "root", *bucket)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or error
            pytest.skip(f"network namespaces cannot be made here: {said}")
        yield made
    finally:
        for machine in made:
            subprocess.run(["ip", "netns", "del", machine.name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"{tag}v"], capture_output=True, check=False)


#: Of a router that hides who is behind it: ports that were announced lead inside, nothing else.
_NAT = """
table ip nat {{
    chain pre {{ type nat hook prerouting priority -100; {announced} }}
    chain post {{ type nat hook postrouting priority 100; oifname "eth0" masquerade; }}
}}
table ip filter {{
    chain forward {{
        type filter hook forward priority 0; policy drop;
        ct state established,related accept
        iifname "eth1" accept
        ct status dnat accept
    }}
    chain input {{
        type filter hook input priority 0; policy drop;
        ct state established,related accept
        iifname {{ "lo", "eth1" }} accept
    }}
}}
"""
PLACES = ("founder", "direct", "slow", "natted", "stranger")


@contextmanager
def sites(*, announced: dict[int, int]) -> Iterator[dict[str, Machine]]:
    """Machines at the :data:`PLACES` of one internet.

    ``natted`` is behind a router: its ``address`` is the router's, where the ``announced`` ports
    lead to ports of its own. ``slow`` sends and receives 50 Mbit/s. Nothing of it is outside
    of the namespaces. Skips the test, with the reason, where they cannot be made.
    """
    tag = f"dt{os.getpid() % 100000}"
    made = {place: Machine(f"{tag}{place}", f"10.214.0.{i + 1}") for i, place in enumerate(PLACES)}
    internet, router = f"{tag}internet", f"{tag}router"
    outside = {m.name if place != "natted" else router: m.address for place, m in made.items()}
    names = [internet, router, *(machine.name for machine in made.values())]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            join("port", outside, switch=internet)
            for namespace, device in (
                (made["slow"].name, "eth0"),
                (internet, f"port{PLACES.index('slow')}"),
            ):
                shape(namespace, device, 50)
            _hide(made["natted"].name, router, announced)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or error
            pytest.skip(f"namespaces with a router (ip, tc, nft) cannot be made here: {said}")
        yield made
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _hide(name: str, router: str, announced: dict[int, int]) -> None:
    """Give a namespace its line to a router, which lets only ``announced`` ports through."""
    here, there = "192.168.77.2", "192.168.77.1"
    ip("-n", router, "link", "add", "eth1", "type", "veth", "peer", "name", "eth0", "netns", name)
    for namespace, device, address in ((router, "eth1", there), (name, "eth0", here)):
        ip("-n", namespace, "addr", "add", f"{address}/24", "dev", device)
        for each in ("lo", device):
            ip("-n", namespace, "link", "set", each, "up")
    ip("-n", name, "route", "add", "default", "via", there)
    at_router = ["ip", "netns", "exec", router]
    run(*at_router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
    rules = (f'iifname "eth0" tcp dport {o} dnat to {here}:{i};' for o, i in announced.items())
    run(*at_router, "nft", _NAT.format(announced=" ".join(rules)))


def join(bridge: str, addresses: Mapping[str, str], *, switch: str | None = None) -> None:
    """Give each namespace that there is its address, at eth0, and a link from there to a new
    ``bridge``, in namespace ``switch`` or on this machine. Its ends there are called after the
    bridge, and numbered. Raises OSError or subprocess.CalledProcessError."""
    here = ["-n", switch] if switch else []
    ip(*here, "link", "add", bridge, "type", "bridge")
    ip(*here, "link", "set", bridge, "up")
    for i, (name, address) in enumerate(addresses.items()):
        there = ["peer", "name", "eth0", "netns", name]
        ip(*here, "link", "add", f"{bridge}{i}", "type", "veth", *there)
        ip(*here, "link", "set", f"{bridge}{i}", "master", bridge, "up")
        ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        for each in ("lo", "eth0"):
            ip("-n", name, "link", "set", each, "up")


def shape(namespace: str, device: str, rate: float) -> None:
    """Bound what leaves a namespace by a device to ``rate`` Mbit/s."""
    # What passes in 4 ms at least, since the kernel's timer is no finer on some machines.
    burst = max(_HEADERS * 10, int(rate * 1e6 / 8 * 0.004))
    bucket = f"tbf rate {rate}mbit burst {burst} latency {_QUEUE}".split()
    run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket)


@contextmanager
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


@contextmanager
def _namespace(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _enter(descriptor: int) -> None:
    """Enter the namespace in the calling thread only (os.setns comes with Python 3.12)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
