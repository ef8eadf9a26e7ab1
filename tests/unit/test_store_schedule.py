"""When snapshots are taken: single decisions, and whole days simulated by bench/freshness."""

from __future__ import annotations

import dataclasses
import itertools
import math
from datetime import timedelta

import pytest

from bench.freshness import ROWS, World, blind_share, compare
from distributed_training.protocol.types import PublicationReport, Revision, StepReport
from distributed_training.store.upload_schedule import UploadSchedule

pytestmark = pytest.mark.timeout(60)

# What the public miner reached where its code was simulated with a validator of its own
# (blocks between rounds, step, upload): share of sweeps that scored it.
MEASURED = {(750, 10, 900): 0.91, (750, 60, 900): 0.91, (400, 10, 900): 0.85}
MEASURED |= {(400, 30, 900): 0.77, (400, 60, 300): 0.92, (400, 60, 900): 0.86}


# Seconds that a round takes.
@pytest.mark.parametrize("pause", [pytest.param(0.0, marks=pytest.mark.long), 840.0])
@pytest.mark.parametrize("row", ROWS, ids=lambda w: f"{w.blocks}-{w.step:.0f}-{w.upload:.0f}")
def test_validators_find_an_upload_at_least_as_often_as_the_public_miner_s(
    row: World, pause: float
) -> None:
    ours, public = compare(dataclasses.replace(row, pause=pause), rounds=6, seed=3)
    assert ours.share >= public.share
    if public.share >= 0.9:
        assert ours.share >= 0.9
    assert ours.inner_step >= public.inner_step, "and it is trained no less"
    if pause == 0.0:  # as it was simulated there
        measured = MEASURED.get((row.blocks, int(row.step), int(row.upload)), 0.0)
        assert ours.share >= max(measured, 0.9)


@pytest.mark.parametrize(("step", "upload"), [(30, 300), (30, 900), (60, 900)])
@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.long), 120])
def test_the_schedule_comes_near_the_best_without_foresight(
    step: float, upload: float, late: float
) -> None:
    world = World(400, step, upload, late=late)
    ours, _ = compare(world, rounds=10, seed=1)
    blind = blind_share(world, rounds=10, seed=1)
    assert blind + 0.015 >= ours.share >= blind - 0.02


def schedule(every: int = 5, **changes: object) -> UploadSchedule:
    values: dict = {
        "upload_steps": every,
        "minimum_inner_step": 50,
        "age_limit": timedelta(seconds=4800),
    }
    return UploadSchedule(**values | changes)


def report(
    inner: int, *, seconds: float = 10.0, outer: int = 1, skipped: bool = False
) -> StepReport:
    return StepReport(outer, inner, 3.0, 1e-4, 1, 1, seconds, 0.0, 1, skipped=skipped)


def ended(outer: int, inner: int, at: float, seconds: float, ok: bool = True) -> PublicationReport:
    return PublicationReport(Revision(5, outer, inner), ok, seconds, 1, "", at)


def run(
    plan: UploadSchedule, steps: range, *, step: float, upload: float, start: float = 0.0
) -> tuple[list[int], list[str]]:
    """Drive it as the loop would; return the inner steps that it chose and its lines."""
    now, chosen, said = start, [], []
    finish: tuple[float, int] | None = None
    for inner in steps:
        now += step
        if finish and now >= finish[0]:
            plan.published(ended(1, finish[1], finish[0], upload))
            finish = None
        decision = plan.step(report(inner, seconds=step), now)
        said += [text for _, text in decision.lines]
        if decision.snapshot:
            chosen.append(inner)
            finish = (now + upload, inner)
    return chosen, said


def test_regular_uploads_begin_at_the_minimum_and_never_overlap() -> None:
    chosen, said = run(schedule(5), range(1, 100), step=10, upload=70)
    assert chosen == [50, 60, 70, 80, 90]
    assert sum("UPLOAD BLOCKED: inner_step (15)" in text for text in said) == 1
    assert any("Previous upload still in progress" in text for text in said)


@pytest.mark.parametrize(("every", "first"), [(1, 50), (3, 51), (7, 56), (60, 60)])
def test_upload_steps_bounds_the_frequency(every: int, first: int) -> None:
    chosen, _ = run(schedule(every), range(1, 400), step=10, upload=5)
    assert chosen[0] == first
    assert all(b - a >= every for a, b in itertools.pairwise(chosen))


@pytest.mark.slow
@pytest.mark.parametrize("every", [5, 20, 60])
@pytest.mark.parametrize("step", [10.0, 30.0, 60.0, 80.0])
@pytest.mark.parametrize("upload", [50.0, 300.0, 900.0])
@pytest.mark.parametrize("known", [True, False])
def test_over_many_rounds_a_publication_is_never_too_old(
    every: int, step: float, upload: float, known: bool
) -> None:
    """Rounds of 4800 s, 700 s of which nobody trains; each begins again at inner step 0."""
    plan = schedule(every)
    oldest, warned, too_old_at = 0.0, 0.0, 0.0
    now, finish = 0.0, (0.0, 0, 0)
    for outer in range(8):
        ends = now + 4100.0
        if known:
            plan.expect_round(ends, 4800.0)
        inner = 0
        while now + step <= ends:
            now += step
            inner += 1
            if finish[0] and now >= finish[0]:
                plan.published(ended(finish[1], finish[2], finish[0], upload))
                finish = (0.0, 0, 0)
            age = plan.repo_age(now)
            if age is not None:
                oldest = max(oldest, age)
                if age > 4800 and not too_old_at:
                    too_old_at = now
            decision = plan.step(report(inner, seconds=step, outer=outer), now)
            said = " ".join(text for _, text in decision.lines)
            if not warned and ("Step 50" in said or "give --neuron.upload_steps" in said):
                warned = now
            if decision.snapshot:
                finish = (now + upload, outer, inner)
        now = ends + 700.0
    assert oldest > 0
    if step <= 60:
        assert oldest <= 4800
    if too_old_at:  # 50 steps take nearly as long as the limit allows
        assert 0 < warned < too_old_at


def test_after_a_restart_the_age_of_the_publication_counts() -> None:
    plan = schedule(60, published_at=0.0)
    plan.upload_seconds = 300.0
    chosen, _ = run(plan, range(62, 200), step=60, upload=300, start=3600.0)
    # The next multiple would be step 120 at 7140 s; the one here ends before 4800 - 240 s, also if
    # it takes a third longer.
    first = chosen[0]
    assert 3600 + 60 * (first - 61) + 400 <= 4560 < 3600 + 60 * (first - 60) + 400


@pytest.mark.parametrize(
    ("late", "expected"), [(-10, 1010.0), (0, 1020.0), (74, 1020.0), (76, math.inf)]
)
def test_a_late_round_is_expected_at_each_step_for_an_eighth_of_the_period(
    late: float, expected: float
) -> None:
    plan = schedule()
    plan.step(report(1, seconds=20.0), 990.0)
    plan.expect_round(1000.0 - late, 600.0)
    assert plan._rounds(1000.0).next_at == expected


def test_a_skipped_step_is_not_published() -> None:
    plan = schedule(5)
    assert not plan.step(report(50, skipped=True), 500.0).snapshot
    assert plan.step(report(55), 550.0).snapshot


def test_a_failed_upload_frees_the_way_and_is_no_publication() -> None:
    plan = schedule(5)
    assert plan.step(report(50), 500.0).snapshot
    assert not plan.step(report(55), 550.0).snapshot
    plan.published(ended(1, 50, 560.0, 60.0, ok=False))
    assert plan.repo_age(600.0) is None
    assert "nothing uploaded yet" in plan.repo_age_line(600.0)
    for inner in range(56, 60):
        assert not plan.step(report(inner), 10.0 * inner).snapshot
    assert plan.step(report(60), 600.0).snapshot
    plan.published(ended(1, 60, 700.0, 60.0))
    assert plan.repo_age_line(750.0) == "Repo age: 50s of 4800s"
    assert plan.upload_seconds == 100.0


def test_a_snapshot_that_was_not_taken_counts_as_not_asked_for() -> None:
    """After a restart, with a bucket that presses soon."""
    plan = schedule(60, published_at=0.0)
    now, asked = 3500.0, []
    for inner in range(46, 110):
        now += 30.0
        if plan.step(report(inner, seconds=30.0), now).snapshot:
            asked.append(inner)
            if len(asked) == 1:
                plan.cancelled()
    assert asked[0] == 60 and now > 4560
    assert 3500 + 30 * (asked[1] - 45) <= 4560 + 30, "in time, although the first was not taken"


def test_the_schedule_warns_in_time_with_the_reason() -> None:
    plan = schedule(500)
    _, said = run(plan, range(1, 4), step=20, upload=10)
    (remedy,) = [text for text in said if "--neuron.upload_steps 50 or less" in text]
    assert "Uploads will score 0" in remedy and "upload_steps = 50)" in remedy
    # The figures are others at each step and in each outer step, and what to do is the same.
    for outer, inner in itertools.product((1, 2, 3), range(4, 40)):
        seconds = 20 + (inner % 7) / 100
        decision = plan.step(report(inner, outer=outer, seconds=seconds), 1e3 * outer + inner)
        assert not any("Uploads will score 0" in text for _, text in decision.lines)
    plan = schedule(5, published_at=0.0)
    decision = plan.step(report(1, seconds=10), 4600.0)
    assert any("Repo age is 4600s" in text for _, text in decision.lines)
    assert plan.step(report(2, seconds=10), 4610.0).lines == ()  # once, not each step
    _, said = run(schedule(5), range(1, 4), step=120, upload=10)
    assert any("Step 50" in text for text in said)


def test_a_first_step_that_compiles_is_no_pace() -> None:
    plan = schedule(5)
    said = plan.step(report(1, seconds=600), 600.0).lines
    for inner in range(2, 40):
        said += plan.step(report(inner, seconds=10), 600.0 + 10 * inner).lines
    assert all("UPLOAD BLOCKED" in text for _, text in said) and plan.step_seconds == 10


def test_the_minimum_is_lowered_where_validators_would_judge_nothing_and_it_is_said() -> None:
    plan = schedule(5)
    plan.upload_seconds = 300.0
    plan.expect_round(4800.0, 4800.0)
    chosen, said = run(plan, range(1, 50), step=60, upload=300)
    first = chosen[0]
    assert 60 * first + 300 <= 2400, "visible before its outer step is judged"
    lowered = [text for text in said if "not 50" in text]
    assert len(lowered) == 1
    assert "refuse only inner step 0" in lowered[0]
    blocked = [text for text in said if "UPLOAD BLOCKED" in text]
    assert blocked and all("minimum (50)" not in text for text in blocked), "true words"
    assert "inner_step (5) < minimum (30)" in blocked[0]


def test_the_age_of_a_publication_is_by_the_stores_clock() -> None:
    plan = schedule(5)
    assert plan.step(report(50), 500.0).snapshot
    done = dataclasses.replace(ended(1, 50, 1500.0, 1000.0), age_seconds=900.0)
    plan.published(done)  # a store that dates an object by when its upload began
    assert plan.repo_age(1500.0) == 900.0


def test_an_upload_through_a_round_does_not_count_as_slow() -> None:
    plan = schedule(5)
    plan.upload_seconds = 300.0
    assert plan.step(report(50), 500.0).snapshot
    plan.step(report(1, outer=2), 1510.0)  # the round took 1000 s
    plan.published(ended(1, 50, 1800.0, 1300.0))
    assert plan.upload_seconds == 300.0


@pytest.mark.parametrize("ok", [True, False])
def test_an_upload_that_the_start_found_in_the_journal_of_an_empty_bucket(ok: bool) -> None:
    """The first publication of all was interrupted by a restart."""
    plan = schedule(10, minimum_inner_step=2)
    plan.expect_round(5000.0, 9000.0)
    assert not plan.step(report(11, outer=3), 110.0).snapshot
    plan.published(PublicationReport(Revision(5, 3, 10), ok, 100.0, 10, "", 115.0))
    assert plan.repo_age(120.0) == (5.0 if ok else None)
    asked = [plan.step(report(n, outer=3), 10.0 * n).snapshot for n in range(12, 400)]
    assert any(asked)


def test_the_last_upload_before_a_round_is_taken_late_and_goes_through_it() -> None:
    plan = schedule(5, published_at=0.0)
    plan.upload_seconds = 900.0
    plan.expect_round(9000.0, 9000.0)
    chosen, _ = run(plan, range(60, 899), step=10, upload=900, start=600.0)
    *_, before, last = [10 * inner + 10 for inner in chosen]
    assert 8900 <= last < 9000
    assert before + 900 <= last, "the one before is visible and counts until then"


def test_upload_counts_for_its_own_outer_step() -> None:
    plan = schedule(5)
    plan.expect_round(9000.0, 9000.0)
    assert plan.step(report(50), 500.0).snapshot
    plan.published(ended(1, 50, 1000.0, 500.0))
    assert plan.counts(1, 4900.0) and not plan.counts(1, 5100.0) and not plan.counts(2, 4900.0)
