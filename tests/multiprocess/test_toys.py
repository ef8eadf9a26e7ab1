"""All kinds of things that somebody may add, from outside of the package and in one miner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributed_training.common.ports import free_ports
from distributed_training.miner.rank_group import rank_variables
from tests.tools.forked import Program

pytestmark = pytest.mark.timeout(120)

SCRIPT = Path(__file__).parents[1] / "tools" / "miner_ranks.py"


def test_a_miner_of_toys_takes_inner_steps_an_outer_step_and_uploads(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    log = tmp_path / "toys.log"
    program = Program(
        *(SCRIPT, "toys", str(tmp_path)),
        environ=rank_variables(0, world_size=1, port=port),
        log=log,
    )
    try:
        assert program.wait(100) == 0, log.read_text()
    finally:
        program.kill()
    ended = json.loads((tmp_path / "toys.json").read_text())
    assert ended["outer_steps"] == 1 and ended["rounds"] == 1 and len(ended["losses"]) >= 3
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["optimizer"] == "Lion" and found["uid"] == 0
    assert found["commitment"] == ended["submitted"][-1]["tag"]
    assert {"config.json", "gradients.pt", "model.safetensors"} <= set(found["files"])
    assert found["gradient"] == ["weightscale", "weightsigns"], "of the toy compression"
    assert "toy_loss_bits" in found["metrics"] and "toy_load" in found["metrics"]
