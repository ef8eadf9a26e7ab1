"""Tensors of a GPU into host memory, at the speed of the bus.

A snapshot or checkpoint holds training while everything is copied: 12 bytes a parameter. A plain
``.to("cpu")`` goes through a small buffer of the driver's, piece by piece, and one core empties it
into memory that was never touched before. Here two pinned buffers alternate: one is filled over the
bus, on a stream of its own, while all cores empty the other. They stay for the next time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

STAGE = 1 << 25  # elements of float32 in each of the two buffers: 128 MiB

#: A flat part of a tensor, and where it goes.
Piece = tuple[Tensor, Tensor]


class HostCopies:
    """For one device; for one thread. ``stage``: float32 elements that a buffer holds."""

    def __init__(self, device: torch.device, *, stage: int = STAGE) -> None:
        cuda = device.type == "cuda"
        self._device, self._stage = device, stage
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._copied = [torch.cuda.Event(), torch.cuda.Event()] if cuda else []
        self._buffers = [torch.empty(stage, pin_memory=cuda) for _ in range(2)]

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """New host tensors with the values that float32 ``tensors`` have once what is queued on the
        current stream is done. Returns when they are there."""
        taken = [torch.empty(t.shape) for t in tensors]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        under_way: tuple[int, list[Piece]] | None = None
        for turn, load in enumerate(self._loads(tensors, taken)):
            self._fill(turn % 2, load)
            if under_way is not None:
                self._empty(*under_way)
            under_way = turn % 2, load
        if under_way is not None:
            self._empty(*under_way)
        return taken

    def _loads(self, tensors: Sequence[Tensor], taken: Sequence[Tensor]) -> Iterator[list[Piece]]:
        """As many pieces at a time as a buffer holds."""
        load: list[Piece] = []
        room = self._stage
        for source, target in zip(tensors, taken, strict=True):
            flat, into = source.detach().reshape(-1), target.view(-1)
            start = 0
            while start < flat.numel():
                size = min(room, flat.numel() - start)
                load.append((flat[start : start + size], into[start : start + size]))
                start, room = start + size, room - size
                if room == 0:
                    yield load
                    load, room = [], self._stage
        if load:
            yield load

    def _fill(self, turn: int, load: Sequence[Piece]) -> None:
        with torch.cuda.stream(self._stream):  # without one: nothing
            for part, (source, _) in self._parts(turn, load):
                part.copy_(source, non_blocking=True)
            if self._stream is not None:
                self._copied[turn].record(self._stream)

    def _empty(self, turn: int, load: Sequence[Piece]) -> None:
        if self._stream is not None:
            self._copied[turn].synchronize()
        for part, (_, target) in self._parts(turn, load):
            target.copy_(part)

    def _parts(self, turn: int, load: Sequence[Piece]) -> Iterator[tuple[Tensor, Piece]]:
        start = 0
        for piece in load:
            size = piece[0].numel()
            yield self._buffers[turn][start : start + size], piece
            start += size


@functools.cache
def _copies(device: torch.device) -> HostCopies:
    return HostCopies(device)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in host memory, which later steps do not change. For the training thread."""
    if not tensors or tensors[0].device.type != "cuda":
        return [t.detach().to("cpu", copy=True) for t in tensors]
    return _copies(tensors[0].device).take(tensors)


def on_host(tensor: Tensor) -> Tensor:
    """Its values in host memory; itself if it lies there. For the training thread."""
    return tensor if tensor.device.type == "cpu" else to_host([tensor])[0]


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for what another thread computes beside training, so that neither waits for the
    other; None where there are none."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None
