"""``kill -9`` of processes of running miners: told at once, mended, everybody in the next round.

The long one is ``bench/kills.py`` for six minutes; the short one kills three in a row.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bench import kills

pytestmark = [pytest.mark.slow]


@pytest.mark.timeout(300)
def test_a_few_kills_and_a_round_with_everybody(tmp_path: Path) -> None:
    outcome = kills.run(
        tmp_path,
        seconds=30,
        every=8,
        kinds=("data worker", "p2pd", "rank"),
        ranks=(1,),
        seed=3,
        blocks=25,
    )
    kills.show(outcome)
    assert outcome.problems == []
    assert len(outcome.kills) >= 3
    assert max(k.told_after for k in outcome.kills if k.told_after is not None) < 5
    assert outcome.distance


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_six_minutes_of_kills_of_every_kind(tmp_path: Path) -> None:
    outcome = kills.run(tmp_path, seconds=360, every=15, seed=11)
    kills.show(outcome)
    assert outcome.problems == []
    killed = Counter(kill.kind for kill in outcome.kills)
    assert len(killed) >= 5, killed
    for kill in outcome.kills:
        if kill.kind not in kills.ENDS_RANKS and kill.told_after is not None:
            assert kill.told_after < 5, (kill.kind, kill.told_after)
