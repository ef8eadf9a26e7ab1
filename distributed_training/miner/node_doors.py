"""Whether the ranks of two nodes can reach each other, tried before any is started.

A firewall may pass the launchers' port and no other. The ranks would then wait for each other for
as long as a collective may take, and none could tell why. So each launcher listens at a port like
those that its ranks will have, its *door*, and all the others knock. Where the environment has the
gradients go through another interface than the rendezvous', there is a door at its address as well.
"""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from distributed_training.common.ports import listen

#: Covers the opening of one connection; a packet that got lost is sent again after 1 s and 3 s.
KNOCK = timedelta(seconds=5)
_CALLERS = 4096

Door = tuple[str, int]  # address and port
DoorOf = tuple[int, str, int]  # of which node
Apart = tuple[int, int, str]  # from which node to which, at what address


def open_door(address: str, port: int = 0) -> socket.socket:
    """Close it once the ranks start. Nobody accepts: the kernel answers by itself."""
    return listen(address, port, backlog=_CALLERS)


def shut_doors(doors: Sequence[DoorOf]) -> list[tuple[int, str]]:
    """Node and address of those of ``doors`` to which no connection can be opened within
    :data:`KNOCK`."""

    def shut(door: DoorOf) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(door[1:], timeout=KNOCK.total_seconds()).close()
            return False
        return True

    if not doors:
        return []
    with ThreadPoolExecutor(len(doors)) as pool:
        found = pool.map(shut, doors)
        return [door[:2] for door, is_shut in zip(doors, found, strict=True) if is_shut]


def whom_to_refuse(apart: Sequence[Apart]) -> dict[int, str]:
    """Node -> why, so that none of the rest are apart. Node 0 cannot be refused; as few others as
    may be are."""
    refused: dict[int, str] = {}
    while apart:
        counted = Counter(n for one, other, _ in apart for n in (other, one, other) if n != 0)
        ((wrong, _),) = counted.most_common(1)
        one, other, address = next(each for each in apart if wrong in each[:2])
        refused[wrong] = (
            f"no connection from node {one} to node {other} came about within "
            f"{KNOCK.total_seconds():.0f} s, at {address}, so their ranks could not meet: let all "
            "TCP ports through between the nodes, in the firewalls of both "
            "(docs/several-machines.md)"
        )
        apart = [each for each in apart if wrong not in each[:2]]
    return refused
