"""The validator dies in the first round of a young network, after its miners' outer step.

They are back at the outer step that was published before it could have called a second round, and
the network continues without help.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from bench import kills
from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet
from distributed_training.telemetry import read_events

pytestmark = pytest.mark.long


@pytest.mark.timeout(900)
def test_a_validator_killed_between_a_round_and_its_publication(tmp_path: Path) -> None:
    options = SubnetOptions(folder=tmp_path / "subnet", ranks=(1, 1), blocks_per_allreduce=60)
    with LocalSubnet(options=options) as subnet:
        validator, miners = subnet.validator, subnet.miners

        def averaging() -> bool:
            return any(miner.state.phase == "averaging" for miner in miners)

        subnet.wait_until(averaging, kills.ROUND, "the first round")
        assert validator.child.pid is not None
        # Its swarm process continues: the miners get their average, and nobody publishes it.
        psutil.Process(validator.child.pid).suspend()
        ahead = timedelta(seconds=120)
        subnet.wait_until(
            lambda: all(miner.state.outer_step == 1 for miner in miners), ahead, "outer step 1"
        )
        validator.child.kill_tree()
        assert validator.state.outer_step == 0
        subnet._start_neuron(validator)
        kills.clean_round(subnet, timedelta(seconds=300))
        for miner in miners:
            loads = read_events(miner.plan.folder / "events.jsonl", "load")
            assert [load["outer_step"] for load in loads] == [0]
            log = miner.child.log.read_text()
            assert "with the weights that this miner had then" in log
            assert "is not taken over" not in log
