"""A small network of each exchange: what it keeps of the promises, in its logs, events and bucket.

One network per exchange runs for all tests of this file; each test looks at one promise. The second
miner's inner steps are held until a close has come too early for it, and then continue.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from bittensor_core import verify

from distributed_training.config import load_config
from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Manifest, Master, State
from distributed_training.scoring import command, export
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.telemetry import read_events
from distributed_training.training.model import parameter_schema
from distributed_training.training.weights import load_weights
from distributed_training.validator.replay import Audit, ManifestChain
from tests.end_to_end.test_doctor import doctor
from tests.tools.subnet_tools import paced, steps_of

pytestmark = [pytest.mark.timeout(580), pytest.mark.long]
WAIT = timedelta(seconds=450)
#: Of the guides of the public network. A rule of the network's file holds in the place of some.
FLAGS = {
    "--neuron.local_batch_size_train_effective": "256",
    "--neuron.upload_steps": "20",
    "--neuron.use_dct": "true",
    "--netuid": "38",
}
AVERAGED = re.compile("All Reduce Finish: ")
PROGRESS = re.compile(r"Upload Model Start(.|\n)*?Successfully pushed .* with tag \d+\.0 ")


@dataclass
class Network:
    """What a network left. ``logs``: of its two miners; the second one was held at first."""

    exchange: str
    subnet: LocalSubnet
    logs: list[str]
    manifests: list[Manifest]
    audit: Audit
    objects: set[str]  # keys of the members' uploads: own buckets, or the network's
    secrets: set[str]
    checks: tuple[int, dict[str, dict[str, Any]]]  # the doctor's of the last miner: status, by name
    verdicts: dict[str, Any]  # of dt-score, in the store network


@pytest.fixture(scope="module", params=["store", "hivemind"])
def network(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Network]:
    exchange = request.param
    options = SubnetOptions(
        folder=tmp_path_factory.mktemp(exchange),
        exchange=exchange,
        ranks=(2, 1) if exchange == "store" else (1, 1),
        outer_steps=2,
        period=54,
        least_miners=1,
        rules={"training.sequence_length": 64},
        # A machine without a GPU says so, in the block that operators send to the founder.
        miner_flags=(
            *("--neuron.device", "auto", "--neuron.stop_timeout", "60"),
            *(word for pair in FLAGS.items() for word in pair),
        ),
    )
    held = tmp_path_factory.mktemp("held") / "miner-2"
    held.touch()
    subnet = LocalSubnet(options=paced(options, samples=4), stop_grace=timedelta(seconds=90))

    def logs() -> list[str]:
        files = [miner.plan.folder / "log.txt" for miner in subnet.miners]
        # A miner begins its log after its program was loaded.
        return [file.read_text() if file.exists() else "" for file in files]

    def complete() -> bool:
        # On a busy machine a validator does not come to judge each of them.
        sent = all("Successfully pushed" in log for log in logs())
        judged = any("our upload was merged" in log for log in logs())
        direct = all(AVERAGED.search(log) and PROGRESS.search(log) for log in logs())
        return sent and judged and (exchange == "store" or direct)

    with pytest.MonkeyPatch.context() as patch, steps_of(1.0):
        patch.setenv("PACED_HELD", str(held))
        with subnet:
            subnet.wait_until(lambda: "UPLOAD BLOCKED" in logs()[1], WAIT, "a close too early")
            held.unlink()
            subnet.wait_until(complete, WAIT, "an upload of each")
            subnet.wait_for_outer_steps(2, WAIT)
            manifests, audit = published(subnet, tmp_path_factory.mktemp("audit"))
            objects = uploads(subnet)
            assert subnet.services is not None
            environ = subnet.services.environment(subnet.validator.plan)
            secrets = {value for name, value in environ.items() if "SECRET" in name}
            plan, verdicts = subnet.miners[-1].plan, dict[str, Any]()
            status, checks, _ = doctor(
                *subnet.services.flags(plan),
                folder=tmp_path_factory.mktemp("doctor"),
                environ=subnet.services.environment(plan),
            )
            if exchange == "store":
                verdicts = dt_score(subnet.folder)
                exported = str(subnet.folder / "exported")
                assert export.main([exported, "--subnet", str(subnet.folder)]) == 0
    seen = objects, secrets, (status, checks), verdicts
    yield Network(exchange, subnet, logs(), manifests, audit, *seen)


def dt_score(folder: Path) -> dict[str, Any]:
    told = folder / "score.json"
    with told.open("w") as file, contextlib.redirect_stdout(file):
        assert command.main(["--subnet", str(folder), "--json"]) == 0
    return dict(json.loads(told.read_text()))


def published(subnet: LocalSubnet, folder: Path) -> tuple[list[Manifest], Audit]:
    """Return the chain of manifests, each with the master's signature, and what an audit finds."""
    assert subnet.services is not None
    file = str(subnet.services.network)
    config = load_config("validator", ["--network", file], check=False, dotenv=None)
    master = Master(config.swarm.run_id, config.miner.master_ss58_address, verify)
    with contextlib.closing(subnet.services.open_bucket(subnet.validator.plan)) as bucket:

        def read(key: str, most: int) -> bytes:
            found = bucket.get(key, limit=most)
            assert found is not None, key
            return found

        state = State.parse(read(keys.STATE, State.most_bytes), master)
        manifests = [
            Manifest.parse(read(keys.outer_key(n, keys.MANIFEST), Manifest.most_bytes), master)
            for n in range(state.outer_step + 1)
        ]
        schema = parameter_schema(json.loads(read(keys.outer_key(0, keys.CONFIG), 1 << 20)))
        return manifests, ManifestChain(BucketReader(bucket), schema, folder, master).audit()


def uploads(subnet: LocalSubnet) -> set[str]:
    """Return the keys of all files in the buckets to which members upload."""
    services, found = subnet.services, set()
    assert services is not None
    hivemind = subnet.options.exchange == "hivemind"
    for neuron in subnet.miners if hivemind else [subnet.validator]:
        with contextlib.closing(services.open_bucket(neuron.plan)) as bucket:
            found |= {one.key for one in bucket.list_objects("")}
    return found


@pytest.mark.parametrize(
    "line",
    [
        r"={80}",
        "🔍 GPU DIAGNOSTICS",
        r"✓ CUDA available: True|❌ CUDA NOT AVAILABLE - Model will run on CPU \(VERY SLOW!\)",
        r"✅ Model correctly on GPU: cuda|❌ Model is on CPU! This will be EXTREMELY SLOW!",
        "✓ Model device: ",
        r"✓ Batch size \(per GPU\): 2$",
        r"✓ Effective batch size \(total\): 4$",
        r"✓ World size \(GPUs\): \d$",
        r"✓ Gradient accumulation steps: \d$",
        r"Outer Step: \d+ \| Inner Step: \d+ \| LR: \d\.\d{8} \| Loss: \d+\.\d\d \| "
        r"Step Time: \d+\.\ds \| GPU Mem: \d+\.\d\dGB$",
        r"Throughput: .*samples/sec",
        r"💾 Saving model state locally for epoch \d+$",
        r"Full State",
        r"Extracted Optimizer & Model State Dict",
        r"Upload Model Start",
        r"🔼 Uploading model and optimizer states to r2 bucket: ",
        r"Successfully pushed new model state with tag \d+\.\d+ to bucket: ",
        r"(?i)all.?reduce",
        r"AllReduce Operation Finished Succesfully",
        r"(?i)score",
    ],
)
def test_an_operator_finds_the_line(network: Network, line: str) -> None:
    for log in network.logs:
        assert re.search(line, log, re.MULTILINE), log


def test_a_close_before_enough_inner_steps_blocks_the_upload(network: Network) -> None:
    (first, *_) = re.findall("UPLOAD BLOCKED.*", network.logs[1])
    wanted = r"UPLOAD BLOCKED: inner_step \((\d)\) < minimum \(5\)\. Validators will reject this! "
    assert (found := re.match(wanted, first)) and int(found[1]) < 5
    assert first.endswith("Waiting for more training steps...")
    uploads = list(read_events(network.subnet.miners[1].plan.events, "upload"))
    assert uploads and min(event["inner_step"] for event in uploads) >= 5
    assert network.logs[1].index("UPLOAD BLOCKED") < network.logs[1].index("Successfully pushed")


def test_flags_of_the_guides_end_no_miner(network: Network) -> None:
    replaced = set(FLAGS) - ({"--neuron.upload_steps"} if network.exchange == "hivemind" else set())
    for log in network.logs:
        for flag in replaced:
            found = re.findall(rf"WARNING \| .*{re.escape(flag)}.*", log)
            assert len(found) == 1, flag
            assert re.search("leave it out$|can be taken out: --neuron.use_dct$", found[0]), found


def test_a_slow_step_is_named(network: Network) -> None:
    assert re.search(
        r"⚠️  SLOW STEP: [\d.]+s( \(expected 10-30s\)|, trained on the CPU)", network.logs[1]
    )


def test_uploads_are_checkpointed_before_they_are_sent(network: Network) -> None:
    order = (
        "Saving model state locally for epoch",
        "Full State",
        "Extracted Optimizer & Model State Dict",
        "Checkpoint written",
        "Upload Model Start",
        "Successfully pushed",
    )
    for log in network.logs:
        place = 0
        for words in order:
            place = log.index(words, place)


def test_members_average_directly_and_say_so(network: Network) -> None:
    if network.exchange == "store":
        assert not any("All Reduce Start" in log for log in network.logs)
        return
    for log in network.logs:
        assert re.search(
            "Starting Pseudo Gradient Averaging.*All Reduce Start.*All Reduce Finish",
            log,
            re.DOTALL,
        )
        assert re.search(r"DHT peer \w+ at 127\.0\.0\.1:\d+", log)
    assert any(manifest.averaging is not None for manifest in network.manifests)


def test_all_start_each_outer_step_with_the_signed_weights(network: Network) -> None:
    """A rank compares the digest of its weights with the manifest's before it votes."""
    for before, manifest in zip(network.manifests, network.manifests[1:], strict=False):
        manifest.check_after(before)
    for miner, log in zip(network.subnet.miners, network.logs, strict=True):
        events = read_events(miner.plan.events, "outer_step")
        assert {1, 2} <= {event["outer_step"] for event in events}, log


def test_an_audit_of_the_published_chain_finds_no_problem(network: Network) -> None:
    assert not network.audit.problems and network.audit.replayed_from == 0


def test_one_close_has_one_file_of_a_member(network: Network) -> None:
    merged = [(m.outer_step, one.uid) for m in network.manifests for one in m.merged]
    assert merged and len(merged) == len(set(merged))
    named = {one.uid for m in network.manifests for one in m.merged}
    named |= {one.uid for m in network.manifests for one in m.refused}
    assert named == {1, 2}


def test_progress_is_uploaded_between_two_closes(network: Network) -> None:
    found = {key for key in network.objects if "progress" in key}
    if network.exchange == "store":
        assert not found
        return
    assert found == {keys.progress_key(1), keys.progress_key(2)}
    assert all(map(PROGRESS.search, network.logs))


def test_the_doctor_of_a_member_finds_nothing_wrong(network: Network) -> None:
    status, checks = network.checks
    assert status == 0, checks
    if network.exchange == "store":
        assert checks["access"]["status"] == "ok"
        assert not checks.keys() & {"port dht.port", "address", "bucket"}


def test_score_and_export_read_the_signed_weights(network: Network) -> None:
    if network.exchange != "store":
        return
    assert network.verdicts["outer_step"] >= 2
    assert {row["uid"] for row in network.verdicts["uploads"]} <= {1, 2}
    exported = network.subnet.folder / "exported"
    schema = parameter_schema(json.loads((exported / keys.CONFIG).read_text()))
    assert len(load_weights(exported / keys.MODEL, schema)) == len(schema)


def test_a_member_has_keys_where_it_has_a_bucket(network: Network) -> None:
    for miner in network.subnet.miners:
        config = (miner.plan.folder / "config.txt").read_text()
        assert ("R2_WRITE_SECRET_ACCESS_KEY                     ********" in config) == (
            network.exchange == "hivemind"
        )


def test_no_secret_is_in_a_log(network: Network) -> None:
    assert network.secrets
    for log in network.logs:
        assert not [secret for secret in network.secrets if secret in log]


def test_a_stop_ends_every_program_with_status_0(network: Network) -> None:
    assert network.subnet.problems == []
    statuses = {neuron.child.exit_status for neuron in network.subnet.neurons}
    assert statuses == {0}
    for log in network.logs:
        assert "Stopped with status 0: asked to stop" in log and "Traceback" not in log
