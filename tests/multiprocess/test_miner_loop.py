"""The whole loop over gloo ranks: kills, stops, full disks, dead sources, clocks that are set.

Kills and stops within a round are in ``tests/promises/test_kill_in_a_round.py``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.forked import Ranks

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def run(scenario: str, folder: Path, world_size: int = 2) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    Ranks("miner_ranks", scenario, str(folder), folder=folder, world_size=world_size).finish()
    content: dict[str, Any] = json.loads((folder / f"{scenario}.json").read_text())
    content["weights"] = torch.load(folder / f"{scenario}.pt", weights_only=True)
    return content


def log_of_rank_0(folder: Path) -> str:
    return min(folder.glob("miner_ranks-*-0.log")).read_text()


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one["weights"], two["weights"], strict=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Twelve inner steps without a stop."""
    return run("straight", tmp_path_factory.mktemp("straight"))


def test_a_kill_loses_no_sequence_and_changes_no_bit(whole: dict[str, Any], tmp_path: Path) -> None:
    Ranks("miner_ranks", "killed", str(tmp_path), folder=tmp_path).finish(killed=True)
    assert not (tmp_path / "killed.json").exists()
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
    text = log_of_rank_0(tmp_path)
    assert "the disk is full, says the test" in text
    assert "rank 1: MemoryError: no memory is left; free host memory" in text
    assert result["losses"][:12] == whole["losses"]
    assert result["uploads"] == ["0.5"], "the third close's"


@contextmanager
def small_disk(folder: Path, *, megabytes: int) -> Iterator[None]:
    """Mount a tmpfs of that size on ``folder``, which is made; skip where that is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_stays_full_is_a_handful_of_lines(tmp_path: Path) -> None:
    """Everything of a rank lies on it: events, metrics, checkpoints, uploads and blocks."""
    disk = tmp_path / "disk"
    with small_disk(disk, megabytes=24):
        words, log = ("miner_ranks", "no_room", str(disk)), tmp_path / "no_room.log"
        Ranks(*words, folder=tmp_path, world_size=1, log=log).finish()
    text = log.read_text()
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
    assert "Using Lion," in found["optimizer"] and found["codecs"] == ["eight"]
    assert "toy_loss_bits" in found["metrics"] and "toy_load" in found["metrics"]
