"""Merges of outer rules: each makes one pseudo-gradient of the members' uploads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distributed_training.training.outer_rule import UploadFacts

Merge = Callable[[Tensor, Sequence[UploadFacts]], Tensor]


def median(rows: Tensor, facts: Sequence[UploadFacts]) -> Tensor:
    return rows.median(0).values


def trimmed(rows: Tensor, facts: Sequence[UploadFacts]) -> Tensor:
    """Leave out the largest and the smallest value of each place."""
    if len(rows) < 3:
        return rows.sum(0) / len(rows)
    return rows.sort(0).values[1:-1].sum(0) / (len(rows) - 2)


def krum(rows: Tensor, facts: Sequence[UploadFacts]) -> Tensor:
    """Take each row from the member whose row is nearest to the others'."""
    apart = (rows.unsqueeze(0) - rows.unsqueeze(1)).abs().amax(-1).sum(0)
    nearest = apart.argmin(0)
    return rows[nearest, torch.arange(rows.shape[1])]


def weighted(rows: Tensor, shares: Sequence[float]) -> Tensor:
    merged = torch.zeros_like(rows[0])
    for each, share in zip(rows, shares, strict=True):
        merged += each * (share / sum(shares))
    return merged


def by_gain(rows: Tensor, facts: Sequence[UploadFacts]) -> Tensor:
    return weighted(rows, [max(each.gain, 0.0) + 1e-3 for each in facts])


def by_tokens(rows: Tensor, facts: Sequence[UploadFacts]) -> Tensor:
    return weighted(rows, [each.tokens for each in facts])


def by_norm(rows: Tensor, facts: Sequence[UploadFacts]) -> Tensor:
    return weighted(rows, [1 / each.norm for each in facts])


MERGES: list[Merge] = [median, trimmed, krum, by_gain, by_tokens, by_norm]
