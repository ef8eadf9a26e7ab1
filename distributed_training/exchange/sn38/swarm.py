"""This miner's peer in the swarm, as rank 0 and the validator use it.

A round is :meth:`HivemindSwarm.average`: find a group, average the buffers with it, check the
average. One peer that sends NaN, or a step out of proportion, spoils everybody's average while
hivemind's step succeeds; so the norm of each average is compared with the norms of earlier rounds
(:class:`Judge`), and a refused average changes no weight.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from distributed_training.common.files import read_state, write_state
from distributed_training.config.settings import SwarmSettings
from distributed_training.protocol.synapses import round_timeout
from distributed_training.protocol.types import (
    AllReduceError,
    AllReduceFault,
    AllReduceResult,
    RoundRequest,
)

from .supervisor import (
    Average,
    Cancel,
    Failed,
    HostKeeper,
    HostLaunch,
    RoundOrder,
    SharedTensors,
)

log = logging.getLogger(__name__)

#: The swarm process keeps a round's deadline itself; this much later it counts as hung.
_HANG_MARGIN = timedelta(seconds=10)
#: A transfer shorter than this many seconds says nothing about the bandwidth.
_SHORTEST_MEASURE = 0.5


class HivemindSwarm:
    """A full peer of the swarm. Every public method may be called from any thread.

    ``schema``: names and shapes in state-dict order. ``run_folder``: keeps the identity (so that a
    restart keeps the peer id), the norms of past rounds and hivemind's log. ``launch``: a swarm
    process that has begun to import. Raises SwarmUnavailable when the swarm process cannot be
    started, tried three times.

    ``buffers`` are float32 CPU tensors in the schema's order, averaged in place. After a round that
    failed their content is not defined: weights never live here.
    """

    def __init__(
        self,
        *,
        settings: SwarmSettings,
        schema: Sequence[tuple[str, tuple[int, ...]]],
        run_folder: Path,
        launch: HostLaunch | None = None,
    ) -> None:
        folder = run_folder / "swarm"
        folder.mkdir(parents=True, exist_ok=True)
        self._settings = settings
        #: The memory of ``buffers``: other ranks map its path.
        self.memory = SharedTensors([shape for _, shape in schema])
        self.buffers: Sequence[torch.Tensor] = self.memory.tensors
        self._judge = Judge(folder / "norms.json", run_id=settings.run_id)
        self._one_round = threading.Lock()
        self._cancelled = threading.Event()  # of the round that runs
        self._number = 0
        self._bandwidth: float | None = None  # Mbit/s, measured; None until a round was
        self._closed = False
        self._keeper = HostKeeper(settings, self.memory, folder, launch)

    @property
    def peer_id(self) -> str:
        return self._keeper.peer_id

    @property
    def visible_maddrs(self) -> list[str]:
        """Addresses under which other peers reach this one."""
        return self._keeper.visible_maddrs

    def known_peers(self) -> int | None:
        """Return how many other peers are in the DHT node's table; None without a swarm process."""
        host = self._keeper.host
        return host.peers if host is not None and host.alive() else None

    def alive(self) -> bool:
        """Return whether the swarm process runs. One that ended is started again within seconds."""
        return self._keeper.alive()

    def restart(self) -> None:
        """End the swarm process, and start it again. Raises SwarmUnavailable."""
        self._keeper.restart()

    def announce(self, ip: str) -> None:
        """Tell the swarm another IPv4 address of this machine: :meth:`HostKeeper.announce`."""
        self._keeper.announce(ip)

    def close(self) -> None:
        """End a running round and everything that was started, within seconds. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.cancel()
        self._keeper.close()
        self.memory.close()

    # --- rounds --------------------------------------------------------------------------------

    def cancel(self) -> None:
        """End a running :meth:`average` soon, with AllReduceError(CANCELLED)."""
        # First: a round that has not reached the swarm process yet looks at it before it waits.
        self._cancelled.set()
        host = self._keeper.host
        if host is not None:
            host.send(Cancel(self._number))

    def average(
        self,
        request: RoundRequest,
        *,
        weight: float = 1.0,
        cancelled: threading.Event | None = None,
    ) -> AllReduceResult:
        """Average ``buffers`` with the peers; blocks, at most until the round's deadline.

        ``cancelled``: the caller's, only for this round. Set before :meth:`cancel`, it ends the
        round even if :meth:`cancel` comes before this call has begun. Raises AllReduceError. Call
        it from a thread of its own.
        """
        cancelled = cancelled or threading.Event()
        if self._closed or cancelled.is_set():
            raise AllReduceError(AllReduceFault.CANCELLED)
        if not self._one_round.acquire(blocking=False):
            raise AllReduceError(AllReduceFault.LOCAL, "a round is already running")
        try:
            # Before the swarm process hears of the round: cancel() in another thread must find it.
            self._cancelled = cancelled
            began = time.monotonic()
            # Before: the average takes the place of our own values.
            local_norm = norm_of(self.buffers)
            if not math.isfinite(local_norm):  # each peer would refuse it, and our averages
                raise AllReduceError(AllReduceFault.LOCAL, "our values hold NaN or Inf")
            answer = self._ask_host(request, weight, cancelled, began)
            total = time.monotonic() - began
            average_norm = norm_of(self.buffers)
            # First: nothing else of a refused average is used.
            try:
                self._judge.check(
                    local_norm=local_norm, average_norm=average_norm, others_norm=answer.usual_norm
                )
            except AllReduceError as error:
                raise AllReduceError(error.fault, error.detail, answer.causes) from None
            failed = tuple(sorted(answer.causes))
            if answer.transfer > _SHORTEST_MEASURE and not failed:
                # Bytes through this peer in both directions, as load balancing counts them.
                self._bandwidth = 8e-6 * 4 * self.memory.values / answer.transfer
            return AllReduceResult(
                peers=tuple(answer.peers),
                failed_peers=failed,
                matchmaking_seconds=answer.matchmaking,
                transfer_seconds=answer.transfer,
                total_seconds=total,
                average_norm=average_norm,
                local_norm=local_norm,
                kept_local=answer.kept_local,
                causes=answer.causes,
            )
        finally:
            self._one_round.release()

    def _ask_host(
        self, request: RoundRequest, weight: float, cancelled: threading.Event, began: float
    ) -> Average:
        timeout = round_timeout(request, self._settings.round_timeout).total_seconds()
        while True:
            with self._keeper.use(timeout - (time.monotonic() - began), cancelled) as host:
                order = self._order(request, weight, timeout - (time.monotonic() - began))
                if order.timeout <= order.min_matchmaking_time:
                    raise AllReduceError(
                        AllReduceFault.NO_GROUP,
                        f"the call leaves {order.timeout:.0f} s, less than "
                        f"round.min_matchmaking_time ({order.min_matchmaking_time:.0f} s)",
                    )
                host.order(order)
                if cancelled.is_set():  # maybe before the process had heard of this round
                    self.cancel()
                try:
                    answer = host.answer(order.timeout + _HANG_MARGIN.total_seconds())
                except queue.Empty:
                    host.end("it did not answer a round")
                    raise AllReduceError(
                        AllReduceFault.TIMEOUT, "the swarm process hung; it is started again"
                    ) from None
                for peer, cause in (answer.causes if answer else {}).items():
                    log.warning("Peer %s was left out of the round: %s", peer, cause)
                if isinstance(answer, Average):
                    return answer
                if isinstance(answer, Failed):
                    raise AllReduceError(AllReduceFault[answer.fault], answer.detail, answer.causes)
                if cancelled.is_set() or self._closed:
                    raise AllReduceError(AllReduceFault.CANCELLED)
                if host.found_group:  # so the buffers have changed
                    raise AllReduceError(
                        AllReduceFault.SWARM_DOWN, f"the swarm process ended: {host.why}"
                    )
            # The peers are still gathering: the keeper starts the process again, and it joins them.

    def _order(self, request: RoundRequest, weight: float, timeout: float) -> RoundOrder:
        self._number += 1
        settings = self._settings

        def seconds(asked: timedelta | None, configured: timedelta) -> float:
            return (asked or configured).total_seconds()

        allreduce = seconds(request.allreduce_timeout, settings.allreduce_timeout)
        return RoundOrder(
            number=self._number,
            weight=weight,
            timeout=timeout,
            min_group_size=request.min_group_size or settings.min_group_size,
            min_matchmaking_time=seconds(
                request.min_matchmaking_time, settings.min_matchmaking_time
            ),
            request_timeout=seconds(request.request_timeout, settings.request_timeout),
            # A call may carry a timeout longer than the round's; the round's deadline stands.
            allreduce_timeout=min(allreduce, timeout),
            next_chunk_timeout=seconds(request.next_chunk_timeout, settings.next_chunk_timeout),
            bandwidth=self._bandwidth,
            peers=request.peers,
            usual_norm=self._judge.usual or 0.0,
            addresses=request.addresses,
        )


#: Largest ratio of an average's norm to the usual one; a longer average is refused.
MAX_NORM_RATIO = 20.0
_KEPT = 5
_ENOUGH_ROUNDS = 3  # as many past norms make a median that one bad round does not move


@dataclass(frozen=True)
class _Norms:
    run_id: str
    norms: list[Annotated[float, Field(allow_inf_nan=False)]]


class Judge:
    """Refuses averages out of proportion.

    An average of vectors is at most as long as the longest of them. So a norm far above the usual
    comes from a peer whose step is out of proportion. Usual is the median of ``norms``, the
    norms of the last averages; while fewer than three are known, the norm that is usual in this
    round. Our own pseudo-gradient is the worse measure: it is short when we joined late, and long
    when we diverged. The contributions that others sent us are the better one: a single peer does
    not decide it.

    ``path`` keeps ``norms`` of the swarm named ``run_id`` over a restart. A file that cannot be
    read or written costs the memory of past rounds, never a round.
    """

    def __init__(self, path: Path, *, run_id: str) -> None:
        self._path = path
        self._run_id = run_id
        lost = "averages are held against this round's pseudo-gradients for three rounds"
        kept = read_state(path, _Norms, lost=lost)
        # Oldest first. Another swarm's do not count.
        self.norms = deque(kept.norms if kept and kept.run_id == run_id else (), maxlen=_KEPT)

    @property
    def usual(self) -> float | None:
        """The usual norm of an average; None while too few are known."""
        return statistics.median(self.norms) if len(self.norms) >= _ENOUGH_ROUNDS else None

    def check(
        self, *, local_norm: float, average_norm: float, others_norm: float | None = 0.0
    ) -> None:
        """Raise AllReduceError when the average must not be used.

        ``others_norm``: the usual norm of the contributions that others sent us in this round.
        None: we averaged nothing for them, so it is not known.
        """
        if not math.isfinite(average_norm):
            raise AllReduceError(AllReduceFault.NOT_FINITE, "at least one peer sent NaN or Inf")
        usual, known = self.usual, "the rounds before"
        if usual is None:
            usual = math.inf if others_norm is None else max(local_norm, others_norm)
            known = "ours" if usual == local_norm else "the others'"
        refused = 0 < MAX_NORM_RATIO * usual < average_norm
        # When the run itself changes, the measure must follow; but slowly, or three rounds of
        # nonsense would make nonsense usual.
        self.norms.append(min(average_norm, 2 * usual) if refused else average_norm)
        with contextlib.suppress(OSError):
            write_state(self._path, _Norms(self._run_id, list(self.norms)))
        if refused:
            raise AllReduceError(
                AllReduceFault.OUT_OF_BOUNDS,
                f"norm {average_norm:.4g} against {usual:.4g} of {known}, more than "
                f"{MAX_NORM_RATIO:g} times as much",
            )


def norm_of(tensors: Sequence[torch.Tensor]) -> float:
    """Return the Euclidean norm over all tensors; NaN or Inf if any value is.

    Values whose squares overflow float32 (1e19) count as Inf.
    """
    # In float32: training waits, and float64 takes five times as long.
    return math.hypot(*(float(torch.linalg.vector_norm(t)) for t in tensors))
