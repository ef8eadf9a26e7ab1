"""Compute what a validator's looks come to: fields of miners, their shares and totals, a table.

A field is made for each way and each miner: this miner mines that way, all others the ``base``
way. Ratings need some tens of passes to settle, so the looks are repeated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from bench import common
from distributed_training.protocol.scoring import RESET, ScoreBoard

PUBLIC, OURS = "public", "ours"
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
    """Of one way in one seed, means over the miners. ``share``, ``total``: in the field in
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


Looks = Mapping[str, Mapping[int, Sequence[Look]]]  # way -> uid -> one entry a look


def results(looks: Looks, base: str = PUBLIC) -> dict[str, Result]:
    """Give each method to every miner in turn, while all others mine as ``base``."""
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


def table(by_seed: Mapping[int, Mapping[str, Result]], base: str) -> None:
    """Print means over seeds as ratios to ``base``; each seed's share at the right."""
    rows = []
    for name in next(iter(by_seed.values())):
        pairs = [(found[name], found[base]) for found in by_seed.values()]
        share = ratio(mean(a.share for a, _ in pairs), mean(b.share for _, b in pairs))
        total = ratio(mean(a.total for a, _ in pairs), mean(b.total for _, b in pairs))
        improved = mean(ratio(a.improvement, b.improvement) for a, b in pairs)
        rows.append(
            (
                *(name, f"{share:.2f}", f"{total:.2f}", f"{improved:.2f}"),
                f"{mean(a.improvement for a, _ in pairs):.2f}",
                f"{mean(a.scored for a, _ in pairs):.0%}",
                f"{mean(a.assigned for a, _ in pairs):.0%}",
                f"{mean(a.inner_step for a, _ in pairs):.0f}",
                " ".join(f"{ratio(a.share, b.share):.2f}" for a, b in pairs),
            )
        )
    titles = ("way", "share", "total", "improved", "% better", "scored", "a > r", "step")
    common.table((*titles, "share by seed"), rows)


def ratio(ours: float, public: float) -> float:
    return ours / public if public > 0 else math.nan
