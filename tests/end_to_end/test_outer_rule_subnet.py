"""An outer rule of a file runs, unchanged, in a local subnet of which a miner is killed."""

from __future__ import annotations

import contextlib
import json
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from bittensor_core import verify

from distributed_training.common import kinds
from distributed_training.config import load_config
from distributed_training.localnet.command import main
from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Master
from distributed_training.protocol.update_file import UpdateFile
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.training.model import parameter_schema
from distributed_training.training.outer_rule import OUTER_RULES, find_rule
from distributed_training.validator.replay import ManifestChain
from tests.tools.subnet_tools import paced, steps_of

pytestmark = pytest.mark.timeout(900)
RULES = Path(__file__).parents[2] / "examples" / "rules"


@pytest.fixture(autouse=True)
def new_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test leave the rules that it has imported."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(kinds, "_imported", [])
    monkeypatch.setattr(OUTER_RULES, "_made", {**OUTER_RULES._made})
    for path in RULES.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)


@pytest.mark.long
def test_sparse_uploads_are_merged_and_replayed_though_a_miner_is_killed(tmp_path: Path) -> None:
    name = find_rule(str(RULES / "sparse_uploads.py"))
    options = SubnetOptions(
        folder=tmp_path / "subnet",
        exchange="store",
        ranks=(2, 1),
        period=90,  # other tests share the cores with it
        least_miners=1,
        rules={"round.grace": "30s", "training.outer_rule": name},
        miner_flags=("--neuron.stop_timeout", "60"),
    )
    subnet = LocalSubnet(options=paced(options, samples=4), stop_grace=timedelta(seconds=90))
    with steps_of(2.5), subnet:
        subnet.wait_for_outer_steps(1, timedelta(seconds=400))
        subnet.kill_miner(0)
        subnet.restart_miner(0)

        def merged_again() -> bool:
            taken = [step for step, _ in subnet.miners[0].state.outer_steps]
            return subnet.validator.state.outer_step >= 3 and bool(taken) and taken[-1] >= 3

        subnet.wait_until(merged_again, timedelta(seconds=400), "outer step 3 of the killed miner")
        services = subnet.services
        assert services is not None
        config = load_config(
            "validator", ["--network", str(services.network)], check=False, dotenv=None
        )
        master = Master(config.swarm.run_id, config.miner.master_ss58_address, verify)
        with contextlib.closing(services.open_bucket(subnet.validator.plan)) as bucket:
            reader = BucketReader(bucket)
            model = reader.get(keys.outer_key(0, keys.CONFIG), limit=1 << 20)
            schema = parameter_schema(json.loads(model or b""))
            chain = ManifestChain(reader, schema, tmp_path / "audit", master)
            found = chain.audit()
            merged = [chain.manifest(step) for step in range(1, 4)]
            newest = merged[-1].merged[0]
            upload = reader.get(keys.merged_key(3, newest.uid), limit=1 << 30)
    assert found.problems == [] and found.replayed_from == 0
    assert {manifest.rule for manifest in merged} == {name}
    assert {one.uid for manifest in merged for one in manifest.merged} == {
        miner.plan.uid for miner in subnet.miners
    }
    (path := tmp_path / "upload").write_bytes(upload or b"")
    file = UpdateFile.reopen(path, schema)
    shares = [float((file.decode(*each) != 0).float().mean()) for each in schema]
    assert 0 < max(shares) < 0.08, "a sixteenth, rounded"


@pytest.mark.parametrize(
    ("rule", "exchange", "refused"),
    [
        ("pairs.py", "store", "all members of a network have the same"),
        ("by_gain.py", "hivemind", "over hivemind peers average among themselves"),
    ],
)
def test_a_rule_that_no_such_subnet_can_have_starts_nothing(
    rule: str,
    exchange: str,
    refused: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "subnet"
    words = ["--exchange", exchange, "--outer-rule", str(RULES / rule), "--folder", str(folder)]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert refused in told and told.count("\n") == 1
    assert not folder.exists()
