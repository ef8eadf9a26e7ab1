"""A real miner of a local subnet under a real pm2: it trains, stops cleanly, goes on afterwards."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from distributed_training.localnet.plan import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet
from distributed_training.telemetry import read_events

ROOT = Path(__file__).parents[2]
PM2 = ROOT / "build" / "node" / "node_modules" / ".bin" / "pm2"
WAIT = timedelta(seconds=120)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not PM2.exists(), reason="pm2 is not installed: make pm2"),
]


@pytest.fixture()
def subnet(tmp_path: Path) -> Iterator[LocalSubnet]:
    subnet = LocalSubnet(options=SubnetOptions(folder=tmp_path / "subnet", ranks=(1,)))
    with subnet:
        yield subnet


def test_pm2_trains_and_stops_a_miner_of_the_local_subnet(
    subnet: LocalSubnet, tmp_path: Path
) -> None:
    (miner,) = subnet.miners
    assert subnet.services is not None

    def steps() -> list[dict[str, Any]]:
        return list(read_events(miner.plan.events, "step"))

    # Started by the subnet first, so that pm2's start is a restart that must lose nothing.
    subnet.wait_until(lambda: len(steps()) >= 12, WAIT, "the first steps")
    assert subnet.stop_miner(0) == 0
    before = steps()[-1]

    words = subnet.services.arguments(miner.plan)[1:]
    environ = {
        **os.environ,
        **subnet.services.environment(miner.plan),
        "PM2_HOME": str(tmp_path / "pm2"),
        "DT_PRESET": "local",
        "DT_FLAGS": " ".join(words),
    }

    def pm2(*arguments: str) -> str:
        done = subprocess.run(
            [str(PM2), *arguments],
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        pm2("start", str(ROOT / "app.config.js"))
        count = len(steps())
        subnet.wait_until(lambda: len(steps()) >= count + 5, WAIT, "steps under pm2")
        starts = list(read_events(miner.plan.events, "start"))
        assert starts[-1]["resumed"]
        resumed = steps()[count]
        assert (resumed["outer_step"], resumed["inner_step"]) == (
            before["outer_step"],
            before["inner_step"] + 1,
        )
        pm2("stop", "distributed_training_miner")
        lines = pm2("jlist").splitlines()
        (app,) = json.loads(next(line for line in lines if line.startswith("[")))
        assert app["pm2_env"]["status"] == "stopped"
        assert app["pm2_env"]["restart_time"] == 0
        stops = list(read_events(miner.plan.events, "stop"))
        assert len(stops) == 2 and stops[-1]["exit_status"] == 0
        left = [" ".join(p.cmdline()) for p in subnet.mark.processes()]
        folder = str(miner.plan.folder)
        assert not [line for line in left if folder in line and "pm2" not in line]
    finally:
        pm2("kill")
