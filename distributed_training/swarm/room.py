"""What a swarm is to the rest of the miner, and how an average is judged."""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Sequence
from typing import Protocol

import torch

from distributed_training.protocol.types import (
    AllReduceError,
    AllReduceFault,
    AllReduceResult,
    RoundRequest,
)

_ENOUGH_ROUNDS = 3  # as many past norms make a median that one bad round does not move


class SwarmUnavailable(RuntimeError):
    """The swarm host could not be started; the message says why and what mends it."""


class Swarm(Protocol):
    """One peer of the swarm."""

    @property
    def peer_id(self) -> str: ...

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        """float32 CPU tensors in state-dict order, averaged in place.

        After a failed round their content is unspecified: weights never live here.
        """
        ...

    def average(
        self,
        request: RoundRequest,
        *,
        weight: float = 1.0,
        cancelled: threading.Event | None = None,
    ) -> AllReduceResult:
        """Average ``buffers`` with the peers; blocks, at most until the round's deadline.

        ``cancelled``: the caller's, for this round alone. Set before :meth:`cancel`, it ends the
        round even if :meth:`cancel` comes before this call has begun. Raises AllReduceError. Call
        it from a thread of its own.
        """
        ...

    def cancel(self) -> None:
        """End a running :meth:`average` soon, with AllReduceError(CANCELLED). From any thread."""
        ...

    def alive(self) -> bool: ...
    def restart(self) -> None: ...
    def close(self) -> None: ...


def norm_of(tensors: Sequence[torch.Tensor]) -> float:
    """Euclidean norm over all tensors; NaN or Inf if any value is.

    Each tensor's in float32, five times as fast as in float64, while training waits; values whose
    squares overflow it (1e19) count as Inf.
    """
    return math.hypot(*(float(torch.linalg.vector_norm(t)) for t in tensors))


def usual_norm(local_norm: float, previous: Sequence[float]) -> float:
    """What an average is measured with: see :func:`judge`."""
    return statistics.median(previous) if len(previous) >= _ENOUGH_ROUNDS else local_norm


def judge(
    *,
    local_norm: float,
    average_norm: float,
    max_ratio: float,
    previous: Sequence[float] = (),
) -> None:
    """Raises AllReduceError when an average must not be used.

    One peer that sends NaN makes every peer's average NaN while hivemind's step succeeds. An
    average of vectors is at most as long as the longest of them, so a norm far above what is usual
    comes from a peer whose step is out of proportion. Usual is the median of ``previous``, the
    norms of the averages before; while fewer than three are known, our own pseudo-gradient's norm.
    Our own says less: it is short when we joined late, and long when it is we who diverged.
    """
    if not math.isfinite(average_norm):
        raise AllReduceError(AllReduceFault.NOT_FINITE, "at least one peer sent NaN or Inf")
    known = len(previous) >= _ENOUGH_ROUNDS
    usual = usual_norm(local_norm, previous)
    if max_ratio > 0 and usual > 0 and average_norm > max_ratio * usual:
        raise AllReduceError(
            AllReduceFault.OUT_OF_BOUNDS,
            f"norm {average_norm:.4g} against {usual:.4g} of "
            f"{'the rounds before' if known else 'ours'}, more than "
            f"--neuron.max_average_norm_ratio {max_ratio:g}",
        )
