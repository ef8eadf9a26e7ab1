"""Test the log lines, the records and the metrics that follow from each event of a miner."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from distributed_training.common.backoff import Clocks
from distributed_training.exchange.base import Close
from distributed_training.health.gpus import GpuSample
from distributed_training.miner import events as ev
from distributed_training.miner.events import MinerState, Mode
from distributed_training.miner.network_watch import chain_facts
from distributed_training.miner.reporter import Metrics, Reporter, gauges_by_rank, machine_gauges
from distributed_training.miner.run_folder import write_pid_file
from distributed_training.protocol import lines
from distributed_training.protocol.types import Base, Progress, Update
from distributed_training.telemetry import MetricsFile
from distributed_training.telemetry.facts import Facts, fold
from distributed_training.telemetry.metrics import METRICS
from distributed_training.telemetry.verdict import judge
from tests.tools.chain_memory import MemoryChain, MemoryLedger
from tests.tools.chain_world import MINER
from tests.tools.miner_parts import step_report, watched
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(30)

TRAINING = MinerState(mode=Mode.TRAINING, outer_step=3)
REPORT = step_report()
CLOSE = Close(12, 3, 1000.0, 60.0)
TWELVE = MinerState(mode=Mode.TRAINING, outer_step=12)
APPLIED = ev.OuterStepEnded(True, 13, "", 0.25)


def state(base: Base, cause: str = "") -> MinerState:
    update = Update(13, Path("u"), base, None, "ab", 500, cause)
    return replace(TWELVE, update=update)


class Rig:
    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.now, self.caplog, self.file = 1000.0, caplog, folder / "metrics.prom"
        self.records: list[tuple[str, dict[str, Any]]] = []
        self.joined = True
        caplog.set_level(logging.INFO)
        self.reporter = Reporter(
            record=lambda kind, **fields: self.records.append((kind, fields)),
            expect_gpu=True,
            bucket="mine",
            clock=lambda: self.now,
            joined=lambda: self.joined,
        )
        self.metrics = Metrics(
            file=MetricsFile(self.file, every=0.0),
            counts={"data": lambda: {"blocks": 3}},
            gauges={"chain_age_seconds": lambda: 4.0, "disk_free_bytes": lambda: None},
        )

    def fields(self, kind: str) -> dict[str, Any]:
        (found,) = [fields for name, fields in self.records if name == kind]
        return found

    def on_event(self, event: ev.Event, state: MinerState = TRAINING) -> list[str]:
        """Return the lines that were logged; a warning is marked with "! "."""
        self.caplog.clear()
        self.reporter.on_event(event, state)
        self.metrics.on_event(event, state)
        # Use the number of the level, because hivemind renames the levels when it is imported.
        marks = {logging.INFO: "", logging.WARNING: "! "}
        return [marks[r.levelno] + r.getMessage() for r in self.caplog.records]


@pytest.fixture
def rig(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Rig:
    return Rig(tmp_path, caplog)


def test_a_step(rig: Rig) -> None:
    step, throughput, warning = rig.on_event(ev.InnerStepDone(REPORT))
    (wanted,) = lines.step_warnings(REPORT, expect_gpu=True)
    assert (step, warning) == (lines.step_line(REPORT), f"! {wanted}")
    assert throughput == lines.throughput_line(REPORT)
    ((kind, fields),) = rig.records
    assert kind == "step"
    assert fields["loss"] == 2.5 and fields["tokens_per_second"] == 128
    assert set(fields) > {"outer_step", "inner_step", "seconds", "data_wait_seconds", "skipped"}
    text = rig.file.read_text()
    assert "dt_train_loss 2.5" in text and "dt_data_blocks_total 3" in text
    assert "dt_chain_age_seconds 4" in text
    assert "disk_free" not in text, "what is not known is absent"


@pytest.mark.parametrize(
    ("event", "line", "kind", "fields"),
    [
        (
            ev.RolledBack(Progress(3, 25)),
            "! Training continues at outer step 3, inner step 25",
            "roll_back",
            {"outer_step": 3, "inner_step": 25},
        ),
        (ev.RolledBack(None), "", "", {}),
        (
            ev.UploadSkipped("3 GB are free", "disk"),
            "! 3 GB are free",
            "skipped",
            {"outer_step": 3, "cause": "no room: 3 GB are free"},
        ),
        (
            ev.UploadSkipped("blocked", "steps"),
            "! blocked",
            "skipped",
            {"outer_step": 3, "cause": "blocked"},
        ),
        (ev.Tick(1.0), "", "", {}),
    ],
)
def test_the_rest(event: ev.Event, line: str, kind: str, fields: dict[str, Any], rig: Rig) -> None:
    assert rig.on_event(event) == ([line] if line else [])
    assert rig.records == ([(kind, fields)] if kind else [])


def test_a_stop_is_recorded_and_its_line_left_to_the_launcher(rig: Rig) -> None:
    state = MinerState(mode=Mode.STOPPING, outer_step=3, stop_reason="deregistered")
    assert rig.on_event(ev.Stopped(3), state) == []
    assert rig.records == [
        ("state", {"before": "training", "after": "stopping"}),
        ("stop", {"reason": "deregistered", "exit_status": 3}),
    ]


def test_the_metrics_are_written_where_no_step_ends(rig: Rig) -> None:
    """No step ends during a round or without data, but the age of the last step must be shown."""
    began = time.time()
    rig.on_event(ev.Tick(1.0), TRAINING)
    first = figures(rig)
    assert first["dt_metrics_written_timestamp_seconds"] >= began
    stood = first["dt_last_step_timestamp_seconds"]
    assert stood >= first["dt_start_timestamp_seconds"]
    assert "dt_last_publication_timestamp_seconds" not in first, "nothing was published"
    wait_for(lambda: time.time() > stood + 0.01, "the clock")
    rig.on_event(ev.Tick(2.0), TRAINING)
    assert figures(rig)["dt_last_step_timestamp_seconds"] == stood
    rig.on_event(ev.InnerStepDone(REPORT))
    assert figures(rig)["dt_last_step_timestamp_seconds"] > stood


def test_uploads_that_are_not_written_are_counted_by_kind(rig: Rig) -> None:
    def refused() -> dict[str, float]:
        name = "dt_uploads_refused_total"
        return {k.partition('"')[2][:-2]: v for k, v in figures(rig).items() if name in k}

    rig.on_event(ev.Tick(1.0))
    assert refused() == {"disk": 0, "steps": 0}, "from zero on"
    assert rig.on_event(ev.UploadSkipped("1 GB is missing", "disk")) == ["! 1 GB is missing"]
    assert rig.on_event(ev.UploadSkipped("2 GB are missing", "disk")) == [], "one cause, one line"
    rig.joined = False
    assert rig.on_event(ev.UploadSkipped("blocked", "steps")) == ["blocked"], "before the first"
    rig.on_event(ev.Tick(2.0))
    assert refused() == {"disk": 2, "steps": 1}


def figures(rig: Rig) -> dict[str, float]:
    """Return the metrics as Prometheus reads them."""
    return parsed(rig.file.read_text())


def parsed(text: str) -> dict[str, float]:
    rows = [r for r in text.splitlines() if r and not r.startswith("#")]
    return {name: float(value) for name, _, value in (row.rpartition(" ") for row in rows)}


@pytest.mark.parametrize(
    "problem", [OSError(24, "Too many open files"), psutil.NoSuchProcess(4711)], ids=repr
)
def test_unmeasurable_metric_is_absent_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, problem: Exception
) -> None:
    """An error here would end training, because the training thread measures it."""

    def fails() -> Any:
        raise problem

    rig = Rig(tmp_path, caplog)
    rig.metrics._gauges = {"memory_bytes": fails, "disk_free_bytes": lambda: 9}
    rig.metrics._by_rank = fails
    rig.on_event(ev.InnerStepDone(REPORT))
    text = rig.file.read_text()
    assert "dt_disk_free_bytes 9" in text and "dt_memory_bytes" not in text


# --- what is measured of the machine and of the limits --------------------------------------------


def test_the_machine_is_measured_rank_by_rank(tmp_path: Path) -> None:
    write_pid_file(tmp_path, 0)
    figures = {name: measure() for name, measure in machine_gauges(tmp_path, needed=5).items()}
    assert figures.keys() <= set(METRICS) and figures["disk_needed_bytes"] == 5
    assert (figures["memory_total_bytes"] or 0) > (figures["memory_bytes"] or 0) > 1e7
    ((name, ranks),) = gauges_by_rank(tmp_path, gpus=0).items()
    assert name == "rank_memory_bytes" and ranks.keys() == {0}
    assert ranks[0] > 1e7 and os.getpid()


def test_each_gpu_is_logged_with_its_ranks_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second GPU cannot measure its power, and the third one does not answer."""
    cards = [GpuSample("H200", 141.0, 70.0, 98.0, 60.0, power) for power in (650.0, None)]
    monkeypatch.setattr(
        f"{Metrics.__module__}.sample_gpu",
        lambda index, **_: dict(enumerate(cards)).get(index),
    )
    found = gauges_by_rank(tmp_path, gpus=3)
    assert found.keys() <= set(METRICS)
    assert found["rank_gpu_memory_bytes"] == {0: 70e9, 1: 70e9}
    assert found["rank_gpu_utilization_percent"] == {0: 98.0, 1: 98.0}
    assert found["rank_gpu_power_watts"] == {0: 650.0}, "what was not measured is absent"


# --- rounds and the verdict ----------------------------------------------------------------------


def test_a_round_is_logged_in_the_promised_lines(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    handle = Mock(hold_seconds=0.5)
    for event in (
        ev.CloseReached(CLOSE),
        ev.UploadBegun(CLOSE, handle, Progress(12, 30)),
        ev.CheckpointBegun(12, lambda: True, 0.125),
        ev.UploadWritten(CLOSE),
        ev.UploadEnded(Close(12, 3), size=2_500_000, seconds=3.0),
    ):
        rig.reporter.on_event(event, TWELVE)
    rig.reporter.on_event(APPLIED, state(Base.MERGED))
    assert [record.getMessage() for record in caplog.records] == [
        "💾 Saving model state locally for epoch 12",
        "Full State",
        "Extracted Optimizer & Model State Dict: training was held for 0.50 s",
        "Upload Model Start",
        "🔼 Uploading model and optimizer states to r2 bucket: mine",
        "Successfully pushed new model state with tag 12.3 to bucket: mine (2.5 MB in 3.0 s)",
        "AllReduce Operation Finished Succesfully: outer step 13 applied; training was held for "
        "0.25 s; our upload was merged",
    ]
    assert rig.fields("close") == {"outer_step": 12, "serial": 3}
    assert (rig.fields("upload")["seconds"], rig.fields("checkpoint")["seconds"]) == (0.5, 0.125)
    publication = rig.fields("publication")
    assert (publication["ok"], publication["bytes_sent"]) == (True, 2_500_000)
    assert rig.fields("outer_step") == {"outer_step": 13}
    found = rig.fields("round")
    assert (found["ok"], found["outer_step"], found["base"]) == (True, 12, "merged")


@pytest.mark.parametrize(
    ("base", "cause", "mark", "line"),
    [
        (Base.KEPT, "late: by 3 s", "", "late: by 3 s"),
        (Base.KEPT, "", "", "no upload of ours"),
        (Base.REFUSED, "copy: of uid 4", "! ", "copy: of uid 4"),
    ],
)
def test_an_upload_that_was_not_merged_is_logged_with_its_cause(
    base: Base, cause: str, mark: str, line: str, rig: Rig
) -> None:
    (said,) = rig.on_event(APPLIED, state(base, cause))
    assert said.startswith(f"{mark}AllReduce") and said.endswith(f"; {line}")


def test_failed_or_dropped_upload_is_a_warning(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.reporter.on_event(ev.UploadEnded(Close(12, 3), "the store is away"), TWELVE)
    failed = ev.OuterStepEnded(False, 12, "another digest")
    rig.reporter.on_event(failed, state(Base.KEPT))
    rig.reporter.on_event(replace(APPLIED, dropped="the 30 inner steps"), state(Base.REFUSED))
    rig.reporter.on_event(ev.NetworkDiffers("two manifests", forked=True), TWELVE)
    for line in (
        "Model state upload failed: the store is away",
        "All Reduce Failed At Checkpoint 3 (another digest)",
        "Dropped: the 30 inner steps",
    ):
        assert line in caplog.text
    assert rig.fields("fork") == {"cause": "two manifests"}
    assert [fields["ok"] for kind, fields in rig.records if kind == "round"] == [False, True]


class Judged:
    """Keep a miner's facts up to date with what its reporter records."""

    def __init__(self, folder: Path) -> None:
        self.now, ledger = 0.0, MemoryLedger()
        ledger.register(MINER.ss58)
        clocks = Clocks(lambda: self.now, lambda: 1e9 + self.now)
        chain = MemoryChain(hotkey=MINER.ss58, ledger=ledger)
        self.network = 12
        self.found: list[dict[str, Any]] = []
        self.facts, self.reporter = watched(
            folder,
            Facts(round_seconds=600.0, outer_step=12),
            lambda: {
                **chain_facts(chain, MINER.ss58, 1e9 + self.now),
                "network_step": self.network,
            },
            clocks,
            write=lambda kind, **fields: kind == "verdict" and self.found.append(fields),
        )

    def after(self, event: ev.Event, before: MinerState, seconds: float = 20.0) -> tuple[str, bool]:
        self.reporter.on_event(event, before)
        self.now += seconds
        self.facts.look()
        return self.found[-1]["verdict"], self.found[-1]["bad"]


def test_a_manifest_names_one_upload_of_several_and_the_newest_are_kept(tmp_path: Path) -> None:
    """Manifests may come late and in any order, even after the upload of a later outer step."""
    judged = Judged(tmp_path)
    for step in (14, 12, 13, 16, 15):
        judged.reporter.on_event(
            ev.UploadEnded(Close(step, step)), replace(TWELVE, outer_step=step)
        )
    for step, base in ((16, Base.MERGED), (15, Base.REFUSED)):
        refused = replace(state(base, "drawn" * (base is Base.REFUSED)), outer_step=step)
        judged.reporter.on_event(replace(APPLIED, outer_step=step + 1), refused)
        judged.now += 1.0
    facts = judged.facts.gather()
    assert [(each.outer_step, each.fate) for each in facts.uploads] == [
        (14, ""), (15, "refused"), (16, "merged"),
    ]  # fmt: skip
    assert judge(facts, 1e9 + judged.now).counts is True, "of the newest that a manifest names"


def test_a_change_is_logged_at_once_and_the_rest_once_an_hour(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    judged = Judged(tmp_path)
    judged.after(ev.UploadEnded(Close(12, 3)), TWELVE)
    caplog.set_level(logging.INFO)
    caplog.clear()
    judged.found.clear()
    judged.network = 13
    judged.after(APPLIED, state(Base.MERGED))
    for _ in range(2 * 3600 // 20):  # no other manifest comes
        judged.after(ev.Tick(judged.now), TWELVE)
    # Use the number of the level, because hivemind renames the levels when it is imported.
    lines = [(r.levelno, r.message) for r in caplog.records if r.message.startswith("Verdict: ")]
    assert lines[0] == (logging.INFO, "Verdict: counts: the upload of outer step 12 was merged")
    levels = [level for level, _ in lines[1:]]
    assert levels == [logging.INFO, *[logging.WARNING] * 3], "at a change, and hourly"
    assert len(judged.found) == pytest.approx(7200 / 300 + 1, abs=2)
    facts = Facts.read(tmp_path)
    assert judge(facts, 1e9 + judged.now).words == judged.found[-1]["words"]


def test_metrics_count_rounds_by_the_share_that_this_miner_had(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.prom")
    metrics = Metrics(file=file, counts={}, gauges={})
    metrics.on_event(APPLIED, state(Base.MERGED))
    metrics.on_event(APPLIED, state(Base.KEPT, "late"))
    whole = Update(20, Path("w"), Base.KEPT, None, "cd", 900, whole="fewer bytes")
    metrics.on_event(ev.OuterStepEnded(True, 20), replace(TWELVE, update=whole))
    metrics.on_event(ev.UploadEnded(Close(12, 3), size=7), TWELVE)
    metrics.on_event(ev.UploadEnded(Close(13, 4), "late"), TWELVE)
    values = parsed(file.registry.text())
    wanted = {
        "dt_rounds_total": 3,
        "dt_rounds_failed_total": 2,
        "dt_rounds_missed_total": 7,  # outer steps 13 to 19, which those weights contain
        "dt_publications_total": 2,
        "dt_publications_failed_total": 1,
        "dt_uploaded_bytes_total": 7,
    }
    assert {name: values[name] for name in wanted} == wanted
    assert values["dt_last_publication_timestamp_seconds"] > 0


def test_a_newcomer_misses_no_close_before_its_first_upload(
    tmp_path: Path, rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    joined = [False]
    rig.reporter._joined = lambda: joined[0]
    file = MetricsFile(tmp_path / "metrics.prom")
    metrics = Metrics(file=file, counts={}, gauges={}, joined=lambda: joined[0])
    early = ev.UploadSkipped("blocked: 3 inner steps", "steps")
    for joined[0] in (False, True):
        for follow in (rig.reporter.on_event, metrics.on_event):
            follow(early, TWELVE)
            follow(APPLIED, state(Base.KEPT))
        warned = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert len(warned) == joined[0]
        assert parsed(file.registry.text())["dt_rounds_total"] == joined[0]
    fates = [fields["fate"] for kind, fields in rig.records if kind == "round"]
    assert fates == ["too early", "missed"]


def test_missed_closes_and_uploads_are_remembered_by_the_next_process(tmp_path: Path) -> None:
    judged = Judged(tmp_path)
    assert not judged.facts.joined
    judged.after(ev.UploadEnded(Close(12, 3)), TWELVE)
    judged.after(APPLIED, state(Base.MERGED))
    for step, cause in ((13, "late: by the clock"), (14, "write lab/u: 403")):
        judged.after(ev.UploadEnded(Close(step, step), cause), replace(TWELVE, outer_step=step))
        # It counts once per close, even though the manifest shows it again.
        nothing = replace(state(Base.KEPT), outer_step=step)
        judged.after(replace(APPLIED, outer_step=step + 1), nothing)
    known = Facts.read(tmp_path)
    assert (known.missed, known.missed_cause) == (2, "not sent: write lab/u: 403")
    assert [upload.fate for upload in known.uploads] == ["merged"]
    again = Judged(tmp_path)
    found = again.after(ev.CloseReached(CLOSE), TWELVE)
    assert again.facts.joined and found == ("missed a close", True), "it is no newcomer"
    assert [upload.fate for upload in again.facts.gather().uploads] == ["merged"]
    for nothing_new in (
        {"kind": "round", "ok": False, "fate": "refused", "detail": "", "outer_step": 13},
        {"kind": "publication", "revision": "15.0", "reason": ""},  # a progress upload
    ):
        assert fold(known, nothing_new, 9.0) == known
