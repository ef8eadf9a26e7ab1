"""Test listeners on each kind of address that an operator may give, and free ports."""

from __future__ import annotations

import errno
import socket

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


def test_ports_are_given_once_and_not_while_somebody_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = free_ports(20)
    assert not set(ours) & set(free_ports(20))
    monkeypatch.setattr(ports, "_given", {})
    places = iter([0, 0, 1000])
    monkeypatch.setattr(ports.random.SystemRandom, "randrange", lambda *_: next(places))
    (first,) = free_ports(1)
    monkeypatch.setattr(ports, "_given", {})  # so that the search begins at the same port
    with listen("127.0.0.1", first):
        again = free_ports(5)
        assert first not in again
    monkeypatch.setattr(ports.os, "getpid", lambda: 1)  # as in a forked process
    assert min(free_ports(5)) > max(again)
    with pytest.raises(OSError, match="of 1000000 ports are free"):
        free_ports(1_000_000)
