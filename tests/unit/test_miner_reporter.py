"""The reporter: the lines and records of each event, for operators and programs."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from distributed_training.health.gpus import GpuSample
from distributed_training.miner import events as ev
from distributed_training.miner.events import MinerState, Mode
from distributed_training.miner.reporter import MachineGauges, Metrics, Reporter
from distributed_training.miner.run_folder import write_pid_file
from distributed_training.protocol import lines
from distributed_training.protocol.types import Progress
from distributed_training.telemetry import MetricsFile
from distributed_training.telemetry.metrics import METRICS
from tests.tools.miner_parts import step_report
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(30)

TRAINING = MinerState(mode=Mode.TRAINING, outer_step=3)
REPORT = step_report()


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
    """A round and a lack of data end no step; the metrics still show the last step's age."""
    began = time.time()
    rig.on_event(ev.Tick(1.0), TRAINING)
    first = figures(rig)
    assert first["dt_metrics_written_timestamp_seconds"] >= began
    stood = rig.metrics._file.registry.values()["last_step_timestamp_seconds"]
    assert first["dt_last_step_timestamp_seconds"] == stood >= first["dt_start_timestamp_seconds"]
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
    rig.metrics._gauges = {"memory_bytes": fails, "disk_free_bytes": lambda: 9}
    rig.metrics._by_rank = fails
    rig.on_event(ev.InnerStepDone(REPORT))
    text = rig.file.read_text()
    assert "dt_disk_free_bytes 9" in text and "dt_memory_bytes" not in text


# --- what is measured of the machine and of the limits --------------------------------------------


def test_the_machine_is_measured_rank_by_rank(tmp_path: Path) -> None:
    write_pid_file(tmp_path, 0)
    machine = MachineGauges(tmp_path, needed=5, gpus=0)
    figures = {name: measure() for name, measure in machine.single().items()}
    assert figures.keys() <= set(METRICS) and figures["disk_needed_bytes"] == 5
    assert (figures["memory_total_bytes"] or 0) > (figures["memory_bytes"] or 0) > 1e7
    (ranks,) = machine.by_rank().values()
    assert machine.by_rank().keys() == {"rank_memory_bytes"} and ranks.keys() == {0}
    assert ranks[0] > 1e7 and os.getpid()


def test_each_gpu_is_logged_with_its_ranks_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one cannot measure its power, the third fell off the bus."""
    cards = [GpuSample("H200", 141.0, 70.0, 98.0, 60.0, power) for power in (650.0, None)]
    monkeypatch.setattr(
        f"{MachineGauges.__module__}.sample_gpu",
        lambda index, **_: dict(enumerate(cards)).get(index),
    )
    machine = MachineGauges(tmp_path, needed=5, gpus=3)
    found = machine.by_rank()
    assert found.keys() <= set(METRICS)
    assert found["rank_gpu_memory_bytes"] == {0: 70e9, 1: 70e9}
    assert found["rank_gpu_utilization_percent"] == {0: 98.0, 1: 98.0}
    assert found["rank_gpu_power_watts"] == {0: 650.0}, "what was not measured is absent"
