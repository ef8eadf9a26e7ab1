"""Machines of a test or a bench: network namespaces joined by a bridge, each with one address."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

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
            import pytest  # benches go without

            said = getattr(error, "stderr", "") or error
            pytest.skip(f"network namespaces cannot be made here: {said}")
        yield made
    finally:
        for machine in made:
            subprocess.run(["ip", "netns", "del", machine.name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"{tag}v"], capture_output=True, check=False)


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
