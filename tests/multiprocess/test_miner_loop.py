"""The whole loop over gloo ranks: kills, stops, full disks, dead sources, clocks that are set.

Kills and stops within a round are in ``tests/promises/test_kill_in_a_round.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed_training.common.ports import free_ports
from distributed_training.miner.rank_group import rank_variables
from tests.tools.forked import Program
from tests.tools.small_disk import small_disk

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

SCRIPT = Path(__file__).parents[1] / "tools" / "miner_ranks.py"
SECONDS = 120.0  # for a run that takes five on a machine at rest


def start(
    scenario: str, folder: Path, world_size: int, *, log: Path | None = None
) -> list[Program]:
    folder.mkdir(exist_ok=True)
    (port,) = free_ports(1)
    return [
        Program(
            *(SCRIPT, scenario, str(folder)),
            environ=rank_variables(rank, world_size=world_size, port=port),
            log=log or folder / f"{scenario}-{rank}.log",
        )
        for rank in range(world_size)
    ]


def end(processes: list[Program]) -> list[int]:
    try:
        return [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()


def logs(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))


def run(scenario: str, folder: Path, world_size: int = 2) -> dict[str, Any]:
    statuses = end(start(scenario, folder, world_size))
    assert set(statuses) == {0}, f"{statuses}\n{logs(folder)}"
    content: dict[str, Any] = json.loads((folder / f"{scenario}.json").read_text())
    content["weights"] = torch.load(folder / f"{scenario}.pt", weights_only=True)
    return content


def end_by_kill(scenario: str, folder: Path) -> None:
    processes = start(scenario, folder, 2)
    processes[0].wait(SECONDS)
    processes[1].kill()  # as the launcher does when a rank is gone, unless it saw that first
    statuses = end(processes)
    assert statuses in ([-9, -9], [-9, 1]), f"{statuses}\n{logs(folder)}"
    assert not (folder / f"{scenario}.json").exists()


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one["weights"], two["weights"], strict=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Twelve inner steps without a stop."""
    return run("straight", tmp_path_factory.mktemp("straight"))


def test_a_kill_loses_no_sequence_and_changes_no_bit(whole: dict[str, Any], tmp_path: Path) -> None:
    end_by_kill("killed", tmp_path)
    resumed = run("resumed", tmp_path)
    assert resumed["losses"] == whole["losses"][5:]
    assert same(resumed, whole)
    assert resumed["pages"] == whole["pages"]


def test_a_wall_clock_that_is_set_changes_nothing(whole: dict[str, Any], tmp_path: Path) -> None:
    result = run("jumping", tmp_path)
    assert result["losses"][:12] == whole["losses"]
    assert result["uploads"] == ["0.3"]


def test_a_full_disk_or_memory_blocks_uploads_and_nothing_else(
    whole: dict[str, Any], tmp_path: Path
) -> None:
    result = run("full_disk", tmp_path)
    text = (tmp_path / "full_disk-0.log").read_text()
    assert "the disk is full, says the test" in text
    assert "rank 1: MemoryError: no memory is left; free host memory" in text
    assert result["losses"][:12] == whole["losses"]
    assert result["uploads"] == ["0.5"], "the third close's"


def test_a_disk_that_stays_full_is_a_handful_of_lines(tmp_path: Path) -> None:
    """Everything of a rank lies on it: events, metrics, checkpoints, uploads and blocks."""
    disk = tmp_path / "disk"
    with small_disk(disk, megabytes=24) as small:
        if not small:
            pytest.skip("a small disk cannot be mounted here")
        (rank,) = start("no_room", disk, 1, log=tmp_path / "no_room.log")
        statuses = end([rank])
    text = (tmp_path / "no_room.log").read_text()
    assert statuses == [0], text
    warned = [line for line in text.splitlines() if line.startswith(("WARNING", "ERROR"))]
    assert "No space left on device" in text and len(warned) <= 8, "\n".join(warned)


def test_a_dead_source_of_one_rank_is_waited_for_by_none(tmp_path: Path) -> None:
    result = run("starved", tmp_path)
    waited, seconds = max(result["waits"])
    assert 3.6 <= waited <= seconds, "the step that waited says so"
    assert len(result["losses"]) > result["waits"].index([waited, seconds]) + 1
    assert json.loads((tmp_path / "longest-1.json").read_text()) < 3, "no wait in a collective"


def test_a_stop_within_an_inner_step_neither_drops_nor_repeats_a_micro_batch(
    whole: dict[str, Any], tmp_path: Path
) -> None:
    stopped = run("stopped", tmp_path)
    assert stopped["losses"] == whole["losses"][:6]
    after = run("after_stop", tmp_path)
    assert after["losses"] == whole["losses"][6:]
    assert same(after, whole)
    assert after["pages"] == whole["pages"]


def test_a_miner_of_toys_takes_inner_steps_an_outer_step_and_uploads(tmp_path: Path) -> None:
    """All kinds of things that somebody may add, from outside of the package and in one miner."""
    ended = run("toys", tmp_path, 1)
    assert ended["outer_step"] == 1 and len(ended["losses"]) >= 3 and ended["uploads"] == ["0.3"]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["optimizer"] == "Lion" and found["codecs"] == ["eight"]
    assert "toy_loss_bits" in found["metrics"] and "toy_load" in found["metrics"]
