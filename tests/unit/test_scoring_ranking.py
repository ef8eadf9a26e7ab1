"""Intervals, chances, and where judgements such as these lead."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from distributed_training.protocol.scoring import ScoreBoard
from distributed_training.scoring.evaluator import Comparison, Judgement, t_quantile
from distributed_training.scoring.score_preview import rank
from distributed_training.scoring.upload import Cause


def comparison(before: list[float], after: list[float]) -> Comparison:
    return Comparison((7,), (100,) * len(before), tuple(before), tuple(after))


def judgement(uid: int, gain: float, *, assigned: float, spread: float = 0.0) -> Judgement:
    before = [5.0, 5.0]
    pair = [comparison(before, [5.0 - g - spread, 5.0 - g + spread]) for g in (gain, assigned)]
    return Judgement(uid, 0, *pair)


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (7, 2.365), (15, 2.131), (100, 1.984)],
)
def test_students_t(freedom: int, expected: float) -> None:
    assert t_quantile(freedom) == pytest.approx(expected, rel=0.005)


def test_an_interval_holds_the_truth_19_times_out_of_20() -> None:
    generator = random.Random(1)
    held = []
    for _ in range(2000):
        gains = [generator.gauss(0.3, 0.1) for _ in range(6)]
        found = comparison([4.0] * 6, [4.0 - g for g in gains])
        assert found.relative == pytest.approx(statistics.mean(gains) / 4)
        low, high = found.interval
        held.append(low <= 0.3 / 4 <= high)
    assert 0.93 < statistics.mean(held) < 0.97


def test_one_micro_batch_tells_no_interval() -> None:
    found = comparison([4.0], [3.0])
    assert found.relative == 0.25 and found.interval == (-math.inf, math.inf)
    assert Judgement(1, 0, found, found).chance is None


def test_the_chance_that_assigned_wins() -> None:
    assert judgement(1, 0.1, assigned=0.2).chance == 1.0
    assert judgement(1, 0.2, assigned=0.1).chance == 0.0
    unsure = judgement(1, 0.1, assigned=0.1, spread=0.05).chance
    assert unsure == pytest.approx(0.5)
    assert Judgement.reset(1, 0, Cause.STALE, "old").chance is None


def test_one_pass_is_the_validators_board() -> None:
    field = [
        judgement(1, 0.3, assigned=0.4),
        judgement(2, 0.2, assigned=0.1),
        Judgement.reset(3, 0, Cause.STALE, "old"),
    ]
    board = ScoreBoard([1, 2, 3])
    board.update_round(
        random={1: (5.0, 4.7), 2: (5.0, 4.8), 3: (0.0, 0.0)},
        assigned={1: (5.0, 4.6), 2: (5.0, 4.9), 3: (0.0, 0.0)},
    )
    found = rank(field, passes=1)
    for uid, standing in found.items():
        assert standing.rating == pytest.approx(board.random_score(uid), abs=1e-9)
        assert standing.assigned == board.assigned_score(uid)
    assert [s.uid for s in found.values()] == [1, 2, 3]
    assert [s.rank for s in found.values()] == [1, 2, 3]


def test_many_passes_tell_who_is_paid() -> None:
    field = [
        judgement(1, 0.30, assigned=0.40, spread=0.02),
        judgement(2, 0.20, assigned=0.30, spread=0.02),
        judgement(3, 0.35, assigned=0.30, spread=0.02),  # the best, but assigned does not win
    ]
    found = rank(field, passes=40)
    assert found == rank(field, passes=40)  # the same seed, the same figures
    assert [found[uid].rank for uid in (3, 1, 2)] == [1, 2, 3]
    assert found[1].share > 0.8 and found[3].assigned < 0.1
    assert sum(s.share for s in found.values()) == pytest.approx(1.0)
    assert found[1].assigned > 0.8
