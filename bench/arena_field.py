"""Compute what a validator's looks come to: fields of miners, their shares and totals, a table.

A field is made for each contender and each miner: this miner mines the contender's way, all others
the ``base`` way. Ratings need some tens of passes to settle, so the looks are repeated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from distributed_training.protocol.scoring import RESET, ScoreBoard

PUBLIC = "public"
UPDATES = 60  # of the ratings, at least


@dataclass(frozen=True)
class Look:
    """Hold a judgement of one upload: (loss before, after) on random and assigned text."""

    valid: bool
    random: tuple[float, float] = RESET
    assigned: tuple[float, float] = RESET
    why: str = ""
    inner_step: int = 0
    said: str = ""

    @property
    def scored(self) -> bool:
        return self.random != RESET

    @property
    def improvement(self) -> float:
        before, after = self.random
        return (before - after) / before if before else 0.0


@dataclass(frozen=True)
class Result:
    """Of one contender in one seed, means over the miners. ``share``, ``total``: in the field in
    which one miner mines this way; ``improvement``: percent, over the looks that scored."""

    share: float
    total: float
    improvement: float
    scored: float
    assigned: float
    inner_step: float


def score_field(looks: Mapping[int, Sequence[Look]]) -> tuple[dict[int, float], dict[int, float]]:
    """Train share and mean total of each uid, once ratings have settled. ``looks``: by uid."""
    board = ScoreBoard(looks)
    passes = list(zip(*looks.values(), strict=True))
    laps = math.ceil(UPDATES / len(passes))
    shares: list[dict[int, float]] = []
    totals: list[dict[int, float]] = []
    for lap in range(laps):
        for found in passes:
            by_uid = dict(zip(looks, found, strict=True))
            board.update_round(
                random={uid: look.random for uid, look in by_uid.items()},
                assigned={uid: look.assigned for uid, look in by_uid.items()},
            )
            if lap == laps - 1:
                train = {uid: board.train_score(uid) for uid in looks}
                whole = sum(train.values()) or 1.0
                shares.append({uid: score / whole for uid, score in train.items()})
                valid = {uid: float(look.valid) for uid, look in by_uid.items()}
                everybody = dict.fromkeys(looks, 1.0)
                totals.append(board.total_scores(all_reduce=everybody, repo_valid=valid))
    return (
        {uid: mean(each[uid] for each in shares) for uid in looks},
        {uid: mean(each[uid] for each in totals) for uid in looks},
    )


Looks = Mapping[str, Mapping[int, Sequence[Look]]]  # contender -> uid -> one entry a look


def results(looks: Looks, base: str = PUBLIC) -> dict[str, Result]:
    """Of each contender: every miner in turn mines its way, all others mine as ``base``."""
    public = looks[base]
    found = {}
    for name, by_uid in looks.items():
        shares, totals = [], []
        for uid, mine in by_uid.items():
            share, total = score_field({**public, uid: mine})  # in its place in the order
            shares.append(share[uid])
            totals.append(total[uid])
        every = [look for mine in by_uid.values() for look in mine]
        scored = [look for look in every if look.scored]
        wins = [
            look.assigned[0] - look.assigned[1] > look.random[0] - look.random[1] for look in scored
        ]
        found[name] = Result(
            share=mean(shares),
            total=mean(totals),
            improvement=100 * mean(look.improvement for look in scored) if scored else 0.0,
            scored=len(scored) / len(every),
            assigned=mean(wins) if wins else 0.0,
            inner_step=mean(look.inner_step for look in scored) if scored else 0.0,
        )
    return found


def table(by_seed: Mapping[int, Mapping[str, Result]], base: str) -> list[str]:
    """Means over seeds as ratios to ``base``; each seed's share at the right."""
    lines = [
        f"{'contender':12} {'share':>6} {'total':>6} {'improved':>8} | "
        f"{'% better':>8} {'scored':>6} {'a > r':>6} {'step':>5}   share by seed"
    ]
    for name in next(iter(by_seed.values())):
        ours = [found[name] for found in by_seed.values()]
        others = [found[base] for found in by_seed.values()]
        pairs = list(zip(ours, others, strict=True))
        share = ratio(mean(a.share for a in ours), mean(b.share for b in others))
        total = ratio(mean(a.total for a in ours), mean(b.total for b in others))
        improved = mean(ratio(a.improvement, b.improvement) for a, b in pairs)
        lines.append(
            f"{name:12} {share:6.2f} {total:6.2f} {improved:8.2f} |"
            f" {mean(a.improvement for a in ours):8.2f} {mean(a.scored for a in ours):6.0%}"
            f" {mean(a.assigned for a in ours):6.0%} {mean(a.inner_step for a in ours):5.0f}   "
            + " ".join(f"{ratio(a.share, b.share):.2f}" for a, b in pairs)
        )
    return lines


def ratio(ours: float, public: float) -> float:
    return ours / public if public > 0 else math.nan
