"""How several sources share a block.

Weights are shares of the sequences. Which source a micro-batch comes from depends on the weights
alone, so all ranks train on the same source at the same time whatever their pages hold; gradient
surgery relies on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def pages_of(weights: Sequence[float], pages: int) -> list[int]:
    """Pages of each source in a block of ``pages``: its share rounded up, at least one."""
    return [max(1, math.ceil(weight * pages - 1e-9)) for weight in weights]


def schedule(weights: Sequence[float], length: int) -> list[int]:
    """The source of each of ``length`` micro-batches. After k of them every source has had its
    share of k to within one: the one furthest behind is next, the first of equals."""
    credit = np.zeros(len(weights))
    share = np.asarray(weights, dtype=np.float64) / sum(weights)
    order = []
    for _ in range(length):
        credit += share
        chosen = int(np.argmax(credit.round(9)))
        credit[chosen] -= 1.0
        order.append(chosen)
    return order


def interleave(
    weights: Sequence[float], sequences: Sequence[int], micro_batch_size: int
) -> tuple[np.ndarray, list[int]]:
    """Order of a block's sequences, and the scheduled source of each micro-batch.

    ``sequences``: how many each source has; they lie one source after the other. int64 indices
    into them. One source alone keeps all of its sequences in order. Of several, it ends with the
    first micro-batch that its source cannot fill, so that shares hold; a source with nothing at
    all (it is down) is replaced by those that have something.
    """
    if len(weights) == 1:
        return np.arange(sequences[0]), [0] * (sequences[0] // micro_batch_size)
    starts = np.concatenate([[0], np.cumsum(sequences)])
    left = [count // micro_batch_size for count in sequences]
    alive = [i for i, count in enumerate(left) if count]
    used = [0] * len(weights)
    indices, sources = [], []
    for scheduled in schedule(weights, sum(left)):
        chosen = scheduled
        if scheduled not in alive:
            if not alive:
                break
            # The one with most left, relative to its share.
            chosen = max(alive, key=lambda i: (left[i] - used[i]) / weights[i])
        if used[chosen] == left[chosen]:
            break
        first = starts[chosen] + used[chosen] * micro_batch_size
        indices.append(np.arange(first, first + micro_batch_size))
        sources.append(scheduled)
        used[chosen] += 1
    joined = np.concatenate(indices) if indices else np.zeros(0, dtype=np.int64)
    return joined, sources
