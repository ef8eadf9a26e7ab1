"""Machines of one test: network namespaces joined by a bridge, each with one address."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


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
        _ip("-n", self.name, "link", "set", "eth0", "down")

    def plug(self) -> None:
        _ip("-n", self.name, "link", "set", "eth0", "up")

    def close_ports_but(self, port: int) -> None:
        """A firewall: connections from elsewhere to other ports are dropped without a word. (Their
        first packets, SYN without ACK, go into a cable without an end.)"""
        _ip("-n", self.name, "link", "add", "hole", "type", "veth", "peer", "name", "nowhere")
        _ip("-n", self.name, "link", "set", "hole", "up")
        tc = [*self.prefix, "tc"]
        filters = [*tc, "filter", "add", "dev", "eth0", "ingress", "protocol", "ip"]
        passed = f"prio 1 u32 match ip dport {port} 0xffff classid 1:1"
        dropped = (
            "prio 2 u32 match ip protocol 6 0xff match u8 0x02 0x12 at 33 "
            "action mirred egress redirect dev hole"
        )
        _run(*tc, "qdisc", "add", "dev", "eth0", "clsact")
        _run(*filters, *passed.split())
        _run(*filters, *dropped.split())

    def open_ports(self) -> None:
        """After :meth:`close_ports_but`."""
        _run(*self.prefix, "tc", "qdisc", "del", "dev", "eth0", "clsact")


@contextmanager
def machines(count: int, *, network: str = "10.0.0", here: bool = False) -> Iterator[list[Machine]]:
    """``network``: of their addresses. ``here``: they reach this machine too, at its .254. Skips
    the test, with the reason, where namespaces cannot be made."""
    tag = f"dt{os.getpid() % 100000}"
    made = [Machine(f"{tag}n{i}", f"{network}.{i + 1}") for i in range(count)]
    try:
        try:
            _ip("link", "add", tag, "type", "bridge")
            _ip("link", "set", tag, "up")
            if here:
                _ip("addr", "add", f"{network}.254/24", "dev", tag)
            for i, machine in enumerate(made):
                _ip("netns", "add", machine.name)
                _ip("link", "add", f"{tag}v{i}", "type", "veth", "peer", "name", "eth0",
                    "netns", machine.name)  # fmt: skip
                _ip("link", "set", f"{tag}v{i}", "master", tag, "up")
                _ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", "eth0")
                _ip("-n", machine.name, "link", "set", "eth0", "up")
                _ip("-n", machine.name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or error
            pytest.skip(f"network namespaces cannot be made here: {said}")
        yield made
    finally:
        for machine in made:
            subprocess.run(["ip", "netns", "del", machine.name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", tag], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
