"""A listener for every address that an operator may give."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from collections import deque

import pytest

from distributed_training.common import ports
from distributed_training.common.ports import free_ports, listen

pytestmark = pytest.mark.timeout(60)
_IPV6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize(
    ("address", "reached"),
    [
        ("127.0.0.1", ["127.0.0.1"]),
        ("0.0.0.0", ["127.0.0.1"]),
        pytest.param("::1", ["::1"], marks=_IPV6),
        pytest.param("::", ["::1", "127.0.0.1"], marks=_IPV6),
    ],
)
def test_a_listener_is_reached_where_its_address_says(address: str, reached: list[str]) -> None:
    with listen(address, 0) as listener:
        port = listener.getsockname()[1]
        for host in reached:
            socket.create_connection((host, port), 5).close()


def test_a_port_that_is_taken_is_an_error_of_one_short_reason() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(OSError) as raised:
        listen("127.0.0.1", taken.getsockname()[1])
    assert raised.value.errno == errno.EADDRINUSE
    assert raised.value.strerror == "Address already in use"


def reserved_elsewhere(wanted: list[int]) -> list[bool]:
    """Return for each port whether another process gets it."""
    ask = f"from distributed_training.common import ports; print(*map(ports._reserve, {wanted}))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    return [word == "True" for word in done.stdout.split()]


def test_a_port_is_given_to_one_process_and_once() -> None:
    """Two subnets that start at the same time, each a minute before its miners listen."""
    ours = free_ports(20)
    assert not set(ours) & set(free_ports(20))
    assert reserved_elsewhere([*ours, 1]) == [*[False] * 20, True]


def test_ports_given_long_ago_are_for_others_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher takes one at each start of its ranks, for weeks."""
    monkeypatch.setattr(ports, "_given", deque(maxlen=2))
    first, *later = [free_ports(1)[0] for _ in range(3)]
    assert reserved_elsewhere([first, *later]) == [True, False, False]


def test_fewer_ports_than_asked_for_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [True, True]
    monkeypatch.setattr(ports, "_reserve", lambda port: bool(left) and left.pop())
    with pytest.raises(OSError, match="only 2 of 3 ports are free"):
        free_ports(3)
