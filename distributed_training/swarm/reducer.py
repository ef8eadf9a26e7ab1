"""The sums of a reducer: the share of the values that this peer averages for its group."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from hivemind.p2p import PeerID
from torch import Tensor


@dataclass
class _Sum:
    """Of one part: what came so far, weighted."""

    buffer: Tensor
    total: Tensor
    weight: float
    done: asyncio.Event = field(default_factory=asyncio.Event)
    came_from: dict[PeerID, Tensor] = field(default_factory=dict)


class Buffers:
    """Memory for one part each, used again: the first touch of fresh memory is what costs."""

    def __init__(self, values: int) -> None:
        self._values = values
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        return self._free.pop() if self._free else torch.empty(self._values)

    def give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)


class Reducer:
    """Averages ``parts``, this peer's own values of its share, in place.

    A part is complete once every one of ``senders`` (the others) that has not failed has sent it.
    ``complete`` is set once all parts are; the averages then stand in ``parts``. What a sender has
    sent before it failed stays in the sums: all peers get the same averages.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        *,
        weight: float,
        senders: Collection[PeerID],
        buffers: Buffers,
    ) -> None:
        self.complete = asyncio.Event()
        self.failed: set[PeerID] = set()
        self._parts = parts
        self._weight = weight
        self._active = set(senders) if parts else set()
        self._buffers = buffers
        self._sums: dict[int, _Sum] = {}
        self._left = len(parts)
        self._look_whether_complete()

    @property
    def alone(self) -> bool:
        """No sender is left."""
        return not self._active

    def add(self, sender: PeerID, index: int, values: Tensor, weight: float) -> asyncio.Event:
        """Add what ``sender`` sent of part ``index``. Each sender adds each part once, in order.

        Once the event is set, ``values`` holds the average minus what it held before. Raises
        ValueError for a weight that is none, and when the sender has been left out already.
        """
        if sender not in self._active:
            raise ValueError("the peer was left out, since it came too late or failed")
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"a weight of {weight}")
        sums = self._sums.get(index)
        if sums is None:
            own, buffer = self._parts[index], self._buffers.take()
            total = torch.mul(own, self._weight, out=buffer[: len(own)])
            sums = self._sums[index] = _Sum(buffer, total, self._weight)
        sums.total.add_(values, alpha=weight)
        sums.weight += weight
        sums.came_from[sender] = values
        self._look_whether_done(index)
        return sums.done

    def leave_out(self, sender: PeerID) -> None:
        """It failed: the parts that it has not sent are averaged without it."""
        if sender not in self._active:
            return
        self._active.discard(sender)
        self.failed.add(sender)
        for index in list(self._sums):
            self._look_whether_done(index)
        self._look_whether_complete()

    def _look_whether_done(self, index: int) -> None:
        sums = self._sums[index]
        if not self._active <= sums.came_from.keys():
            return
        del self._sums[index]
        average = torch.div(sums.total, sums.weight, out=self._parts[index])
        for values in sums.came_from.values():
            torch.sub(average, values, out=values)
        self._buffers.give_back(sums.buffer)
        sums.done.set()
        self._left -= 1
        self._look_whether_complete()

    def _look_whether_complete(self) -> None:
        # Without senders, the parts that nobody has sent keep their values.
        if not self._left or not self._active:
            self.complete.set()
