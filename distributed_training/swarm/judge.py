"""Which averages are used: their norm is judged by those of the rounds before."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from distributed_training.common.files import read_json_object, write_json
from distributed_training.protocol.types import AllReduceError, AllReduceFault

_KEPT = 5
_ENOUGH_ROUNDS = 3  # as many past norms make a median that one bad round does not move


class Judge:
    """Refuses averages out of proportion, and remembers the norms in ``path``.

    ``max_ratio``: of an average's norm to what is usual; 0 accepts any that is finite.
    """

    def __init__(self, path: Path, *, run_id: str, max_ratio: float) -> None:
        self._norms = PastNorms(path, run_id=run_id)
        self._max_ratio = max_ratio

    def check(self, *, local_norm: float, average_norm: float) -> None:
        """Raises AllReduceError when the average must not be used."""
        previous = self._norms()
        try:
            judge(
                local_norm=local_norm,
                average_norm=average_norm,
                max_ratio=self._max_ratio,
                previous=previous,
            )
        except AllReduceError:
            # When the run itself changes, the measure must follow; but slowly, or three rounds of
            # nonsense would make nonsense usual.
            usual = usual_norm(local_norm, previous)
            if usual > 0 and math.isfinite(average_norm):
                self._norms.add(min(average_norm, 2 * usual))
            raise
        self._norms.add(average_norm)


class PastNorms:
    """At most five, oldest first, of the swarm named ``run_id``; another swarm's do not count.

    A file that cannot be read or written costs the memory of past rounds, never a round.
    """

    def __init__(self, path: Path, *, run_id: str) -> None:
        self._path = path
        self._run_id = run_id
        self._norms: deque[float] = deque(self._read(), maxlen=_KEPT)

    def _read(self) -> list[float]:
        kept = read_json_object(self._path) or {}
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            norms = [float(norm) for norm in kept["norms"]]
            if kept["run_id"] == self._run_id and all(map(math.isfinite, norms)):
                return norms
        return []

    def __call__(self) -> tuple[float, ...]:
        return tuple(self._norms)

    def add(self, norm: float) -> None:
        """NaN and Inf are no measure and are left out."""
        if not math.isfinite(norm):
            return
        self._norms.append(norm)
        with contextlib.suppress(OSError):
            write_json(self._path, {"run_id": self._run_id, "norms": list(self._norms)})


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
