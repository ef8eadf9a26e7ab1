"""Listen at TCP ports, and find free ones of this machine."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import socket
from collections import deque
from pathlib import Path

#: Ports that this process gave out last. Neither it nor another process gives them out again soon.
_given: deque[int] = deque(maxlen=512)


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

    They lie below the range from which the system takes ports for outgoing connections, or one of
    these might take a port between now and its use. Another program still may; another process of
    this user that asks here does not get them while this one lives, or until this one has asked for
    512 others. Raises OSError if there are fewer.
    """
    try:
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        low = 32768
    candidates = list(range(min(15000, low // 2), low))
    random.SystemRandom().shuffle(candidates)
    # Hold each port until all are found, or one might be found twice.
    with contextlib.ExitStack() as held:
        found: list[int] = []
        for port in candidates:
            if len(found) == count:
                break
            if port in _given or not _reserve(port):
                continue
            probe = held.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                _release(port)
                continue
            found.append(port)
        if len(found) < count:
            for port in found:
                _release(port)
            raise OSError(
                errno.EADDRNOTAVAIL,
                f"only {len(found)} of {count} ports are free at 127.0.0.1, of those below {low}",
            )
        for port in found:
            # Release the oldest: a launcher that starts ranks for weeks would leave no ports to
            # others.
            if len(_given) == _given.maxlen:
                _release(_given.popleft())
            _given.append(port)
        return found


# The file stays open, since the kernel drops all locks of a process on a file as soon as it closes
# any descriptor of that file.
_reservations: int | None = None  # descriptor of a file, a byte of which is locked for each port


def _reserve(port: int) -> bool:
    """Lock a port; False if another process has it. The kernel ends the lock with this process."""
    global _reservations
    try:
        if _reservations is None:
            # Not $TMPDIR, since all processes must find the same file.
            path = f"/tmp/free-ports-{os.getuid()}"
            # In /tmp another user may have put a link to one of our files under this name.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            _reservations = os.open(path, flags, 0o600)
        fcntl.lockf(_reservations, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except BlockingIOError:
        return False
    except OSError:  # there is no such folder or it has no locks: continue without them
        return True
    return True


def _release(port: int) -> None:
    if _reservations is not None:
        with contextlib.suppress(OSError):
            fcntl.lockf(_reservations, fcntl.LOCK_UN, 1, port)
