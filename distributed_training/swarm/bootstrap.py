"""Which of the peers through which the swarm is joined can be reached."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta


def address_of(maddr: str) -> tuple[str, int] | None:
    """Host and TCP port of ``/ip4|ip6|dns4|dns6|dns/<host>/tcp/<port>/...``; None for others."""
    parts = maddr.split("/")
    if len(parts) < 5 or parts[1] not in {"ip4", "ip6", "dns", "dns4", "dns6"}:
        return None
    if parts[3] != "tcp" or not parts[4].isdigit():
        return None
    return parts[2], int(parts[4])


def any_reachable(maddrs: Sequence[str], *, timeout: timedelta) -> bool:
    """Whether a TCP connection to at least one of them opens; all are tried at once.

    ``timeout`` covers each connection, name resolution not included. Addresses without a TCP port
    (QUIC) cannot be probed and count as reachable: only joining tells.
    """
    addresses = [address_of(maddr) for maddr in maddrs]
    if None in addresses:
        return True

    def opens(address: tuple[str, int] | None) -> bool:
        assert address is not None
        try:
            with socket.create_connection(address, timeout=timeout.total_seconds()):
                return True
        except OSError:
            return False

    if not addresses:
        return False
    with ThreadPoolExecutor(max_workers=min(16, len(addresses))) as pool:
        return any(pool.map(opens, addresses))
