"""Test the promises in the logs, events and buckets of a small network of each exchange.

One network per exchange runs for all tests of this file, and each test checks one promise. The
second miner takes no inner step until a close has come too early for it. Before the last outer step
a process of each miner is killed.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from bittensor_core import verify
from prometheus_client.parser import text_string_to_metric_families

from distributed_training.config import load_config
from distributed_training.doctor import main as run_doctor
from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalNeuron, LocalSubnet
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Manifest, Master, State
from distributed_training.scoring import command, export
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.telemetry import read_events
from distributed_training.telemetry.metrics import METRICS
from distributed_training.training.model import parameter_schema
from distributed_training.training.weights import load_weights
from distributed_training.validator.replay import Audit, ManifestChain
from testbed import kills
from tests.end_to_end.test_doctor import doctor
from tests.tools.log_reference import LINE, Reference
from tests.tools.page import served
from tests.tools.subnet_tools import paced, steps_of
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
WAIT = timedelta(seconds=450)
#: Flags of the public network's guides. Rules of the network's file take precedence over some.
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
    """Hold what a network has left. ``logs``: the logs of its two miners."""

    exchange: str
    subnet: LocalSubnet
    logs: list[str]
    manifests: list[Manifest]
    audit: Audit
    objects: set[str]  # keys in the buckets to which members upload
    secrets: set[str]
    command_lines: list[str]
    kills: list[kills.Kill]
    # The doctor's exit status for the last miner, and its checks by name.
    checks: tuple[int, dict[str, dict[str, Any]]]
    probe: tuple[int, str]  # what --probe says about the last miner's peer
    verdicts: dict[str, Any]  # what dt-score prints


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
        # With "auto" a miner without a GPU says so in the diagnostics block.
        miner_flags=(
            *("--neuron.device", "auto", "--neuron.stop_timeout", "60"),
            *(word for pair in FLAGS.items() for word in pair),
        ),
    )
    held = tmp_path_factory.mktemp("held") / "miner-2"
    held.touch()
    subnet = LocalSubnet(options=paced(options, samples=4), stop_grace=timedelta(seconds=90))

    def logs() -> list[str]:
        files = [miner.folder / "log.txt" for miner in subnet.miners]
        # A miner creates its log only after its program has been loaded.
        return [file.read_text() if file.exists() else "" for file in files]

    def complete() -> bool:
        # On a busy machine the validator may not judge every upload.
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
            subnet.wait_until(lambda: all(map(kept, subnet.miners)), WAIT, "a checkpoint of each")
            kind = "DHT peer" if exchange == "hivemind" else "data worker"
            killed = [kill(subnet, 0, kind), kill(subnet, 1, "rank")]
            subnet.wait_until(lambda: all(map(trains_on, killed)), WAIT, "a step after each kill")
            subnet.wait_for_outer_steps(2, WAIT)
            subnet.wait_for_figures(timedelta(seconds=30))
            subnet.wait_until(lambda: all(map(counts, subnet.miners)), WAIT, "that uploads count")
            lines = [" ".join(p.cmdline()) for p in subnet.processes()]
            last = subnet.miners[-1]
            status, checks, _ = doctor(
                *last.flags,
                *subnet.options.miner_flags,
                folder=tmp_path_factory.mktemp("doctor"),
                environ=last.environment,
            )
            probed = probe(last.flags) if exchange == "hivemind" else (0, "")
            verdicts = dt_score(subnet.folder)
            assert export.main([str(subnet.folder / "out"), "--subnet", str(subnet.folder)]) == 0
            manifests, audit = published(subnet, tmp_path_factory.mktemp("audit"))
            objects = uploads(subnet)
            secrets = {v for name, v in subnet.store.keys.items() if "SECRET" in name}
    left = (manifests, audit, objects, secrets, lines, killed, (status, checks), probed, verdicts)
    yield Network(exchange, subnet, logs(), *left)


def kept(miner: LocalNeuron) -> bool:
    """Return whether ``miner`` has a checkpoint from which it can start again."""
    return any(miner.folder.glob("checkpoints/checkpoint-*/rank-0.json"))


def counts(miner: LocalNeuron) -> bool:
    """Return whether ``miner`` knows that the newest manifest has merged its upload."""
    return "dt_counts 1" in (miner.folder / "metrics.prom").read_text()


def kill(subnet: LocalSubnet, index: int, kind: str) -> kills.Kill:
    chosen, miner = random.Random(0), subnet.miners[index]
    found: kills.Kill = wait_for(lambda: kills.kill_one(miner, kind, chosen), f"a {kind} to kill")
    return found


def trains_on(kill: kills.Kill) -> bool:
    restarted = kill.kind in kills.ENDS_RANKS
    return kills.first_step(kill.miner, kill.at, restarted=restarted) is not None


def probe(flags: Sequence[str]) -> tuple[int, str]:
    told, port = io.StringIO(), flags[flags.index("--dht.port") + 1]
    with contextlib.redirect_stdout(told):
        return run_doctor(["--probe", f"127.0.0.1:{port}", "--json"]), told.getvalue()


def dt_score(folder: Path) -> dict[str, Any]:
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert command.main(["--subnet", str(folder), "--json"]) == 0
    return dict(json.loads(told.getvalue()))


def published(subnet: LocalSubnet, folder: Path) -> tuple[list[Manifest], Audit]:
    """Return the chain of manifests, each with the master's signature, and what an audit finds."""
    words = ["--network", str(subnet.network)]
    config = load_config("validator", words, check=False, dotenv=None)
    master = Master(config.swarm.run_id, config.miner.master_ss58_address, verify)
    with contextlib.closing(subnet.open_bucket()) as bucket:

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
    found = set()
    hivemind = subnet.options.exchange == "hivemind"
    for neuron in subnet.miners if hivemind else [subnet.validator]:
        with contextlib.closing(subnet.open_bucket(neuron)) as bucket:
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
    uploads = list(read_events(network.subnet.miners[1].folder / "events.jsonl", "upload"))
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
        events = read_events(miner.folder / "events.jsonl", "outer_step")
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


def test_a_member_has_keys_where_it_has_a_bucket(network: Network) -> None:
    for miner in network.subnet.miners:
        config = (miner.folder / "config.txt").read_text()
        assert ("R2_WRITE_SECRET_ACCESS_KEY                     ********" in config) == (
            network.exchange == "hivemind"
        )


def test_no_secret_on_a_command_line_or_in_a_log(network: Network) -> None:
    assert len(network.command_lines) > 5 and network.secrets
    assert not [line for line in network.command_lines for s in network.secrets if s in line]
    # A commitment publishes read keys on purpose, but write keys must appear nowhere.
    for path in network.subnet.folder.rglob("*"):
        if path.is_file() and path.suffix in (".txt", ".jsonl", ".log"):
            text = path.read_text(errors="replace")
            assert not [secret for secret in network.secrets if secret in text], path


def test_a_stop_ends_every_program_with_status_0(network: Network) -> None:
    assert network.subnet.problems == [] and network.subnet.strays == []
    assert not network.subnet.processes()
    statuses = {neuron.exit_status for neuron in network.subnet.neurons}
    assert statuses == {0}
    validator = network.subnet.validator
    assert validator.state.phase == "stopped" and "had to be" not in validator.log.read_text()
    for log in network.logs:
        assert "Stopped with status 0: asked to stop" in log and "Traceback" not in log


def test_the_held_out_loss_falls(network: Network) -> None:
    first = network.manifests[1]
    assert all(first.losses_after[name] < loss for name, loss in first.losses_before.items())


def test_a_killed_process_is_logged_at_once_and_its_miner_keeps_training(network: Network) -> None:
    for kill in network.kills:
        kills.follow_up(kill)
        # About a second if the machine is idle.
        assert kill.told_after is not None and kill.told_after < 20, kill
        assert kill.step_after is not None, kill


def test_the_doctor_finds_a_running_miner_in_order(network: Network) -> None:
    status, checks = network.checks
    assert status == 0, {n: c for n, c in checks.items() if c["status"] == "fail"}
    if network.exchange == "store":
        assert checks["access"]["status"] == "ok"
        assert not checks.keys() & {"port dht.port", "address", "bucket"}
        return
    names = "hotkey, commitment, bucket, line, clock, address, port dht.port"
    wrong = {name: checks[name] for name in names.split(", ") if checks[name]["status"] != "ok"}
    assert not wrong
    # These miners give a flag whose value the founder's file already sets.
    assert "leave it out" in checks["configuration"]["remedy"]
    assert "the running miner listens there" in checks["port dht.port"]["finding"]
    assert f"uid {network.subnet.miners[-1].uid}" in checks["hotkey"]["finding"]


def test_a_second_machine_dials_a_miner_back(network: Network) -> None:
    status, told = network.probe
    assert status == 0 and ("a libp2p peer answers" in told) == (network.exchange == "hivemind")


def test_score_and_export_read_the_signed_weights(network: Network) -> None:
    assert network.verdicts["outer_step"] >= 2
    assert {row["uid"] for row in network.verdicts["uploads"]} <= {1, 2}
    exported = network.subnet.folder / "out"
    schema = parameter_schema(json.loads((exported / keys.CONFIG).read_text()))
    assert len(load_weights(exported / keys.MODEL, schema)) == len(schema)


def test_each_miner_first_logs_its_identity_and_keeps_its_settings(network: Network) -> None:
    for miner, log in zip(network.subnet.miners, network.logs, strict=True):
        begins = re.search(rf"Miner \S+: uid {miner.uid}, hotkey 5\w+", log)
        model = re.search(r"Global state of outer step \d+: a model of [0-9.]+ M param", log)
        assert begins and model
        assert begins.start() < model.start() < log.index("Inner Step: 1 ")
        assert log.index("Configuration of this miner") < begins.start()
        assert len(log[: begins.start()].splitlines()) < 40, "not all settings"
        settings = miner.folder / "config.txt"
        assert "--neuron.checkpoint_steps" in settings.read_text()
        assert settings.stat().st_mode & 0o777 == 0o600


def test_each_warning_of_a_miners_log_is_explained(network: Network) -> None:
    reference = Reference()
    for miner in network.subnet.miners:
        lines = miner.log.read_text().splitlines()
        found = [LINE.fullmatch(line) for line in lines]
        undated = [line for line, match in zip(lines, found, strict=True) if match is None]
        unknown = {m[2] for m in found if m and not reference.has(m[2], level=m[1])}
        assert (undated, unknown) == ([], set())
        stops = [match[2] for match in found if match and match[2].startswith("Stopped")]
        assert len(stops) == 1, "one line for one event"


#: Metrics that a miner without a GPU does not have in a short run.
NOT_MEASURED = re.compile(r"launcher_running|train_mfu|gpu_.*|rank_gpu_.*")


def not_written(folder: Path, *files: str) -> set[str]:
    text = "".join((folder / name).read_text() for name in files)
    written = {family.name for family in text_string_to_metric_families(text)}
    # The parser removes _total from a counter's name.
    return {n for n in METRICS if f"dt_{n.removesuffix('_total')}" not in written}


def test_every_metric_is_written_by_a_real_miner_or_validator(network: Network) -> None:
    each = [
        not_written(miner.folder, "metrics.prom", "launcher.prom")
        for miner in network.subnet.miners
    ]
    # A miner that was killed may have sent nothing since.
    missing = {name for name in set.intersection(*each) if not name.startswith("network_")}
    assert {n for n in missing if not NOT_MEASURED.fullmatch(n)} == set()
    missing = not_written(network.subnet.validator.folder, "metrics.prom")
    # A stopped network is neither healthy nor faulty, and a speed needs two outer steps.
    of_network = {name for name in missing if name.startswith("network_")}
    assert of_network <= {"network_training", "network_tokens_per_second"}


def test_the_page_shows_the_run_and_no_secret(network: Network) -> None:
    with served(*(neuron.folder for neuron in network.subnet.neurons)) as page:
        answers = [httpx.get(page.url + "history", timeout=30)]
        for miner in network.subnet.miners:
            named = {"neuron": miner.name}
            answers.append(httpx.get(page.url + "metrics", params=named, timeout=30))
    assert all(answer.status_code == 200 for answer in answers)
    assert not [secret for a in answers for secret in network.secrets if secret in a.text]
    shown = {neuron["name"]: neuron for neuron in answers[0].json()["neurons"]}
    for miner in network.subnet.miners:
        known = shown[miner.name]
        assert known["state"] == "stopped" and known["marks"] and known["tables"]["publication"]
        assert len(known["steps"]) == len(miner.state.losses)
    assert shown["validator"]["scores"]
