"""The memory through which rank 0 and the swarm host exchange tensors."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch


class SharedTensors:
    """float32 tensors of ``shapes`` in one memory file that several processes map.

    Memory, not a file on a disk: the kernel would write each round's values to it. And not in
    /dev/shm, which is small in containers.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.shapes = [tuple(shape) for shape in shapes]
        self.descriptor = os.memfd_create("swarm-tensors")
        os.truncate(self.descriptor, 4 * self.values)
        self.tensors = map_tensors(self.descriptor, self.shapes)

    @property
    def values(self) -> int:
        return sum(map(math.prod, self.shapes))

    @property
    def path(self) -> str:
        """Under which other processes of this user on this machine can map it, while this one
        lives."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def close(self) -> None:
        """The tensors stay valid as long as they are referred to."""
        os.close(self.descriptor)


def map_tensors(descriptor: int, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The tensors in that memory file; the descriptor may be closed afterwards."""
    sizes = [math.prod(shape) for shape in shapes]
    path = f"/proc/self/fd/{descriptor}"
    flat = torch.from_file(path, shared=True, size=sum(sizes), dtype=torch.float32)
    return [part.view(tuple(s)) for part, s in zip(flat.split(sizes), shapes, strict=True)]
