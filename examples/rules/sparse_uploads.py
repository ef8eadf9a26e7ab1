"""An outer rule: a member uploads the largest values of each row, and keeps the rest for later.

    python examples/compare.py nesterov examples/rules/sparse_uploads.py
    make run ARGS="--exchange store --outer-rule examples/rules/sparse_uploads.py"

After SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706): what was not sent is the member's residual,
of which 95 % is added to its next upload; there is no outer momentum. The paper sends 1 to 3 % of
the values. That is too few for a comparison of 20 outer steps, so here it is a sixteenth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distributed_training.training.outer_rule import OUTER_RULES, OuterRule

SENT = 1 / 16  # of the values of a row
FEEDBACK = 0.95


def largest(rows: Tensor) -> Tensor:
    """Return the largest values of each row, by magnitude, and zeros for the others."""
    count = max(1, round(SENT * rows.shape[1]))
    places = rows.abs().topk(count, dim=1).indices
    return torch.zeros_like(rows).scatter_(1, places, rows.gather(1, places))


def plain_sgd(
    param: Tensor, grad: Tensor, state: Tensor | None, *, lr: float, mu: float
) -> tuple[Tensor, Tensor]:
    """Take a step of SGD without momentum; ``state`` stays zero."""
    # A product, then a difference: one fused operation would give other bits on other processors.
    return param - grad * lr, torch.zeros_like(param)


OUTER_RULES.register("sparse-uploads", OuterRule(plain_sgd, select=largest, feedback=FEEDBACK))
