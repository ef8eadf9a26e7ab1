"""Test how events become states and a summary, and the arguments of a trial's scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_training.localnet.summary import summarize
from distributed_training.localnet.trial import words_of
from distributed_training.telemetry.events import EventFollower
from distributed_training.telemetry.neuron_state import COLUMNS, NeuronState

pytestmark = pytest.mark.timeout(60)
T0 = 1000.0


def step(time: float, outer: int, inner: int, loss: float, **more: Any) -> dict[str, Any]:
    fields = {"time": time, "kind": "step", "outer_step": outer, "inner_step": inner, "loss": loss}
    return fields | {"tokens_per_second": 2048.0, "seconds": 2.0} | more


def feed(state: NeuronState, *events: dict[str, Any]) -> NeuronState:
    for event in events:
        state.apply(event)
    return state


def a_miner(uid: int = 0, *, steps: tuple[int, ...] = (1, 2), fault: str = "") -> NeuronState:
    """Return a miner that has trained, published once and taken the outer steps ``steps``."""
    miner = NeuronState(Path(f"miner-{uid:03d}"), uid=uid)
    feed(miner, {"time": T0, "kind": "start"})
    for i in range(4):
        feed(miner, step(T0 + i, 0, i + 1, 5.0 - i / 10))
    feed(
        miner,
        {"time": T0 + 5, "kind": "publication", "revision": "5.0.4", "ok": True, "bytes_sent": 9},
    )
    for reached in steps:
        at = T0 + 10 * reached
        feed(
            miner,
            {"kind": "round", "ok": not fault, "fault": fault, "outer_step": reached - 1},
            {"time": at, "kind": "outer_step", "outer_step": reached},
        )
    return miner


@given(
    st.lists(st.tuples(st.floats(1, 600), st.floats(1, 1e5)), min_size=2, max_size=60),
    st.floats(0, 100_000),
)
def test_a_day_s_tokens_are_its_steps_and_a_younger_run_s_pace(
    steps: list[tuple[float, float]], pause: float
) -> None:
    miner, at = NeuronState(Path("m")), T0
    for number, (seconds, pace) in enumerate(steps):
        at += seconds + (pause if number == 1 else 0)
        feed(miner, step(at, 0, number, 3.0, seconds=seconds, tokens_per_second=pace))
    found, day = miner.tokens_a_day(at), 86400.0
    span = min(day, at - T0)
    began = [s for s in miner.steps if s.time is not None and s.time >= at - day]
    tokens = sum((s.seconds or 0) * (s.tokens_per_second or 0) for s in began)
    if span < 60:
        assert found is None
    else:
        assert found == pytest.approx(tokens * day / span, rel=0.01)


@pytest.mark.parametrize(("hours", "seconds"), [(30, 3600), (200, 86400)])
def test_uploads_and_rounds_are_counted_by_the_hour_and_after_days_by_the_day(
    hours: int, seconds: int
) -> None:
    miner = NeuronState(Path("m"))
    for hour in range(hours):
        at = 1.7e9 + 3600 * hour
        fate = ("merged", "not merged", "refused")[hour % 3]
        feed(
            miner,
            {"time": at, "kind": "publication", "ok": hour % 2 > 0},
            {"time": at, "kind": "round", "ok": True, "fate": fate},
            {"time": "never", "kind": "round", "ok": True},
        )
    counts = miner.counts()
    assert counts["seconds"] == seconds
    columns = [sum(column) for column in zip(*counts["rows"], strict=True)][1:]
    merged = len(range(0, hours, 3))
    assert columns == [hours // 2, hours - hours // 2, merged, hours - merged]
    assert all(row[0] % seconds == 0 for row in counts["rows"])


def scored(uid: int, reason: str = "", cause: str = "") -> dict[str, Any]:
    return {
        "kind": "upload_scored",
        "uid": uid,
        "ok": not reason,
        "cause": cause,
        "reason": reason,
        "revision": "5.2.10",
        "outer_step": 1,
    }


def a_validator(*steps: int, judged: tuple[dict[str, Any], ...] = ()) -> NeuronState:
    """Return a validator that held the rounds of ``steps`` and scored uploads of uids 0 and 11."""
    validator = NeuronState(Path("validator"), uid=200)
    feed(validator, *(judged or (scored(0), scored(11))))
    for reached in steps:
        at = T0 + 10 * reached
        feed(
            validator,
            {"kind": "round", "ok": True, "outer_step": reached - 1, "seconds": 3.5},
            {"time": at, "kind": "outer_step", "outer_step": reached},
        )
    return validator


def summary_of(validator: NeuronState, *miners: NeuronState, wanted: int = 2):  # type: ignore[no-untyped-def]
    return summarize(
        wanted_outer_steps=wanted,
        started_at=T0,
        seconds=90,
        validator=validator,
        miners=miners,
        world_sizes=[1] * len(miners),
    )


class TestFollower:
    def test_a_reader_waits_for_complete_lines_and_continues(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        follower = EventFollower(path)
        assert follower.poll() == []
        path.write_text('{"kind": "start"}\n{"kind": "st')
        assert [e["kind"] for e in follower.poll()] == ["start"]
        with path.open("a") as file:
            file.write('ep"}\n')
        assert [e["kind"] for e in follower.poll()] == ["step"]
        assert follower.poll() == []

    def test_a_rotated_file_is_read_to_its_end_and_then_the_new_one(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        path.write_text('{"kind": "a"}\n')
        follower = EventFollower(path)
        assert len(follower.poll()) == 1
        with path.open("a") as file:
            file.write('{"kind": "b"}\n')
        path.rename(tmp_path / "events.jsonl.1")
        path.write_text('{"kind": "c"}\n')
        assert [e["kind"] for e in follower.poll() + follower.poll()] == ["b", "c"]


class TestState:
    def test_a_miner(self) -> None:
        miner = a_miner()
        assert (miner.outer_step, miner.inner_step, miner.phase) == (2, 0, "training")
        assert miner.uploads == ["5.0.4"]
        assert miner.steps[-1].tokens_per_second == 2048
        assert [p.loss for p in miner.losses] == pytest.approx([5.0, 4.9, 4.8, 4.7])

    def test_a_skipped_step_and_a_nan_are_no_points_of_the_curve(self) -> None:
        state = NeuronState(Path("m"))
        feed(state, step(1, 0, 1, 5.0, skipped=True), step(2, 0, 2, float("nan")))
        assert state.losses == [] and state.inner_step == 2

    @pytest.mark.parametrize(
        "event",
        [
            {},
            {"kind": "weather"},
            {"kind": "state"},
            {"kind": "step", "time": "noon", "outer_step": "?", "loss": [], "inner_step": True},
            {"kind": "scores", "scores": {"0": 1.0}},
            {"kind": "scores", "scores": None},
            {"kind": "sweep", "not_alive": 3},
            {"kind": "upload_scored", "uid": None},
            {"kind": "outer_step", "outer_step": 10**400},
            {"kind": "publication", "time": 10**400},
        ],
    )
    def test_events_that_no_neuron_of_ours_writes_are_no_error(self, event: dict[str, Any]) -> None:
        state = a_miner()
        state.apply(event)
        assert (state.outer_step, state.scores) == (2, {})
        assert state.shown()["taken"] == len(a_miner().losses) + 7

    def test_a_phase_is_that_of_the_last_state_and_of_a_validator_its_work(self) -> None:
        state = NeuronState(Path("m"))
        phases = []
        for kind, more in (
            ("start", {}), ("step", {}), ("state", {"after": "update_failed"}), ("step", {}),
            ("stop", {}), ("start", {}), ("held_out", {}), ("round", {"ok": False}),
            ("upload_scored", {"uid": 1}), ("scores", {"scores": {}}),
        ):  # fmt: skip
            state.apply({"kind": kind, **more})
            phases.append(state.phase)
        training = ["starting", "training", "update failed", "update failed", "stopped"]
        work = ["starting", "waiting", "waiting", "scoring", "waiting"]
        assert phases == training + work and state.starts == 2

    def test_events_of_one_moment_and_of_a_clock_set_back_are_all_new(self) -> None:
        miner = NeuronState(Path("m"))
        lines = ({"kind": "round", "time": 9.0}, {"kind": "step", "time": 9.0}, {"time": 3.0})
        assert [miner.apply(line)["number"] for line in lines] == [1, 2, 3]
        assert miner.shown()["taken"] == 3

    def test_the_time_between_two_steps_is_not_lost(self) -> None:
        """It includes rounds, snapshots and loads, but not the time in which the miner was off."""
        miner = NeuronState(Path("m"))
        seen = [
            miner.apply({"kind": kind, "time": time, "seconds": 10.0}).get("between_seconds")
            for kind, time in (
                ("start", 1.0), ("step", 100.0), ("step", 110.0), ("step", 150.0), ("stop", 151.0),
                ("start", 30_000.0), ("step", 30_100.0), ("step", 30_109.0),
            )
        ]  # fmt: skip
        assert seen == [None, None, 0.0, 30.0, None, None, None, 0.0]
        at = COLUMNS.index("between_seconds")
        assert [row[at] for row in miner.shown()["steps"]] == [None, 0.0, 30.0, None, 0.0]


class TestSummary:
    def test_a_good_run(self) -> None:
        summary = summary_of(a_validator(1, 2), a_miner(0), a_miner(11))
        assert summary.ok, summary.problems
        assert [s.participants for s in summary.outer_steps] == [
            ("validator", "miner-000", "miner-011")
        ] * 2
        assert summary.outer_steps[0].seconds_from_start == 10
        assert summary.outer_steps[0].round_seconds == 3.5

    def test_a_miner_that_missed_a_step_is_named(self) -> None:
        summary = summary_of(a_validator(1, 2), a_miner(0), a_miner(11, steps=(1,)))
        assert not summary.ok
        assert summary.outer_steps[1].missed_by == ("miner-011",)
        assert any("outer step 2" in p and "miner-011" in p for p in summary.problems)
        assert "MISSED BY miner-011" in summary.text()

    @pytest.mark.parametrize(
        ("reached", "judged", "fault", "problem"),
        [
            ((1,), (), "", "1 outer step succeeded; 2 were wanted"),
            ((1, 2), (), "TIMEOUT", "miner-000: a round failed (TIMEOUT)"),
            (
                *((1, 2), (scored(0, "too old"), scored(0, "too old")), ""),
                "miner-000: none of its 2 judged uploads was scored; the last was reset: too old",
            ),
            ((1, 2), (scored(11),), "", "miner-000: the validator judged none of its uploads"),
        ],
    )
    def test_failures_are_named_in_the_summary(
        self, reached: tuple[int, ...], judged: tuple[Any, ...], fault: str, problem: str
    ) -> None:
        miner = a_miner(0, steps=reached, fault=fault)
        summary = summary_of(a_validator(*reached, judged=judged), miner)
        assert set(summary.problems) == {problem}
        assert "all rounds worked" not in summary.verdict


def test_each_member_gets_its_number_and_files_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a member's script runs in another folder
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("")
    args = ["NETWORK", "{member}.txt", "--seed={member}", "2.txt"]
    assert [words_of(args, number) for number in range(2)] == [
        ["NETWORK", str(tmp_path / f"{number}.txt"), f"--seed={number}", "2.txt"]
        for number in range(2)
    ]
