"""The scripts of docs/join-a-script.md as members of a network, killed and started again.

One subnet runs for all tests of this file; each test looks at one property of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from distributed_training.common.llama import llama_config
from distributed_training.data.page_source import StdlibSource
from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet
from distributed_training.protocol import keys
from distributed_training.telemetry import read_events
from distributed_training.training.model import parameter_schema

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).parents[1] / "tools" / "script_member.py"
WAIT = timedelta(seconds=300)
BEFORE, AFTER = 2, 2  # outer steps before and after the kill


@dataclass
class Run:
    subnet: LocalSubnet
    merged: dict[str, set[int]]  # by miner: outer steps into which its upload went
    killed: int  # the validator's outer step when both scripts were
    before: dict[str, str]  # what each script printed until it was killed
    after: dict[str, str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("scripts")
    text = "\n".join(StdlibSource().held_out())
    own, held = folder / "own.txt", folder / "held.txt"
    own.write_text(text[100_000:])
    held.write_text(text[:100_000])
    sizes = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 2, "intermediate": 128}
    config = llama_config(vocab=264, max_positions=512, **sizes)
    model = {key: value for key, value in config.items() if value is not None}
    parameters = sum(math.prod(shape) for _, shape in parameter_schema(model))
    digest = hashlib.sha256(held.read_bytes()).hexdigest()
    rules = {
        "model.config": model,
        "model.parameters": parameters,
        "data.own": True,
        "data.held_out": [f"python={held}#{digest}"],
    }
    options = SubnetOptions(
        folder=folder / "subnet",
        exchange="store",
        outer_steps=BEFORE + AFTER,
        period=40,
        ranks=(1, 1),
        rules=rules,
        miner_script=SCRIPT,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OWN_TEXT", str(own))
        with LocalSubnet(options=options) as subnet:
            subnet.wait_for_outer_steps(BEFORE, WAIT)
            for index in range(2):
                subnet.kill_miner(index)
            killed = subnet.validator.state.outer_step
            before = {miner.plan.name: miner.child.log.read_text() for miner in subnet.miners}
            for index in range(2):
                subnet.restart_miner(index)
            subnet.wait_for_outer_steps(killed + AFTER, WAIT)
            after = {
                miner.plan.name: miner.child.log.read_text()[len(before[miner.plan.name]) :]
                for miner in subnet.miners
            }
            assert subnet.services is not None
            with contextlib.closing(subnet.services.open_bucket(subnet.validator.plan)) as bucket:
                found = {item.key for item in bucket.list_objects("")}
            merged = {
                miner.plan.name: {
                    step
                    for step in range(1, killed + AFTER + 2)
                    if keys.merged_key(step, miner.plan.uid) in found
                }
                for miner in subnet.miners
            }
            yield Run(subnet, merged, killed, before, after)


def test_uploads_of_both_scripts_are_merged_before_and_after_the_kill(run: Run) -> None:
    for name, steps in run.merged.items():
        assert {1, 2} <= steps, (name, steps)
        assert max(steps) > run.killed, (name, steps)


def test_both_scripts_apply_each_update(run: Run) -> None:
    for miner in run.subnet.miners:
        taken = {event["outer_step"] for event in read_events(miner.plan.events, "outer_step")}
        assert set(range(1, run.killed + AFTER + 1)) <= taken, (miner.plan.name, taken)


def test_a_killed_script_continues_with_the_weights_it_had(run: Run) -> None:
    first, again = (
        float(re.findall(r"^loss ([\d.]+)$", log["miner-1"], re.M)[0])
        for log in (run.before, run.after)
    )
    assert first > 5 and again < first - 1


def test_the_trainer_continues_from_its_own_checkpoint(run: Run) -> None:
    epochs = [
        [float(epoch) for epoch in re.findall(r"'epoch': '([\d.]+)'", log["miner-2"])]
        for log in (run.before, run.after)
    ]
    assert epochs[0] and epochs[1] and epochs[1][0] > epochs[0][0]
