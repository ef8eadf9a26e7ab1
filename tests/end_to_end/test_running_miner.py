"""Around a miner that runs: the doctor, a second miner with its hotkey; then the hotkey is lost.

One subnet for all of it, in this order, without rounds.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from distributed_training.chain.local import LocalChain
from distributed_training.common.files import read_json_object
from distributed_training.doctor.command import main
from distributed_training.localnet.plan import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet, SubnetFailure
from distributed_training.telemetry import read_events
from tests.end_to_end.test_doctor import doctor
from tests.subnet_tools import paced

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def subnet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSubnet]:
    folder = tmp_path_factory.mktemp("running") / "subnet"
    options = SubnetOptions(folder=folder, ranks=(1,), blocks_per_allreduce=100_000)
    with LocalSubnet(options=paced(options)) as running:
        (miner,) = running.miners
        running.wait_until(lambda: bool(miner.state.losses), timedelta(seconds=180), "a step")
        yield running


def test_a_running_miner_is_found_in_order(subnet: LocalSubnet, tmp_path: Path) -> None:
    (miner,) = subnet.miners
    assert subnet.services is not None
    metrics = miner.plan.folder / "metrics.prom"
    subnet.wait_until(
        lambda: metrics.exists() and 'kind="IsAlive"' in metrics.read_text(),
        timedelta(seconds=60),
        "a call in the metrics",
    )
    flags = subnet.services.arguments(miner.plan)[1:]
    status, checks, _ = doctor(
        *flags,
        "--diagnostics.measure=0",
        folder=tmp_path,
        environ=subnet.services.environment(miner.plan),
    )
    assert status == 0, {n: c for n, c in checks.items() if c["status"] == "fail"}
    for name in (
        *("configuration", "hotkey", "commitment", "endpoint", "bucket", "bootstrap", "line"),
        *("clock", "chain clock", "calls", "port axon.port", "port dht.port"),
    ):
        assert checks[name]["status"] == "ok", checks[name]
    assert "the running miner listens there" in checks["port axon.port"]["finding"]
    assert f"uid {miner.plan.uid}" in checks["hotkey"]["finding"]


def test_a_second_machine_dials_a_miner_back(
    subnet: LocalSubnet, capsys: pytest.CaptureFixture[str]
) -> None:
    (miner,) = subnet.miners
    assert main(["--probe", f"127.0.0.1:{miner.plan.axon_port}"]) == 0
    assert "an HTTP server answers" in capsys.readouterr().out
    assert main(["--probe", f"127.0.0.1:{miner.plan.dht_port}"]) == 0
    assert "a libp2p peer answers" in capsys.readouterr().out


def test_a_second_miner_with_the_same_hotkey_is_refused(
    subnet: LocalSubnet, tmp_path: Path
) -> None:
    (miner,) = subnet.miners
    assert subnet.services is not None
    words = subnet.services.arguments(miner.plan)
    more = ["--neuron.run_folder", str(tmp_path / "second"), "--axon.port", "0"]
    second = subprocess.run(
        [sys.executable, *words, *more, "--dht.port", "0"],
        env=subnet.services.environment(miner.plan),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert second.returncode == 3, second.stdout[-2000:] + second.stderr
    assert "another miner with hotkey" in second.stdout + second.stderr
    assert miner.child.running


def test_deregistration_ends_the_miner_with_status_3(subnet: LocalSubnet) -> None:
    (miner,) = subnet.miners
    assert subnet.services is not None
    wallet = subnet.services.wallet(miner.plan)
    with closing(LocalChain(url=subnet.services.chain_endpoint, wallet=wallet)) as chain:
        chain.deregister()
    with pytest.raises(SubnetFailure):  # the orchestrator sees a neuron end by itself
        subnet.wait_until(lambda: False, timedelta(seconds=120), "the miner's end")
    assert miner.child.exit_status == 3
    status = read_json_object(miner.plan.folder / "exit_status.json")
    assert status is not None and status["status"] == 3
    assert "no longer registered" in status["reason"]
    assert list(read_events(miner.plan.events, "stop"))[-1]["exit_status"] == 3
