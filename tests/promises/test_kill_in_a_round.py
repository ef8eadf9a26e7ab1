"""Kill and stop a member with real ranks at each moment of a round, over both exchanges."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed_training.data.tokenizer import BYTE_VOCABULARY
from distributed_training.miner.rank_group import rank_variables
from distributed_training.protocol import lines
from distributed_training.telemetry import read_events
from tests.tools.forked import Ranks
from tests.tools.member_world import MINER, UID
from tests.tools.store_leader import Leader
from tests.tools.store_ranks import store_config
from tests.tools.training_world import tiny
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

SCRIPT = Path(__file__).parents[1] / "tools" / "store_ranks.py"
SECONDS = 120.0
#: Files that rank 0 of a member executes in each phase, in addition to those of earlier phases.
PHASES = {
    "": (
        "telemetry/verdict telemetry/facts miner/build miner/network_watch common/files "
        "common/processes data/block_builder chain/base node/identity "
        # These run every 15 s, for the metrics file and the verdict.
        "exchange/store_rounds protocol/network_report"
    ),
    "inner step": (
        "miner/blocks miner/events miner/ranks miner/loop miner/run_folder miner/rounds "
        "miner/reporter protocol/pages protocol/lines protocol/types "
        "data/pipeline training/trainer training/micro_batches training/copies training/model "
        "training/inner_optimizer training/collectives training/throughput telemetry/own_facts "
        "telemetry/events telemetry/logs telemetry/metrics common/backoff common/kinds"
    ),
    "upload": (
        "exchange/base exchange/store_rounds exchange/own_uploads store/base store/transfer "
        "store/folder training/outer_step training/held_weights "
        "training/frozen training/sharding training/checkpoint protocol/update_file "
        "protocol/codecs protocol/keys"
    ),
    "round": "exchange/chain_copy protocol/manifest store/bucket_reader",
}
#: Moments of an outer step at which all ranks are killed.
KILLS = ("taken", "written", "sent", "prepared", "committed")


class World:
    """Hold a miner of ``ranks`` ranks, its folder, and the network's bucket with its leader."""

    def __init__(self, folder: Path, ranks: int = 2, exchange: str = "store") -> None:
        self.exchange = exchange
        self.folder, self.bucket, self.ranks = folder / "miner", folder / "bucket", ranks
        self.folder.mkdir()
        model = tiny(vocab=BYTE_VOCABULARY)
        run_id = store_config(exchange).swarm.run_id
        self.leader = Leader(self.bucket, model, run_id=run_id, members={UID: MINER.ss58_address})
        self.started: list[Ranks] = []

    def start(self, moment: str, until: int) -> Ranks:
        words = moment, str(until), str(self.folder), str(self.bucket), self.exchange
        how: dict[str, Any] = {"folder": self.folder, "world_size": self.ranks}
        self.started.append(Ranks("store_ranks", *words, **how))
        return self.started[-1]

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def events(self, kind: str) -> list[dict[str, Any]]:
        return list(read_events(self.folder / "events.jsonl", kind))

    def steps(self, outer_step: int) -> int:
        return sum(e["outer_step"] == outer_step for e in self.events("step"))

    def wait_for_steps(self, more: int) -> None:
        """Wait until inner steps continue while the round waits."""
        before = len(self.events("step"))
        wait_for(lambda: len(self.events("step")) >= before + more, f"inner steps\n{self.log()}")

    def assert_equal_to_the_leader(self) -> None:
        """Assert that the weights equal the leader's bit for bit."""
        held = torch.load(self.folder / "epoch-start.pt", weights_only=True)
        pairs = zip(held, self.leader.state.weights, strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(tmp_path, exchange=getattr(request, "param", "store"))
    yield world
    for ranks in world.started:  # still running if a test has failed
        ranks.kill()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", ["store", "hivemind"], indirect=True)
def test_a_kill_at_any_moment_of_a_round_leaves_each_epoch_start_equal_to_the_bit(
    world: World,
) -> None:
    leader = world.leader
    for moment in KILLS:
        outer = leader.outer_step
        ranks = world.start(moment, 10**6)
        wait_for(lambda outer=outer: world.steps(outer) >= 2, f"{moment}\n{world.log()}")
        leader.open_close()
        if moment in ("prepared", "committed"):
            leader.take_outer_step(UID)
        ranks.finish(killed=True)
        # The next process finishes the upload of the killed process or writes another, and applies
        # the outer step again.
        ranks = world.start("none", outer + 1)
        if leader.outer_step == outer:
            leader.take_outer_step(UID)
        ranks.finish()
        world.assert_equal_to_the_leader()
    ranks = world.start("none", leader.outer_step + 1)
    reached = leader.outer_step
    wait_for(lambda: world.steps(reached) >= 2, world.log())
    uploads = len(world.events("publication"))
    leader.open_close()
    wait_for(lambda: len(world.events("publication")) > uploads, f"an upload\n{world.log()}")
    world.wait_for_steps(2)
    leader.take_outer_step(UID)
    ranks.finish()
    world.assert_equal_to_the_leader()
    assert leader.outer_step == len(KILLS) + 1
    fates = {(e["ok"], e["base"]) for e in world.events("round")}
    assert fates == {(True, "merged")}, world.log()
    # Without other members there is no average, which costs nothing.
    assert (lines.ALL_REDUCE_START in world.log()) == (world.exchange == "hivemind")


def test_a_stop_in_a_round_and_a_close_that_moves_cost_nothing(world: World) -> None:
    leader = world.leader
    ranks = world.start("stopped", 10**6)
    wait_for(lambda: world.steps(0) >= 2, world.log())
    leader.open_close()
    ranks.finish()
    leader.open_close()
    ranks = world.start("none", 1)
    leader.take_outer_step(UID)
    ranks.finish()
    world.assert_equal_to_the_leader()
    uploads = [e["revision"] for e in world.events("publication") if e["ok"]]
    assert uploads == ["0.3", "0.4"], world.log()
    assert [e["base"] for e in world.events("round")] == ["merged"]


def test_a_member_has_nothing_of_hivemind_in_its_memory_and_nobody_can_connect_to_it(
    tmp_path: Path,
) -> None:
    """Also check that it executes no files other than those in PHASES."""
    world = World(tmp_path, ranks=1)
    environ = {**os.environ, **rank_variables(0, world_size=1)}
    # Do not fork it, since the fork server has imported much more than a member does.
    log = (world.folder / "traced.log").open("w")
    places = str(world.folder), str(world.bucket), world.exchange
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.tools.store_ranks", "traced", "1", *places],
        cwd=SCRIPT.parents[2],
        env=environ,
        stdout=log,
        stderr=log,
    )
    try:
        wait_for(lambda: world.steps(0) >= 2 or process.poll(), world.log())
        world.leader.open_close()
        world.leader.take_outer_step(UID)
        assert process.wait(SECONDS) == 0, world.log()
    finally:
        process.kill()
        log.close()
    seen = json.loads((world.folder / "seen.json").read_text())
    files = seen.pop("files")
    assert seen == {"modules": [], "listens": [], "outer_step": 1}
    listed = set[str]()
    counts = [len(PHASES[phase].split()) for phase in ("inner step", "upload", "round")]
    said = (
        "through {} files, an upload through {} more, and a round through the store through {} more"
    )
    assert said.format(*counts) in (SCRIPT.parents[2] / "docs/architecture.md").read_text()
    for phase, names in PHASES.items():
        listed |= {f"{name}.py" for name in names.split()}
        # The simulated chain uses files of the registry.
        run = {name for name in files.get(phase, []) if not name.startswith("registry/")}
        assert run - listed == set(), phase
