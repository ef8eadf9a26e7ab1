"""The score preview on a running local subnet.

What it says must be what the subnet's validator writes of the same upload. No round is called in
this time, so that uploads stay what they are judged as. Without a subnet, and each day:
test_scoring_script.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet
from distributed_training.telemetry import read_events
from tests.tools.subnet_tools import paced, stop_miner

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
FIGURES = ("before", "after", "relative")


@dataclass
class Run:
    subnet: LocalSubnet
    uids: list[int]
    frozen: dict[str, Any]  # the preview from outside, once the miners had stopped
    judged: list[dict[str, Any]]  # upload_scored events by then


def _judged(subnet: LocalSubnet) -> list[dict[str, Any]]:
    events = read_events(subnet.validator.plan.events)
    return [e for e in events if e["kind"] == "upload_scored" and e["ok"]]


def _newest_whole_pass(judged: Sequence[Mapping[str, Any]], uids: Sequence[int]) -> int:
    """The random block of the newest pass that judged every uid: the last may be under way."""
    passes: dict[int, set[int]] = {}
    for event in judged:
        passes.setdefault(event["random_block"], set()).add(event["uid"])
    return [block for block, seen in passes.items() if seen >= set(uids)][-1]


def _look(subnet: LocalSubnet, random_block: int) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "scripts" / "score.py"), "--subnet", str(subnet.folder)]
    options = ["--all", "--json", "--passes", "1", "--random-block", str(random_block)]
    flags = ["--neuron.blocks_per_allreduce", "900"]
    done = subprocess.run([*command, *options, *flags], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    options = SubnetOptions(
        folder=tmp_path_factory.mktemp("subnet"),
        ranks=(1,),  # two uploads beside each other: test_scoring_script.py
        blocks_per_allreduce=900,
        miner_flags=("--neuron.upload_steps", "10"),
        validator_flags=("--validator.score_blocks", "5"),
    )
    with LocalSubnet(options=paced(options)) as subnet:
        uids = [miner.plan.uid for miner in subnet.miners]

        def all_judged() -> bool:
            return {event["uid"] for event in _judged(subnet)} == set(uids)

        subnet.wait_until(all_judged, timedelta(seconds=500), "a judged upload of each miner")
        for index in range(len(uids)):
            assert stop_miner(subnet, index) == 0
        before = len(_judged(subnet))
        # One pass over buckets that do not change any more, and the one that may be under way.
        subnet.wait_until(
            lambda: len(_judged(subnet)) >= before + 2 * len(uids),
            timedelta(seconds=200),
            "two passes of the validator",
        )
        judged = _judged(subnet)
        block = _newest_whole_pass(judged, uids)
        frozen = _look(subnet, block)
        yield Run(subnet, uids, frozen, judged)


def test_from_outside_it_equals_the_validator_for_the_same_blocks(run: Run) -> None:
    block = run.frozen["random_blocks"][0]
    of_the_pass = {e["uid"]: e for e in run.judged if e["random_block"] == block}
    assert [row["uid"] for row in run.frozen["miners"]] == run.uids
    for row in run.frozen["miners"]:
        event = of_the_pass[row["uid"]]
        assert row["revision"] == event["revision"]
        for text in ("random", "assigned"):
            for figure in FIGURES:
                name = f"{text}_{figure}"
                assert row[name] == pytest.approx(event[name], abs=1e-6), (row["uid"], name)
        gain = {t: event[f"{t}_before"] - event[f"{t}_after"] for t in ("random", "assigned")}
        assert row["assigned_wins"] == (gain["assigned"] > gain["random"])
