"""A miner whose hotkey is deregistered ends with status 3; pm2 leaves that alone."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from distributed_training.chain.local import LocalChain
from distributed_training.localnet.plan import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet, SubnetFailure
from distributed_training.miner.process import read_json
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
            url=subnet.services.chain_endpoint, wallet=subnet.services._wallets[miner.plan.name]
        )
        try:
            chain.deregister()
        finally:
            chain.close()
        with pytest.raises(SubnetFailure):  # the orchestrator sees a neuron end by itself
            subnet.wait_until(lambda: False, timedelta(seconds=60), "the miner's end")
        assert miner.child.exit_status == 3
        status = read_json(miner.plan.folder / "exit_status.json")
        assert status["status"] == 3 and "no longer registered" in status["reason"]
        assert list(read_events(events, "stop"))[-1]["exit_status"] == 3
