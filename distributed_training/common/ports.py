"""Listen on TCP ports, and find free ports on this machine."""

from __future__ import annotations

import errno
import os
import random
import socket
from pathlib import Path

_given: dict[int, int] = {}  # pid of this process -> offset of the next port to try


def listen(address: str, port: int, *, backlog: int | None = None) -> socket.socket:
    """Listen on an IPv4 or IPv6 address; ``::`` means both versions. Raises OSError."""
    try:
        # On "::", create_server accepts only IPv6 unless it is asked for both versions.
        return socket.create_server(
            (address, port),
            family=socket.AF_INET6 if ":" in address else socket.AF_INET,
            backlog=backlog,
            dualstack_ipv6=address == "::" and socket.has_dualstack_ipv6(),
        )
    # Remove the address that Python adds: the reader of this error already knows it.
    except OSError as error:
        raise OSError(error.errno, str(error.strerror).partition(" (while")[0]) from None


def free_ports(count: int) -> list[int]:
    """Return ``count`` different free ports on 127.0.0.1.

    They are below the range from which the system takes ports for outgoing connections; otherwise
    such a connection might take a port before it is used. Each process begins at a random port and
    returns no port twice until it has tried all, so that two processes which ask at the same time
    hardly ever get the same port. Raises OSError if there are too few.
    """
    try:
        end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        end = 32768
    begin, found, me = min(15000, end // 2), list[int](), os.getpid()
    if me not in _given:  # a forked process begins elsewhere
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
        f"only {len(found)} of {count} ports are free on 127.0.0.1, among those below {end}",
    )
