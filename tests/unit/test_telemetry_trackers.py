"""Test that TensorBoard and W&B get the right figures and never disturb training."""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from distributed_training.common.processes import command_of
from distributed_training.config.settings import TelemetrySettings
from distributed_training.protocol.types import StepReport
from distributed_training.telemetry import EventLog, MetricsFile
from distributed_training.telemetry.trackers import figures, open_trackers
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(200)
REPORT = StepReport(
    3, 7, 2.5, 1e-3, 256, 8, 2.0, 0.5, 2, grad_norm=1.5, mfu=0.4, total_inner_steps=107
)
STAND_IN = """
import json
class Error(Exception): pass
class Settings:
    def __init__(self, **_): pass
class Run:
    logged = 0
    def define_metric(self, *_, **__): pass
    def log(self, figures):
        print("x" * 100_000, flush=True)
        self.logged += 1
        if self.logged == 3:
            raise RuntimeError("a defect")
        with open(self.folder + "/figures", "a") as file: file.write(json.dumps(figures) + "\\n")
def init(dir, **_):
    run = Run()
    run.folder = dir
    return run
"""
SECRET = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def time_for_the_last_figures(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr("distributed_training.telemetry.trackers._CLOSE_SECONDS", 90.0)


def log_steps(settings: TelemetrySettings, folder: Path, *steps: int, loss: float = 0.0) -> None:
    with (
        EventLog(folder / "events.jsonl") as events,
        open_trackers(settings, folder, name="miner-7"),
    ):
        for step in steps:
            report = replace(REPORT, loss=loss or step / 100, total_inner_steps=step)
            events.write("step", **asdict(report), tokens_per_second=report.tokens_per_second)
        skipped = replace(REPORT, skipped=True, total_inner_steps=steps[-1] + 1)
        events.write("step", **asdict(skipped), tokens_per_second=1.0)


def warning(caplog: pytest.LogCaptureFixture) -> str:
    """Return the only warning that was logged."""
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return line


def test_only_measured_figures_are_drawn() -> None:
    drawn = figures({"kind": "step", **asdict(REPORT), "tokens_per_second": 128.0})
    assert drawn["train/loss"] == 2.5 and drawn["train/tokens_per_second"] == 128
    assert "train/gpu_memory_gb" not in drawn and "train/total_inner_steps" not in drawn
    export = {"kind": "export", "results": {"accuracy": 0.5, "note": "x"}}
    assert figures(export) == {"evaluation/accuracy": 0.5}


# --- TensorBoard --------------------------------------------------------------------------------


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, round(event.value, 6)) for event in events.Scalars(name)]


def test_tensorboard_reads_every_step_once_over_restarts_and_roll_backs(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    settings = TelemetrySettings(tensorboard_dir=tmp_path / "board")
    file = MetricsFile(tmp_path / "metrics.prom")
    file.registry.set("disk_free_bytes", 7e9)
    file.write(lambda: None)
    log_steps(settings, tmp_path, *range(1, 11))
    # Training resumes from the checkpoint of step 7.
    log_steps(settings, tmp_path, 8, 9, 10, 11, 12, 10, 11, loss=1.0)
    board = tmp_path / "board" / "miner-7"
    wanted = [(step, step / 100 if step < 8 else 1.0) for step in range(1, 12)]
    assert scalars(board, "train/loss") == wanted
    assert scalars(board, "train/learning_rate")[-1] == (11, 0.001)
    assert scalars(board, "disk/free_bytes")[-1] == (11, 7e9)


def test_tensorboard_that_is_not_installed_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = "raise ModuleNotFoundError('x', name='tensorboard')"
    (tmp_path / "tensorboard.py").write_text(missing)
    monkeypatch.syspath_prepend(str(tmp_path))
    log_steps(TelemetrySettings(tensorboard_dir=tmp_path), tmp_path, 1)
    assert "pip install 'distributed-training-miner[tensorboard]'" in warning(caplog)


# --- Weights & Biases ---------------------------------------------------------------------------


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let W&B reach no server, and find no key of this machine's user."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", os.devnull)


def test_error_of_any_kind_in_wandb_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Use a stand-in for the library that prints more than fits into a pipe and fails at step 3."""
    (tmp_path / "wandb.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = TelemetrySettings(wandb="offline")
    log_steps(settings, tmp_path, 1, 2, 3, 4)
    rows = [json.loads(row) for row in (tmp_path / "figures").read_text().splitlines()]
    assert [(row["inner_step_total"], row["train/learning_rate"]) for row in rows] == [
        (1, 0.001),
        (2, 0.001),
    ]
    assert warning(caplog).startswith("W&B shows nothing from here on (a defect)")
    caplog.clear()
    (tmp_path / "wandb.py").write_text(STAND_IN.replace("self, **_", "self"))
    log_steps(settings, tmp_path, 1)
    assert "unexpected keyword argument" in warning(caplog)


def test_a_library_that_hangs_holds_neither_training_nor_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text("import time; time.sleep(1000)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("distributed_training.telemetry.trackers._CLOSE_SECONDS", 0.5)
    began = time.monotonic()
    log_steps(TelemetrySettings(wandb="offline"), tmp_path, *range(1, 1000))
    assert time.monotonic() - began < 30
    assert not any("telemetry.trackers" in command_of(p) for p in psutil.Process().children())


@pytest.mark.slow
@pytest.mark.usefixtures("wandb")
def test_wandb_has_the_miners_secrets_in_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R2_WRITE_SECRET_ACCESS_KEY", SECRET)
    settings = TelemetrySettings(wandb="offline", wandb_api_key=SECRET)
    with open_trackers(settings, tmp_path, name="m"):
        wait_for(lambda: list(tmp_path.glob("wandb/offline-run-*/*.wandb")), "a run")
        names: set[str] = set()
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # the process has ended since it was listed
                names.add(process.name())
                assert SECRET not in str(process.environ()) + str(process.cmdline()), process
    assert "wandb-core" in names
