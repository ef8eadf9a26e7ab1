"""The swarm's twin in memory: peers of one process meet at a :class:`MemoryMeetingPoint`."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch

from distributed_training.protocol.types import (
    AllReduceError,
    AllReduceFault,
    AllReduceResult,
    RoundRequest,
)

from .room import judge, norm_of


class MemoryMeetingPoint:
    """Where :class:`MemorySwarm` peers find each other."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.waiting: dict[str, MemorySwarm] = {}
        self.done: dict[str, tuple[str, ...]] = {}


class MemorySwarm:
    """Same behaviour as :class:`~.client.HivemindSwarm`, between threads of one process."""

    def __init__(
        self,
        *,
        peer_id: str,
        shapes: Sequence[tuple[int, ...]],
        meeting: MemoryMeetingPoint,
        min_group_size: int = 2,
        min_matchmaking_time: timedelta = timedelta(milliseconds=200),
        round_timeout: timedelta = timedelta(seconds=5),
        max_norm_ratio: float = 20.0,
    ) -> None:
        self.peer_id = peer_id
        self.buffers: Sequence[torch.Tensor] = [torch.zeros(s) for s in shapes]
        self._meeting = meeting
        self._min_group_size = min_group_size
        self._matchmaking = min_matchmaking_time
        self._timeout = round_timeout
        self._max_norm_ratio = max_norm_ratio
        self._cancelled = threading.Event()
        self._closed = False
        self._weight = 1.0

    def alive(self) -> bool:
        return not self._closed

    def restart(self) -> None:
        self._closed = False

    def close(self) -> None:
        self.cancel()
        self._closed = True

    def cancel(self) -> None:
        self._cancelled.set()
        with self._meeting.condition:
            self._meeting.condition.notify_all()

    def average(
        self,
        request: RoundRequest,
        *,
        weight: float = 1.0,
        cancelled: threading.Event | None = None,
    ) -> AllReduceResult:
        if self._closed:
            raise AllReduceError(AllReduceFault.SWARM_DOWN)
        self._cancelled = cancelled or threading.Event()
        self._weight = weight
        started = time.monotonic()
        group_size = request.min_group_size or self._min_group_size
        gather_until = started + (request.min_matchmaking_time or self._matchmaking).total_seconds()
        deadline = started + (request.timeout or self._timeout).total_seconds()
        local_norm = norm_of(self.buffers)
        point = self._meeting
        with point.condition:
            point.waiting[self.peer_id] = self
            point.condition.notify_all()
            while self.peer_id not in point.done:
                now = time.monotonic()
                if self._cancelled.is_set():
                    point.waiting.pop(self.peer_id, None)
                    raise AllReduceError(AllReduceFault.CANCELLED)
                if now >= gather_until and len(point.waiting) >= group_size:
                    _average_all(point)
                    break
                if now >= deadline:
                    point.waiting.pop(self.peer_id, None)
                    raise AllReduceError(AllReduceFault.NO_GROUP)
                until = deadline if now >= gather_until else min(deadline, gather_until)
                point.condition.wait(until - now)
            peers = point.done.pop(self.peer_id)
        total = time.monotonic() - started
        average_norm = norm_of(self.buffers)
        judge(local_norm=local_norm, average_norm=average_norm, max_ratio=self._max_norm_ratio)
        return AllReduceResult(
            peers=peers,
            failed_peers=(),
            matchmaking_seconds=total,
            transfer_seconds=0.0,
            total_seconds=total,
            average_norm=average_norm,
            local_norm=local_norm,
        )


def _average_all(point: MemoryMeetingPoint) -> None:
    group = dict(point.waiting)
    shapes = {tuple(tuple(b.shape) for b in peer.buffers) for peer in group.values()}
    if len(shapes) > 1:
        raise AllReduceError(AllReduceFault.SCHEMA)
    weight = sum(peer._weight for peer in group.values())
    for tensors in zip(*(peer.buffers for peer in group.values()), strict=True):
        parts = [t * p._weight for t, p in zip(tensors, group.values(), strict=True)]
        mean = torch.stack(parts).sum(0) / weight
        for tensor in tensors:
            tensor.copy_(mean)
    peers = tuple(sorted(group))
    for name in group:
        point.done[name] = peers
    point.waiting.clear()
    point.condition.notify_all()
