"""Determine from where an IP address can be reached, in whatever form it is written.

Our programs connect to addresses that others announce. With an address in a private network, or of
the machine itself, somebody could make a program call services that only this program can reach.
"""

from __future__ import annotations

import enum
import ipaddress
import socket
from urllib.parse import urlsplit


class Reach(enum.IntEnum):
    """Which machines can reach an address, from all machines to none."""

    EVERYWHERE = 0
    NETWORK = 1  # machines in the same private network
    MACHINE = 2  # this machine only
    NOWHERE = 3  # link-local, multicast, unspecified or reserved, or a cloud's own service


#: Addresses at which clouds hand out keys to their machines, in addition to 169.254.169.254.
_OF_CLOUDS = frozenset(
    map(
        ipaddress.ip_address,
        ("168.63.129.16", "192.0.0.192", "100.100.100.200", "fd00:ec2::254", "fd20:ce::254"),
    )
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_COMPATIBLE = ipaddress.ip_network("::/96")
_GLOBAL = ipaddress.ip_network("2000::/3")
_OF_NOBODY = ipaddress.ip_network("0.0.0.0/8")


def keeps_secrets(url: str, *, private: bool) -> bool:
    """Return whether a secret may be sent to ``url``: encrypted, or only over our own network.

    ``private``: all machines are in one private network.
    """
    parts = urlsplit(url)
    inside = private or parts.hostname in ("127.0.0.1", "localhost", "::1")
    return parts.scheme == "https" or (parts.scheme == "http" and inside)


def reach(text: str) -> Reach:
    """Return who can reach the IP address ``text``. Raises ValueError if it is not an address."""
    address = ipaddress.ip_address(text)
    if address.is_loopback:
        return Reach.MACHINE
    if (
        address in _OF_CLOUDS
        or address.is_unspecified
        or address.is_multicast
        or address.is_link_local
    ):
        return Reach.NOWHERE
    if isinstance(address, ipaddress.IPv4Address):
        if address.is_reserved or address in _OF_NOBODY:
            return Reach.NOWHERE
    else:
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64 or address in _COMPATIBLE:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:  # packets go to the address inside this one
            return reach(str(inner))
        if not address.is_private and address not in _GLOBAL:
            return Reach.NOWHERE
    return Reach.EVERYWHERE if address.is_global else Reach.NETWORK


def is_inside(url: str) -> bool:
    """Return whether the host of ``url`` has an address that is not public."""
    try:
        found = socket.getaddrinfo(urlsplit(url).hostname, None, type=socket.SOCK_STREAM)
        addresses = [str(info[4][0]).partition("%")[0] for info in found]
        return any(reach(address) is not Reach.EVERYWHERE for address in addresses)
    except (OSError, ValueError):  # the request itself will fail and say so
        return False
