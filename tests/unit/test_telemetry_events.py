from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from distributed_training.common.processes import _Forward
from distributed_training.protocol.types import ExitStatus, StepReport
from distributed_training.telemetry import EventLog, MetricsFile, read_events
from distributed_training.telemetry.events import EventFollower
from distributed_training.telemetry.logs import register_secret
from distributed_training.telemetry.metrics import (
    CHAIN_COUNTS,
    METRICS,
    MetricsRegistry,
    read_metrics,
    record_step,
    register_metric,
)
from distributed_training.telemetry.neuron_state import NeuronState
from distributed_training.telemetry.trackers import gauges

pytestmark = pytest.mark.timeout(20)


def test_events_come_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    with EventLog(path) as log:
        log.write("publication", uids=(3, 4), status=ExitStatus.FINISHED, folder=tmp_path)
        log.write("step", loss=float("nan"), key=SecretStr("abcdefgh"))
    first, second = read_events(path)
    assert first["kind"] == "publication" and first["time"] > 1e9
    assert (first["uids"], first["status"]) == ([3, 4], int(ExitStatus.FINISHED))
    assert first["folder"] == str(tmp_path)
    assert second["loss"] is None and "abcdefgh" not in path.read_text()
    assert [e["kind"] for e in read_events(path, "step")] == ["step"]


def test_a_line_cut_by_a_kill_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write("start")
    with path.open("ab") as file:
        file.write(b'{"time": 1, "kind": "st')
    with EventLog(path) as log:
        log.write("step")
    assert [e["kind"] for e in read_events(path)] == ["start", "step"]


def test_a_follower_continues_in_a_file_that_was_emptied(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log, contextlib.closing(EventFollower(path)) as follower:
        log.write("start", filling="x" * 200)
        assert [e["kind"] for e in follower.poll()] == ["start"]
        os.truncate(path, 0)
        log.write("step")
        assert [e["kind"] for e in follower.poll()] == ["step"]


@pytest.mark.parametrize("name", ["events.jsonl.1", None])
def test_events_go_on_in_a_new_file_where_theirs_was_moved_away(
    tmp_path: Path, name: str | None
) -> None:
    """The file may be moved by logrotate, or deleted by a person."""
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write("start")
        path.rename(tmp_path / name) if name else path.unlink()
        path.touch()
        log.write("step")
    assert [e["kind"] for e in read_events(path)] == (["start"] if name else []) + ["step"]


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, retention_bytes=4000) as log:
        for i in range(200):
            log.write("step", i=i)
    kept = [e["i"] for e in read_events(path)]
    assert kept == list(range(kept[0], 200)) and 20 < len(kept) < 100
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) < 4200


def test_a_disk_that_fails_costs_only_the_events_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, retention_bytes=400) as events:
        with monkeypatch.context() as broken:
            broken.setattr(os, "replace", _no_space)
            for number in range(8):
                events.write("step", number=number, filling="x" * 60)
        assert caplog.text.count("cannot be written") == 1 and "No space left" in caplog.text
        events.write("after")
        assert (tmp_path / "events.jsonl.1").exists()
        events.write("later")
    written = [e["kind"] for e in read_events(path)]
    assert written[-2:] == ["after", "later"]
    assert events.write("closed") is None and written == [e["kind"] for e in read_events(path)]


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("text", "values"), [("%s", ("\ud800",)), ("%d", ("x",)), ("%s %s", (1,))])
def test_no_log_line_ends_its_caller(
    tmp_path: Path, text: str, values: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)  # as setup_logging sets it
    root, before = logging.getLogger(), list(logging.getLogger().handlers)
    events = EventLog.open(tmp_path)
    said: list[Any] = []
    try:
        for handler in before:  # pytest's own handlers would raise an error
            root.removeHandler(handler)
        root.addHandler(_Forward(SimpleNamespace(send=said.append)))  # as in a child process
        logging.getLogger("distributed_training.test").warning(text, *values)
        logging.getLogger("distributed_training.test").warning("whole")
    finally:
        root.handlers[:] = before
        events.close()
    assert [e["text"] for e in read_events(events.path)][-1] == "whole" == said[-1].text


def test_secrets_registered_for_the_log_are_masked_here_too(tmp_path: Path) -> None:
    register_secret("very-secret-value")
    register_secret('quoted"\\secret')
    with EventLog(tmp_path / "e.jsonl") as log:
        log.write("fault", detail="key very-secret-value refused")
        log.write("fault", detail='quoted"\\secret')
    assert "quoted" not in (tmp_path / "e.jsonl").read_text()
    assert next(read_events(tmp_path / "e.jsonl"))["detail"] == "key ******** refused"


def test_metrics_are_typed_and_absent_until_measured() -> None:
    registry = MetricsRegistry()
    registry.add("publications_total", 2)
    assert "dt_publications_total 2.0\n" in registry.text() and "train_mfu" not in registry.text()
    registry.set("train_mfu", 0.5)
    assert "dt_train_mfu 0.5\n" in registry.text()
    registry.set("train_mfu", float("nan"))
    assert "train_mfu" not in registry.text()
    with pytest.raises(TypeError):
        registry.add("train_mfu")
    with pytest.raises(ValueError):
        registry.set("not_in_the_catalogue", 1.0)


def test_the_metrics_file_is_whole_and_not_written_too_often(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.prom"
    times = iter((100.0, 110.0, 115.0, 200.0, 300.0))
    file = MetricsFile(path, every=15.0, clock=lambda: next(times))
    updates: list[float] = []

    def update() -> None:
        updates.append(1.0)
        file.registry.totals("server", {"refused.bad-signature": len(updates), "calls": 7})
        file.registry.set("chain_age_seconds", 12.5)

    for _ in range(3):
        file.write(update)
    assert len(updates) == 2
    text, found = path.read_text(), read_metrics(path)
    assert "# TYPE dt_chain_age_seconds gauge\n" in text
    assert "# TYPE dt_server_calls_total counter\n" in text
    assert f"# HELP dt_chain_age_seconds {METRICS['chain_age_seconds'].about}\n" in text
    assert found.pop("dt_metrics_written_timestamp_seconds") > 1.7e9
    assert found == {
        "dt_chain_age_seconds": 12.5,
        "dt_server_calls_total": 7.0,
        "dt_server_refused_total.bad_signature": 2.0,
    }
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b'# TYPE dt_a gauge\ndt_a{kind=, ="x"} 1.0} "x\ndt_b 2\n')
    assert read_metrics(tmp_path / "missing") == read_metrics(damaged) == {}
    file.registry.totals("chain", {"failures": 1})
    assert f"# HELP dt_chain_failures_total {CHAIN_COUNTS['chain_failures_total']}" in (
        file.registry.text()
    )
    path.unlink()
    path.mkdir()
    for _ in range(2):
        file.write(update)
    assert caplog.text.count("Metrics cannot be written") == 1


def test_a_metric_of_a_plug_in_is_in_the_file_the_page_and_the_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(METRICS, "_made", dict(METRICS._made))
    runpy.run_path(str(Path(__file__).parents[1] / "toys" / "metric.py"))
    register_metric("toy_broken", "always fails", measure=lambda: 1 / 0)
    for name, wrong in {"toy_text": "1.5", "toy_text_total": "x", "toy_back_total": -1}.items():
        register_metric(name, "no number, or less than none", step=lambda report, v=wrong: v)
    with pytest.raises(ValueError, match="two kinds of metric called 'train_loss'"):
        register_metric("train_loss", "taken")
    file = MetricsFile(tmp_path / "metrics.prom", every=0.0)
    record_step(file.registry, StepReport(3, 7, 2.0, 1e-3, 256, 8, 2.0, 0.5, 2))
    for _ in range(2):
        file.write(lambda: None)
    assert gauges(tmp_path)["toy/loss_bits"] == 2.0 / math.log(2)
    shown = NeuronState(tmp_path).shown()["gauges"]
    assert shown["dt_toy_loss_bits"] == 2.0 / math.log(2) and shown["dt_toy_load"] >= 0
    assert "bits per token" in (tmp_path / "metrics.prom").read_text()
    assert "dt_toy_broken" not in shown and shown["dt_toy_text"] == 1.5
    assert caplog.text.count("The metric dt_toy_text_total cannot be read (ValueError") == 1
    assert (
        "dt_toy_back_total cannot be read (ValueError('a counter cannot grow by -1.0" in caplog.text
    )
    assert caplog.text.count("The metric dt_toy_broken cannot be read (ZeroDivisionError") == 1
