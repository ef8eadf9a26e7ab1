"""Several sources at once: ``--data.source web=hf,code=jsonl:DIR --data.mix web=0.7,code=0.3``.

Weights are shares of the sequences. Which source a micro-batch comes from depends only on the
weights, so all ranks train on the same source at the same time whatever their pages hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from distributed_training.config.settings import SourceSpec, parse_source
from distributed_training.config.types import ConfigError


def parse_named(source: str, mix: str) -> tuple[SourceSpec, ...]:
    """Read named sources and their weights, without those of weight 0. Raises ConfigError."""
    named: dict[str, SourceSpec] = {}
    for entry in (entry.strip() for entry in source.split(",") if entry.strip()):
        name, equals, text = entry.partition("=")
        if not equals or not name or ":" in name or name in named:
            raise ConfigError(
                f"--data.source {source}: {entry!r} is not name=SOURCE with a name of its own, so "
                "there is nothing to train on: give e.g. web=hf,code=jsonl:DIR"
            )
        named[name] = parse_source(name, text)
    weights = _parse_weights(mix, named)
    total = sum(weights.values())
    return tuple(
        SourceSpec(spec.name, spec.kind, spec.folder, weights[name] / total)
        for name, spec in named.items()
        if weights[name] > 0
    )


def _parse_weights(mix: str, named: dict[str, SourceSpec]) -> dict[str, float]:
    if not mix:
        return dict.fromkeys(named, 1.0)
    weights: dict[str, float] = {}
    for entry in (entry.strip() for entry in mix.split(",") if entry.strip()):
        name, _, text = entry.partition("=")
        try:
            weights[name] = float(text)
        except ValueError:
            weights[name] = -1.0
        if not 0 <= weights[name] < float("inf"):
            raise ConfigError(
                f"--data.mix {entry!r} is not name=WEIGHT, so the mix is not defined: "
                "give e.g. web=0.7,code=0.3"
            )
    if set(weights) != set(named) or not any(weights.values()):
        raise ConfigError(
            f"--data.mix {mix} does not weigh exactly the sources {', '.join(named)}, so the mix "
            "is not defined: give each of them a weight, one at least above 0"
        )
    return weights


def pages_of(weights: Sequence[float], pages: int) -> list[int]:
    """Return the pages of each source in a block: its share rounded up, at least one."""
    # 0.07 * 100 is 7.000000000000001, which must not become one page more.
    return [max(1, math.ceil(weight * pages - 1e-9)) for weight in weights]


def schedule(weights: Sequence[float], length: int) -> list[int]:
    """Return the source of each of ``length`` micro-batches.

    After k of them every source has had its share of k to within one: the one furthest behind is
    next, the first of equals.
    """
    credit = np.zeros(len(weights))
    share = np.asarray(weights, dtype=np.float64) / sum(weights)
    order = []
    for _ in range(length):
        credit += share
        # Rounded: ties differ in their last bits, and must fall alike on all ranks.
        chosen = int(np.argmax(credit.round(9)))
        credit[chosen] -= 1.0
        order.append(chosen)
    return order


def interleave(
    weights: Sequence[float], sequences: Sequence[int], micro_batch_size: int
) -> tuple[np.ndarray, list[int]]:
    """Order of a block's sequences, and the scheduled source of each micro-batch.

    ``sequences``: how many each source has; they lie one source after the other. int64 indices
    into them. It ends with the first micro-batch that its source cannot fill, so that shares hold;
    a source with nothing at all (it is down) is replaced by those that have something.
    """
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
