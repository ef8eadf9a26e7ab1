"""Listen at TCP ports, and find free ones of this machine."""

from __future__ import annotations

import errno
import os
import random
import socket
from pathlib import Path

_given: dict[int, int] = {}  # pid of this process -> how many ports it has tried


def listen(address: str, port: int, *, backlog: int | None = None) -> socket.socket:
    """Listen at an IP address of either version; at ``::`` for both. Raises OSError."""
    try:
        # create_server takes only IPv6 at "::" unless it is asked for both.
        return socket.create_server(
            (address, port),
            family=socket.AF_INET6 if ":" in address else socket.AF_INET,
            backlog=backlog,
            dualstack_ipv6=address == "::" and socket.has_dualstack_ipv6(),
        )
    # Python adds the address, which the reader of this error already knows.
    except OSError as error:
        raise OSError(error.errno, str(error.strerror).partition(" (while")[0]) from None


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that are free, all different.

    They are below the range from which the system takes ports for outgoing connections, or one of
    these might take a port between now and its use. Each process begins at a random place and gives
    no port twice until it has tried all, so that two which ask at the same time hardly ever get the
    same one. Raises OSError if there are fewer.
    """
    try:
        end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        end = 32768
    begin, found, me = min(15000, end // 2), list[int](), os.getpid()
    if me not in _given:  # a fork begins elsewhere
        _given[me] = random.SystemRandom().randrange(end - begin)
    for _ in range(end - begin):
        tried = _given[me]
        _given[me] += 1
        with socket.socket() as probe:
            port = begin + tried % (end - begin)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise OSError(
        errno.EADDRNOTAVAIL,
        f"only {len(found)} of {count} ports are free at 127.0.0.1, of those below {end}",
    )
