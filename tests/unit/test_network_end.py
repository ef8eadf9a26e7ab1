"""Test a network that has reached the [stop] of its file: no program trains or restarts."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distributed_training.config import rules_at
from distributed_training.config.versions import Versions
from distributed_training.network import Shown, signed
from distributed_training.node.start import OtherRules, exit_status_of
from distributed_training.protocol import keys
from distributed_training.protocol.types import FINAL, ExitStatus
from distributed_training.telemetry import EventLog
from distributed_training.telemetry.neuron_state import NeuronState
from distributed_training.validator.program import follow_rules
from tests.tools.network import ALICE, network_file
from tests.tools.settings import load_config
from tests.tools.store_world import PERIOD, StoreWorld
from tests.tools.validator_world import one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[2]
STOPS = [
    {"stop.outer_steps": 1},
    {"stop.outer_steps": 9, "stop.tokens": 100},
    {"stop.loss": 4.0},
]


def founded(folder: Path, stop: dict[str, Any]) -> StoreWorld:
    """Return a network whose file has this ``[stop]``."""
    file = network_file(folder / "file", {"exchange": "store", **stop})
    loaded = rules_at(file, "validator").rounds
    names = ("stop_outer_steps", "stop_tokens", "stop_loss")
    return StoreWorld(folder, **{name: getattr(loaded, name) for name in names})


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: list(stop)[-1])
def test_no_round_is_led_once_a_stop_is_reached(
    tmp_path: Path, stop: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world = founded(tmp_path, stop)
    assert not world.events.of("finished") and not world.validator.finished
    world.round()
    assert world.validator.state.outer_step == 1
    (told,) = world.events.of("finished")
    assert told["outer_step"] == 1 and list(stop)[-1] in told["reason"]
    assert f"The network is finished ({told['reason']})" in caplog.text
    if "stop.tokens" in stop:
        assert world.validator.state.total_tokens >= stop["stop.tokens"]
    scores = world.validator.standings.weights()
    rounds = len(world.events.of("round"))
    for _ in range(3):
        world.clock.ahead += PERIOD
        world.tick()
    assert len(world.events.of("round")) == rounds
    assert world.state.finished == told["reason"]
    assert world.validator.standings.weights() == scores, "judged no more"
    state = NeuronState(tmp_path / "validator").catch_up()
    assert state.phase == "finished" and state.tables["finished"][-1]["reason"] == told["reason"]

    world.restarted()
    world.clock.ahead += PERIOD
    world.tick()
    assert len(world.events.of("round")) == rounds and len(world.events.of("finished")) == 2


def test_the_bucket_names_a_new_version_as_soon_as_it_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = founded(tmp_path, {})
    network = world.config.network
    versions = Versions(network, tmp_path)
    parts = replace(world.parts(), versions=versions)
    follow = follow_rules(world.config, parts)
    head = {"version": 2, "previous": f"sha256:{network.digest}", "from_outer_step": 9}
    versions.add(signed(network.text, ALICE, head=head))
    world.bucket.down = True
    for _ in range(3):
        follow(1)
    world.bucket.down = False
    follow(1)
    assert Shown.parse(world.bucket.objects[keys.NETWORK][0]).version == 2
    assert caplog.text.count("is not published") == 1


def test_a_version_from_the_last_outer_step_on_delays_the_end(tmp_path: Path) -> None:
    """The validator restarts with that version, and has not announced an end."""
    world = founded(tmp_path, {"stop.outer_steps": 1})

    def follow(step: int) -> None:
        if step == 1:
            raise OtherRules("version 2 holds")

    world.validator.follow = follow
    with pytest.raises(OtherRules):
        world.round()
    assert world.validator.state.outer_step == 1 and exit_status_of(OtherRules()) == 5
    assert not world.validator.finished and not world.events.of("finished")


def test_a_network_without_a_stop_is_never_finished(tmp_path: Path) -> None:
    file = network_file(tmp_path, {"exchange": "store"})
    config = load_config("validator", ["--network", file], check=False)
    assert not config.finished(outer_step=10**9, tokens=10**18, loss=0.0)
    assert not config.finished(outer_step=0, tokens=0, loss=float("nan"))


def test_the_page_calls_a_miner_finished_that_ended_so(tmp_path: Path) -> None:
    record = EventLog.open(tmp_path).write
    for status, mode in ((ExitStatus.FINISHED, "finished"), (ExitStatus.STOPPED, "stopped")):
        record("stop", reason="why", exit_status=status)
        assert NeuronState(tmp_path).catch_up().phase == mode


def test_nothing_starts_a_miner_again_whose_network_is_finished() -> None:
    """The files of pm2, systemd, Docker and Slurm name the same final exit statuses."""
    found = {
        "app.config.js": r"stop_exit_codes: \[(2, .*)\]",
        "ops/systemd/distributed-training-miner.service": r"RestartPreventExitStatus=(.*)",
        "ops/entrypoint.sh": r"^([\d |]+)\)$",
        "ops/slurm/run.sh": r"case \$status in ([\d |]+)\) break",
    }
    for file, pattern in found.items():
        named = re.search(pattern, (ROOT / file).read_text(), re.M)
        assert named is not None and list(map(int, re.findall(r"\d", named[1]))) == [*FINAL], file
