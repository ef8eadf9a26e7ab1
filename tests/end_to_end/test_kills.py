"""Every kind of process of a network is killed in every phase; everybody is in the next round.

Two kills are in test_localnet_end_to_end.py; what the launcher does, in test_launcher_tree.py.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from bench import kills
from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet
from tests.tools import subnet_tools
from tests.tools.subnet_tools import paced

pytestmark = pytest.mark.long

# Seconds until a line tells of a killed process: about 1 at rest; two subnets may share two cores.
TOLD_WITHIN = 10


@pytest.mark.timeout(600)
def test_ranks_start_again_after_a_gpu_is_lost_in_mid_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, rank 1 raises the error of torch for a failed GPU or driver."""
    armed = tmp_path / "armed"
    monkeypatch.setenv("LOST_GPU", str(armed))
    options = SubnetOptions(folder=tmp_path / "subnet", ranks=(2,), period=30)
    script = Path(subnet_tools.__file__).with_name("lost_gpu_miner.py")
    with LocalSubnet(options=replace(paced(options), miner_script=script)) as subnet:
        (miner,) = subnet.miners
        subnet.wait_until(lambda: bool(miner.state.losses), kills.ROUND, "a step")
        kills.clean_round(subnet)  # ends with a checkpoint
        outer_step, starts = miner.state.outer_step, miner.state.starts
        armed.touch()
        subnet.wait_until(
            lambda: miner.state.starts > starts, timedelta(seconds=180), "another start"
        )
        assert not armed.exists()
        kills.clean_round(subnet)
        log = miner.child.log.read_text()
        assert "GPU 1 (which the driver does not show any more) failed: CUDA error: unsp" in log
        assert "Resumed at outer step" in log and miner.state.outer_step > outer_step
        assert "Traceback" not in log.partition("failed: CUDA error")[2].partition("Resumed")[2]
    assert subnet.problems == []


@pytest.mark.timeout(3600)
def test_every_kind_of_process_in_every_phase(tmp_path: Path) -> None:
    outcome = kills.run(tmp_path, seed=1, phases=kills.PHASES, ranks=(2, 1, 1))
    kills.show(outcome)
    assert outcome.problems == []  # one that no process was killed for is a problem
    assert len(outcome.kills) == len(kills.KINDS) * len(kills.PHASES)
    for kill in outcome.kills:
        assert kill.step_after is not None and kill.rounds is not None and kill.rounds >= 1
        if kill.kind != "launcher":  # which logs it when it is started again
            assert kill.told_after is not None and kill.told_after < TOLD_WITHIN, kill
