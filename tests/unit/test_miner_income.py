"""The verdict on a miner's income: the first thing in the way, else what the chain pays."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from distributed_training.chain.base import Neuron
from distributed_training.miner import events as ev
from distributed_training.miner.events import MinerState, Mode
from distributed_training.miner.income import (
    Facts,
    Income,
    Standing,
    Verdict,
    judge_income,
    standing,
)
from distributed_training.telemetry.metrics import METRICS

pytestmark = pytest.mark.timeout(30)

NEURONS = (
    Neuron(0, "master", validator_permit=True, last_update=900, incentive=0.5),
    Neuron(1, "me", incentive=0.2, emission=0.4),
    Neuron(2, "other", incentive=0.3),
    Neuron(3, "equal", incentive=0.2),
)
WELL = Facts(
    standing=standing(NEURONS, "me"),
    running=9000,
    upload_age=60,
    age_limit=4800,
    blocks_left=10,
    behind=None,
    silent=60,
    patience=600,
    round_period=9000,
)
PAID_IN_NOTHING = Standing(0.2, 0.0, 2, 3, 900)  # by a registry
UNPAID = replace(WELL, standing=Standing(0.0, 0.0, 3, 3, 900))


def test_validators_are_no_rivals_and_equal_miners_share_a_place() -> None:
    assert standing(NEURONS, "me") == Standing(0.2, 0.4, rank=2, miners=3, weights_block=900)
    assert standing(NEURONS, "stranger") is None


@pytest.mark.parametrize(
    ("facts", "verdict", "words", "bad"),
    [
        (WELL, Verdict.EARNING, "rank 2 of 3 miners, emission 0.4 per tempo", False),
        (replace(WELL, standing=PAID_IN_NOTHING), Verdict.EARNING, "rank 2 of 3 miners", False),
        (UNPAID, Verdict.NOT_YET, "uploads count; the weights", False),
        (replace(WELL, standing=None), Verdict.UNKNOWN, "does not show", False),
        (replace(WELL, upload_age=None), Verdict.NOTHING_UPLOADED, "UPLOAD BLOCKED", True),
        (
            replace(UNPAID, upload_age=None, running=60),
            Verdict.NOTHING_UPLOADED,
            "in the 60 s since the start",
            False,
        ),
        (
            replace(UNPAID, upload_age=None, running=0.2),
            Verdict.NOTHING_UPLOADED,
            "uploaded since the start",
            False,
        ),
        (replace(WELL, upload_age=4900), Verdict.RESET, "82 min old", True),
        (replace(WELL, blocks_left=-1.0), Verdict.RESET, "1 block too old", True),
        (replace(WELL, behind=300), Verdict.EARNING, "incentive", False),
        (replace(WELL, behind=3600), Verdict.BEHIND, "60 min", True),
        (replace(WELL, silent=9001), Verdict.NOT_CALLED, "2.5 h", True),
    ],
)
def test_the_first_thing_in_the_way_is_named(
    facts: Facts, verdict: Verdict, words: str, bad: bool
) -> None:
    found = judge_income(facts)
    assert found[0] is verdict and found[2] is bad
    assert words in found[1]
    still_paid = facts.standing == WELL.standing and verdict is not Verdict.EARNING
    assert ("Still paid" in found[1]) == (still_paid and facts.standing is not None)


def test_a_change_is_logged_at_once_and_the_rest_once_an_hour(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class View:
        def neurons(self) -> tuple[Neuron, ...]:
            return NEURONS

        def age(self) -> timedelta:
            return timedelta()

    now, age, written = [0.0], [60.0], []
    income = Income(
        hotkey="me",
        chain=View(),  # type: ignore[arg-type]
        limits={
            "publication_age_seconds": lambda: age[0],
            "publication_age_limit_seconds": lambda: 4800.0,
            "block_list_blocks_left": lambda: None,
        },
        called_at=lambda: now[0],
        round_period=lambda: 9000.0,
        patience=600.0,
        record=lambda kind, **fields: written.append({"kind": kind, **fields}),
        clock=lambda: now[0],
    )
    state = MinerState(mode=Mode.TRAINING, outer_step=3, global_due=0.0)

    def measured() -> dict[str, Any]:
        return {name: measure() for name, measure in income.gauges().items()}

    assert measured()["earning"] is None and measured().keys() <= set(METRICS)
    with caplog.at_level(logging.INFO):
        for second in range(7100):
            now[0] = float(second)
            age[0] = 5000.0 if second >= 7000 else 60.0
            income.on_event(ev.Tick(now[0]), state)
    # By number: hivemind, once imported, gives levels other names.
    lines = [(r.levelno, r.message.split(":")[1].strip()) for r in caplog.records]
    well = (logging.INFO, "earning")
    assert lines == [well, well, (logging.WARNING, "reset")]
    assert len(written) == pytest.approx(7100 / 300 + 1, abs=2)
    assert written[-1]["verdict"] == "reset" and written[-1]["rank"] == 2
    assert measured()["earning"] == 0 and measured()["incentive"] == 0.2
    income.on_event(ev.GlobalEpochSeen(4, now[0]), state)
    age[0], now[0] = 60.0, 9000.0
    income.on_event(ev.Tick(now[0]), state)
    assert written[-1]["verdict"] == "behind the network"
    income.on_event(ev.Loaded(4), state)
    now[0] += 20
    income.on_event(ev.Tick(now[0]), state)
    assert written[-1]["verdict"] == "earning"
