"""A hotkey that is lost ends the miner with status 3; one that is in use refuses a second miner."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from distributed_training.chain.local import LocalChain
from distributed_training.common.files import read_json_object
from distributed_training.localnet.plan import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet, SubnetFailure
from distributed_training.telemetry import read_events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_deregistration_ends_the_miner_with_status_3(tmp_path: Path) -> None:
    subnet = LocalSubnet(options=SubnetOptions(folder=tmp_path / "subnet", ranks=(1,)))
    with subnet:
        (miner,) = subnet.miners
        events = miner.plan.events
        subnet.wait_until(
            lambda: any(read_events(events, "step")), timedelta(seconds=120), "a first step"
        )
        assert subnet.services is not None
        chain = LocalChain(
            url=subnet.services.chain_endpoint, wallet=subnet.services.wallet(miner.plan)
        )
        try:
            chain.deregister()
        finally:
            chain.close()
        with pytest.raises(SubnetFailure):  # the orchestrator sees a neuron end by itself
            subnet.wait_until(lambda: False, timedelta(seconds=60), "the miner's end")
        assert miner.child.exit_status == 3
        status = read_json_object(miner.plan.folder / "exit_status.json")
        assert status is not None and status["status"] == 3
        assert "no longer registered" in status["reason"]
        assert list(read_events(events, "stop"))[-1]["exit_status"] == 3


def test_a_second_miner_with_the_same_hotkey_is_refused(tmp_path: Path) -> None:
    subnet = LocalSubnet(options=SubnetOptions(folder=tmp_path / "subnet", ranks=(1,)))
    with subnet:
        (miner,) = subnet.miners
        subnet.wait_until(
            lambda: any(read_events(miner.plan.events, "step")),
            timedelta(seconds=120),
            "a first step",
        )
        assert subnet.services is not None
        words = subnet.services.arguments(miner.plan)
        more = ["--neuron.run_folder", str(tmp_path / "second"), "--axon.port", "0"]
        second = subprocess.run(
            [sys.executable, *words, *more, "--dht.port", "0"],
            env=subnet.services.environment(miner.plan),
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert second.returncode == 2, second.stdout[-2000:] + second.stderr
        assert "another miner with hotkey" in second.stdout + second.stderr
        assert miner.child.running
