"""``kill -9`` of processes of running miners: told at once, repaired, everybody in the next round.

A rank that is stopped, ``bench/kills.py`` for six minutes, and with every kind of process in every
phase. Two kills are in test_localnet_end_to_end.py, a lost machine in test_nodes.py.
"""

from __future__ import annotations

from collections import Counter
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
def test_a_rank_that_is_stopped_is_replaced(tmp_path: Path) -> None:
    options = SubnetOptions(
        folder=tmp_path / "subnet",
        exchange="hivemind",
        ranks=(2,),
        period=30,
        # Also the longest that the fork server's imports may take while other tests run.
        miner_flags=("--neuron.hang_timeout", "30"),
    )
    with LocalSubnet(options=paced(options)) as subnet:
        (miner,) = subnet.miners
        subnet.wait_until(lambda: bool(miner.state.losses), kills.ROUND, "a step")
        kills.clean_round(subnet)
        assert "The ranks hang" not in miner.child.log.read_text()
        processes = kills.processes_of(miner)
        stopped = max(processes["rank"], key=lambda process: process.pid)
        stopped.suspend()
        starts = miner.state.starts
        subnet.wait_until(
            lambda: miner.state.starts > starts, timedelta(seconds=180), "another start"
        )
        kills.clean_round(subnet)
        stacks = (miner.plan.folder / "stacks.txt").read_text()
        for kind in ("rank", "DHT peer", "data worker"):
            for process in processes[kind]:
                told = stacks.partition(f"=== {process.pid} (")[2].partition("===")[0]
                assert 'File "' in told, (kind, stacks)
        assert f"=== {stopped.pid} (stopped)" in stacks
        log = miner.child.log.read_text()
        assert log.count("The ranks hang") == 1
        assert "Resumed at outer step" in log
    assert subnet.problems == []


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


@pytest.mark.timeout(1500)
def test_six_minutes_of_kills_of_every_kind(tmp_path: Path) -> None:
    outcome = kills.run(tmp_path, seed=11, seconds=360, every=15)
    kills.show(outcome)
    assert outcome.problems == []
    killed = Counter(kill.kind for kill in outcome.kills)
    assert len(killed) >= 5, killed
    for kill in outcome.kills:
        if kill.kind not in kills.ENDS_RANKS and kill.told_after is not None:
            assert kill.told_after < TOLD_WITHIN, (kill.kind, kill.told_after)


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
