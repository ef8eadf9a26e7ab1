"""Files on their way to another node, beside training.

Where nodes share one copy of the model, each has rows that no other has. So the rank r of a node
sends what it wrote to the rank r of another, over a process group of their own: collectives of the
training thread are not in its way, and nothing is held in memory but a chunk of a file.

Hazard: both sides must go through the same messages, or one waits until the group's timeout. What
cannot be read is sent as zeros, and what cannot be written is taken and thrown away; the digests
beside the files tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.common.files import atomic_file

from .layout import Layout
from .tensor_files import tensor_bytes

_CHUNK = 1 << 26  # bytes


class Courier:
    """One per rank and purpose. ``timeout`` covers each message. Collective."""

    def __init__(self, layout: Layout, timeout: timedelta) -> None:
        self._layout = layout
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def to_next_node(self, folder: Path, files: Sequence[Path]) -> None:
        """``files`` below ``folder`` go to the next node's folder, those of the node before come
        here. Every rank calls it. Raises RuntimeError if a node is gone, OSError if the disk
        failed."""
        rank, local, world = self._layout.rank, self._layout.local, self._layout.world_size
        after, before = (rank + local) % world, (rank - local) % world
        if rank // local % 2:  # or all would send, and none receive
            try:
                self.take(folder, before)
            finally:
                self.give(folder, files, after)
        else:
            self.give(folder, files, after)
            self.take(folder, before)

    def give(self, folder: Path, files: Sequence[Path], rank: int) -> None:
        """Send what ``rank`` lacks of ``files``, in this order."""
        listed = [(str(f.relative_to(folder)), f.stat().st_size) for f in files]
        dist.send_object_list([listed], group=self._group, group_dst=rank)
        for index in self._answer(rank):
            left = listed[index][1]
            with files[index].open("rb") as handle:
                while left:
                    size = min(left, _CHUNK)
                    try:
                        data = handle.read(size)
                    except OSError:
                        data = b""
                    chunk = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
                    dist.send(chunk, group=self._group, group_dst=rank)
                    left -= size

    def take(self, folder: Path, rank: int) -> None:
        """What ``rank`` gives. Raises OSError when all of it has come."""
        listed: list[tuple[str, int]] = self._answer(rank)
        wanted = [i for i, (name, size) in enumerate(listed) if not _is_there(folder / name, size)]
        dist.send_object_list([wanted], group=self._group, group_dst=rank)
        problem: OSError | None = None
        for name, size in (listed[index] for index in wanted):
            chunks = self._chunks(size, rank)
            try:
                with atomic_file(folder / name) as handle:
                    for chunk in chunks:
                        handle.write(chunk)
            except OSError as error:
                problem = error
            for _ in chunks:
                pass
        if problem is not None:
            raise problem

    def _answer(self, rank: int) -> Any:
        box: list[Any] = [None]
        dist.recv_object_list(box, group=self._group, group_src=rank)
        return box[0]

    def _chunks(self, size: int, rank: int) -> Iterator[memoryview]:
        while size:
            chunk = torch.empty(min(size, _CHUNK), dtype=torch.uint8)
            dist.recv(chunk, group=self._group, group_src=rank)
            size -= len(chunk)
            yield tensor_bytes(chunk)


def _is_there(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False
