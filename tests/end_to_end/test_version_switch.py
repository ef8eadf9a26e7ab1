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

pytestmark = pytest.mark.long

CUT_OFF = Path(__file__).parents[1] / "tools" / "cut_off_miner.py"
LONG = timedelta(seconds=420)  # only how long a broken test takes


@pytest.mark.timeout(900)
def test_running_miners_and_validator_switch_at_the_step_that_the_version_names(
    tmp_path: Path,
) -> None:
    """A miner that has not heard of the version is named and not called."""
    options = SubnetOptions(
        folder=tmp_path / "subnet",
        ranks=(2, 1, 1),
        period=90,
        least_miners=2,
        rules={"training.schedule": "constant", "training.effective_batch": 4},
        miner_script=CUT_OFF,
    )
    with LocalSubnet(options=options) as subnet:
        services = subnet.services
        assert services is not None
        *followers, deaf = subnet.miners
        (deaf.plan.folder / "cut-off").touch()
        subnet.wait_until(
            lambda: all(miner.state.starts for miner in subnet.miners), LONG, "three miners"
        )
        before = {m.plan.name: psutil.Process(m.child.pid).children(True) for m in followers}
        first = services.network.read_text()
        rate = flatten(tree_of(first))["training.learning_rate"]
        rules = first.replace(
            f"learning_rate = {rate}\n",
            f"learning_rate = {rate / 4}\ndecay_from = 30\ndecay_steps = 1000000\n",
            1,
        )
        digest = digest_of(flatten(tree_of(first)))
        head = {"version": 2, "previous": f"sha256:{digest}", "from_outer_step": 1}
        master = services.wallet(subnet.validator.plan).hotkey
        versions = services.network.parent / "versions"
        versions.mkdir(exist_ok=True)
        (versions / "2.toml").write_text(signed(rules, master, nearby=str, head=head))

        def log(neuron: object) -> str:
            return neuron.child.log.read_text()  # type: ignore[attr-defined, no-any-return]

        there = "Version 2 of the network's file holds from outer step 1: it changes"
        subnet.wait_until(lambda: all(there in log(m) for m in followers), LONG, "the news")
        now = "is trained by version 2 of the network's file"
        assert not any(now in log(m) for m in subnet.neurons)
        subnet.wait_until(
            lambda: all(m.state.outer_step >= 2 for m in (*followers, subnet.validator)),
            LONG,
            "the first outer step by the new rules",
        )
        for neuron in (*followers, subnet.validator):
            assert f"Outer step 1 {now}" in log(neuron)
        for miner in followers:
            steps = read_events(miner.plan.folder / "events.jsonl", "step")
            rates = {s["outer_step"]: s["learning_rate"] for s in steps if s["inner_step"] > 1}
            assert rates[1] <= rate / 4 < rates[0] <= rate
            assert miner.state.starts == 1
            # Its ranks are the very processes.
            assert all(p.is_running() for p in before[miner.plan.name] if "rank" in p.name())
        events = subnet.validator.plan.folder / "events.jsonl"
        (second,) = [r for r in read_events(events, "round") if r["ok"] and r["outer_step"] == 1]
        assert set(second["called"]) == {m.plan.uid for m in followers}
        named = f"uid {deaf.plan.uid} runs with another version of the network's file"
        assert log(subnet.validator).count(named) == 1 and there not in log(deaf)
