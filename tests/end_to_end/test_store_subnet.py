"""A whole subnet that exchanges through the store: real programs, then what they left.

One subnet runs for the first two tests. What a network does is in tests/promises/test_networks.py,
and ``.ci/run`` runs ``make run`` with both exchanges.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet
from distributed_training.protocol import keys
from distributed_training.scoring import command, export
from distributed_training.training.model import parameter_schema
from distributed_training.training.weights import load_weights
from tests.end_to_end.test_doctor import doctor
from tests.tools.subnet_tools import paced, steps_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
WAIT = timedelta(seconds=400)


@dataclass
class Run:
    subnet: LocalSubnet
    checks: tuple[int, dict[str, dict[str, Any]]]  # the doctor's of the last miner
    verdicts: dict[str, Any]  # of dt-score
    outer_steps: int

    @property
    def uids(self) -> set[int]:
        return {miner.plan.uid for miner in self.subnet.miners}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    outer_steps = 2
    folder = tmp_path_factory.mktemp("subnet")
    options = SubnetOptions(
        folder=folder,
        exchange="store",
        ranks=(2, 1, 1, 1),
        outer_steps=outer_steps,
        period=90,  # other tests share the cores with it
        rules={"round.grace": "30s", "training.sequence_length": 64},
        miner_flags=("--neuron.stop_timeout", "60"),
    )
    subnet = LocalSubnet(options=paced(options, samples=4), stop_grace=timedelta(seconds=90))
    with steps_of(2.5), subnet:
        subnet.wait_for_outer_steps(outer_steps, WAIT)
        subnet.wait_for_figures(timedelta(seconds=30))
        services = subnet.services
        assert services is not None
        plan = subnet.miners[-1].plan
        status, checks, _ = doctor(
            *services.flags(plan),
            folder=tmp_path_factory.mktemp("doctor"),
            environ=services.environment(plan),
        )
        verdicts = dt_score(folder)
        assert export.main([str(folder / "exported"), "--subnet", str(folder)]) == 0
    yield Run(subnet, (status, checks), verdicts, outer_steps)


def dt_score(folder: Path) -> dict[str, Any]:
    told = folder / "score.json"
    with told.open("w") as file, contextlib.redirect_stdout(file):
        assert command.main(["--subnet", str(folder), "--json"]) == 0
    return dict(json.loads(told.read_text()))


def test_the_doctor_of_a_member_finds_nothing_wrong(run: Run) -> None:
    status, checks = run.checks
    assert status == 0, checks
    assert checks["access"]["status"] == "ok"
    assert not checks.keys() & {"port dht.port", "address", "bucket"}


def test_score_and_export_read_the_signed_weights(run: Run) -> None:
    assert run.verdicts["outer_step"] >= run.outer_steps
    assert {row["uid"] for row in run.verdicts["uploads"]} == run.uids
    exported = run.subnet.folder / "exported"
    schema = parameter_schema(json.loads((exported / keys.CONFIG).read_text()))
    assert len(load_weights(exported / keys.MODEL, schema)) == len(schema)


def test_members_with_a_bucket_each(tmp_path: Path) -> None:
    options = SubnetOptions(
        folder=tmp_path,
        exchange="store",
        ranks=(1, 1),
        outer_steps=2,
        period=60,
        rules={"round.grace": "20s", "store.access": "own", "training.sequence_length": 64},
    )
    with steps_of(1.0), LocalSubnet(options=paced(options, samples=4)) as subnet:
        subnet.wait_for_outer_steps(2, WAIT)
        services = subnet.services
        assert services is not None
        with contextlib.closing(services.open_bucket(subnet.validator.plan)) as bucket:
            objects = {found.key for found in bucket.list_objects("")}
        assert not [key for key in objects if key.startswith("uploads/")]
        for miner in subnet.miners:
            uid = miner.plan.uid
            assert keys.merged_key(2, uid) in objects
            with contextlib.closing(services.open_bucket(miner.plan)) as bucket:
                kept = {found.key for found in bucket.list_objects("")} - {keys.progress_key(uid)}
            steps = {keys.parse_upload_key(key) for key in kept}
            assert steps and all(place and place[0] == uid and place[1] > 0 for place in steps)
        status, checks, _ = doctor(
            *services.flags(subnet.miners[-1].plan),
            folder=tmp_path,
            environ=services.environment(subnet.miners[-1].plan),
        )
    assert status == 0, checks
    assert {checks[name]["status"] for name in ("global state", "commitment", "bucket")} == {"ok"}
    assert subnet.problems == []
