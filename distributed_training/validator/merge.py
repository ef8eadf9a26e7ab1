"""Merge the uploads of a close into the update of an outer step (protocol page, section 12).

The accepted uploads are clipped and averaged, each with weight 1, or the outer rule merges them
itself. It makes an update of the result. The *residual*, which quantization took from the update
before, is added. The sum is quantized; its loss becomes the next residual. So no merged upload is
ever lost, and all apply the same bytes, the validator too.

Whoever replays the outer step must get the same bits on another machine. So all of it is float32 on
the CPU, upload by upload in the manifest's order, and each product and each sum is rounded by
itself: torch's ``add(alpha=)`` and ``addcmul`` are one fused operation on some processors only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from distributed_training.config import Config
from distributed_training.config.types import choose_kind
from distributed_training.protocol.manifest import Manifest
from distributed_training.protocol.types import Sign
from distributed_training.protocol.update_file import (
    UpdateFile,
    UpdateLayout,
    digest_rows_of,
    digest_weights,
    finish,
    rows_and_columns,
    write_rows,
)
from distributed_training.training.outer_rule import OUTER_RULES, UploadFacts, nesterov_sgd

NESTEROV = "nesterov"
#: Outer steps whose merged norms bound the norm of an upload.
HISTORY = 10
_CLIP = 2.0  # times the usual norm
_CHUNK = 1 << 22  # values handled at once, of one upload


class Values(Protocol):
    """The values that one upload, or the members' average, adds to a merge."""

    def rows(self, index: int, first: int, stop: int) -> Tensor:
        """Return rows of a parameter, float32 ``(rows, columns)``, a tensor of its own."""
        ...


@dataclass(frozen=True)
class OuterState:
    """The validator's tensors of an outer step, float32, on the CPU, in the schema's order.

    They are never changed in place. ``momentum`` and ``residual``: None where all are zeros.
    """

    weights: Sequence[Tensor]
    momentum: Sequence[Tensor] | None = None
    residual: Sequence[Tensor] | None = None

    @property
    def digests(self) -> tuple[str, str, str]:
        """The digests of weights, momentum and residual as a manifest has them."""
        momentum = "" if self.momentum is None else digest_of(self.momentum)
        residual = "" if self.residual is None else digest_of(self.residual)
        return digest_of(self.weights), momentum, residual


@dataclass(frozen=True)
class Rule:
    """The outer rule of an outer step: its name, the outer learning rate, the outer momentum."""

    name: str
    learning_rate: float
    mu: float

    @classmethod
    def of(cls, config: Config) -> Rule:
        training = config.training
        return cls(training.outer_rule, training.outer_learning_rate, training.outer_momentum)


def digest_of(tensors: Sequence[Tensor]) -> str:
    """Return the digest of float32 tensors in the schema's order, as a manifest has it."""
    return digest_weights(digest_rows_of(t.view(rows_and_columns(t.shape)) for t in tensors))


def norm_of(upload: UpdateFile) -> float:
    """Return the Euclidean norm of all values of an upload."""
    parts = range(len(upload.layout.parts))
    found = (upload.rows(i, a, b) for i in parts for a, b in _chunks(upload.layout, i))
    return math.sqrt(sum(float(rows.double().square_().sum()) for rows in found))


def merged_norms(chain: Sequence[Manifest]) -> list[float]:
    """Return the norms, as they were merged, of the last outer steps of ``chain``, ascending."""
    return [each.norm * each.factor for manifest in chain[-HISTORY:] for each in manifest.merged]


def clip_factors(norms: Sequence[float], history: Sequence[float]) -> list[float]:
    """Return the factor of each upload, at most 1, by which it is multiplied.

    None is to be longer than twice what is usual: the lower median of this close, or the median of
    ``history``, whichever is less. Factors are float32. ``norms`` are positive, and of those that
    are merged: without one of them the others' factors may be others.
    """
    usual = statistics.median_low(norms)
    if history:
        usual = min(usual, statistics.median(history))
    return [float(np.float32(min(1.0, _CLIP * usual / norm))) for norm in norms]


@torch.no_grad()
def merge(
    uploads: Sequence[Values],
    factors: Sequence[float],
    before: OuterState,
    rule: Rule,
    *,
    path: Path,
    layout: UpdateLayout,
    sign: Sign,
    facts: Sequence[UploadFacts] = (),
) -> tuple[str, OuterState]:
    """Write the update into ``path``; return its digest, and the state after it.

    Args:
        uploads: Ascending by uid, at least one.
        factors: Of each, from :func:`clip_factors` or the manifest.
        before: Of the outer step from which the uploads count.
        path: Where no file is yet.
        layout: Of the update, with its header.
        sign: By the master.
        facts: Of each upload, for a rule that merges them itself. It does not get an upload whose
            factor is 0.

    Raises OSError, ConfigError where the outer rule is unknown or fails, and ValueError for values
    that became too large to be written.
    """
    chosen = choose_kind(OUTER_RULES, rule.name, key="the outer rule")
    own = None if chosen.merge is None else chosen
    counted = [each for each in zip(uploads, factors, facts, strict=True) if each[1]] if own else []
    momenta, residuals = ([torch.empty_like(w) for w in before.weights] for _ in range(2))
    for index, part in enumerate(layout.parts):
        shape = (part.rows, part.columns)
        weight, new_momentum, wanted = (
            tensors[index].view(shape) for tensors in (before.weights, momenta, residuals)
        )
        momentum, residual = (
            None if tensors is None else tensors[index].view(shape)
            for tensors in (before.momentum, before.residual)
        )
        # Such a rule gets the rows of all members at once, so they are fewer: memory is bounded.
        for a, b in _chunks(layout, index, max(1, len(counted))):
            if own is not None:
                rows = [upload.rows(index, a, b).mul_(factor) for upload, factor, _ in counted]
                mean = own.merge_rows(torch.stack(rows), [each[2] for each in counted])
            else:
                mean = uploads[0].rows(index, a, b).mul_(factors[0])
                for upload, factor in zip(uploads[1:], factors[1:], strict=True):
                    mean.add_(upload.rows(index, a, b).mul_(factor))
                mean.div_(len(uploads))
            step, new_momentum[a:b] = _step(
                rule, weight[a:b], mean, None if momentum is None else momentum[a:b]
            )
            if residual is not None:
                step.add_(residual[a:b])
            wanted[a:b] = step
            write_rows(path, layout, index, a, step)
    finish(path, layout, sign)
    # From the file: it is what all others apply.
    update = UpdateFile.reopen(path, layout.schema)
    _subtract(residuals, update)  # until here all that was wanted
    return update.digest, OuterState(subtract(before.weights, update), momenta, residuals)


def _step(rule: Rule, weight: Tensor, mean: Tensor, momentum: Tensor | None) -> tuple[Tensor, ...]:
    """Return what the outer rule subtracts from some weights, and their new momentum."""
    step = OUTER_RULES[rule.name].step
    if step is not nesterov_sgd:
        new, kept = step(weight, mean, momentum, lr=rule.learning_rate, mu=rule.mu)
        return weight - new, kept
    # Computed here, since the hivemind kind's has torch's fused additions.
    kept = mean.clone() if momentum is None else momentum.mul(rule.mu).add_(mean)
    return kept.mul(rule.mu).add_(mean).mul_(rule.learning_rate), kept


@torch.no_grad()
def subtract(weights: Sequence[Tensor], update: UpdateFile) -> list[Tensor]:
    """Return the weights after an update, as each member computes them."""
    after = [weight.clone() for weight in weights]
    _subtract(after, update)
    return after


def _subtract(tensors: Sequence[Tensor], update: UpdateFile) -> None:
    for index, (tensor, part) in enumerate(zip(tensors, update.layout.parts, strict=True)):
        rows = tensor.view(part.rows, part.columns)
        for a, b in _chunks(update.layout, index):
            rows[a:b].sub_(update.rows(index, a, b))


def _chunks(layout: UpdateLayout, index: int, members: int = 1) -> Iterator[tuple[int, int]]:
    """Yield ranges of a parameter's rows, first and after the last, each handled at once.

    ``members``: whose rows of a range are in memory together.
    """
    part = layout.parts[index]
    step = max(1, _CHUNK // max(1, part.columns * members))
    return ((first, min(first + step, part.rows)) for first in range(0, part.rows, step))


def find_spoilers(count: int, passes: Callable[[Sequence[int]], bool]) -> tuple[int, ...] | None:
    """Find the uploads, of ``count``, without which the merge of the others passes the gate.

    The merge of all has failed. The least trusted come last. ``passes``: whether the merge of some
    does, by their places. It is asked at most ``2 log2 count + 2`` times; where that is not enough,
    or nothing passes, None is returned and nobody is to blame.

    One is found by halves: with the first k of them the merge fails, with the first k - 1 it
    passes. If the others pass without it, it is to blame; else another one is looked for too.
    """
    left, found, asked = list(range(count)), list[int](), 0
    good = 0  # the first ``good`` uploads pass
    most = math.floor(2 * math.log2(max(1, count)) + 2)
    while len(left) > 1:
        bad = len(left)  # the first ``bad`` uploads fail
        while bad - good > 1:
            if (asked := asked + 1) > most:
                return None
            half = (good + bad) // 2
            good, bad = (half, bad) if passes(left[:half]) else (good, half)
        found.append(left.pop(bad - 1))
        if good < len(left):
            if (asked := asked + 1) > most:
                return None
            if not passes(left):
                continue
        return tuple(sorted(found))
    return None
