"""The gate, the schedule, and the disk check: pure functions as tables."""

from __future__ import annotations

import itertools
from datetime import timedelta
from pathlib import Path

import pytest

from distributed_training.protocol.types import PublicationReport, Revision, StepReport
from distributed_training.store.gate import disk_allows, preview_warning, upload_due, upload_gate
from distributed_training.store.upload import MIB, part_size_for
from distributed_training.store.upload_schedule import UploadSchedule

pytestmark = pytest.mark.timeout(10)


def test_the_line_operators_grep_for() -> None:
    assert upload_gate(inner_step=15, minimum=50) == (
        "⚠️  UPLOAD BLOCKED: inner_step (15) < minimum (50). "
        "Validators will reject this! Waiting for more training steps..."
    )
    assert upload_gate(inner_step=50, minimum=50) is None


@pytest.mark.parametrize(("every", "first"), [(5, 50), (3, 51), (60, 60), (120, 120), (1, 50)])
def test_the_first_upload_is_the_first_multiple_at_or_above_the_minimum(
    every: int, first: int
) -> None:
    due = [n for n in range(200) if upload_due(n, upload_steps=every, minimum=50)]
    assert due[0] == first
    assert all(n % every == 0 for n in due)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"blocks": ()}, "block list is empty"),
        ({"not_finite": "x of model.safetensors"}, "NaN or Inf in x of model.safetensors"),
        ({"preview_delta": 0.01, "block_on_preview": True}, "+0.0100"),
        ({"preview_delta": float("nan"), "block_on_preview": True}, "NaN"),
    ],
)
def test_each_block_has_its_line(change: dict, text: str) -> None:
    good = {"inner_step": 50, "minimum": 50, "blocks": (7,), "preview_delta": -0.1}
    assert upload_gate(**good) is None
    line = upload_gate(**good | change)
    assert line is not None
    assert text in line
    assert "\n" not in line


def test_a_useless_gradient_only_warns_unless_told_to_block() -> None:
    assert upload_gate(inner_step=50, minimum=50, preview_delta=0.5) is None
    assert preview_warning(0.5)
    assert preview_warning(-0.5) is None
    assert preview_warning(None) is None


def test_parts_are_equal_and_never_too_many() -> None:
    for size in (6 * MIB, 511 * MIB, 2048 * MIB, 48 * 10**9, 5 * 10**12):
        part = part_size_for(size)
        assert part >= 5 * MIB
        assert -(-size // part) <= 10_000
    assert part_size_for(100 * MIB, wanted=1) == 5 * MIB


def test_a_full_disk_says_what_to_do(tmp_path: Path) -> None:
    assert disk_allows(tmp_path / "not" / "there", 1, reserve=0) is None
    line = disk_allows(tmp_path, 10**18)
    assert line is not None
    assert "UPLOAD BLOCKED" in line
    assert "--neuron.run_folder" in line


# --- the schedule ---------------------------------------------------------------------------------


def schedule(every: int = 5, **changes: object) -> UploadSchedule:
    values: dict = {
        "upload_steps": every,
        "minimum_inner_step": 50,
        "age_limit": timedelta(seconds=4800),
        "slack": timedelta(seconds=240),
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
    """Drive it as the loop would; the inner steps it chose and what it said."""
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


def test_upload_steps_bounds_the_frequency() -> None:
    for every in (1, 3, 7, 60):
        chosen, _ = run(schedule(every), range(1, 400), step=10, upload=5)
        assert chosen
        assert all(b - a >= every for a, b in itertools.pairwise(chosen))


@pytest.mark.parametrize("every", [5, 20, 60])
@pytest.mark.parametrize("upload", [50.0, 300.0, 900.0])
@pytest.mark.parametrize("round_at", [3000.0, 4100.0, 4500.0])
def test_one_upload_ends_shortly_before_the_round(
    every: int, upload: float, round_at: float
) -> None:
    plan = schedule(every)
    plan.upload_seconds = upload
    plan.expect_round(round_at)
    chosen, _ = run(plan, range(1, int(round_at / 10)), step=10, upload=upload)
    ends = [10 * inner + upload for inner in chosen]
    landed = [end for end in ends if end <= round_at - 240 + 10]
    assert landed, "nothing landed before the round"
    # No older than one period of the operator's choice plus what sending takes.
    assert round_at - 240 - max(landed) <= max(every * 10, upload) + 10 * every + 10


@pytest.mark.parametrize("every", [5, 20, 60])
@pytest.mark.parametrize("step", [10.0, 30.0, 60.0, 80.0])
@pytest.mark.parametrize("upload", [50.0, 300.0, 900.0])
@pytest.mark.parametrize("known", [True, False])
def test_over_many_rounds_what_is_published_is_never_too_old(
    every: int, step: float, upload: float, known: bool
) -> None:
    """Rounds of 4800 s, 700 s of which nobody trains; each begins again at inner step 0."""
    plan = schedule(every)
    oldest, warned, too_old_at = 0.0, 0.0, 0.0
    now, finish = 0.0, (0.0, 0, 0)
    for outer in range(8):
        ends = now + 4100.0
        if known:
            plan.expect_round(ends)
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
            if not warned and ("Step 50" in said or "--neuron.upload_steps 50" in said):
                warned = now
            if decision.snapshot:
                finish = (now + upload, outer, inner)
        now = ends + 700.0
    assert oldest > 0
    if step <= 60:
        assert oldest <= 4800
    if too_old_at:  # 50 steps alone take nearly as long as the limit allows
        assert 0 < warned < too_old_at


def test_after_a_restart_the_age_of_what_is_published_counts() -> None:
    plan = schedule(60, published_at=0.0)
    plan.upload_seconds = 300.0
    chosen, _ = run(plan, range(62, 200), step=60, upload=300, start=3600.0)
    # The next multiple would be step 120 at 7140 s; the one here ends before 4800 - 240 s.
    first = chosen[0]
    assert 3600 + 60 * (first - 61) + 300 <= 4560 < 3600 + 60 * (first - 60) + 300


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
    assert "nothing published yet" in plan.repo_age_line(600.0)
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


def test_one_that_is_to_be_asked_for_again_is_at_the_next_step() -> None:
    plan = schedule(5)
    assert plan.step(report(50), 500.0).snapshot
    plan.cancelled(again=True)
    assert plan.step(report(51), 510.0).snapshot
    assert not plan.step(report(52), 520.0).snapshot


def test_it_warns_before_it_is_too_late_with_the_reason() -> None:
    plan = schedule(500)
    _, said = run(plan, range(1, 3), step=20, upload=10)
    assert any("--neuron.upload_steps 50 or less" in text for text in said)
    plan = schedule(5, published_at=0.0)
    decision = plan.step(report(1, seconds=10), 4600.0)
    assert any("Repo age is 4600s" in text for _, text in decision.lines)
    assert plan.step(report(2, seconds=10), 4610.0).lines == ()  # once, not each step
    plan = schedule(5)
    decision = plan.step(report(1, seconds=120), 120.0)
    assert any("Step 50" in text for _, text in decision.lines)
