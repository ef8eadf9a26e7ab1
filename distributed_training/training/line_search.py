"""The best length along one direction: a search over a single number.

The loss of ``start - factor * direction`` has one valley as the factor grows, and it is flat at the
bottom, so a factor within a few per cent of the best is as good as the best. Factors are therefore
compared on a logarithmic scale: double (or halve) while that helps, then look where the parabola
through the last three points has its minimum. Five evaluations are typical.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

SMALLEST, LARGEST = 1 / 8, 64.0


@dataclass(frozen=True)
class Found:
    """``loss``: at ``factor``; ``evaluations``: how many factors were tried."""

    factor: float
    loss: float
    evaluations: int


def best_factor(loss: Callable[[float], float], *, first: float = 1.0) -> Found:
    """The factor within ``SMALLEST``..``LARGEST`` with the lowest ``loss`` of those tried.

    ``first``: where to begin, such as the factor found last time; powers of two are tried, from the
    nearest one on, and one factor between them. A loss that is NaN or infinite
    counts as worse than any other; where nothing finite is found the factor is 1.
    """
    seen: dict[float, float] = {}

    def at(factor: float) -> float:
        if factor not in seen:
            value = loss(factor)
            seen[factor] = value if math.isfinite(value) else math.inf
        return seen[factor]

    best = 2.0 ** round(math.log2(min(max(first, SMALLEST), LARGEST)))
    for ratio in (2.0, 0.5):
        while SMALLEST <= best * ratio <= LARGEST and at(best * ratio) < at(best):
            best *= ratio
    low, high = best / 2, best * 2
    if low in seen and high in seen and at(low) < math.inf and at(high) < math.inf:
        bend = at(low) - 2 * at(best) + at(high)
        if bend > 0:
            at(best * 2.0 ** (0.5 * (at(low) - at(high)) / bend))
    factor = min(seen, key=lambda tried: seen[tried])
    if seen[factor] == math.inf:
        return Found(1.0, math.inf, len(seen))
    return Found(factor, seen[factor], len(seen))
