"""Machines of one test: network namespaces joined by a bridge, each with one address."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.links import ip, join, run


class Machine:
    """One namespace. ``address`` is that of its only interface besides loopback."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address

    @property
    def prefix(self) -> list[str]:
        """Goes before a command that is to run there."""
        return ["ip", "netns", "exec", self.name]

    def unplug(self) -> None:
        """What it sends and what is sent to it is lost from here on, without a word."""
        ip("-n", self.name, "link", "set", "eth0", "down")

    def plug(self) -> None:
        ip("-n", self.name, "link", "set", "eth0", "up")

    def close_ports_but(self, port: int, *, device: str = "eth0") -> None:
        """A firewall: connections from elsewhere to other ports are dropped without a word. (Their
        first packets, SYN without ACK, go into a cable without an end.)"""
        ip("-n", self.name, "link", "add", "hole", "type", "veth", "peer", "name", "nowhere")
        ip("-n", self.name, "link", "set", "hole", "up")
        tc = [*self.prefix, "tc"]
        filters = [*tc, "filter", "add", "dev", device, "ingress", "protocol", "ip"]
        passed = f"prio 1 u32 match ip dport {port} 0xffff classid 1:1"
        dropped = (
            "prio 2 u32 match ip protocol 6 0xff match u8 0x02 0x12 at 33 "
            "action mirred egress redirect dev hole"
        )
        run(*tc, "qdisc", "add", "dev", device, "clsact")
        run(*filters, *passed.split())
        run(*filters, *dropped.split())

    def open_ports(self, *, device: str = "eth0") -> None:
        """After :meth:`close_ports_but`."""
        run(*self.prefix, "tc", "qdisc", "del", "dev", device, "clsact")
        ip("-n", self.name, "link", "del", "hole")


@contextmanager
def machines(
    count: int,
    *,
    network: str = "10.0.0",
    here: bool = False,
    second: str | None = None,
    rate: str | None = None,
) -> Iterator[list[Machine]]:
    """``network``: of their addresses. ``here``: they reach this machine too, at its .254.
    ``second``: another network, which each has at eth1 with the same last number. ``rate``: at
    which each sends through eth0, as tc writes it. Skips the test, with the reason, where
    namespaces cannot be made."""
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
            if here:
                ip("addr", "add", f"{network}.254/24", "dev", f"{tag}v")
            if second is not None:
                more = {m.name: f"{second}.{i + 1}" for i, m in enumerate(made)}
                join(f"{tag}w", more, device="eth1")
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or error
            pytest.skip(f"network namespaces cannot be made here: {said}")
        yield made
    finally:
        for machine in made:
            subprocess.run(["ip", "netns", "del", machine.name], capture_output=True, check=False)
        for bridge in (f"{tag}v", f"{tag}w"):
            subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)
