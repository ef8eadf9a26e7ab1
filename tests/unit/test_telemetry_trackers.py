"""TensorBoard and W&B: read back with their own formats, and never in training's way."""

from __future__ import annotations

import itertools
import json
import logging
import os
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from distributed_training.common.processes import command_of
from distributed_training.config.settings import TelemetrySettings
from distributed_training.protocol.types import StepReport
from distributed_training.telemetry import MetricsRegistry, record_step
from distributed_training.telemetry.trackers import Tracker, figures, open_trackers
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


def log_steps(settings: TelemetrySettings, folder: Path, steps: range, *, first: int) -> None:
    registry = MetricsRegistry()
    trackers = open_trackers(settings, folder, name="miner-7", first_step=first)
    for step in steps:
        record_step(registry, replace(REPORT, loss=step / 100, total_inner_steps=step))
        for tracker in trackers:
            tracker.log(step, registry.values())
    for tracker in trackers:
        tracker.close()
    wait_for(lambda: not any(t._thread.is_alive() for t in trackers), "what was logged, written")


def warning(caplog: pytest.LogCaptureFixture) -> str:
    """The one line that was said."""
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    return line


# --- names --------------------------------------------------------------------------------------


def test_torchtitans_names_stand_where_the_same_thing_is_meant() -> None:
    registry = MetricsRegistry()
    record_step(registry, REPORT)
    registry.set("next_round_timestamp_seconds", 1e9)
    drawn = figures(registry.values())
    assert drawn["loss_metrics/global_avg_loss"] == 2.5 and drawn["mfu(%)"] == 40
    assert drawn["time_metrics/data_loading(%)"] == 25 and drawn["lr"] == 1e-3
    assert drawn["train/tokens_per_second"] == 128 and drawn["train/steps_total"] == 1
    assert not any("timestamp" in name for name in drawn)
    assert "gpu/memory_gb" not in drawn, "what was not measured is absent"


# --- TensorBoard --------------------------------------------------------------------------------


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, round(event.value, 6)) for event in events.Scalars(name)]


def test_tensorboard_reads_every_step_once_over_restarts_and_roll_backs(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    board = tmp_path / "board"
    settings = TelemetrySettings(tensorboard_dir=board)
    log_steps(settings, tmp_path, range(1, 11), first=1)
    log_steps(settings, tmp_path, range(8, 13), first=8)  # a checkpoint of step 7
    loss = scalars(board / "miner-7", "loss_metrics/global_avg_loss")
    assert loss == [(step, step / 100) for step in range(1, 13)]
    assert scalars(board / "miner-7", "lr")[-1] == (12, 0.001)


def test_a_roll_back_in_mid_run_replaces_the_rows_after_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tracker,) = open_trackers(
        TelemetrySettings(tensorboard_dir=tmp_path), tmp_path, name="m", first_step=1
    )
    for step, loss in itertools.chain(((s, 9.0) for s in range(1, 7)), ((s, 1.0) for s in (4, 5))):
        tracker.log(step, {"train_loss": loss})
    tracker.close()
    found = scalars(tmp_path / "m", "loss_metrics/global_avg_loss")
    assert found == [(1, 9.0), (2, 9.0), (3, 9.0), (4, 1.0), (5, 1.0)]


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    board = tmp_path / "board"
    board.write_text("a file where the folder should be")  # root may write read-only folders
    log_steps(TelemetrySettings(tensorboard_dir=board), tmp_path, range(1, 4), first=1)
    line = warning(caplog)
    assert (
        line.startswith("TensorBoard shows nothing from here on (") and "Training continues" in line
    )


def test_tensorboard_that_is_not_installed_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    log_steps(TelemetrySettings(tensorboard_dir=tmp_path), tmp_path, range(1, 3), first=1)
    assert "pip install 'distributed-training-miner[tensorboard]'" in warning(caplog)


# --- Weights & Biases ---------------------------------------------------------------------------


def records(file: Path) -> Iterator[Any]:
    """The protobuf records of a ``.wandb`` file: LevelDB's log format after seven bytes."""
    protocol = pytest.importorskip("wandb.proto.wandb_internal_pb2")

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # no header fits: padding
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield protocol.Record.FromString(parts)
            parts = b""


def offline_runs(folder: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    """Run id and history of each run kept in ``folder``, oldest first."""
    runs = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime):
        found = list(records(file))
        ids = [r.run.run_id for r in found if r.HasField("run")]
        history = [
            {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in r.history.item}
            for r in found
            if r.HasField("history")
        ]
        runs.append((ids[0], history))
    return runs


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server is reached, and no key of this machine's user is found."""
    pytest.importorskip("wandb")
    monkeypatch.setattr("distributed_training.telemetry.trackers._SERVER_SECONDS", 3.0)
    monkeypatch.setattr("distributed_training.telemetry.trackers._CLOSE_SECONDS", 60.0)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", os.devnull)


def test_error_of_any_kind_in_wandb_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stand-in for the library: it prints more than a pipe holds, and fails at the third step."""
    (tmp_path / "wandb.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = TelemetrySettings(wandb="offline")
    (tracker,) = open_trackers(settings, tmp_path, name="m", first_step=1)

    def logs() -> bool:
        tracker.log(1, {"train_loss": 1.0})
        return tracker._thread.is_alive()

    wait_for(lambda: not logs(), "that it gives up")
    rows = [json.loads(row) for row in (tmp_path / "figures").read_text().splitlines()]
    assert rows == 2 * [{"inner_step_total": 1, "loss_metrics/global_avg_loss": 1.0}]
    assert warning(caplog).startswith("W&B shows nothing from here on")
    caplog.clear()
    (tmp_path / "wandb.py").write_text(STAND_IN.replace("self, **_", "self"))
    log_steps(settings, tmp_path, range(1, 2), first=1)
    assert "unexpected keyword argument" in warning(caplog)


@pytest.mark.long
@pytest.mark.usefixtures("wandb")
def test_wandb_gets_a_run_for_each_start_over_one_axis_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["neurons/miner.py", "--an.argument"])
    settings = TelemetrySettings(wandb="offline", wandb_api_key=SECRET)
    log_steps(settings, tmp_path, range(1, 4), first=1)
    log_steps(settings, tmp_path, range(3, 6), first=3)
    (first, before), (second, after) = offline_runs(tmp_path)
    assert first != second
    assert [row["inner_step_total"] for row in before] == [1, 2, 3]
    assert [row["inner_step_total"] for row in after] == [3, 4, 5]
    assert after[-1]["loss_metrics/global_avg_loss"] == 0.05
    (tmp_path / "wandb" / "latest-run").unlink()
    for file in (p for p in tmp_path.glob("wandb/**/*") if p.is_file()):
        content = file.read_bytes()
        assert SECRET.encode() not in content, file
        assert b"--an.argument" not in content and b"pytest" not in content, file


@pytest.mark.long
@pytest.mark.usefixtures("wandb")
@pytest.mark.parametrize(("key", "words"), [(SECRET, "wandb sync"), (None, "WANDB_API_KEY")])
def test_a_wandb_server_or_key_that_is_away_costs_a_line_and_no_figures(
    key: str | None, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log_steps(TelemetrySettings(wandb="online", wandb_api_key=key), tmp_path, range(1, 4), first=1)
    line = warning(caplog)
    assert words in line and SECRET not in line
    ((_, rows),) = offline_runs(tmp_path)
    assert [row["inner_step_total"] for row in rows] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.usefixtures("wandb")
def test_wandb_has_the_miners_secrets_in_no_process_and_a_killed_one_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R2_WRITE_SECRET_ACCESS_KEY", SECRET)
    settings = TelemetrySettings(wandb="offline", wandb_api_key=SECRET)
    (tracker,) = open_trackers(settings, tmp_path, name="m", first_step=1)
    wait_for(lambda: list(tmp_path.glob("wandb/offline-run-*/*.wandb")), "a run")
    names: set[str] = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ended since it was listed
            names.add(process.name())
            assert SECRET not in str(process.environ()) + str(process.cmdline()), process
    assert "wandb-core" in names
    for process in psutil.Process().children():
        if "telemetry.trackers" in command_of(process):
            process.kill()
            process.wait(20)
    tracker.log(1, {"train_loss": 1.0})
    wait_for(lambda: not tracker._thread.is_alive(), "that it gives up")
    assert warning(caplog).startswith("W&B shows nothing from here on")


# --- training's side ----------------------------------------------------------------------------


class Stuck:
    def __init__(self) -> None:
        self.free = threading.Event()
        self.seen: list[int] = []

    def write(self, step: int, figures: Any) -> None:
        self.free.wait()
        self.seen.append(step)

    def close(self) -> None:
        pass


def test_a_writer_that_hangs_holds_nobody_up(monkeypatch: Any) -> None:
    monkeypatch.setattr("distributed_training.telemetry.trackers._QUEUED_STEPS", 10)
    monkeypatch.setattr("distributed_training.telemetry.trackers._CLOSE_SECONDS", 0.2)
    writer = Stuck()
    tracker = Tracker("stuck", lambda: writer)
    began = time.perf_counter()
    for step in range(1000):
        tracker.log(step, {"train_loss": 1.0})
    assert time.perf_counter() - began < 10  # 1000 steps, while the writer never returns
    tracker.close()
    writer.free.set()
    assert writer.seen in ([], list(range(len(writer.seen)))), "those that waited, in order"
