"""A whole subnet that exchanges through the store: real programs, then what they left.

One subnet runs for all tests of this file; each test looks at one property of it. Each landing has
the first outer step of such a subnet too: ``.ci/run`` runs ``make run`` with both kinds.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from bittensor_core import verify

from distributed_training.config import load_config
from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet
from distributed_training.localnet.summary import Summary
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Manifest, Master, State
from distributed_training.scoring import command, export
from distributed_training.telemetry import read_events
from distributed_training.training.model import parameter_schema
from distributed_training.training.weights import load_weights
from tests.end_to_end.test_doctor import doctor
from tests.tools.subnet_tools import paced, steps_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
WAIT = timedelta(seconds=400)


@dataclass
class Run:
    subnet: LocalSubnet
    chain: list[Manifest]
    state: State
    objects: set[str]  # keys in the bucket
    copy: Path  # of what the bucket holds below outer/
    programs: list[str]  # command lines of the miners' processes
    secrets: set[str]  # names of variables of the miners' processes that hold keys
    checks: tuple[int, dict[str, dict[str, Any]]]  # the doctor's of the last miner
    verdicts: dict[str, Any]  # of dt-score
    summary: Summary
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
        processes = [
            process
            for miner in subnet.miners
            for process in psutil.Process(miner.child.pid).children(recursive=True)
        ]
        programs = [" ".join(process.cmdline()) for process in processes]
        secrets = {name for p in processes for name in p.environ() if name.startswith("R2_")}
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
        with contextlib.closing(services.open_bucket(subnet.validator.plan)) as bucket:
            objects = {found.key for found in bucket.list_objects("")}
            copy = tmp_path_factory.mktemp("copy")
            for key in objects:
                if keys.parse_outer_key(key) is not None:
                    (copy / key).parent.mkdir(parents=True, exist_ok=True)
                    (copy / key).write_bytes(bucket.get(key, limit=1 << 26) or b"")
            config = load_config(
                "validator", ["--network", str(services.network)], check=False, dotenv=None
            )
            master = Master(config.swarm.run_id, config.miner.master_ss58_address, verify)

            def read(kind: Any, key: str) -> Any:
                data = bucket.get(key, limit=kind.most_bytes)
                assert data is not None, key
                return kind.parse(data, master)

            state: State = read(State, keys.STATE)
            steps = range(state.outer_step + 1)
            chain = [read(Manifest, keys.outer_key(step, keys.MANIFEST)) for step in steps]
    yield Run(
        subnet,
        chain,
        state,
        objects,
        copy,
        programs,
        secrets,
        (status, checks),
        verdicts,
        subnet.summary(),
        outer_steps,
    )


def dt_score(folder: Path) -> dict[str, Any]:
    told = folder / "score.json"
    with told.open("w") as file, contextlib.redirect_stdout(file):
        assert command.main(["--subnet", str(folder), "--json"]) == 0
    return dict(json.loads(told.read_text()))


def test_every_outer_step_has_the_uploads_of_all(run: Run) -> None:
    assert run.summary.ok, run.summary.text()
    assert len(run.chain) > run.outer_steps and run.state.head == run.chain[-1].digest
    for before, manifest in zip(run.chain, run.chain[1:], strict=False):
        manifest.check_after(before)
        assert {one.uid for one in manifest.merged} == run.uids, manifest
        assert not manifest.refused
        assert keys.outer_key(manifest.outer_step, keys.UPDATE) in run.objects
        for uid in run.uids:
            assert keys.merged_key(manifest.outer_step, uid) in run.objects
    first, last = run.chain[1], run.chain[run.outer_steps]
    assert sum(last.losses_after.values()) < sum(first.losses_before.values())


def test_the_uploads_that_were_merged_are_scored(run: Run) -> None:
    assert all(miner.uploads_scored > 0 for miner in run.summary.miners)
    assert set(run.chain[-1].scores) == run.uids


def test_all_begin_each_outer_step_with_the_same_weights(run: Run) -> None:
    """A rank compares the digest of its own before it votes for an outer step."""
    for miner in run.subnet.miners:
        taken = {
            event["outer_step"]
            for event in read_events(miner.plan.folder / "events.jsonl")
            if event["kind"] == "outer_step"
        }
        assert set(range(1, run.outer_steps + 1)) <= taken
    assert len({manifest.weights for manifest in run.chain}) == len(run.chain)


def test_a_miner_has_no_dht_peer_and_no_key(run: Run) -> None:
    assert run.programs and not [line for line in run.programs if "p2pd" in line]
    assert run.secrets == set()
    assert not [key for key in run.objects if key.startswith("epoch-")]


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
