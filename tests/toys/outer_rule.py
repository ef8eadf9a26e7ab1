"""A plug-in: an outer rule that takes the sign of a moving average (Lion without weight decay)."""

from __future__ import annotations

import torch
from torch import Tensor

from distributed_training.training.outer_rule import OUTER_RULES, OuterRule


def signed(
    param: Tensor, grad: Tensor, state: Tensor | None, *, lr: float, mu: float
) -> tuple[Tensor, Tensor]:
    """Move each entry by a thousandth of ``lr`` (arXiv 2302.06675)."""
    average = torch.zeros_like(grad) if state is None else state
    direction = average.mul(mu).add_(grad, alpha=1 - mu).sign_()
    kept = average.mul(0.99).add_(grad, alpha=0.01)
    return param - lr / 1000 * direction, kept


OUTER_RULES.register("signed", OuterRule(signed))
