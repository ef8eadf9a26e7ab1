"""Test the whole loop over gloo ranks: kills, stops, failing sources and plug-ins.

``tests/promises/test_kill_in_a_round.py`` has the kills and stops within a round.
"""

from __future__ import annotations

import json
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


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one["weights"], two["weights"], strict=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of twelve inner steps without a stop."""
    return run("straight", tmp_path_factory.mktemp("straight"))


def test_a_kill_loses_no_sequence_and_changes_no_bit(whole: dict[str, Any], tmp_path: Path) -> None:
    Ranks("miner_ranks", "killed", str(tmp_path), folder=tmp_path).finish(killed=True)
    assert not (tmp_path / "killed.json").exists()
    resumed = run("resumed", tmp_path)
    assert resumed["losses"] == whole["losses"][5:]
    assert same(resumed, whole)
    assert resumed["pages"] == whole["pages"]


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
    """One miner uses a plug-in of each kind, all from outside the package."""
    ended = run("toys", tmp_path, 1)
    assert ended["outer_step"] == 1 and len(ended["losses"]) >= 3 and ended["uploads"] == ["0.3"]
    found = json.loads((tmp_path / "found.json").read_text())
    assert "Using Lion," in found["optimizer"] and found["codecs"] == ["eight"]
    assert "toy_loss_bits" in found["metrics"] and "toy_load" in found["metrics"]
