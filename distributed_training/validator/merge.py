"""Merge the uploads of a close into the update of an outer step (protocol page, section 5).

The accepted uploads that help are clipped, added, and divided by the number of usual uploads that
they amount to, or the outer rule merges them itself. The outer rule makes an update of the result.
Then the *residual*, which is what quantization lost from the previous update, is added. The sum is
quantized, and what is lost now becomes the next residual. So no part of a merged upload is ever
lost, and everybody applies the same bytes, including the validator.

What is usual (the norm, the inner steps, the distance of two uploads) is decided only by uploads
that help. Otherwise noise, and uploads that change nothing, would decide it.

Anybody who replays the outer step on another machine must get the same bits. So it is all computed
in float32 on the CPU, upload by upload in the manifest's order, and each product and each sum is
rounded separately. Torch's ``add(alpha=)`` and ``addcmul`` are not used, because only some
processors fuse both operations.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from distributed_training.config import Config
from distributed_training.config.types import choose_kind
from distributed_training.protocol.manifest import Manifest, Merged
from distributed_training.protocol.types import Sign
from distributed_training.protocol.update_file import (
    UpdateFile,
    UpdateLayout,
    digest_rows_of,
    digest_weights,
    finish,
    row_chunks,
    rows_and_columns,
    write_rows,
)
from distributed_training.training.outer_rule import OUTER_RULES, UploadFacts, nesterov_sgd

NESTEROV = "nesterov"
#: Number of past outer steps whose uploads help to decide what is usual.
HISTORY = 10
_CLIP = 2.0  # uploads are clipped to the usual norm times this
_FEEBLE = 3.0  # an upload does not help if it gains less than the usual gain divided by this
_LEAP = 4.0  # factor by which inner steps per second may change from one close to the next


class Values(Protocol):
    """The values that one upload, or the members' average, adds to a merge."""

    def rows(self, index: int, first: int, stop: int) -> Tensor:
        """Return rows of a parameter as a new tensor, float32 ``(rows, columns)``."""
        ...


@dataclass(frozen=True)
class OuterState:
    """The validator's float32 tensors of an outer step, on the CPU and in the schema's order.

    They are never changed in place. ``momentum`` and ``residual``: None if all values are zero.
    """

    weights: Sequence[Tensor]
    momentum: Sequence[Tensor] | None = None
    residual: Sequence[Tensor] | None = None

    @property
    def digests(self) -> tuple[str, str, str]:
        """The digests of the weights, momentum and residual, in the form that manifests use."""
        momentum = "" if self.momentum is None else digest_of(self.momentum)
        residual = "" if self.residual is None else digest_of(self.residual)
        return digest_of(self.weights), momentum, residual


@dataclass(frozen=True)
class Rule:
    """The outer rule of an outer step: its name, outer learning rate and outer momentum."""

    name: str
    learning_rate: float
    mu: float

    @classmethod
    def of(cls, config: Config) -> Rule:
        training = config.training
        return cls(training.outer_rule, training.outer_learning_rate, training.outer_momentum)


def digest_of(tensors: Sequence[Tensor]) -> str:
    """Return the digest that manifests use of float32 tensors in the schema's order."""
    return digest_weights(digest_rows_of(t.view(rows_and_columns(t.shape)) for t in tensors))


def norm_of(upload: UpdateFile) -> float:
    """Return the Euclidean norm of all values of an upload."""
    parts = enumerate(upload.layout.parts)
    found = (upload.rows(i, a, b) for i, p in parts for a, b in row_chunks(p.rows, p.columns))
    return math.sqrt(sum(float(rows.double().square_().sum()) for rows in found))


class Measured(NamedTuple):
    """The judge's measurements of an upload, which decide how it is merged.

    ``norm``: the norm of all its values. ``gain``: nats per token by which it lowers the loss on
    text. ``chance``: nats per token by which mere chance may lower it. ``share``: its share of the
    weight of one upload, which all uploads that are alike share.
    """

    norm: float
    gain: float
    chance: float
    share: float = 1.0


def measured(merged: Sequence[Merged]) -> list[Measured]:
    """Return the measurements of each upload that a manifest names as accepted."""
    return [
        Measured(each.norm, each.improvement, each.chance or 0.0, each.share) for each in merged
    ]


def helpful(uploads: Sequence[Measured]) -> list[bool]:
    """Return for each upload of a close whether it helps. Only such uploads decide what is usual.

    An upload helps if it lowers the loss by more than chance may, and by at least a third of the
    median gain of the uploads that do so. Without the second condition, an honest upload multiplied
    by a thousandth would help too.
    """
    gains = [each.gain for each in uploads if each.gain > each.chance]
    least = statistics.median_high(gains) / _FEEBLE if gains else math.inf
    return [each.gain > each.chance and each.gain >= least for each in uploads]


def usual_norm(uploads: Sequence[Measured], chain: Sequence[Manifest]) -> float | None:
    """Return the weighted median norm of the uploads of a close and the last outer steps that help.

    The weight of an upload is its gain, but at most the usual gain of its close. So short uploads
    at the first close do not limit all later uploads. Returns None if no upload has helped.
    """
    weighted: list[tuple[float, float]] = []
    closes = [
        (measured(m.merged), [each.factor / each.share for each in m.merged])
        for m in chain[-HISTORY:]
    ]
    for close, factors in [*closes, (uploads, [1.0] * len(uploads))]:
        helping = [
            (each.norm * factor, each.gain)
            for each, factor, helps in zip(close, factors, helpful(close), strict=True)
            if helps and factor
        ]
        most = statistics.median_high(gain for _, gain in helping) if helping else 0.0
        weighted += [(norm, min(gain, most)) for norm, gain in helping]
    weighted.sort()
    half, passed = math.fsum(gain for _, gain in weighted) / 2, 0.0
    for norm, gain in weighted:
        passed += gain
        if passed >= half * (1 - 1e-9):  # sums of equal gains may differ slightly
            return norm
    return None


def longest_norm(uploads: Sequence[Measured], chain: Sequence[Manifest]) -> float:
    """Return the norm to which longer uploads are clipped: twice the usual norm.

    If no upload has helped yet, the usual norm is the lower median of the close, or inf without
    uploads.
    """
    usual = usual_norm(uploads, chain)
    if usual is None:
        usual = statistics.median_low(u.norm for u in uploads) if uploads else math.inf
    return _CLIP * usual


def merge_factors(uploads: Sequence[Measured], chain: Sequence[Manifest]) -> list[float]:
    """Return the factor by which each accepted upload is multiplied, a float32 of at most 1.

    The factor clips the upload to :func:`longest_norm`. If at least half of the uploads help, the
    judge had enough text to tell them apart, and the factor of the others is 0: their members carry
    them over. If fewer help, all are merged, so that no honest member is excluded late in training.
    Uploads that are alike share the weight of one upload, so that a member's text counts only once.
    """
    helps, longest = helpful(uploads), longest_norm(uploads, chain)
    enough = 2 * sum(helps) >= len(uploads)
    return [
        0.0
        if enough and not each
        else float(np.float32(clip_factor(upload.norm, longest) * upload.share))
        for each, upload in zip(helps, uploads, strict=True)
    ]


def whole_uploads(uploads: Sequence[Measured]) -> float:
    """Return how many usual uploads the uploads of a close that help amount to, as a float32.

    The sum of the uploads is divided by this number. An upload with half of the median gain or norm
    counts as half an upload; otherwise a member that trains less, or hides its training under
    noise, would make the outer step shorter for everybody. The norm counts as well as the gain,
    because an upload multiplied by a half gains more than half as much.

    If chance may explain its smaller gain, an upload counts as 1, because otherwise outer steps
    would grow by chance late in training. No upload counts as more than 1, and neither do all
    uploads together that are alike. If too few help, and all are merged, each counts as 1, or as
    its share.
    """
    helps = helpful(uploads)
    if 2 * sum(helps) < len(uploads):
        return float(np.float32(math.fsum(each.share for each in uploads)))
    helping = [each for each, good in zip(uploads, helps, strict=True) if good]
    gain = statistics.median_high(each.gain for each in helping)
    # Take the lower median, since half of the uploads may be far too long.
    norm = statistics.median_low(each.norm for each in helping)
    parts = (
        min(1.0, (each.gain + each.chance) / gain, each.norm / norm) * each.share
        for each in helping
    )
    return float(np.float32(math.fsum(parts)))


def clip_factor(norm: float, longest: float) -> float:
    """Return the float32 factor that clips an upload of this norm to the longest allowed norm."""
    return float(np.float32(min(1.0, longest / norm)))


def count_steps(
    uploads: Sequence[tuple[Measured, int]], chain: Sequence[Manifest], closed_at: float, most: int
) -> int:
    """Return by how many inner steps an outer step advances the schedule.

    Args:
        uploads: The uploads that are merged, each with the inner steps that its member claims.
        chain: The last manifests.
        closed_at: The time of this close by the validator's clock, in seconds since 1970.
        most: The most inner steps that a member can take between two closes.

    It is the upper median of the possible claims of members whose uploads help. It is kept between
    a quarter of the lowest and four times the highest rate of the last outer steps. So false claims
    by half of the members can neither stop the schedule nor rush it to its end.
    """
    helps = helpful([each for each, _ in uploads])
    claims = [n for (_, n), good in zip(uploads, helps, strict=True) if good and 0 < n <= most]
    rates = [
        (two.total_inner_steps - one.total_inner_steps) / (two.closed_at - one.closed_at)
        for one, two in itertools.pairwise(chain[-HISTORY - 1 :])
        if two.update and 0 < one.closed_at < two.closed_at
    ]
    seconds = closed_at - chain[-1].closed_at if chain else 0.0
    if not claims:
        claims = [round(statistics.median(rates) * seconds)] if rates else [n for _, n in uploads]
    steps = statistics.median_high(claims)
    if rates and seconds > 0:
        low, high = min(rates) * seconds / _LEAP, max(rates) * seconds * _LEAP
        steps = round(min(max(steps, low), high))
    return max(0, min(steps, most))


def merge_named(
    merged: Sequence[Merged],
    uploads: Sequence[Values],
    before: OuterState,
    rule: Rule,
    *,
    average: Values | None = None,
    path: Path,
    layout: UpdateLayout,
    sign: Sign,
) -> tuple[str, OuterState]:
    """Write the update of an outer step from its manifest's entries; return as :func:`merge` does.

    The validator merges in this way, and so does anybody who replays the outer step: both get the
    same bits.

    Args:
        merged: The manifest's entries of all accepted uploads.
        uploads: The uploads whose factor is not 0.
        before: The state of the outer step that the uploads start from.
        rule: The outer rule.
        average: The values that the members have averaged, which replace the uploads.
        path: The update's file. An existing file is replaced.
        layout: The update's layout, with its header.
        sign: Signs for the master.
    """
    counted = [each for each in merged if each.factor]
    # Manifests from before uploads were carried over lack the values that decide the divisor.
    known = all(each.chance is not None for each in merged)
    divisor = whole_uploads(measured(merged)) if known else None
    factors = [each.factor for each in counted]
    if average is not None:
        uploads, factors = [average], [1.0]
        divisor = None if divisor is None else divisor / len(merged)
    path.unlink(missing_ok=True)
    return merge(
        uploads,
        factors,
        before,
        rule,
        path=path,
        layout=layout,
        sign=sign,
        divisor=divisor,
        facts=[UploadFacts(each.tokens, each.norm, each.improvement) for each in counted],
    )


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
    divisor: float | None = None,
    facts: Sequence[UploadFacts] = (),
) -> tuple[str, OuterState]:
    """Write the update into ``path``; return its digest, and the state after it.

    Args:
        uploads: Ascending by uid, at least one.
        factors: The factor of each upload, from :func:`merge_factors` or the manifest, never 0.
        before: The state of the outer step that the uploads start from.
        path: The update's file, which must not exist yet.
        layout: The update's layout, with its header.
        sign: Signs for the master.
        divisor: The divisor of the uploads' sum, a float32, from :func:`whole_uploads`. None: the
            number of uploads, as in manifests from before uploads were carried over.
        facts: The facts about each upload, for a rule that merges uploads itself.

    Raises OSError, ConfigError if the outer rule is unknown or fails, and ValueError for values
    that became too large to be written.
    """
    chosen = choose_kind(OUTER_RULES, rule.name, key="the outer rule")
    own = None if chosen.merge is None else chosen
    counted = list(zip(uploads, factors, strict=True))
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
        # A rule with its own merge gets the rows of all members at once, so take fewer rows at a
        # time to limit the memory.
        for a, b in row_chunks(*shape, len(counted) if own is not None else 1):
            clipped = (upload.rows(index, a, b).mul_(factor) for upload, factor in counted)
            if own is not None:
                mean = own.merge_rows(torch.stack([*clipped]), facts)
            else:
                mean = next(clipped)
                for rows in clipped:
                    mean.add_(rows)
                mean.div_(len(counted) if divisor is None else divisor)
            step, new_momentum[a:b] = _step(
                rule, weight[a:b], mean, None if momentum is None else momentum[a:b]
            )
            if residual is not None:
                step.add_(residual[a:b])
            wanted[a:b] = step
            write_rows(path, layout, index, a, step)
    finish(path, layout, sign)
    # Read the update from the file, since that is what everybody else applies.
    update = UpdateFile.reopen(path, layout.schema)
    _subtract(residuals, update)  # until here the residuals were the update before quantization
    return update.digest, OuterState(subtract(before.weights, update), momenta, residuals)


def _step(rule: Rule, weight: Tensor, mean: Tensor, momentum: Tensor | None) -> tuple[Tensor, ...]:
    """Return what the outer rule subtracts from ``weight``, and the new momentum."""
    step = OUTER_RULES[rule.name].step
    if step is not nesterov_sgd:
        new, kept = step(weight, mean, momentum, lr=rule.learning_rate, mu=rule.mu)
        return weight - new, kept
    # Computed here, since the rule's own code uses fused additions.
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
        for a, b in row_chunks(part.rows, part.columns):
            rows[a:b].sub_(update.rows(index, a, b))


def find_spoilers(count: int, passes: Callable[[Sequence[int]], bool]) -> tuple[int, ...] | None:
    """Find the uploads to leave out so that the merge of the others passes the gate.

    The merge of all ``count`` uploads has failed. The least trusted uploads come last. ``passes``
    returns whether the merge of the uploads at the given places passes. It is called at most
    ``2 log2 count + 2`` times; if that is not enough, or nothing passes, None is returned and
    nobody is blamed.

    Bisection finds the k for which the merge of the first k uploads fails and the merge of the
    first k - 1 passes, and leaves out the k-th upload. If the rest then passes, the search ends;
    otherwise it looks for another upload.
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
