"""Check that no spelling of an address makes a program call an internal service."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import replace

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_training.chain import auth
from distributed_training.common.addresses import Reach, reach
from distributed_training.registry.service import narrowest
from tests.tools.chain_server_thread import FAST, RegistryServer
from tests.tools.chain_world import VALIDATOR

pytestmark = pytest.mark.timeout(60)
EVERYWHERE, NETWORK, MACHINE, NOWHERE = Reach

#: IPv4 networks that are not public, and from where their addresses can be reached.
INSIDE = {
    "10.0.0.0/8": NETWORK,
    "172.16.0.0/12": NETWORK,
    "192.168.0.0/16": NETWORK,
    "100.64.0.0/10": NETWORK,
    "198.18.0.0/15": NETWORK,
    "127.0.0.0/8": MACHINE,
    "169.254.0.0/16": NOWHERE,
    "224.0.0.0/4": NOWHERE,
    "240.0.0.0/4": NOWHERE,
    "0.0.0.0/8": NOWHERE,
    "168.63.129.16/32": NOWHERE,
    "100.100.100.200/32": NOWHERE,
}
#: IPv6 notations that contain an IPv4 address.
FORMS = ("::ffff:{}", "64:ff9b::{}", "::{}", "2002:{:04x}:{:04x}::1")


def inside(network: str) -> st.SearchStrategy[tuple[str, Reach]]:
    net = ipaddress.IPv4Network(network)
    number = st.integers(int(net[0]), int(net[-1]))
    return number.map(lambda n: (str(ipaddress.IPv4Address(n)), INSIDE[network]))


def form(text: str, how: str) -> str:
    number = int(ipaddress.IPv4Address(text))
    return how.format(number >> 16, number & 0xFFFF) if "04x" in how else how.format(text)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(list(INSIDE)).flatmap(inside), st.sampled_from(["{}", *FORMS]))
def test_no_form_of_an_address_inside_passes_for_a_public_one(
    drawn: tuple[str, Reach], how: str
) -> None:
    text, narrow = drawn
    if text == "100.100.100.200":
        narrow = NOWHERE
    if how == "::{}" and text in ("0.0.0.0", "0.0.0.1"):  # these have a meaning in IPv6
        narrow = max(MACHINE, narrow if text == "0.0.0.0" else MACHINE)
    found = reach(form(text, how))
    assert found == narrow or (found > EVERYWHERE and found >= min(narrow, MACHINE))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(1 << 24, (1 << 32) - 1), st.sampled_from(["{}", *FORMS]))
def test_a_public_address_is_public_in_each_form(number: int, how: str) -> None:
    address = ipaddress.IPv4Address(number)
    inside = any(address in ipaddress.ip_network(network) for network in INSIDE)
    if not inside and address.is_global and str(address) != "192.0.0.192":
        assert reach(form(str(address), how)) is EVERYWHERE


@pytest.mark.parametrize(
    ("text", "narrow"),
    [
        ("2606:4700::1111", EVERYWHERE),
        ("::1", MACHINE),
        ("::", NOWHERE),
        ("fe80::1", NOWHERE),
        ("fec0::1", NOWHERE),
        ("ff0e::1", NOWHERE),
        ("fd12:3456::1", NETWORK),
        ("fd00:ec2::254", NOWHERE),
        ("2001:db8::1", NETWORK),
        ("5f00::1", NOWHERE),
    ],
)
def test_addresses_of_ipv6(text: str, narrow: Reach) -> None:
    assert reach(text) is narrow


@pytest.mark.parametrize("text", ["", "localhost", "1.2.3", "0x7f.1", "2130706433", "1.2.3.4:80"])
def test_malformed_address_has_no_reach(text: str) -> None:
    with pytest.raises(ValueError):
        reach(text)


ANNOUNCED = ("8.8.8.8", "10.0.0.9", "127.0.0.1", "169.254.169.254", "::ffff:127.0.0.1", "0.0.0.0")


class TestRegistry:
    """Test which endpoints a registry accepts."""

    @pytest.mark.parametrize(
        ("host", "caller", "expected"),
        [
            ("127.0.0.1", "127.0.0.1", MACHINE),  # in a local subnet
            ("::1", "::1", MACHINE),
            ("10.0.0.1", "10.0.0.2", NETWORK),
            ("10.0.0.1", "8.8.8.8", EVERYWHERE),  # a port that the router forwards
            ("0.0.0.0", "8.8.8.8", EVERYWHERE),
            ("0.0.0.0", "127.0.0.1", EVERYWHERE),
            ("0.0.0.0", "192.168.1.5", NETWORK),  # in a laboratory's network
            ("8.8.4.4", "8.8.8.8", EVERYWHERE),
            ("", "127.0.0.1", EVERYWHERE),  # behind a proxy that names no client, or this machine
            ("", "", EVERYWHERE),
            ("", "10.0.0.2", NETWORK),
        ],
    )
    def test_only_a_caller_inside_announces_an_address_inside(
        self, host: str, caller: str, expected: Reach
    ) -> None:
        assert narrowest(host, caller) is expected

    @pytest.mark.parametrize(
        ("caller", "private", "allowed"),
        [
            ("8.8.8.8", False, 1),
            ("10.0.0.2", False, 2),
            ("", False, 1),
            ("", True, 2),  # a proxy that names no client, in a private network
        ],
    )
    def test_behind_a_proxy_the_true_caller_counts(
        self, caller: str, private: bool, allowed: int
    ) -> None:
        limits = replace(FAST, proxy="127.0.0.1", private=private)
        with RegistryServer(limits=limits) as server:
            taken = []
            for ip in ANNOUNCED:
                path, body = "/serve", json.dumps({"ip": ip, "port": 8091}).encode()
                headers = auth.sign_btauth(
                    VALIDATOR, path=path, body=body, receiver=server.charter.identity
                )
                headers["x-forwarded-for"] = caller
                reply = httpx.post(
                    server.url + path, content=body, headers=headers, trust_env=False
                )
                if reply.status_code == 200:
                    taken.append(ip)
                else:
                    assert "--dht.ip" in reply.json()["message"]
            assert taken == list(ANNOUNCED[:allowed])
