"""Whether the ranks of two nodes can reach each other, tried before any is started.

A firewall may pass the launchers' port and no other. The ranks would then wait for each other for
as long as a collective may take, and none could tell why. So each launcher listens at a port like
those that its ranks will have, its *door*, and all the others knock.
"""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from distributed_training.common.ports import listen

#: Covers the opening of one connection; a packet that got lost is sent again after 1 s and 3 s.
KNOCK = timedelta(seconds=5)
_CALLERS = 4096

Door = tuple[str, int]  # address and port


def open_door(address: str, port: int = 0) -> socket.socket:
    """Close it once the ranks start. Nobody accepts: the kernel answers by itself."""
    return listen(address, port, backlog=_CALLERS)


def shut_doors(doors: Mapping[int, Door]) -> list[int]:
    """The nodes of ``doors`` to which no connection can be opened within :data:`KNOCK`."""

    def shut(door: Door) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(door, timeout=KNOCK.total_seconds()).close()
            return False
        return True

    if not doors:
        return []
    with ThreadPoolExecutor(len(doors)) as pool:
        found = pool.map(shut, doors.values())
        return [node for node, is_shut in zip(doors, found, strict=True) if is_shut]


def whom_to_refuse(apart: Sequence[tuple[int, int]]) -> dict[int, str]:
    """Node -> why, so that none of the rest are apart. ``apart``: from which node to which no
    connection came about. Node 0 cannot be refused; as few others as may be are."""
    refused: dict[int, str] = {}
    while apart:
        counted = Counter(n for one, other in apart for n in (other, one, other) if n != 0)
        ((wrong, _),) = counted.most_common(1)
        one, other = next(pair for pair in apart if wrong in pair)
        refused[wrong] = (
            f"no connection from node {one} to node {other} came about within "
            f"{KNOCK.total_seconds():.0f} s, so their ranks could not meet: let all TCP ports "
            "through between the nodes, in the firewalls of both (docs/several-machines.md)"
        )
        apart = [pair for pair in apart if wrong not in pair]
    return refused
