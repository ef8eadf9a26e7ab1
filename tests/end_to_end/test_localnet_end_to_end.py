"""A network over hivemind on this machine: real programs, then what they left.

One network runs for all tests of this file (minutes); each test looks at one property of it. Before
its last outer step two processes of miners are killed. Each day it takes one. With two it is long.
Smaller networks over both exchanges are in tests/promises/test_networks.py.
"""

from __future__ import annotations

import contextlib
import io
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench import kills
from distributed_training.doctor import main as run_doctor
from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalNeuron, LocalSubnet
from distributed_training.localnet.summary import Summary
from distributed_training.telemetry.metrics import METRICS
from distributed_training.telemetry.page import PageProcess
from tests.end_to_end.test_doctor import doctor
from tests.tools.log_reference import LINE, Reference
from tests.tools.subnet_tools import paced, steps_of
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WAIT = timedelta(seconds=400)


@dataclass
class Run:
    subnet: LocalSubnet
    folder: Path
    command_lines: list[str]
    secrets: set[str]
    kills: list[kills.Kill]
    checks: tuple[int, dict[str, dict[str, Any]]]  # the doctor's of the last miner: status, by name
    probe: tuple[int, str]  # a second machine's
    summary: Summary
    outer_steps: int


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, id="one outer step"),
        pytest.param(2, id="two outer steps", marks=pytest.mark.long),
    ],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    outer_steps: int = request.param
    folder = tmp_path_factory.mktemp("subnet")
    options = SubnetOptions(
        folder=folder,
        exchange="hivemind",
        outer_steps=outer_steps,
        period=90,  # other tests share the cores with it
        rules={"training.sequence_length": 64},
        miner_flags=("--neuron.stop_timeout", "60"),  # a busy machine takes long for a checkpoint
    )
    subnet = LocalSubnet(options=paced(options, samples=4), stop_grace=timedelta(seconds=90))
    with steps_of(2.5), subnet:
        if outer_steps > 1:
            subnet.wait_for_outer_steps(outer_steps - 1, WAIT)
        subnet.wait_until(lambda: all(map(kept, subnet.miners)), WAIT, "a checkpoint of each")
        killed = [kill(subnet, 0, "DHT peer"), kill(subnet, 1, "rank")]
        subnet.wait_until(lambda: all(map(trains_on, killed)), WAIT, "a step after each kill")
        subnet.wait_for_outer_steps(outer_steps, WAIT)
        subnet.wait_for_figures(timedelta(seconds=30))
        subnet.wait_until(lambda: all(map(counts, subnet.miners)), WAIT, "whether uploads count")
        lines = [" ".join(p.cmdline()) for p in subnet.processes()]
        assert subnet.services is not None
        plan = subnet.miners[-1].plan
        status, checks, _ = doctor(
            *subnet.services.flags(plan),
            folder=tmp_path_factory.mktemp("doctor"),
            environ=subnet.services.environment(plan),
        )
        probed = probe(plan.dht_port)
        secrets = set()
        for neuron in subnet.neurons:
            given = subnet.services.environment(neuron.plan)
            secrets |= {given["R2_WRITE_SECRET_ACCESS_KEY"], given["R2_READ_SECRET_ACCESS_KEY"]}
    seen = (status, checks), probed, subnet.summary()
    yield Run(subnet, folder, lines, secrets, killed, *seen, outer_steps)


def probe(port: int) -> tuple[int, str]:
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        return run_doctor(["--probe", f"127.0.0.1:{port}", "--json"]), told.getvalue()


def kept(miner: LocalNeuron) -> bool:
    """Return whether ``miner`` has a checkpoint to start again from."""
    return any(miner.plan.folder.glob("checkpoints/checkpoint-*/rank-0.json"))


def counts(miner: LocalNeuron) -> bool:
    """Return whether ``miner`` knows what the manifest says of its upload."""
    return "dt_counts 1" in (miner.plan.folder / "metrics.prom").read_text()


def kill(subnet: LocalSubnet, index: int, kind: str) -> kills.Kill:
    done: list[kills.Kill | None] = []
    wait_for(
        lambda: (
            done.append(kills.kill_one(subnet.miners[index], kind, random.Random(0))) or done[-1]
        ),
        f"a {kind} to kill",
    )
    assert done[-1] is not None
    return done[-1]


def trains_on(kill: kills.Kill) -> bool:
    restarted = kill.kind in kills.ENDS_RANKS
    return kills.first_step(kill.miner, kill.at, restarted=restarted) is not None


def test_both_miners_took_every_outer_step_and_the_held_out_loss_fell(run: Run) -> None:
    assert run.summary.ok, run.summary.text()
    assert len(run.summary.outer_steps) >= run.outer_steps
    for step in run.summary.outer_steps:
        assert step.participants == ("validator", "miner-1", "miner-2")
        assert step.loss_before is not None and step.loss_after is not None
    first, last = run.summary.outer_steps[0], run.summary.outer_steps[-1]
    assert first.loss_after < first.loss_before  # a later one's are hundredths where steps are few
    assert last.loss_after < first.loss_before
    assert [m.world_size for m in run.summary.miners] == [2, 1]


def test_a_killed_process_is_logged_at_once_and_its_miner_keeps_training(run: Run) -> None:
    """Everybody takes part in the round after it."""
    for kill in run.kills:
        kills.follow_up(kill)
        assert kill.told_after is not None and kill.told_after < 20, kill  # at rest one
        assert kill.step_after is not None, kill


def test_the_doctor_finds_a_running_miner_in_order(run: Run) -> None:
    status, checks = run.checks
    assert status == 0, {n: c for n, c in checks.items() if c["status"] == "fail"}
    for name in (
        *("configuration", "hotkey", "commitment", "bucket", "line"),
        *("clock", "address", "port dht.port"),
    ):
        assert checks[name]["status"] == "ok", checks[name]
    assert "the running miner listens there" in checks["port dht.port"]["finding"]
    assert f"uid {run.subnet.miners[-1].plan.uid}" in checks["hotkey"]["finding"]


def test_a_second_machine_dials_a_miner_back(run: Run) -> None:
    status, told = run.probe
    assert status == 0 and "a libp2p peer answers" in told


def test_everything_ended_by_itself(run: Run) -> None:
    assert run.subnet.problems == []
    assert run.subnet.strays == []
    assert not run.subnet.processes()
    assert [n.child.exit_status for n in run.subnet.neurons] == [0, 0, 0]


def test_no_secret_on_a_command_line_or_in_a_log(run: Run) -> None:
    assert len(run.command_lines) > 5
    assert not [line for line in run.command_lines for secret in run.secrets if secret in line]
    # The chain's commitment publishes read keys on purpose; write keys are nowhere but in the
    # store's own configuration.
    for path in run.folder.rglob("*"):
        if path.is_file() and path.suffix in (".txt", ".jsonl", ".log"):
            text = path.read_text(errors="replace")
            assert not [secret for secret in run.secrets if secret in text], path


def test_each_miner_first_logs_its_identity_and_keeps_its_settings(run: Run) -> None:
    for miner in run.subnet.miners:
        plan = miner.plan
        text = (plan.folder / "log.txt").read_text()
        who = rf"Miner \S+: uid {plan.uid}, hotkey 5\w+, netuid \d+, bucket \S+-{plan.uid:03d}"
        begins = re.search(rf"{who}", text)
        model = re.search(r"Global state of outer step \d+: a model of [0-9.]+ M param", text)
        first = text.index("Inner Step: 1 ")
        assert begins and model and begins.start() < model.start() < first
        assert text.index("Configuration of this miner") < begins.start()
        assert len(text[: begins.start()].splitlines()) < 40, "not all settings"
        settings = plan.folder / "config.txt"
        assert "--neuron.checkpoint_steps" in settings.read_text()
        assert settings.stat().st_mode & 0o777 == 0o600


def test_each_warning_of_a_miners_log_is_explained(run: Run) -> None:
    reference = Reference()
    for miner in run.subnet.miners:
        lines = miner.child.log.read_text().splitlines()
        found = [LINE.fullmatch(line) for line in lines]
        undated = [line for line, match in zip(lines, found, strict=True) if match is None]
        unknown = {m[2] for m in found if m and not reference.has(m[2], level=m[1])}
        assert (undated, unknown) == ([], set())
        texts = [match[2] for match in found if match]
        assert sum(text.startswith("Stopped") for text in texts) == 1, "one line for one event"
        assert any(
            text.startswith(f"Checkpoint written: outer step {run.outer_steps}") for text in texts
        )


#: What a miner without a GPU, of an hour's run at most, cannot have.
NOT_MEASURED = re.compile(r"launcher_running|train_mfu|gpu_.*|rank_gpu_.*")


def not_written(text: str) -> set[str]:
    written = {family.name for family in text_string_to_metric_families(text)}
    # The parser takes _total off a counter's name.
    return {n for n in METRICS if f"dt_{n.removesuffix('_total')}" not in written}


def test_every_metric_is_written_by_a_real_miner_or_validator(run: Run) -> None:
    for miner in run.subnet.miners:
        files = ("metrics.prom", "launcher.prom")
        text = "".join((miner.plan.folder / name).read_text() for name in files)
        missing = {n for n in not_written(text) if not n.startswith("network_")}
        assert {n for n in missing if not NOT_MEASURED.fullmatch(n)} == set()
        assert "dt_round_participation_ratio 1.0" in text
    assert run.subnet.validator is not None
    text = (run.subnet.validator.plan.folder / "metrics.prom").read_text()
    missing = {n for n in not_written(text) if n.startswith("network_")}
    # A stopped network is neither well nor ill; a speed takes two outer steps.
    assert missing <= {"network_training", "network_tokens_per_second"}


def test_the_page_shows_the_run_and_no_secret(run: Run) -> None:
    said: list[str] = []
    with PageProcess([n.plan.folder for n in run.subnet.neurons], told=said.append):
        wait_for(lambda: said, "the page")
        url = said[0].removeprefix("page: ")
        answers = [httpx.get(url + "history", timeout=30)]
        answers += [
            httpx.get(url + "metrics", params={"neuron": n.plan.name}, timeout=30)
            for n in run.subnet.miners
        ]
        assert all(answer.status_code == 200 for answer in answers)
        assert not [secret for a in answers for secret in run.secrets if secret in a.text]
        shown = {neuron["name"]: neuron for neuron in answers[0].json()["neurons"]}
    for miner in run.subnet.miners:
        known = shown[miner.plan.name]
        assert len(known["steps"]) == len(miner.state.losses) and known["state"] == "stopped"
        assert len(known["marks"]) >= run.outer_steps and known["tables"]["publication"]
    assert shown["validator"]["scores"]
