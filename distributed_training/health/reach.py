"""Check whether a port of another machine can be reached: another miner's, or our own node's.

No machine can find out alone whether its ports are open to others: a router may turn its own
address back inside. So a second machine, a peer's or a rented one, dials: ``doctor --probe``.
"""

from __future__ import annotations

import ipaddress
import os
import random
import socket
from collections.abc import Iterator
from datetime import timedelta

import psutil

from distributed_training.common.ports import is_port
from distributed_training.config import Config, ConfigError
from distributed_training.config.settings import ChainSettings, SwarmSettings
from distributed_training.protocol.synapses import IS_ALIVE_ROUTE, PROBE_HOST
from distributed_training.protocol.types import Check

_TIMEOUT = timedelta(seconds=5)
_P2PD = b"/multistream/1.0.0"  # libp2p's first words, said by whoever is dialled
_REQUEST = f"GET {IS_ALIVE_ROUTE} HTTP/1.1\r\nHost: {PROBE_HOST}\r\nConnection: close\r\n\r\n"

#: Which interfaces gloo and NCCL take, where that shall not be the rendezvous'.
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


#: What listens behind a port that a miner opens, by the flag that names the port.
CALLS, SWARM = "--axon.port", "--dht.port"
_ANSWERS = {CALLS: "an HTTP server", SWARM: "a libp2p peer"}


def probed(text: str) -> Iterator[tuple[str, int, str | None]]:
    """Yield host, port and what is expected there (None: either) of what ``--probe`` names.

    That is HOST (both ports, at their defaults), HOST:PORT, or HOST:PORT,PORT (of calls, of the
    swarm). Raises ConfigError.
    """
    host, colon, given = text.rpartition(":")
    if not colon or _is_ipv6(text):
        host, given = text, f"{ChainSettings().axon_port},{SwarmSettings().dht_port}"
    host, ports = host.strip("[]"), given.split(",")
    if not host or text.isdigit() or len(ports) > 2 or not all(map(is_port, ports)):
        raise ConfigError(
            f"--probe {text!r} is not HOST, HOST:PORT or HOST:PORT,PORT, so nothing was dialled: "
            "give e.g. 203.0.113.7:8091,8009"
        )
    wanted = (CALLS, SWARM) if len(ports) == 2 else (None,)
    yield from ((host, int(port), what) for port, what in zip(ports, wanted, strict=True))


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text.strip("[]")).version == 6
    except ValueError:
        return False


def probe(
    host: str, port: int, wanted: str | None = None, *, timeout: timedelta = _TIMEOUT
) -> Check:
    """Dial a port of another machine.

    ``wanted``: CALLS or SWARM, None: either is right. ``timeout`` covers the connection, and each
    of two waits for an answer.
    """
    name, place = f"probe {host}:{port}", f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=timeout.total_seconds()) as connection:
            return _judge(name, _who(connection), wanted)
    # Before OSError, which it is: a firewall that drops keeps silent, a closed port refuses.
    except TimeoutError:
        finding = (
            f"{place} does not answer: a firewall drops what is sent there, or no such machine"
        )
        remedy = f"open TCP port {port} in the machine's firewall and at its provider, forward it"
    except ConnectionRefusedError:
        finding = f"{place} is reached, but nothing listens there"
        remedy = (
            "start the miner there; --axon.port and --dht.port name its ports, "
            "--axon.external_port and --dht.external_port what a router makes of them"
        )
    except (OSError, UnicodeError) as error:
        finding = f"{place} cannot be dialled ({error})"
        remedy = "check the address, and the network of this machine"
    return Check(name, "fail", finding, remedy)


def _judge(name: str, found: tuple[str, str], wanted: str | None) -> Check:
    who, detail = found
    if not who:
        return Check(
            name,
            "warn",
            "open, but neither a miner's server nor a libp2p peer answers",
            "check that the port is forwarded to the miner and not to something else",
        )
    finding = f"open; {_ANSWERS[who]} answers{detail}, as behind {who}"
    if wanted in (None, who):
        return Check(name, "ok", finding)
    remedy = f"forward it to {wanted}, or exchange --axon.external_port and --dht.external_port"
    return Check(name, "fail", f"{finding}, not {wanted}", remedy)


def _who(connection: socket.socket) -> tuple[str, str]:
    """Return what answers, CALLS, SWARM or nothing known, and more of its answer."""
    connection.settimeout(1.0)  # a libp2p daemon speaks first
    said = _read(connection)
    if _P2PD in said:
        return SWARM, ""
    connection.settimeout(_TIMEOUT.total_seconds())
    try:
        connection.sendall(_REQUEST.encode())
    except OSError:
        said = b""
    # What speaks first and is no libp2p peer is no HTTP server either.
    said = said or _read(connection)
    if not said.startswith(b"HTTP/"):
        return "", ""
    status = said.split(b" ", 2)[1:2]
    code = status[0][:3].decode("ascii", "replace") if status else "?"
    return CALLS, f" (status {code})"


def _read(connection: socket.socket) -> bytes:
    try:
        # The first words tell. Whoever is dialled may send without an end.
        return connection.recv(256)
    except OSError:  # nothing was said in time, or it hung up
        return b""


# --- the nodes of one miner ---------------------------------------------------------------------


def address_of(endpoint: str) -> tuple[str, int]:
    """Return IP address and port of ``HOST:PORT``. Raises ConfigError for an unknown host."""
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
    """Return the network interface of this machine that has ``address``. Raises ConfigError."""
    for name, entries in psutil.net_if_addrs().items():
        # psutil adds "%" and the interface to a link-local address.
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    raise ConfigError(
        f"no network interface of this machine has the address {address}, so the other nodes could "
        "not reach it: give --rdzv_endpoint an address of node 0, and run node 0 there"
    )


def check_nodes(config: Config, *, offline: bool) -> list[Check]:
    """Check the way to the miner's other machines; no checks for a miner of one machine.

    A missing ``--rdzv_endpoint`` is refused by the configuration's check.
    """
    settings = config.nodes
    if not settings.several or settings.rdzv_endpoint is None:
        return []
    try:
        address, port = address_of(settings.rdzv_endpoint)
        if settings.leads:
            own, found = address, f"other nodes find this one at {settings.rdzv_endpoint}"
        elif offline:
            return [Check("nodes", "skip", "--offline: node 0 is not asked")]
        else:
            with socket.create_connection((address, port), _TIMEOUT.total_seconds()) as line:
                # The address that the route to node 0 really takes.
                own = line.getsockname()[0].partition("%")[0]
            found = f"node 0 answers at {settings.rdzv_endpoint}"
            if problem := _blocked(address):
                found += f", but not at port {problem}, so its ranks could not be reached"
                remedy = f"let all TCP ports through from {own} in the firewall of node 0"
                return [Check("nodes", "fail", found, f"{remedy}: docs/several-machines.md")]
        interface = interface_of(own)
    except ConfigError as error:
        finding, _, remedy = str(error).rpartition(": ")
        return [Check("nodes", "fail", finding, remedy)]
    except OSError as error:
        finding = f"node 0 does not answer at {settings.rdzv_endpoint} ({error.strerror or error})"
        remedy = "start node 0, and open all TCP ports between the nodes (docs/several-machines.md)"
        return [Check("nodes", "warn", finding, remedy)]
    checks = [Check("nodes", "ok", f"{found}, interface {interface}")]
    if ipaddress.ip_address(own).is_global:
        finding = f"{own} is a public address, and what nodes tell each other has no password"
        remedy = f"let only the nodes reach interface {interface}: docs/several-machines.md"
        checks.append(Check("nodes' firewall", "warn", finding, remedy))
    else:
        checks.append(Check("nodes' firewall", "ok", f"{own} is no public address"))
    for name in VARIABLES:
        if (wanted := os.environ.get(name)) and interface not in wanted:
            finding = f"{name} is {wanted}, the rendezvous goes through {interface}"
            checks.append(Check("nodes' interface", "warn", finding, f"unset {name}, if not meant"))
    return checks


def _blocked(address: str) -> str | None:
    """Return a port such as ranks listen at, and the reason why it cannot be reached, or None.

    Where nobody listens a machine itself refuses at once, and a firewall keeps silent or answers
    that it is one.
    """
    # Of the range from which gloo's and NCCL's listeners get their ports.
    port = random.randrange(32768, 60999)
    try:
        socket.create_connection((address, port), _TIMEOUT.total_seconds()).close()
    except ConnectionRefusedError:
        return None
    except OSError as error:
        return f"{port} ({error.strerror or error})"
    return None
