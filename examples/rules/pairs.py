"""An outer rule without a centre: members average in pairs, which change at each outer step.

    python examples/compare.py nesterov examples/rules/pairs.py

After NoLoCo (Kolehmainen et al. 2025, arXiv 2506.10911): nobody averages all members, so weights of
two members differ and are drawn together pair by pair. Here a pair begins at the mean of its two
epoch starts, and takes a Nesterov step along the mean of its two movements; each keeps a momentum
of its own. The paper draws them together by a term of that step. One published update is not for
such members, so a network refuses this rule, and only the comparison has it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from distributed_training.training.outer_rule import OUTER_RULES, OuterRule, nesterov_sgd


def drawn_pairs(members: int, outer_step: int) -> Sequence[Sequence[int]]:
    """Return pairs of members, the same for all who ask; an odd one remains by itself."""
    order = random.Random(outer_step).sample(range(members), members)
    return [order[first : first + 2] for first in range(0, members, 2)]


OUTER_RULES.register("pairs", OuterRule(nesterov_sgd, groups=drawn_pairs))
