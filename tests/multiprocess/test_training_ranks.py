"""Test several ranks, each in its own process, against a single rank and against whole tensors."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.tools.forked import Ranks

pytestmark = pytest.mark.timeout(120)


def ranks(scenario: str, world_size: int, folder: Path) -> Ranks:
    store = folder / f"store-{scenario}-{time.time_ns()}"
    words = (scenario, str(folder), str(store))
    return Ranks("training_ranks", *words, folder=folder, world_size=world_size)


# Written by this test on 2026-11-20 with torch 2.13.0 (CPU, float32). If more than the rounding
# changes here, training itself has changed: explain that in the commit.
GOLDEN = json.loads((Path(__file__).parent / "training_golden.json").read_text())


def test_golden_losses_at_world_sizes_1_and_2(tmp_path: Path) -> None:
    runs = [ranks("losses", world, tmp_path) for world in (1, 2)]
    for run in runs:
        run.finish()
    for world in (1, 2):
        content = json.loads((tmp_path / f"losses-{world}.json").read_text())
        assert content["losses"] == pytest.approx(GOLDEN["losses"], abs=2e-4)
        assert content["evaluated"] == pytest.approx(GOLDEN["evaluated"], abs=2e-4)
    assert GOLDEN["losses"][-1] < GOLDEN["losses"][0] - 0.7


def test_nodes_with_a_copy_each_train_alike_in_groups_with_the_miners_timeout(
    tmp_path: Path,
) -> None:
    ranks("losses_of_nodes", 2, tmp_path).finish()  # also checks the timeouts of the groups
    content = json.loads((tmp_path / "nodes-2.json").read_text())
    assert content["losses"] == pytest.approx(GOLDEN["losses"], abs=2e-4)


def test_a_frozen_base_is_that_of_rank_0_on_any_layout(tmp_path: Path) -> None:
    for scenario, world in (("adapters", 1), ("adapters", 2), ("adapters_of_nodes", 2)):
        ranks(scenario, world, tmp_path).finish()
    one, *others = [
        json.loads((tmp_path / f"{name}.json").read_text())["losses"]
        for name in ("adapters-1", "adapters-2", "adapters-nodes-2")
    ]
    for other in others:
        assert other == pytest.approx(one, abs=2e-4)


def test_ranks_that_ran_out_of_memory_start_again_and_know(tmp_path: Path) -> None:
    first = ranks("out_of_memory", 2, tmp_path)
    try:
        assert first.processes[1].wait(60) == 1
        assert "start again" in (tmp_path / "error.txt").read_text()
        assert "run 1 at once" in (tmp_path / "error.txt").read_text()
    finally:
        first.kill()  # rank 0 waits in a collective; the launcher kills it too
    ranks("out_of_memory", 2, tmp_path).finish()
    content = json.loads((tmp_path / "again.json").read_text())
    assert content["losses"] == pytest.approx(GOLDEN["losses"], abs=2e-4)


def test_an_optimizers_state_continues_to_the_bit_and_at_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    ranks("toy_optimizer", 2, tmp_path).finish()
    for world in (1, 3):
        ranks("other_number_of_ranks", world, tmp_path).finish()


@pytest.mark.parametrize("scenario", ["no_memory", "unlike_gpus", "disk_of_a_copy"])
def test_two_ranks(scenario: str, tmp_path: Path) -> None:
    """Run a scenario; its docstring in ``training_ranks.py`` names the promise."""
    ranks(scenario, 2, tmp_path).finish()


@pytest.mark.long
@pytest.mark.parametrize(("scenario", "world"), [("muon", 3), ("muon_of_nodes", 4)])
def test_muon_steps_as_one_rank_would_on_any_layout(
    scenario: str, world: int, tmp_path: Path
) -> None:
    ranks(scenario, world, tmp_path).finish()


def test_epoch_starts_of_a_store_network_are_equal_to_the_bit_on_any_layout(tmp_path: Path) -> None:
    """Compare uploads, epoch starts, residuals and later steps, also after a restart."""
    for world in (1, 2, 3):
        ranks("through_store", world, tmp_path).finish()
    ranks("through_store_of_nodes", 4, tmp_path).finish()
    one, *others = [
        json.loads((tmp_path / f"store-{name}.json").read_text())
        for name in ("1-0", "2-0", "3-0", "4-2")
    ]
    for other in others:
        assert other == one
    ranks("through_store_resumed", 1, tmp_path).finish()
    assert json.loads((tmp_path / "store-resumed.json").read_text()) == one["steps"][0]
