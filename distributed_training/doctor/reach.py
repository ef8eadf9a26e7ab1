"""Whether a port of another miner can be reached from here, and what answers there.

No machine can find out alone whether its ports are open to others: a router may turn its own
address back inside. So a second machine, a peer's or a rented one, dials: ``doctor --probe``.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from distributed_training.config import ConfigError
from distributed_training.diagnostics.checks import Check

_TIMEOUT = timedelta(seconds=5)
_P2PD = b"/multistream/1.0.0"  # libp2p's first words, said by whoever is dialled
_REQUEST = b"GET /IsAlive HTTP/1.1\r\nHost: probe\r\nConnection: close\r\n\r\n"


def host_and_port(text: str) -> tuple[str, int]:
    """Raises ConfigError."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"--probe {text!r} is not HOST:PORT, so nothing was dialled: give e.g. 203.0.113.7:8091"
        )
    return host, int(port)


def probe(host: str, port: int, *, timeout: timedelta = _TIMEOUT) -> Check:
    """``timeout`` covers the connection, and each of two waits for an answer."""
    name, place = f"probe {host}:{port}", f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=timeout.total_seconds()) as connection:
            return _who(name, connection)
    except TimeoutError:
        finding = (
            f"{place} does not answer: a firewall drops what is sent there, or no such machine"
        )
        remedy = f"open TCP port {port} in the machine's firewall and at its provider, forward it"
    except ConnectionRefusedError:
        finding = f"{place} is reached, but nothing listens there"
        remedy = "start the miner there; --axon.port and --dht.port name its ports"
    except (OSError, UnicodeError) as error:
        finding = f"{place} cannot be dialled ({error})"
        remedy = "check the address, and the network of this machine"
    return Check(name, "fail", finding, remedy)


def _who(name: str, connection: socket.socket) -> Check:
    connection.settimeout(1.0)  # a libp2p daemon speaks first
    said = _read(connection)
    if _P2PD in said:
        return Check(name, "ok", "open; a libp2p peer answers, as behind --dht.port")
    connection.settimeout(_TIMEOUT.total_seconds())
    try:
        connection.sendall(_REQUEST)
    except OSError:
        said = b""
    said = said or _read(connection)
    if said.startswith(b"HTTP/"):
        status = said.split(b" ", 2)[1:2]
        code = status[0][:3].decode("ascii", "replace") if status else "?"
        return Check(
            name, "ok", f"open; an HTTP server answers (status {code}), as behind --axon.port"
        )
    return Check(
        name,
        "warn",
        "open, but neither a miner's server nor a libp2p peer answers",
        "check that the port is forwarded to the miner and not to something else",
    )


def _read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(256)
    except OSError:  # nothing was said in time, or it hung up
        return b""
