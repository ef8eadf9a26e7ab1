"""Which of the coming moments are worth a snapshot for publication. Pure: no clock, no I/O.

Between two rounds validators judge uploads all the time (protocol page, sections 3 and 7): for half
a period those of the outer step that a round has just ended, then those of the present one.

    round k            half a period             round k+1          half a period
      |--- judged: k-1 ------|------ judged: k ------|------ judged: k ------|--- judged: k+1 ...
      |----------- training makes uploads of k ------|------ training makes uploads of k+1 ------

An upload counts while its newest listed block is no older than half a period and its file no older
than the age limit. Its blocks end where its snapshot was taken, so a snapshot that is taken late
counts for longer; but until it is visible the one before has to count, and only one is sent at a
time. A round stops training, and pauses an upload under way, which goes on afterwards.

So there is a best way to place the next snapshots: the one under which validators find an upload
that counts for the most seconds. :func:`weigh` finds what a snapshot now, and waiting, is worth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MOST_MOMENTS = 150  # that are considered

Seconds = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Rounds:
    """``next_at``: when the next one will be called, infinite if unknown; ``period``: seconds
    between two of them, infinite if unknown; ``pause``: how long one keeps training, and the
    uplink, for itself."""

    next_at: float
    period: float
    pause: float

    @property
    def half(self) -> float:
        return self.period / 2


@dataclass(frozen=True)
class Pace:
    """In seconds. ``step``: an inner step; ``upload``: from a snapshot until it is visible;
    ``block_age``: of the newest listed block when a snapshot is taken."""

    step: float
    upload: float
    block_age: float


@dataclass(frozen=True)
class Bounds:
    """In seconds. ``age_limit``: of a file; ``margin``: how much earlier than needed uploads are to
    end; ``spacing``: between two snapshots at least; ``first``: from a round's end to the first
    inner step that may be published."""

    age_limit: float
    margin: float
    spacing: float
    first: float


@dataclass(frozen=True)
class Worth:
    """Judged seconds, from now on, in which an upload counts: at most so many if a snapshot is
    taken ``now``, or only ``later``. ``resolution``: differences below it mean nothing."""

    now: float
    later: float
    resolution: float


def weigh(now: float, *, rounds: Rounds, pace: Pace, bounds: Bounds, counts_until: float) -> Worth:
    """``counts_until``: how long that counts which is published of this outer step; anything in the
    past if nothing is. The next round lies ahead, and a snapshot now is possible: the uplink is
    free, the step allowed."""
    horizon = now + 2 * min(rounds.half, bounds.age_limit)
    if rounds.next_at < math.inf:
        horizon = rounds.next_at + rounds.pause + 0.75 * rounds.period
    taken, resolution = _moments(now, horizon, rounds, pace.step, bounds.first)
    ours = taken < rounds.next_at  # of the present outer step; the others are of the next
    visible = taken + pace.upload
    visible[ours & (visible > rounds.next_at)] += rounds.pause
    until = np.minimum(
        taken - pace.block_age + rounds.half - bounds.margin, visible + bounds.age_limit
    )

    def judged(start: Seconds, end: Seconds, of_ours: Flags) -> Seconds:
        """How much of [start, end) validators judge uploads of that outer step."""
        change = rounds.next_at + rounds.half  # from the present outer step to the next
        began = change - rounds.period if change < math.inf else -math.inf
        lowest = np.where(of_ours, began, change) - bounds.margin
        highest = np.where(of_ours, change, horizon)
        start, end = np.maximum(start, lowest), np.minimum(end, np.minimum(highest, horizon))
        in_round = np.minimum(end, rounds.next_at + rounds.pause) - np.maximum(
            start, rounds.next_at
        )
        return np.maximum(end - start, 0.0) - np.maximum(in_round, 0.0)

    # counts[i, j]: for how long snapshot i does if j is the next one. They lie in different
    # folders, so one of the next outer step takes nothing from those of this one.
    replaced = np.where(ours[:, None] == ours, visible, math.inf)
    counts = judged(visible[:, None], np.minimum(replaced, until[:, None]), ours[:, None])
    counts[taken < np.maximum(visible, taken + bounds.spacing)[:, None]] = -math.inf
    best = judged(visible, until, ours)  # if there is no next one
    for i in range(len(taken) - 2, -1, -1):
        best[i] = max(best[i], float((counts[i, i + 1 :] + best[i + 1 :]).max()))
    # What is published already counts until the first of them is visible.
    held = np.minimum(np.where(ours, visible, math.inf), counts_until)
    worth = judged(np.full(len(taken), now), held, np.full(len(taken), True)) + best
    return Worth(float(worth[0]), float(worth[1:].max(initial=-math.inf)), resolution)


def _moments(
    now: float, horizon: float, rounds: Rounds, step: float, first: float
) -> tuple[Seconds, float]:
    """Ends of inner steps at which a snapshot is possible, or some of them; their distance."""
    stride = step * max(1, math.ceil((horizon - now) / step / _MOST_MOMENTS))
    moments = np.concatenate(([now], np.arange(now + step, horizon, stride)))
    again = rounds.next_at + rounds.pause + first  # training's first publishable step after it
    return moments[(moments < rounds.next_at) | (moments >= again)], stride
