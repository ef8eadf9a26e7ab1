"""An outer rule that merges by itself: uploads count by what they gain on text.

    python examples/compare.py nesterov examples/rules/by_gain.py --speeds 1,1,0.5,0.25
    make run ARGS="--exchange store --outer-rule examples/rules/by_gain.py"

The gain is the judge's: the nats per token by which an upload lowers the loss. One that gains
nothing nearly counts for nothing. The step along the merged pseudo-gradient is the default one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distributed_training.training.outer_rule import (
    OUTER_RULES,
    OuterRule,
    UploadFacts,
    nesterov_sgd,
)


def by_gain(rows: Tensor, facts: Sequence[UploadFacts]) -> Tensor:
    """Return the mean of the members' rows, weighted by their gains."""
    gains = [max(each.gain, 0.0) + 1e-6 for each in facts]
    merged = torch.zeros_like(rows[0])
    for each, gain in zip(rows, gains, strict=True):
        merged += each * (gain / sum(gains))  # a product, then a sum: the same bits everywhere
    return merged


OUTER_RULES.register("by-gain", OuterRule(nesterov_sgd, merge=by_gain))
