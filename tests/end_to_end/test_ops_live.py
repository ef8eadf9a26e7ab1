"""Prometheus itself, on the metrics of a miner's own code: every panel has data, every alert works.

The figures come the way they come in a miner: events through the reporter, gauges of machine and
the network; the page serves the file, Prometheus scrapes it as configured in
``ops``. Only the GPU's gauges are set by hand.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from distributed_training.common.ports import free_ports
from distributed_training.miner import events as ev
from distributed_training.miner.events import MinerState, Mode
from distributed_training.miner.launcher import Outages
from distributed_training.miner.metrics import MachineGauges, Metrics
from distributed_training.miner.run_folder import write_pid_file
from distributed_training.protocol.types import Base, StepReport, Update
from distributed_training.telemetry import MetricsFile, unix_time
from distributed_training.telemetry.metrics import METRICS
from distributed_training.telemetry.page import PageProcess
from distributed_training.telemetry.run_state import LauncherFile
from tests.tools.waiting import wait_for
from tests.unit.test_ops import queries

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.slow,
    pytest.mark.skipif(PROMETHEUS is None, reason="needs prometheus (Debian package)"),
]
OPS = Path(__file__).parents[2] / "ops"
TRAINING = MinerState(mode=Mode.TRAINING, outer_step=3)


class Miner:
    """A miner's reporter with the gauges that ``miner/start.py`` gives it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.step = 0
        self.round_seconds: float | None = None  # of the reporter
        write_pid_file(folder, 0)
        self.machine = MachineGauges(folder, needed=10**6, gpus=0)
        self.metrics = Metrics(
            file=MetricsFile(folder / "metrics.prom", every=0.0),
            counts={},
            gauges={
                "chain_age_seconds": lambda: 4.0,
                "next_round_timestamp_seconds": lambda: unix_time(time.monotonic() + 600),
                "clock_offset_seconds": lambda: 0.1,
                "global_outer_step": lambda: 3,
                "round_seconds": lambda: self.round_seconds,
                "counts": lambda: 1.0,
                **self.machine.single(),
            },
            by_rank=self.by_rank,
        )

    def by_rank(self) -> dict[str, dict[int, float]]:
        gpu = {
            "rank_gpu_memory_bytes": {0: 7e10, 1: 7e10},
            "rank_gpu_utilization_percent": {0: 98.0, 1: 97.0},
            "rank_gpu_temperature_celsius": {0: 60.0, 1: 61.0},
            "rank_gpu_power_watts": {0: 650.0, 1: 640.0},
        }
        return self.machine.by_rank() | gpu

    def train(self) -> None:
        """One step, the outer step counted on every time so that its changes can be asked for."""
        self.step += 1
        report = StepReport(
            self.step, 1, 2.5, 1e-3, 256, 8, 0.2, 0.0, 2,
            grad_norm=1.0, gpu_memory_gb=70.0, gpu_utilization=98.0, mfu=0.5,
            learning_rate_share=0.5,
        )  # fmt: skip
        self.metrics.on_event(ev.InnerStepDone(report), TRAINING)

    def everything_else(self) -> None:
        """One of each of the other events that leave a figure behind."""
        see = self.metrics.on_event
        update = Update(4, Path("update"), Base.MERGED, None, "ab")
        see(ev.OuterStepEnded(True, 5), replace(TRAINING, update=update))
        self.round_seconds = 2.5
        see(ev.UploadEnded(3, 0, size=5_000_000, seconds=2.0), TRAINING)


class Prometheus:
    def __init__(self, folder: Path, target: str) -> None:
        config = yaml.safe_load((OPS / "prometheus" / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(OPS / "prometheus" / "miner.rules.yml")]
        del config["scrape_configs"][1:]  # of a validator
        config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}/api/v1/"
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    str(PROMETHEUS),
                    f"--config.file={file}",
                    f"--storage.tsdb.path={folder / 'tsdb'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def get(self, what: str, **parameters: str) -> Any:
        answer = httpx.get(self.url + what, params=parameters, timeout=20).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[Any]:
        result: list[Any] = self.get("query", query=expression)["result"]
        return result

    def answers(self) -> bool:
        try:
            # It listens before it is ready, and says so in plain text.
            ready = httpx.get(self.url + "query", timeout=20).status_code != 503
            return ready and bool(self.query("up == 1"))
        except (httpx.HTTPError, AssertionError):
            return False

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("miner")
    said: list[str] = []
    with ExitStack() as stack:
        Outages(
            folder, threading.Event(), LauncherFile(folder)
        ).report()  # as the launcher does at its start
        miner = Miner(folder, stack)
        miner.train()
        stack.enter_context(PageProcess([folder], told=said.append))
        wait_for(lambda: said, "the page")
        address = said[0].removeprefix("page: http://").rstrip("/")
        found = stack.enter_context(closing(Prometheus(folder, address)))
        wait_for(found.answers, "the first scrape")
        scraped = "count_over_time(dt_round_seconds[1m]) >= 4"  # which the other events leave
        miner.everything_else()

        def enough() -> bool:
            miner.train()
            return bool(found.query(scraped))

        wait_for(enough, "some scrapes", every=0.3)
        yield found


PANELS = [row for row in queries() if not row[0].startswith("alert ")]


@pytest.mark.parametrize(("title", "query"), PANELS, ids=lambda value: value[:30])
def test_every_panel_has_data(prometheus: Prometheus, title: str, query: str) -> None:
    assert prometheus.query(query), f"{title}: {query}"


def test_every_alert_is_evaluated_and_none_fires_for_a_healthy_miner(
    prometheus: Prometheus,
) -> None:
    def rules() -> list[dict[str, Any]]:
        (group,) = prometheus.get("rules")["groups"]
        found: list[dict[str, Any]] = group["rules"]
        return found

    wait_for(lambda: all(rule["health"] != "unknown" for rule in rules()), "the evaluation")
    assert [(r["name"], r["lastError"]) for r in rules() if r["health"] != "ok"] == []
    assert [r["name"] for r in rules() if r["state"] == "firing"] == []


def test_every_metric_of_the_catalogue_arrives(prometheus: Prometheus) -> None:
    names = set(prometheus.get("label/__name__/values"))
    wanted = [name for name in METRICS if not name.startswith("network_")]  # a validator's
    missing = {f"dt_{name}" for name in wanted} - names
    # Written with the last figures, at a stop; added by the page.
    assert missing <= {"dt_registered", "dt_launcher_running"}, missing
    described = prometheus.get("metadata")
    assert all(described[name][0]["help"] for name in names if name.startswith("dt_train"))
