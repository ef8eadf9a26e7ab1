"""Measure how much of a validator's time finds an upload to score: ours against the public way.

    python -m bench.freshness [--rounds 10]

A miner with a steady step time and upload time lives through rounds; the product's upload schedule
(``store/upload_schedule.py``) and round clock (``miner/uploads.py``) decide for ours. A
validator looks once a minute and scores what the protocol page says (sections 3 and 7): an upload
of the outer step that is judged now, its newest listed block at most half the blocks between two
rounds old, its file at most 4800 s. No model is trained; an hour takes milliseconds.

Files are written before they are sent, and ours wait for the gradient check, which runs in a
round. The two differ in their decision and in four facts of the public code. It publishes every
fifth inner step that finds the last upload done. It publishes inner step 0. A round kills an upload
under way instead of pausing it. It fetches a block when it needs it, not before.

*blind*: what no schedule can beat that sends as ours does and cannot foresee. It knows how late
calls may be and how long sending may take, and of each only what has happened.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bench.common import parser, table
from distributed_training.miner.round_clock import RoundClock
from distributed_training.protocol.scoring import SECONDS_PER_BLOCK, UPLOAD_AGE_LIMIT
from distributed_training.protocol.types import PublicationReport, Revision, StepReport
from distributed_training.store.upload_schedule import UploadSchedule

STEPS_OF_A_BLOCK = 2.4  # inner steps that one block's tokens last on four ranks
LEAD = 60.0  # seconds before it is needed that we ask for a block
LOOK_EVERY = 60.0  # seconds between a validator's looks at this miner
WARM_UP = 2  # rounds that do not count


@dataclass(frozen=True)
class World:
    """Seconds, but ``blocks``: between two rounds. ``pause``: that a round takes; ``late``: a call
    comes up to this long after it is due; ``write``: of a snapshot's files; ``check``: of its
    gradient."""

    blocks: int
    step: float
    upload: float
    pause: float = 300.0
    late: float = 120.0
    write: float = 30.0
    check: float = 15.0

    @property
    def period(self) -> float:
        return self.blocks * SECONDS_PER_BLOCK

    @property
    def half(self) -> float:
        return self.period / 2


ROWS = (
    World(750, 10, 300),
    World(750, 30, 300),
    World(750, 60, 300),
    World(750, 10, 900),
    World(750, 30, 900),
    World(750, 60, 900),
    World(750, 60, 1800),
    World(400, 30, 300),
    World(400, 10, 900),
    World(400, 30, 900),
    World(400, 60, 300),
    World(400, 60, 900),
)


@dataclass
class File:
    """Hold what an upload put into ``epoch-N``."""

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
    """``through_rounds``: an upload is checked before it begins, and a round pauses it instead of
    killing it."""

    decide: Decide
    done: Callable[[File, float], None]
    through_rounds: bool
    files: list[File] = field(default_factory=list)
    under_way: File | None = None

    def sent(self, now: float) -> None:
        """Take note of an upload that has ended by ``now``."""
        if self.under_way is not None and self.under_way.visible_at <= now:
            self.done(self.under_way, self.under_way.visible_at)
            self.under_way = None


def public_miner() -> Miner:
    def decide(
        outer: int, inner: int, now: float, busy: bool, block_age: float, next_round: float | None
    ) -> bool:
        return inner % 5 == 0 and not busy

    return Miner(decide, lambda file, now: None, through_rounds=False)


def our_miner(world: World) -> Miner:
    """The public preset's settings."""
    plan = UploadSchedule(
        upload_steps=5,
        minimum_inner_step=50,
        age_limit=UPLOAD_AGE_LIMIT,
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

    return Miner(decide, done, through_rounds=True)


@dataclass(frozen=True)
class OuterStep:
    """``began``: the round before it ended. ``steps``: the ends of inner steps, each with when the
    chain was at its newest listed block."""

    number: int
    began: float
    called: float
    steps: list[tuple[float, float]]


def life(
    world: World, *, lead: float, rounds: int, seed: int, all_steps: bool = False
) -> list[OuterStep]:
    """Steps and calls vary by some percent: a single beat would prove nothing.

    ``all_steps``: with those until a call can come at the latest.
    """
    dice, began, lived = random.Random(seed), world.pause, []
    for number in range(rounds):
        called = began + world.period + dice.uniform(0, world.late)
        now, left, asked, listed, steps = began, 0.0, began - lead, began - lead, []
        latest = began + world.period + world.late if all_steps else called
        while (now := now + world.step * dice.uniform(0.95, 1.05)) <= latest:
            left, listed = left - 1, asked
            if left <= 0:
                left, asked = left + STEPS_OF_A_BLOCK, now - lead
            steps.append((now, listed))
        lived.append(OuterStep(number, began, called, steps))
        began = called + world.pause
    return lived


def sent(world: World, taken: float, called: float, upload: float) -> float:
    """When ours is visible: a round holds up the sending, not the writing and the check."""
    begins = taken + world.write + world.check
    if begins >= called:
        return max(begins, called + world.pause) + upload
    return begins + upload + (world.pause if begins + upload > called else 0.0)


def live(world: World, miner: Miner, *, rounds: int, seed: int) -> Score:
    lived = life(world, lead=LEAD if miner.through_rounds else 0.0, rounds=rounds, seed=seed)
    now, dice = lived[0].began, random.Random(seed)
    clock = RoundClock(
        chain_block=lambda: int(now / SECONDS_PER_BLOCK),
        blocks_per_allreduce=world.blocks,
        last_allreduce_block=int(now / SECONDS_PER_BLOCK),
        clock=lambda: now,
    )

    def publish(outer: OuterStep, inner: int, listed: float) -> None:
        upload = world.upload * dice.uniform(0.9, 1.1)
        visible = now + world.write + upload
        if miner.through_rounds:
            visible = sent(world, now, outer.called, upload)
        elif visible > outer.called:
            visible = math.inf  # killed by the round
        miner.under_way = File(outer.number, inner, listed, visible)
        if visible < math.inf:
            miner.files.append(miner.under_way)

    for outer in lived:
        now = outer.began
        if outer.number:
            clock.round_ended()
        if not miner.through_rounds:
            publish(outer, 0, now)
        for inner, (ends, listed) in enumerate(outer.steps, 1):
            now = ends
            miner.sent(now)
            busy = miner.under_way is not None
            if miner.decide(outer.number, inner, now, busy, now - listed, clock.next_at()):
                publish(outer, inner, listed)
        now = outer.called
        clock.round_called()
        if not miner.through_rounds:
            miner.under_way = None
    return _judge(world, miner.files, lived)


def _judge(world: World, files: Sequence[File], lived: Sequence[OuterStep]) -> Score:
    looks, steps = 0, []
    for outer in lived[WARM_UP:]:
        now = outer.began
        while now < outer.called:
            judged = outer.number - 1 if now - outer.began < world.half else outer.number
            looks += 1
            seen = [f for f in files if f.outer_step == judged and f.visible_at <= now]
            newest = max(seen, key=lambda f: f.visible_at, default=None)
            if (
                newest is not None
                and now - newest.block_time <= world.half
                and now - newest.visible_at < UPLOAD_AGE_LIMIT.total_seconds()
            ):
                steps.append(newest.inner_step)
            now += LOOK_EVERY
    return Score(len(steps) / looks, sum(steps) / max(len(steps), 1))


_CALLS = 8  # moments in which a call may come, for the blind one
_HURRY = (0.933, 1.0, 1.067)  # times that sending may take, all as likely, of the usual one


def blind_share(world: World, *, rounds: int, seed: int) -> float:
    """Share of the looks that an upload covers, as expected by who decides best without foresight.

    Looks back from the last round. It knows when steps end; files of half a period age out first.
    """
    calls = world.period + world.late * (np.arange(_CALLS) + 0.5) / _CALLS
    lived = life(world, lead=LEAD, rounds=rounds, seed=seed, all_steps=True)
    after = np.zeros(1), np.array([math.inf])  # worth of the uplink free from a moment on
    for outer in reversed(lived):
        after = _blind_outer_step(world, np.array(outer.steps) - outer.began, calls, after)
    return float(after[0][0]) / rounds / float(calls.mean())


def _blind_outer_step(world: World, steps: Any, calls: Any, after: tuple[Any, Any]) -> Any:
    taken, listed = steps.T
    may = calls >= taken[:, None]  # [snapshot, call]
    visible = np.array(  # [hurry, snapshot, call]
        [[[sent(world, t, c, h * world.upload) for c in calls] for t in taken] for h in _HURRY]
    )
    until = (listed + world.half)[:, None]

    def judged(before: Any) -> Any:
        own = np.clip(before, world.half, calls) - world.half
        return own + np.clip(before - calls - world.pause, 0.0, world.half)

    free = np.searchsorted(after[1], visible - calls - world.pause)
    alone = np.maximum(0.0, judged(until) - judged(visible)) + after[0][free]
    worth = np.zeros(len(taken))
    for i in range(len(taken) - 1, -1, -1):
        chance = may[i] / max(1, may[i].sum())
        for visible_i, alone_i in zip(visible[:, i], alone[:, i], strict=True):
            following = slice(np.searchsorted(taken, visible_i[-1]), len(taken))
            ends = np.minimum(until[i], visible[:, following])
            both = np.maximum(0.0, judged(ends) - judged(visible_i)).mean(0)
            both = np.where(may[following], both + worth[following, None], alone_i)
            values = np.append((both * chance).sum(1), (alone_i * chance).sum())
            worth[i] += values.max() / len(_HURRY)
    best = np.maximum.accumulate(np.append(worth, 0.0)[::-1])[::-1]
    return best, taken


def compare(world: World, *, rounds: int, seed: int) -> tuple[Score, Score]:
    """(ours, the public miner's) under the same dice."""
    return (
        live(world, our_miner(world), rounds=rounds, seed=seed),
        live(world, public_miner(), rounds=rounds, seed=seed),
    )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=10)
    options = arguments.parse_args()
    rows = []
    for row, late in itertools.product(ROWS, (0.0, 120.0, 600.0)):
        world = replace(row, late=late)
        ours, public = compare(world, rounds=options.rounds, seed=1)
        blind = blind_share(world, rounds=options.rounds, seed=1)
        rows.append(
            (
                *(world.blocks, f"{world.step:.0f} s", f"{world.upload:.0f} s", f"{late:.0f} s"),
                *(f"{share:.1%}" for share in (blind, ours.share, public.share)),
                *(f"{score.inner_step:.0f}" for score in (ours, public)),
            )
        )
    titles = ("blocks", "step", "upload", "late", "blind", "ours", "public", "ours at", "public at")
    table(titles, rows)


if __name__ == "__main__":
    main()
