"""Messages and memory that rank 0 shares with its swarm process.

Messages travel over a socket pair as one JSON object a line, in both directions. Tensors are not
sent: both processes map one memory file (:class:`SharedTensors`), whose descriptor goes over the
socket with the first byte.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class HostConfig:
    """The first line to a swarm process: all that it needs for its life. Durations are seconds."""

    parent: int  # process id of rank 0; the swarm process ends when it is gone
    tensors: int  # descriptor of the memory file that rank 0 and the swarm process map
    shapes: list[list[int]]  # of the tensors in it, float32, one after the other
    sockets: str  # folder of p2pd's Unix sockets
    initial_peers: list[str]
    listen: list[str]
    announce: list[str]  # empty: what p2pd finds out
    identity: str  # file of the key that makes the peer id; written if it is missing
    start_timeout: float
    prefix: str  # of the group's name in the DHT and of the calls between peers
    part_size: int  # bytes of an uncompressed part
    compression: str


@dataclass(frozen=True)
class RoundOrder:
    """Take part in a round. Durations are seconds."""

    number: int
    weight: float
    timeout: float  # from now to the answer
    min_group_size: int
    min_matchmaking_time: float
    request_timeout: float
    allreduce_timeout: float
    next_chunk_timeout: float
    bandwidth: float | None  # Mbit/s as measured; None: not yet
    peers: Sequence[str] = ()  # ids of those who may take part; empty: whoever is found


@dataclass(frozen=True)
class Cancel:
    """Round ``number`` and those before it are not wanted. It may come before the round itself."""

    number: int


@dataclass(frozen=True)
class Close:
    """End: leave the DHT, and end p2pd."""


@dataclass(frozen=True)
class Ready:
    """The DHT is joined, or begun alone when there were no initial peers."""

    peer_id: str
    maddrs: list[str]


@dataclass(frozen=True)
class Beat:
    """The event loop turns, and p2pd answers. ``peers``: others that the DHT node has met."""

    peers: int


@dataclass(frozen=True)
class Found:
    """A group was found: from here on the tensors change."""


@dataclass(frozen=True)
class Average:
    """The round's answer when it went well. Peers are peer ids, durations seconds."""

    peers: list[str]
    failed: list[str]  # senders that were left out
    kept_local: float  # share of the values for which no average came back
    matchmaking: float
    transfer: float


@dataclass(frozen=True)
class Failed:
    """The round's answer when it did not: the name of an ``AllReduceFault``, and why."""

    fault: str
    detail: str = ""


@dataclass(frozen=True)
class Ended:
    """The last line of a swarm process that cannot go on, or could not start."""

    detail: str


Message = HostConfig | RoundOrder | Cancel | Close | Ready | Beat | Found | Average | Failed | Ended
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in Message.__args__}


def to_line(message: Message) -> bytes:
    return json.dumps([type(message).__name__, asdict(message)]).encode() + b"\n"


def from_line(line: bytes) -> Message:
    # Of our own process, over a socket that nobody else has: not checked further.
    name, fields = json.loads(line)
    message: Message = _KINDS[name](**fields)
    return message


class SharedTensors:
    """float32 tensors of ``shapes`` in one memory file that several processes map."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.shapes = [tuple(shape) for shape in shapes]
        # Memory, not a file on a disk: the kernel would write each round's values to it. And not
        # in /dev/shm, which is small in containers.
        self.descriptor = os.memfd_create("swarm-tensors")
        os.truncate(self.descriptor, 4 * self.values)
        self.tensors = map_tensors(self.descriptor, self.shapes)

    @property
    def values(self) -> int:
        return sum(map(math.prod, self.shapes))

    @property
    def path(self) -> str:
        """The path under which other processes of this user can map it, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def close(self) -> None:
        """Close the descriptor; the tensors stay valid as long as they are referred to."""
        os.close(self.descriptor)


def map_tensors(descriptor: int, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return the tensors in that memory file; the descriptor may be closed afterwards."""
    sizes = [math.prod(shape) for shape in shapes]
    path = f"/proc/self/fd/{descriptor}"
    # shared: what one process writes is there for the other, without a copy.
    flat = torch.from_file(path, shared=True, size=sum(sizes), dtype=torch.float32)
    return [part.view(tuple(s)) for part, s in zip(flat.split(sizes), shapes, strict=True)]
