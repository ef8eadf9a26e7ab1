"""A new version of a network's file is signed while its network runs."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet
from distributed_training.network import digest_of, flatten, signed, tree_of
from distributed_training.telemetry import read_events
from distributed_training.telemetry.run_state import read_launcher

pytestmark = pytest.mark.long

LONG = timedelta(seconds=420)  # only how long a broken test takes


@pytest.mark.timeout(900)
def test_miners_and_validator_start_again_at_the_step_that_the_version_names(
    tmp_path: Path,
) -> None:
    """One miner is killed between the news and that outer step, which costs nothing."""
    options = SubnetOptions(
        folder=tmp_path / "subnet",
        ranks=(2, 1),
        period=90,
        least_miners=1,
        rules={"training.schedule": "constant", "training.effective_batch": 4},
    )
    with LocalSubnet(options=options) as subnet:
        services = subnet.services
        assert services is not None
        calm, killed = subnet.miners
        subnet.wait_until(
            lambda: all(miner.state.starts for miner in subnet.miners), LONG, "two miners"
        )
        first = services.network.read_text()
        rate = flatten(tree_of(first))["training.learning_rate"]
        rules = first.replace(f"learning_rate = {rate}\n", f"learning_rate = {rate / 4}\n", 1)
        digest = digest_of(flatten(tree_of(first)))
        head = {"version": 2, "previous": f"sha256:{digest}", "from_outer_step": 1}
        master = services.wallet(subnet.validator.plan).hotkey
        versions = services.network.parent / "versions"
        versions.mkdir(exist_ok=True)
        (versions / "2.toml").write_text(signed(rules, master, nearby=str, head=head))

        def log(neuron: object) -> str:
            return neuron.child.log.read_text()  # type: ignore[attr-defined, no-any-return]

        there = "Version 2 of the network's file holds from outer step 1: it changes training."
        subnet.wait_until(lambda: all(there in log(m) for m in subnet.miners), LONG, "the news")
        now = "is trained by version 2 of the network's file"
        assert not any(now in log(m) for m in subnet.neurons)
        processes = {n.plan.name: psutil.Process(n.child.pid) for n in (calm, subnet.validator)}
        subnet.kill_miner(1)
        subnet.restart_miner(1)
        subnet.wait_until(
            lambda: all(n.state.outer_step >= 2 for n in subnet.neurons),
            LONG,
            "the first outer step by the new rules",
        )
        for neuron in subnet.neurons:
            assert f"Outer step 1 {now}" in log(neuron)
            assert "Starting the ranks again in" not in log(neuron), "it was no crash"
        for name, process in processes.items():
            assert process.is_running(), f"{name}: to pm2 it has not ended"
        assert "Stopped with status 5: version 2 of the network's file" in log(calm)
        launch = read_launcher(calm.plan.folder)
        assert calm.state.starts == 2 and launch is not None and launch.restarts == 0
        for miner in subnet.miners:
            steps = read_events(miner.plan.folder / "events.jsonl", "step")
            rates = {s["outer_step"]: s["learning_rate"] for s in steps if s["inner_step"] > 1}
            assert rates[1] <= rate / 4 < rates[0] <= rate, miner.plan.name
        assert killed.state.starts >= 2
