#!/usr/bin/env python3
"""How much of a validator's time finds an upload that it can score: ours against the public way.

    python -m bench.freshness [--rounds 40] [--pause 300] [--seed 1]

A miner with a steady step time and upload time lives through rounds; the real upload schedule
(``store/upload_schedule.py``) decides for ours. A validator looks once a minute and scores what the
protocol page says (sections 3 and 7): an upload of the outer step that is judged now, its newest
listed block at most half the blocks between two rounds old, its file at most 4800 s. No model is
trained; an hour takes milliseconds.

What differs between the two is their decision and three facts of the public code: it publishes
every fifth inner step that finds the last upload done, a round kills an upload under way instead of
pausing it, and it fetches a block when it needs one instead of some seconds before.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from distributed_training.protocol import schedule
from distributed_training.protocol.types import PublicationReport, Revision, StepReport
from distributed_training.store.upload_schedule import UploadSchedule

STEPS_OF_A_BLOCK = 2.4  # inner steps that one block's tokens last on four ranks
LEAD = 60.0  # seconds before it is needed that we ask for a block
LOOK_EVERY = 60.0  # seconds between a validator's looks at this miner
WARM_UP = 2  # rounds that do not count


@dataclass(frozen=True)
class World:
    """Seconds, but ``blocks``: between two rounds. ``pause``: that a round takes."""

    blocks: int
    step: float
    upload: float
    pause: float = 300.0

    @property
    def period(self) -> float:
        return self.blocks * schedule.SECONDS_PER_BLOCK


ROWS = (
    World(750, 10, 300),
    World(750, 30, 300),
    World(750, 60, 300),
    World(750, 10, 900),
    World(750, 30, 900),
    World(750, 60, 900),
    World(750, 60, 1800),
    World(400, 10, 900),
    World(400, 30, 900),
    World(400, 60, 300),
    World(400, 60, 900),
)


@dataclass
class File:
    """What a publication put into ``epoch-N``."""

    outer_step: int
    inner_step: int
    block_time: float  # when the chain was at the newest listed block
    visible_at: float


@dataclass(frozen=True)
class Score:
    """``share`` of the looks that found an upload to score, and its mean inner step."""

    share: float
    inner_step: float


# (outer step, inner step, now, upload under way, age of the newest listed block, next round)
Decide = Callable[[int, int, float, bool, float, float | None], bool]


@dataclass
class Miner:
    """``through_rounds``: an upload is paused by a round, not killed. ``lead``: seconds before it
    is needed that a block is asked for."""

    decide: Decide
    done: Callable[[File, float], None]
    through_rounds: bool
    lead: float
    files: list[File] = field(default_factory=list)
    under_way: File | None = None


def public_miner() -> Miner:
    def decide(
        outer: int, inner: int, now: float, busy: bool, block_age: float, next_round: float | None
    ) -> bool:
        return inner % 5 == 0 and not busy

    return Miner(decide, lambda file, now: None, through_rounds=False, lead=0.0)


def our_miner(world: World, upload_steps: int = 5) -> Miner:
    """The public preset's settings."""
    plan = UploadSchedule(
        upload_steps=upload_steps,
        minimum_inner_step=50,
        age_limit=schedule.UPLOAD_AGE_LIMIT,
        slack=timedelta(seconds=240),
    )

    def decide(
        outer: int, inner: int, now: float, busy: bool, block_age: float, next_round: float | None
    ) -> bool:
        plan.expect_round(next_round, world.period)
        report = StepReport(outer, inner, 3.0, 1e-4, 1, 1, world.step, 0.0, 1)
        return plan.step(report, now, block_age=block_age).snapshot

    def done(file: File, now: float) -> None:
        revision = Revision(5, file.outer_step, file.inner_step)
        plan.published(PublicationReport(revision, True, world.upload, 1, "", now))

    return Miner(decide, done, through_rounds=True, lead=LEAD)


def live(world: World, miner: Miner, *, rounds: int, seed: int) -> Score:
    """Steps, uploads and calls vary by some percent: one beat alone would prove nothing."""
    dice = random.Random(seed)
    calls = [0.0]
    for _ in range(rounds):
        calls.append(calls[-1] + world.period + dice.uniform(0, 120))  # a sweep ends first
    for outer, (called, ends) in enumerate(itertools.pairwise(calls)):
        _one_outer_step(world, miner, outer, called, ends, dice)
    return _judge(world, miner.files, calls)


def _one_outer_step(
    world: World, miner: Miner, outer: int, called: float, ends: float, dice: random.Random
) -> None:
    """From a round's call to the next one's, which is when training stops."""
    now = called + world.pause
    inner, left = 0, 0.0  # steps that the block under way still lasts
    asked_at = listed = now - miner.lead
    while True:
        took = world.step * dice.uniform(0.95, 1.05)
        if now + took > ends:
            break
        left -= 1
        now, inner, listed = now + took, inner + 1, asked_at
        if left <= 0:
            left, asked_at = left + STEPS_OF_A_BLOCK, now - miner.lead
        if miner.under_way is not None and miner.under_way.visible_at <= now:
            miner.done(miner.under_way, miner.under_way.visible_at)
            miner.under_way = None
        due = called + world.period
        next_round = due if now < due else None
        if miner.decide(outer, inner, now, miner.under_way is not None, now - listed, next_round):
            visible_at = now + world.upload * dice.uniform(0.9, 1.1)
            miner.under_way = File(outer, inner, listed, visible_at)
            miner.files.append(miner.under_way)
    if miner.under_way is not None and miner.under_way.visible_at > ends:
        if miner.through_rounds:
            miner.under_way.visible_at += world.pause
        else:
            miner.files.pop()
            miner.under_way = None


def _judge(world: World, files: Sequence[File], calls: Sequence[float]) -> Score:
    looks, steps = 0, []
    half = world.period / 2
    for outer in range(WARM_UP, len(calls) - 1):
        now = calls[outer] + world.pause
        while now < calls[outer + 1]:
            judged = outer - 1 if now - calls[outer] < half else outer
            looks += 1
            seen = [f for f in files if f.outer_step == judged and f.visible_at <= now]
            newest = max(seen, key=lambda f: f.visible_at, default=None)
            if (
                newest is not None
                and now - newest.block_time <= half
                and now - newest.visible_at < schedule.UPLOAD_AGE_LIMIT.total_seconds()
            ):
                steps.append(newest.inner_step)
            now += LOOK_EVERY
    return Score(len(steps) / looks, sum(steps) / max(len(steps), 1))


def compare(world: World, *, rounds: int, seed: int, upload_steps: int = 5) -> tuple[Score, Score]:
    """(ours, the public miner's) under the same dice."""
    return (
        live(world, our_miner(world, upload_steps), rounds=rounds, seed=seed),
        live(world, public_miner(), rounds=rounds, seed=seed),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--pause", type=float, default=300.0, help="seconds that a round takes")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print("blocks between rounds, step, upload | looks scored: ours  public  ratio | step judged")
    for row in ROWS:
        world = World(row.blocks, row.step, row.upload, arguments.pause)
        ours, public = compare(world, rounds=arguments.rounds, seed=arguments.seed)
        print(
            f"{world.blocks:21} {world.step:3.0f} s {world.upload:6.0f} s |"
            f"{ours.share:19.1%} {public.share:7.1%} {ours.share / public.share:6.2f} |"
            f"{ours.inner_step:6.0f} {public.inner_step:4.0f}"
        )


if __name__ == "__main__":
    main()
