"""The reporter: the lines and records of each event, for operators and programs."""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from distributed_training.health.gpus import GpuSample, NvmlSampler
from distributed_training.miner import events as ev
from distributed_training.miner.events import MinerState, Mode
from distributed_training.miner.metrics import Growth, MachineGauges, Metrics, limits
from distributed_training.miner.missed_rounds import MissedRounds
from distributed_training.miner.reporter import Reporter
from distributed_training.miner.run_folder import INSTANCE, write_pid_file
from distributed_training.protocol import lines
from distributed_training.protocol.types import (
    AllReduceFault,
    AllReduceResult,
    Progress,
    PublicationReport,
    Revision,
    RoundRequest,
)
from distributed_training.telemetry import MetricsFile
from distributed_training.telemetry.metrics import METRICS
from tests.tools.miner_parts import step_report, upload_schedule
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(30)

TRAINING = MinerState(mode=Mode.TRAINING, outer_step=3)
IN_ROUND = MinerState(mode=Mode.AVERAGING, outer_step=3)
RESULT = AllReduceResult(("me", "a"), ("b",), 1.5, 2.5, 4.0, causes={"b": "it sent nothing"})
REPORT = step_report()


class Rig:
    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.now, self.caplog, self.file = 1000.0, caplog, folder / "metrics.prom"
        self.records: list[tuple[str, dict[str, Any]]] = []
        self.warnings: list[str] = []
        self.clock_fault = ""
        self.judged: int | None = None
        caplog.set_level(logging.INFO)
        self.reporter = Reporter(
            record=lambda kind, **fields: self.records.append((kind, fields)),
            schedule=upload_schedule(published_at=900.0),
            warnings=lambda report: self.warnings,
            bucket="mine",
            global_uid=3,
            reload_timeout=timedelta(seconds=2640),
            judged_step=lambda: self.judged,
            uploaded_step=3,
            clock_fault=lambda: self.clock_fault,
            clock=lambda: self.now,
        )
        self.metrics = Metrics(
            file=MetricsFile(self.file, every=0.0),
            counts={"data": lambda: {"blocks": 3}},
            gauges={"chain_age_seconds": lambda: 4.0, "disk_free_bytes": lambda: None},
        )

    def on_event(self, event: ev.Event, state: MinerState = TRAINING) -> list[str]:
        """The lines said; a warning begins with "! "."""
        self.caplog.clear()
        self.reporter.on_event(event, state)
        self.metrics.on_event(event, state)
        # By number: hivemind, where a test imported it, calls WARNING something else.
        marks = {logging.INFO: "", logging.WARNING: "! "}
        return [marks[r.levelno] + r.getMessage() for r in self.caplog.records]


@pytest.fixture
def rig(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Rig:
    return Rig(tmp_path, caplog)


def test_a_step(rig: Rig) -> None:
    rig.warnings = ["the GPU sleeps"]
    step, throughput, warning = rig.on_event(ev.InnerStepDone(REPORT))
    assert (step, warning) == (lines.step_line(REPORT), "! the GPU sleeps")
    assert throughput == f"{lines.throughput_line(REPORT)} | Repo age: 100s of 32400s"
    ((kind, fields),) = rig.records
    assert kind == "step"
    assert fields["loss"] == 2.5 and fields["tokens_per_second"] == 128
    assert set(fields) > {"outer_step", "inner_step", "seconds", "data_wait_seconds", "skipped"}
    text = rig.file.read_text()
    assert "dt_train_loss 2.5" in text and "dt_data_blocks_total 3" in text
    assert "dt_chain_age_seconds 4" in text
    assert "disk_free" not in text, "what is not known is absent"


def test_a_young_upload_of_an_outer_step_that_is_over_is_not_called_well(rig: Rig) -> None:
    def said(outer_step: int) -> str:
        return rig.on_event(ev.InnerStepDone(replace(REPORT, outer_step=outer_step)))[1]

    rig.on_event(ev.GlobalEpochSeen(4, 1.0))
    for rig.judged in (None, 3):  # not known; in the first half of the period
        assert said(4).endswith("Repo age: 100s of 32400s")
    rig.judged = 4
    for training in (3, 4, 5):  # loaded, and nothing uploaded of it yet
        text = said(training)
        assert text.endswith("Repo age: 100s of 32400s, of outer step 3, validators read 4")
    assert "dt_global_outer_step 4" in rig.file.read_text()
    for ok in (False, True):
        rig.on_event(ev.PublicationEnded(PublicationReport(Revision(0, 4, 1), ok, 1.0, 1)))
        assert said(4).endswith("validators read 4") != ok


def test_trackers_get_each_step_once_by_its_number(rig: Rig, tmp_path: Path) -> None:
    class Kept:
        def __init__(self) -> None:
            self.steps: list[tuple[int, float | None]] = []

        def log(self, step: int, metrics: dict[str, float]) -> None:
            self.steps.append((step, metrics.get("train_loss")))

    kept = Kept()
    file = MetricsFile(tmp_path / "other.prom", every=0.0)
    metrics = Metrics(file=file, counts={}, gauges={}, trackers=[kept])
    skipped = {"loss": math.nan, "skipped": True}
    for changes in ({}, skipped, {"total_inner_steps": 42, "loss": 2.0}):
        report = replace(REPORT, **({"total_inner_steps": 41} | changes))
        metrics.on_event(ev.InnerStepDone(report), TRAINING)
    assert kept.steps == [(41, 2.5), (42, 2.0)]


def test_a_round_that_only_others_had_counts_as_missed(rig: Rig) -> None:
    registry = rig.metrics._file.registry
    averaged = MinerState(mode=Mode.AVERAGING, outer_step=3, averaged=RESULT)
    rig.on_event(ev.OuterStepEnded(True, 4), averaged)
    rig.on_event(ev.RoundFailed(AllReduceFault.TIMEOUT), MinerState(Mode.AVERAGING, outer_step=4))
    # Outer step 4 failed here; of 5 and 6 nothing was heard.
    rig.on_event(ev.Loaded(7), MinerState(Mode.TRAINING, outer_step=4))
    values = registry.values()
    assert values["round_participation_ratio"] == 1 / 4
    assert values["rounds_missed_total"] == 3 and values["rounds_total"] == 2
    assert values["rounds_failed_in_a_row"] == 3
    # A rebase: nothing was missed.
    rig.on_event(ev.Loaded(7), MinerState(Mode.TRAINING, outer_step=7))
    assert registry.values() == values


def test_a_successful_round(rig: Rig) -> None:
    began = [lines.PAUSING, lines.AVERAGING_START]
    began.append(f"{lines.ALL_REDUCE_START} (pseudo-gradient norm 0.5000)")
    assert rig.on_event(ev.PseudoGradientWritten(0.5), IN_ROUND) == began
    assert "it only takes the average" in rig.on_event(ev.PseudoGradientWritten(0.0), IN_ROUND)[2]
    rig.now += 6
    averaged = MinerState(mode=Mode.AVERAGING, outer_step=3, averaged=RESULT)
    said = rig.on_event(ev.OuterStepEnded(True, 4), averaged)
    assert said[:3] == [
        lines.ALL_REDUCE_FINISH,
        f"{lines.ALL_REDUCE_DONE}: outer step 4 with 2 peers in 6.0 s",
        lines.RESUMING,
    ]
    assert said[3].startswith("Waiting 2640 seconds until validator complete the all_reduce")
    assert said[4].startswith("! Parts of the average failed"), "a peer was lost"
    fields = {"outer_step": 3, "ok": True, "fault": "", "detail": "", "peers": ["me", "a"]}
    fields |= {"failed_peers": ["b"], "causes": {"b": "it sent nothing"}, "seconds": 6.0}
    fields |= {"matchmaking_seconds": 1.5, "transfer_seconds": 2.5}
    assert rig.records == [("outer_step", {"outer_step": 4}), ("round", fields)]


@pytest.mark.parametrize(
    ("event", "checkpoint"),
    [
        (ev.RoundFailed(AllReduceFault.LOCAL, "NaN", began=False), 1),
        (ev.RoundFailed(AllReduceFault.NO_GROUP), 1),
        (ev.RoundFailed(AllReduceFault.TIMEOUT), 2),
        (ev.RoundFailed(AllReduceFault.SWARM_DOWN, "p2pd is gone"), 2),
        (ev.RoundFailed(AllReduceFault.LOCAL, "a round is already running"), None),
        (ev.RoundFailed(AllReduceFault.CANCELLED), None),
    ],
)
def test_a_round_without_an_average(
    event: ev.RoundFailed, checkpoint: int | None, rig: Rig
) -> None:
    said = rig.on_event(event, IN_ROUND)
    assert said[0].startswith(f"! All Reduce Failed: {event.fault.value}")
    assert event.detail in said[0]
    numbered = [text for text in said if "At Checkpoint" in text]
    assert numbered == ([f"! {lines.all_reduce_failed(checkpoint)}"] if checkpoint else [])
    assert said[-2] == lines.RESUMING
    ((kind, fields),) = rig.records
    assert (kind, fields["ok"], fields["fault"]) == ("round", False, event.fault.name)
    assert fields["peers"] == [] and fields["matchmaking_seconds"] is None


def test_a_vote_against_the_outer_step(rig: Rig) -> None:
    averaged = MinerState(mode=Mode.AVERAGING, outer_step=3, averaged=RESULT)
    said = rig.on_event(ev.OuterStepEnded(False, 3, "no memory"), averaged)
    assert said[0] == f"! {lines.all_reduce_failed(3)} (no memory)"
    ((_, fields),) = rig.records
    assert (fields["ok"], fields["fault"], fields["detail"]) == (False, "LOCAL", "no memory")


@pytest.mark.parametrize("mode", list(Mode))
def test_a_call_that_leads_to_nothing_is_said(mode: Mode, rig: Rig) -> None:
    call = ev.AllReduceCalled(RoundRequest("5V"), 1.0)
    said = rig.on_event(call, MinerState(mode=mode, outer_step=3))
    if mode in (Mode.FETCHING, Mode.LOADING, Mode.STOPPING):
        assert said == [f"! An AllReduce call is ignored: this miner is {mode.value}"]
    else:
        assert said == []


def test_a_publication(rig: Rig) -> None:
    handle: Any = type("Handle", (), {"hold_seconds": 0.25})
    revision = Revision(5, 3, 10)
    saved, full, held = rig.on_event(ev.SnapshotTaken(handle, Progress(3, 10)))
    assert (saved, full) == (lines.SAVING_STATE % 3, lines.FULL_STATE)
    assert held == f"{lines.EXTRACTED_STATE}: training was held for 0.25 s"
    preview = ev.GradientChecked(-0.0123, 0.5)
    begun = [lines.UPLOAD_MODEL_START, lines.UPLOADING % "mine"]
    assert rig.on_event(ev.SnapshotSubmitted(revision, ev.GradientChecked(None, 0.0))) == begun
    assert rig.records == [], "that gradient could not be tried"
    assert rig.on_event(ev.SnapshotSubmitted(revision, preview)) == begun
    report = PublicationReport(revision, True, 3.0, 2_500_000, "", 1.7e9)
    pushed = f"{lines.pushed(revision.tag, 'mine')} (2.5 MB in 3.0 s)"
    assert rig.on_event(ev.PublicationEnded(report)) == [pushed]
    failed = PublicationReport(revision, False, 3.0, 0, "403")
    assert rig.on_event(ev.PublicationEnded(failed)) == [f"! {lines.UPLOAD_FAILED % '403'}"]
    assert [kind for kind, _ in rig.records] == ["preview", "publication", "publication"]
    assert rig.records[0][1] == {"revision": "5.3.10", "delta": -0.0123, "seconds": 0.5}
    stays = {"revision": "5.3.10", "ok": True, "seconds": 3.0, "bytes_sent": 2_500_000}
    stays |= {"reason": "", "finished_at": 1.7e9, "age_seconds": None}
    assert stays.items() <= rig.records[1][1].items()
    rig.on_event(ev.InnerStepDone(REPORT))
    text = rig.file.read_text()
    assert "dt_publications_total 2" in text and "dt_publications_failed_total 1" in text
    assert "dt_uploaded_bytes_total 2.5e+06" in text


AWFUL = "loss 14.00, limit 11.82"


@pytest.mark.parametrize(
    ("event", "line", "kind", "fields"),
    [
        (
            ev.ModeChanged(Mode.TRAINING, Mode.AWAITING_GLOBAL),
            "",
            "state",
            {"before": "training", "after": "awaiting_global"},
        ),
        (ev.Loaded(5), "Loaded the global state of outer step 5", "load", {"outer_step": 5}),
        (
            ev.LoadFailed("60 layers", 1.0),
            "! The global state does not fit this model (60 layers). Training continues.",
            "load_failed",
            {"problem": "60 layers"},
        ),
        (
            ev.LoadFailed(AWFUL, 1.0, awful=True),
            f"! {lines.worse_weights(3, AWFUL)}",
            "load_failed",
            {"problem": AWFUL},
        ),
        (ev.GlobalFetchFailed("404", 1.0), f"! {lines.not_fetched('404')}", "", {}),
        (
            ev.RolledBack(Progress(3, 25)),
            "! Training continues at outer step 3, inner step 25",
            "roll_back",
            {"outer_step": 3, "inner_step": 25},
        ),
        (ev.RolledBack(None), "", "", {}),
        (ev.SnapshotFailed("no room", kind="disk"), "! no room", "", {}),
        (ev.SnapshotPutOff(), lines.STALE_LIST, "", {}),
        (ev.Tick(1.0), "", "", {}),
    ],
)
def test_the_rest(event: ev.Event, line: str, kind: str, fields: dict[str, Any], rig: Rig) -> None:
    assert rig.on_event(event) == ([line] if line else [])
    assert rig.records == ([(kind, fields)] if kind else [])


def test_a_stop_is_recorded_and_its_line_left_to_the_launcher(rig: Rig) -> None:
    state = MinerState(mode=Mode.STOPPING, outer_step=3, stop_reason="deregistered")
    assert rig.on_event(ev.Stopped(3), state) == []
    assert rig.records == [("stop", {"reason": "deregistered", "exit_status": 3})]


def test_the_metrics_are_written_where_no_step_ends(rig: Rig) -> None:
    """A round and a lack of data end no step; the metrics still show the last step's age."""
    began = time.time()
    rig.on_event(ev.Tick(1.0), IN_ROUND)
    first = figures(rig)
    assert first["dt_metrics_written_timestamp_seconds"] >= began
    stood = rig.metrics._file.registry.values()["last_step_timestamp_seconds"]
    assert first["dt_last_step_timestamp_seconds"] == stood >= first["dt_start_timestamp_seconds"]
    assert "dt_last_publication_timestamp_seconds" not in first, "nothing was published"
    wait_for(lambda: time.time() > stood + 0.01, "the clock")
    rig.on_event(ev.Tick(2.0), IN_ROUND)
    assert figures(rig)["dt_last_step_timestamp_seconds"] == stood
    rig.on_event(ev.InnerStepDone(REPORT))
    assert figures(rig)["dt_last_step_timestamp_seconds"] > stood


def test_snapshots_that_are_not_published_are_counted_by_kind(rig: Rig) -> None:
    def refused() -> dict[str, float]:
        name = "dt_snapshots_refused_total"
        return {k.partition('"')[2][:-2]: v for k, v in figures(rig).items() if name in k}

    rig.on_event(ev.Tick(1.0))
    zero = {"disk": 0, "blocks": 0, "list": 0, "write": 0, "unchecked": 0}
    assert refused() == zero, "from zero on"
    rig.on_event(ev.SnapshotFailed("no room", kind="disk"))
    rig.on_event(ev.SnapshotFailed("No space left on device", Revision(5, 3, 10)))
    rig.on_event(ev.SnapshotPutOff())
    rig.on_event(ev.SnapshotPutOff())
    rig.on_event(ev.Tick(2.0))
    assert refused() == zero | {"disk": 1, "list": 2, "write": 1}


def figures(rig: Rig) -> dict[str, float]:
    """The metrics as Prometheus reads them."""
    rows = [r for r in rig.file.read_text().splitlines() if r and not r.startswith("#")]
    return {name: float(value) for name, _, value in (row.rpartition(" ") for row in rows)}


@pytest.mark.parametrize(
    "problem", [OSError(24, "Too many open files"), psutil.NoSuchProcess(4711)], ids=repr
)
def test_unmeasurable_metric_is_absent_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, problem: Exception
) -> None:
    """It is measured on the thread that trains."""

    def fails() -> Any:
        raise problem

    rig = Rig(tmp_path, caplog)
    rig.metrics._gauges = {"memory_bytes": fails, "chain_block": lambda: 9}
    rig.metrics._by_rank = fails
    rig.on_event(ev.InnerStepDone(REPORT))
    text = rig.file.read_text()
    assert "dt_chain_block 9" in text and "dt_memory_bytes" not in text


class Missed:
    """``MissedRounds`` of a miner at outer step 3, and its log."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.caplog, self.clock_fault = caplog, ""
        self.rounds = MissedRounds(
            outer_step=3,
            published_within=timedelta(minutes=55),
            clock_fault=lambda: self.clock_fault,
        )

    def on_event(self, event: ev.Event, mode: Mode = Mode.TRAINING, *, ours: int = 3) -> list[str]:
        self.caplog.clear()
        self.rounds.on_event(event, MinerState(mode=mode, outer_step=ours))
        return [r.getMessage() for r in self.caplog.records if r.levelno == logging.WARNING]

    def call(self, at: float, mode: Mode = Mode.TRAINING) -> None:
        assert self.on_event(ev.AllReduceCalled(RoundRequest("5Master"), at), mode) == []


@pytest.fixture
def missed(caplog: pytest.LogCaptureFixture) -> Missed:
    return Missed(caplog)


def test_a_round_that_nobody_called_here_is_one_warning(missed: Missed) -> None:
    assert missed.on_event(ev.GlobalEpochSeen(3, 100.0)) == []
    (line,) = missed.on_event(ev.GlobalEpochSeen(4, 400.0))
    assert "took outer step 4 without this miner: the validator did not call it" in line
    assert "doctor" in line and "--axon.port" in line
    for mode in (Mode.FETCHING, Mode.LOADING, Mode.AWAITING_GLOBAL):
        assert missed.on_event(ev.GlobalEpochSeen(4, 700.0), mode) == [], "once"
    (line,) = missed.on_event(ev.GlobalEpochSeen(7, 1000.0), Mode.FETCHING)
    assert "outer step 5 to 7 without" in line
    assert missed.on_event(ev.GlobalEpochSeen(7, 1300.0), ours=7) == []
    # Back to a checkpoint of before: the network took nothing without us.
    assert missed.on_event(ev.GlobalEpochSeen(7, 1600.0), ours=6) == []


@pytest.mark.parametrize("fault", [AllReduceFault.NO_GROUP, AllReduceFault.TIMEOUT])
def test_a_wrong_clock_is_the_cause_of_a_round_without_a_group(
    fault: AllReduceFault, rig: Rig, missed: Missed
) -> None:
    wrong = "this machine's clock is 5.0 s ahead of the store's"
    rig.clock_fault = missed.clock_fault = wrong
    said = rig.on_event(ev.RoundFailed(fault), IN_ROUND)
    ((_, fields),) = rig.records
    missed.call(1000.0)
    missed.on_event(ev.RoundFailed(fault), Mode.AVERAGING)
    (line,) = missed.on_event(ev.GlobalEpochSeen(4, 2000.0), Mode.AWAITING_GLOBAL)
    named = fault is AllReduceFault.NO_GROUP
    assert [wrong in said[0], wrong in fields["detail"], wrong in line] == [named] * 3
    assert not (named and "--dht.port" in line)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (AllReduceFault.NO_GROUP, "found no group: see whether other machines reach its --dht"),
        (AllReduceFault.TIMEOUT, "failed here (the round passed its deadline)"),
    ],
)
def test_a_round_that_failed_only_here_is_a_warning_with_its_cause(
    fault: AllReduceFault, cause: str, missed: Missed
) -> None:
    missed.call(1000.0)
    missed.on_event(ev.RoundFailed(fault), Mode.AVERAGING)
    (line,) = missed.on_event(ev.GlobalEpochSeen(4, 2000.0), Mode.AWAITING_GLOBAL)
    assert cause in line
    # The network had no outer step in that round either, and the next one was not called here.
    missed.call(10_000.0)
    missed.on_event(ev.RoundFailed(fault), Mode.AVERAGING, ours=4)
    (line,) = missed.on_event(ev.GlobalEpochSeen(5, 16_000.0), ours=4)
    assert "did not call it" in line


def test_a_vote_or_a_fetch_in_the_way_of_a_round_is_named(missed: Missed) -> None:
    missed.call(1000.0)
    missed.on_event(ev.OuterStepEnded(False, 3, "out of memory"), Mode.AVERAGING)
    (line,) = missed.on_event(ev.GlobalEpochSeen(4, 2000.0), Mode.AWAITING_GLOBAL)
    assert "a rank could not apply the average (out of memory)" in line
    missed.call(6000.0, Mode.FETCHING)
    missed.on_event(ev.Loaded(4), Mode.LOADING)
    assert missed.on_event(ev.GlobalEpochSeen(4, 6300.0), ours=4) == []
    (line,) = missed.on_event(ev.GlobalEpochSeen(5, 7000.0), ours=4)
    assert "called while it was fetching" in line


def test_our_own_round_is_no_missed_one_in_any_order(missed: Missed) -> None:
    missed.call(1000.0)
    assert missed.on_event(ev.GlobalEpochSeen(4, 1500.0), Mode.AVERAGING) == []
    missed.on_event(ev.OuterStepEnded(True, 4), Mode.AVERAGING)
    assert missed.on_event(ev.GlobalEpochSeen(4, 1800.0), Mode.AWAITING_GLOBAL, ours=4) == []
    (line,) = missed.on_event(ev.GlobalEpochSeen(5, 3000.0), ours=4)
    assert "did not call it" in line, "that call was of the round before"


# --- what is measured of the machine and of the limits --------------------------------------------


def test_a_leak_has_a_slope_and_a_start_has_none() -> None:
    growth, steady = Growth(), Growth()
    for minute in range(120):
        assert (growth.per_hour() is None) == (minute < 30)
        for second in (0, 15, 30, 45):  # as the metrics are written
            growth.add(60 * minute + second, 1e9 + 2e6 * minute + (5e5 if minute % 2 else 0))
            steady.add(60 * minute + second, 1e9)
    assert growth.per_hour() == pytest.approx(120e6, rel=0.02) and steady.per_hour() == 0


def test_the_machine_is_measured_rank_by_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INSTANCE, "mark")
    write_pid_file(tmp_path, 0)
    machine = MachineGauges(tmp_path, needed=5, gpus=0)
    figures = {name: measure() for name, measure in machine.single().items()}
    assert figures.keys() <= set(METRICS) and figures["disk_needed_bytes"] == 5
    assert figures["memory_growth_bytes_per_hour"] is None
    assert (figures["memory_total_bytes"] or 0) > (figures["memory_bytes"] or 0) > 1e7
    (ranks,) = machine.by_rank().values()
    assert machine.by_rank().keys() == {"rank_memory_bytes"} and ranks.keys() == {0}
    assert ranks[0] > 1e7 and os.getpid()
    monkeypatch.setenv(INSTANCE, "another")
    write_pid_file(tmp_path, 0)
    assert machine.by_rank() == {}, "a rank of another start is none of ours"


class Card:
    """Report as a GPU does: the second one cannot measure its power, the third fell off the bus."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.closed = False

    def sample(self) -> GpuSample | None:
        power = 650.0 if self.index == 0 else None
        used = GpuSample("H200", 141.0, 70.0, 98.0, 60.0, power)
        return None if self.index == 2 else used

    def close(self) -> None:
        self.closed = True


def test_each_gpu_is_logged_with_its_ranks_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = [Card(index) for index in range(3)]
    monkeypatch.setattr(NvmlSampler, "open", lambda index: dict(enumerate(cards)).get(index))
    machine = MachineGauges(tmp_path, needed=5, gpus=4)  # the fourth has no NVML
    found = machine.by_rank()
    assert found.keys() <= set(METRICS)
    assert found["rank_gpu_memory_bytes"] == {0: 70e9, 1: 70e9}
    assert found["rank_gpu_utilization_percent"] == {0: 98.0, 1: 98.0}
    assert found["rank_gpu_power_watts"] == {0: 650.0}, "what was not measured is absent"
    machine.close()
    assert all(card.closed for card in cards)


def test_both_limits_count_down() -> None:
    schedule = upload_schedule(published_at=time.monotonic() - 1000)
    newest: list[int | None] = [None]
    made = limits(
        schedule, newest=lambda: newest[0], chain_block=lambda: 1300, most_blocks=lambda: 200
    )
    assert made.keys() <= set(METRICS)
    assert made["block_list_age_blocks"]() is None and made["block_list_blocks_left"]() is None
    newest[0] = 1250
    found = {name: measure() for name, measure in made.items()}
    assert found["publication_age_seconds"] == pytest.approx(1000, abs=5)
    assert found["publication_seconds_left"] == pytest.approx(32400 - 1000, abs=5)
    assert found["last_publication_timestamp_seconds"] == pytest.approx(time.time() - 1000, abs=5)
    assert found["block_list_age_blocks"] == 50 and found["block_list_blocks_left"] == 150
