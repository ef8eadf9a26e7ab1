"""A script of two ranks that joined a store network, under DDP and FSDP2: kills, then weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from distributed_training.common.ports import free_ports
from distributed_training.miner.rank_group import rank_variables
from distributed_training.telemetry import read_events
from tests.tools.forked import Program
from tests.tools.member_world import MemberWorld
from tests.tools.store_ranks import UID
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
SCRIPT = Path(__file__).parents[1] / "tools" / "member_script.py"
SECONDS = 120.0


class Ranks:
    def __init__(self, folder: Path) -> None:
        self.world, self.folder, self.starts = MemberWorld(folder), folder, 0
        self.programs: list[Program] = []

    def start(self, kind: str, moment: str, until: int) -> None:
        (port,) = free_ports(1)
        self.starts += 1
        self.programs = [
            Program(
                *(SCRIPT, kind, moment, str(until), str(self.folder)),
                environ=rank_variables(rank, world_size=2, port=port),
                log=self.folder / f"log-{self.starts}-{rank}.txt",
            )
            for rank in range(2)
        ]

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("log-*")))

    def wait_for_steps(self, outer_step: int) -> None:
        def there() -> bool:
            events = read_events(self.folder / "run" / "events.jsonl", "step")
            return sum(event["outer_step"] == outer_step for event in events) >= 3

        events = self.folder / "run" / "events.jsonl"
        wait_for(lambda: events.exists() and there(), f"inner steps\n{self.log()}", SECONDS)

    def end(self, *, killed: bool = False) -> None:
        try:
            if killed:
                self.programs[0].wait(SECONDS)
                self.programs[1].kill()
            statuses = [program.wait(SECONDS) for program in self.programs]
        finally:
            for program in self.programs:
                program.kill()
        assert (statuses[0] == -9) if killed else statuses == [0, 0], f"{statuses}\n{self.log()}"

    def assert_equal_to_the_leader(self) -> None:
        held = torch.load(self.folder / "epoch-start.pt", weights_only=True)
        pairs = zip(held, self.world.leader.state.weights, strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    for program in made.programs:  # of a test that failed
        program.kill()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_of_a_script_apply_the_same_update_as_all(ranks: Ranks, kind: str) -> None:
    ranks.start(kind, "none", 1)
    ranks.wait_for_steps(0)
    ranks.world.leader.open_close()
    ranks.world.leader.take_outer_step(UID)
    ranks.end()
    ranks.assert_equal_to_the_leader()
