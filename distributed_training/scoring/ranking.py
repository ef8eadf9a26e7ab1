"""What one pass of judgements means for the miners' scores: rank and share.

A validator keeps ratings over months that nobody else can see. What can be computed from outside is
where they lead: the present uploads judged again and again, each time with the uncertainty that the
texts leave. That is the figure to compare two ways of mining by.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from distributed_training.protocol.scoring import RESET, ScoreBoard
from distributed_training.scoring.evaluator import Comparison, Judgement

PASSES = 40  # a rating has settled by then: about two days of passes on the public network


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, found: Comparison) -> Interval:
        """Relative improvement. Infinite for fewer than two micro-batches."""
        before = found.losses[0]
        reach = t_quantile(len(found.before) - 1) * found.error
        if not before:
            return cls(0.0, -math.inf, math.inf)
        return cls(
            found.relative, (found.absolute - reach) / before, (found.absolute + reach) / before
        )


def t_quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t with so many degrees of freedom (Cornish-Fisher, Abramowitz
    and Stegun 26.7.5); exact where that series is not: for 1 and 2."""
    if freedom < 1:
        return math.inf
    if freedom < 3:
        return (12.706, 4.303)[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))


def chance_assigned_wins(judgement: Judgement) -> float | None:
    """How likely a validator finds that assigned text gains more than random text, in nats per
    token. None for a reset upload or too little text."""
    if judgement.random is None or judgement.assigned is None:
        return None
    error = math.hypot(judgement.random.error, judgement.assigned.error)
    gain = judgement.assigned.absolute - judgement.random.absolute
    if not math.isfinite(error):
        return None
    if error == 0:
        return float(gain > 0)
    return NormalDist().cdf(gain / error)


@dataclass(frozen=True)
class Standing:
    """``rating``: mu - 3 sigma. ``assigned``: in 0..1. ``share``: of the train score of everybody
    who was judged, which decides 3/4 of the total score."""

    uid: int
    rank: int  # from 1, by rating
    rating: float
    assigned: float
    train: float
    share: float


def rank(
    judgements: Sequence[Judgement], *, passes: int = PASSES, seed: int = 0
) -> Mapping[int, Standing]:
    """Where ``passes`` judgements such as these lead, from fresh ratings; by uid.

    Each pass draws every upload's improvement anew from what its texts say of it. ``passes=1``
    takes the figures as they are: one pass of a new validator.
    """
    generator = random.Random(seed)
    board = ScoreBoard(j.uid for j in judgements)
    for _ in range(passes):
        vary = generator if passes > 1 else None
        board.update_round(
            random={j.uid: _draw(j.random, vary) for j in judgements},
            assigned={j.uid: _draw(j.assigned, vary) for j in judgements},
        )
    return standings(board)


def standings(board: ScoreBoard) -> Mapping[int, Standing]:
    """Of everybody on the board, by uid, best first."""
    train = {uid: board.train_score(uid) for uid in board.uids}
    total = sum(train.values())
    ordered = sorted(board.uids, key=lambda uid: -board.random_score(uid))
    return {
        uid: Standing(
            uid=uid,
            rank=place,
            rating=board.random_score(uid),
            assigned=board.assigned_score(uid),
            train=train[uid],
            share=train[uid] / total if total else 0.0,
        )
        for place, uid in enumerate(ordered, 1)
    }


def _draw(found: Comparison | None, generator: random.Random | None) -> tuple[float, float]:
    if found is None:
        return RESET
    before, after = found.losses
    if generator is None or not math.isfinite(found.error):
        return before, after
    return before, after + generator.gauss(0.0, found.error)
