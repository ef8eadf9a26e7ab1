"""A wall clock that is set, by NTP or by hand, must not move the times that are due."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest

from distributed_training.miner.round_clock import RoundClock


class Chain:
    def __init__(self) -> None:
        self.block, self.now = 1000, 50.0

    def clock(self, last: int | None, blocks: int = 400, **more: Any) -> RoundClock:
        return RoundClock(
            chain_block=lambda: self.block,
            blocks_per_allreduce=blocks,
            last_allreduce_block=last,
            clock=lambda: self.now,
            **more,
        )

    def pass_blocks(self, count: int, seconds: float) -> None:
        self.block += count
        self.now += count * seconds


def test_the_pace_is_that_of_the_last_blocks_not_of_all_since_the_start() -> None:
    chain = Chain()
    clock = chain.clock(1000)
    for _ in range(40):
        chain.pass_blocks(10, 12.0)
        clock.next_at()
    clock.round_ended()
    assert clock.next_at() == pytest.approx(chain.now + 400 * 12)
    for _ in range(20):
        chain.pass_blocks(10, 30.0)
        clock.next_at()
    assert clock.next_at() == pytest.approx(chain.now + 200 * 30)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("pace", [12.0, 12.4, 24.0])
def test_looks_at_uneven_moments_do_not_move_the_round(seed: int, pace: float) -> None:
    """A block is read up to 6 s after it was made, and the pace asked for when a step ends."""
    draw = random.Random(seed)
    chain = Chain()
    begin, first = chain.now - pace * draw.random(), chain.block

    def block() -> int:
        return first + int((chain.now - draw.uniform(0, 6) - begin) // pace)

    clock = RoundClock(
        chain_block=block,
        blocks_per_allreduce=750,
        last_allreduce_block=1000,
        clock=lambda: chain.now,
    )
    error = []
    while chain.now < begin + 740 * pace:
        chain.now += draw.uniform(20, 90)
        if chain.now > begin + 30 * pace:
            expected = clock.next_at()
            assert expected is not None
            error.append(abs(expected - (begin + 750 * pace)))
    assert max(error) < 60 if pace == 12.0 else max(error) < 600
    assert error[-1] < 60


def test_a_chain_that_does_not_answer_leaves_the_due_round_unknown() -> None:
    silence = timedelta()
    clock = Chain().clock(1000, chain_age=lambda: silence)
    assert clock.due() is False
    silence = timedelta(minutes=6)
    assert clock.due() is None


def test_a_round_without_this_miner_begins_the_period_again() -> None:
    chain = Chain()
    clock = chain.clock(1000)
    chain.pass_blocks(500, 12.0)
    assert clock.next_at() is None and clock.due() is True
    assert clock.expected_at() == chain.now - 100 * 12, "an alert sees how long it is overdue"
    clock.round_heard_of(1410)
    assert remaining(clock, chain) == pytest.approx(310)
    assert clock.due() is False
    for nothing_new in (None, 900, chain.block + 1000):
        clock.round_heard_of(nothing_new)
        assert remaining(clock, chain) == pytest.approx(310)


@pytest.mark.parametrize("ahead", [1, 900, 10**9])
def test_a_last_round_in_the_future_is_no_last_round(ahead: int) -> None:
    """A wrong figure in the global state, or a chain that was set back behind it."""
    chain = Chain()
    clock = chain.clock(chain.block + ahead)
    assert (clock.due(), clock.next_at(), clock.expected_at()) == (None, None, None)
    clock.round_called()  # which tells no period
    assert clock.seconds() == 400 * 12
    clock.round_heard_of(900)  # smaller, and the first that can be true
    assert clock.due() is False and remaining(clock, chain) == pytest.approx(300)
    chain.pass_blocks(400, 12.0)
    assert clock.due() is True and clock.expected_at() == pytest.approx(chain.now - 100 * 12)


def test_a_chain_that_begins_again_is_measured_again() -> None:
    chain = Chain()
    clock = chain.clock(1000)
    chain.block = 3
    clock.round_ended()
    clock.next_at()
    chain.pass_blocks(10, 1.0)
    assert clock.next_at() == pytest.approx(chain.now + 390)


def test_a_round_is_missed_when_it_is_overdue_or_was_held_without_this_miner() -> None:
    chain = Chain()
    assert not chain.clock(None).missed()
    clock = chain.clock(1000)
    chain.pass_blocks(425, 12.0)
    assert not clock.missed()
    chain.pass_blocks(1, 12.0)
    assert clock.missed()
    clock.round_heard_of(1410)  # its global state: the period begins again, the miner was not there
    assert clock.missed()
    live(clock, chain, [384])
    assert not clock.missed()


@pytest.mark.parametrize("averaged", [True, False])
def test_the_state_of_a_round_with_this_miner_is_no_missed_round(averaged: bool) -> None:
    chain = Chain()
    clock = chain.clock(800)
    clock.round_called()
    chain.pass_blocks(10, 12.0)
    clock.round_ended(averaged=averaged)
    chain.pass_blocks(40, 12.0)
    clock.round_heard_of(1030)  # the validator's round took 20 blocks longer
    assert not clock.missed() and remaining(clock, chain) == pytest.approx(380)
    chain.pass_blocks(400, 12.0)
    clock.round_heard_of(1440)
    assert clock.missed()
    clock.round_heard_of(1445)  # which does not make good for it
    assert clock.missed()


def test_block_lists_are_judged_by_the_networks_file_and_not_by_calls() -> None:
    chain = Chain()
    clock = chain.clock(1000)
    for _ in range(3):
        chain.pass_blocks(560, 12.0)
        clock.round_called()
        clock.round_ended()
    assert clock.seconds() == 560 * 12.0 and clock.half() == 200


def test_the_networks_first_success_brings_the_later_period() -> None:
    chain = Chain()
    clock = chain.clock(1000, blocks=400, later=750)
    chain.pass_blocks(400, 12.0)
    clock.round_called()
    clock.round_ended(averaged=False)
    assert clock.half() == 200
    clock.round_ended()
    assert clock.half() == 375 and clock.next_at() == pytest.approx(chain.now + 750 * 12)


def test_a_round_may_be_called_a_tenth_of_the_period_early() -> None:
    chain = Chain()
    clock = chain.clock(1000)
    assert clock.half() == 200, "blocks that validators still take"
    chain.pass_blocks(359, 12.0)
    assert clock.due() is False
    chain.pass_blocks(1, 12.0)
    assert clock.due() is True
    unknown = chain.clock(None)
    assert unknown.due() is None and unknown.next_at() is None


def test_a_validator_that_starts_again_may_call_after_the_shorter_period() -> None:
    chain = Chain()
    clock = chain.clock(1000, 750, shortest_period=400)
    chain.pass_blocks(400, 12.0)
    assert clock.due() is True and clock.next_at() == chain.now + 350 * 12


def live(clock: RoundClock, chain: Chain, gaps: list[int]) -> None:
    """Call rounds ``gaps`` blocks after the end of the one before; each takes 10 blocks."""
    for gap in gaps:
        chain.pass_blocks(gap, 12.0)
        clock.round_called()
        chain.pass_blocks(10, 12.0)
        clock.round_ended()


def remaining(clock: RoundClock, chain: Chain) -> float:
    """Blocks until the next call."""
    at = clock.next_at()
    assert at is not None
    return (at - chain.now) / 12


@pytest.mark.parametrize(
    ("gaps", "period"),
    [
        ([], 400),
        ([750], 400),  # one may be an accident
        ([750, 760], 750),
        ([200, 205], 200),
        ([750, 400, 752], 750),  # a validator that started again called once after 400
        ([400, 401, 1201], 400),  # two calls were missed
        ([3, 4, 2], 400),  # the validator tried again: no period
        ([750, 751, 500, 502], 500),  # it was changed
        ([100_000, 100_000], 400),  # this miner was away
    ],
)
def test_the_period_is_learnt_from_two_calls_that_agree(gaps: list[int], period: int) -> None:
    chain = Chain()
    clock = chain.clock(1000)
    live(clock, chain, gaps)
    assert remaining(clock, chain) == pytest.approx(period)
    assert clock.seconds() == period * 12
