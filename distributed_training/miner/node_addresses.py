"""Under which addresses and through which interfaces the nodes of one miner reach each other.

Everything between nodes goes through the interface of the rendezvous, unless gloo's or NCCL's own
environment variable has gradients go through another.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence

import psutil

from distributed_training.config import ConfigError

#: Which interfaces gloo and NCCL take, where that shall not be the rendezvous'.
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def address_of(endpoint: str) -> tuple[str, int]:
    """IP address and port of ``HOST:PORT``. Raises ConfigError for a host nobody knows."""
    host, _, port = endpoint.rpartition(":")
    try:
        family = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"--rdzv_endpoint {endpoint}: the host cannot be resolved ({error.strerror}), so the "
            "nodes cannot meet: give node 0's IP address"
        ) from None
    address = str(family[0][4][0])
    if ":" in address and ipaddress.ip_address(address).is_link_local:
        raise ConfigError(
            f"--rdzv_endpoint {endpoint} is a link-local address, which names another machine on "
            "each interface, so the nodes cannot meet: give another address of node 0"
        )
    return address, int(port)


def interface_of(address: str) -> str:
    """The network interface of this machine that has ``address``."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    raise ConfigError(
        f"no network interface of this machine has the address {address}, so the other nodes could "
        "not reach it: give --rdzv_endpoint an address of node 0, and run node 0 there"
    )


def other_addresses(interface: str) -> list[str]:
    """This machine's, on the interfaces that the environment has gradients go through instead of
    ``interface``. Raises ConfigError if gloo's is not there."""
    there, found = psutil.net_if_addrs(), list[str]()
    for variable in VARIABLES:
        wanted = os.environ.get(variable, "")
        if wanted.startswith("^"):  # NCCL takes any but those
            continue
        names = tuple(filter(None, wanted.removeprefix("=").split(",")))
        taken = [name for name in there if name in names]
        of_gloo = variable == VARIABLES[0]
        if not (taken or of_gloo or wanted.startswith("=")):
            # NCCL's may be beginnings of names; its ranks meet at the first that is found.
            taken = [name for name in there if name.startswith(names)][:1]
        if of_gloo and names and not taken:
            raise ConfigError(
                f"{variable} is {wanted}, and no network interface of this machine has that name, "
                f"so its ranks could not meet others: one of {', '.join(there)}, or unset it"
            )
        for name in taken:
            if name != interface and (address := _address_on(there[name])):
                found.append(address)
    return sorted(set(found))


def _address_on(entries: Sequence[psutil._ntuples.snicaddr]) -> str | None:
    listed = [e.address for family in _FAMILIES for e in entries if e.family == family]
    return next((a for a in listed if not ipaddress.ip_address(a).is_link_local), None)
