"""Test the scripts of ops/slurm with a real Slurm."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed_training.common.ports import free_ports
from distributed_training.telemetry import read_events
from tests.multiprocess.test_launcher_tree import COMMON, KEYS
from tests.multiprocess.test_nodes import FLAGS, PROGRAM, ROOT, RULES
from tests.tools.network import network_file
from tests.tools.slurm_world import Slurm, slurm
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.timeout(600)]


#: A launcher that records its starts and stops. Each start ends as the list of its node says, and
#: after the list it keeps running. "late": it starts while its node is being stopped, so Slurm does
#: not signal it.
LAUNCHER = """
notes=$NOTES-$SLURM_NODEID
stop=""
trap stop=yes TERM
echo started >>$notes
declare -n plan=ENDS$SLURM_NODEID
ends=($plan)
end=${ends[$(grep -c started $notes) - 1]:-runs}
case $end in
late) kill -TERM $PPID ;&
runs) while [ -z "$stop" ]; do sleep 0.1; done; echo stopped >>$notes ;;
[0-9]*) exit $end ;;
*) trap - TERM; kill -$end $$ ;;
esac
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Slurm]:
    with slurm(tmp_path / "slurm") as world:
        (world.folder / "ops").symlink_to(ROOT / "ops")
        for hotkey in ("H", "h0", "h1"):
            path = world.folder / "wallets" / "W" / "hotkeys" / hotkey
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        yield world


def _submit(cluster: Slurm, script: str, **more: str) -> str:
    """Submit a job with the command in the guide."""
    page = (ROOT / "docs" / "several-machines.md").read_text()
    (line,) = [line for line in page.splitlines() if f"ops/slurm/{script}.sbatch" in line]
    before, _, after = line.partition("sbatch ")
    variables = dict(word.split("=", 1) for word in shlex.split(before))
    options, _, flags = after.partition(f"ops/slurm/{script}.sbatch")
    network_file(cluster.folder, RULES)  # as the command names it
    arguments = [part for name, text in FLAGS.items() for part in (f"--{name}", text)]
    environment = {
        "DT_PROGRAM": str(PROGRAM),
        "DT_PYTHON": sys.executable,
        "BT_WALLET_PATH": str(cluster.folder / "wallets"),
        "OMP_NUM_THREADS": "1",
        **KEYS,
        **variables,
        **more,
    }
    command = ["sbatch", "--parsable", "--cpus-per-task=1", *options.split()]
    command += [f"ops/slurm/{script}.sbatch", *COMMON, *arguments]
    if script == "one-node":
        environment["DT_MINER"] = f"{sys.executable} {PROGRAM}"
    return cluster.run(*command, *flags.split(), **environment)


def _place() -> dict[str, str]:
    """Return the address at which the nodes meet, since this machine cannot resolve n0."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}


def _finish(cluster: Slurm, job: str, folder: Path, steps: int) -> None:
    """Stop a miner after all its steps, because it never ends on its own."""
    wait_for(lambda: len(_losses(folder)) >= steps, f"{steps} steps", seconds=240, every=0.5)
    cluster.run("scancel", "--signal=TERM", job)
    _ended(cluster, job)


def _losses(folder: Path) -> dict[int, float]:
    events = folder / "events.jsonl"
    found = read_events(events, "step") if events.exists() else []
    return {e["total_inner_steps"]: e["loss"] for e in found}


def _output(cluster: Slurm) -> str:
    return "\n".join(p.read_text() for p in cluster.folder.glob("miner-*.log"))


def _ended(cluster: Slurm, job: str) -> None:
    wait_for(
        lambda: cluster.job(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"),
        "the job's end",
        seconds=240,
        every=1.0,
    )
    assert cluster.job(job)["JobState"] == "COMPLETED", _output(cluster)[-5000:]


@pytest.mark.long
def test_a_preempted_job_saves_in_its_grace_time_and_continues_later(cluster: Slurm) -> None:
    """Slurm itself preempts it: a job of a partition with a higher priority takes both nodes."""
    job = _submit(cluster, "several-nodes", **_place(), NODE_STEPS="40")
    folder = cluster.folder / "runs" / "miner-node0"
    wait_for(lambda: len(_losses(folder)) >= 3, "steps", seconds=150, every=0.2)
    urgent = cluster.run(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=urgent",
        "--wrap", "srun hostname",
    )  # fmt: skip
    _ended(cluster, urgent)
    saved = max(_losses(folder))
    assert saved < 40, "the urgent job came first"
    assert cluster.job(job)["Restarts"] == "1", "queued again by Slurm"
    _finish(cluster, job, folder, 40)
    assert set(_losses(folder)) == set(range(1, 41)), "no step is lost"
    output = _output(cluster)
    assert "Another node was asked" not in output or "Stopped with status 0" in output
    assert f"Resumed at outer step 0, inner step {saved}" in output


@pytest.mark.long
def test_an_array_runs_a_miner_for_each_hotkey(cluster: Slurm) -> None:
    job = _submit(cluster, "one-node", NODE_STEPS="4")
    for index in range(2):
        _finish(cluster, f"{job}_{index}", cluster.folder / "runs" / f"miner-h{index}", 4)


def _submit_launchers(cluster: Slurm, *, node1: str, **more: str) -> str:
    """Submit a job whose launchers end, one after another, with these statuses or signals."""
    (cluster.folder / "launcher").write_text(LAUNCHER)
    environment = {
        "DT_MINER": f"bash {cluster.folder / 'launcher'}",
        "NOTES": str(cluster.folder / "notes"),
        "DT_PAUSE": "0.2",
        "ENDS0": "",
        "ENDS1": node1,
        **more,
    }
    script = ("--cpus-per-task=1", "ops/slurm/several-nodes.sbatch")
    return cluster.run("sbatch", "--parsable", *script, **environment)


def _notes(cluster: Slurm, node: int) -> list[str]:
    path = cluster.folder / f"notes-{node}"
    return path.read_text().split() if path.exists() else []


@pytest.mark.slow
def test_every_node_starts_its_own_launcher_again_after_any_end(cluster: Slurm) -> None:
    """pm2 does the same after a kill for lack of memory, an abort of NCCL, or a rank's end."""
    job = _submit_launchers(cluster, node1="KILL TERM ABRT 0 1 137")
    wait_for(lambda: len(_notes(cluster, 1)) == 7, "the seventh start")
    assert _notes(cluster, 1) == ["started"] * 7 and _notes(cluster, 0) == ["started"]
    assert cluster.job(job)["JobState"] == "RUNNING"
    cluster.run("scancel", "--batch", "--signal=USR1", job)  # as --signal before the time limit
    wait_for(lambda: cluster.job(job)["Restarts"] == "1", "queued again", every=0.5)
    for node in (0, 1):
        wait_for(lambda n=node: _notes(cluster, n)[-2:] == ["stopped", "started"], "a start")
    cluster.run("scancel", "--signal=TERM", job)
    _ended(cluster, job)
    assert _notes(cluster, 0)[3:] == ["stopped"], "stopped, not started again"


@pytest.mark.slow
def test_a_launcher_that_starts_during_a_stop_is_stopped_too(cluster: Slurm) -> None:
    job = _submit_launchers(cluster, node1="1 late")
    wait_for(lambda: _notes(cluster, 1)[2:] == ["stopped"], "the stop of node 1", seconds=60)
    cluster.run("scancel", "--signal=TERM", job)
    _ended(cluster, job)
    assert _notes(cluster, 0) == ["started", "stopped"]


@pytest.mark.slow
@pytest.mark.parametrize("status", [2, 3])
def test_refusal_that_no_restart_cures_ends_the_job_on_all_nodes(
    cluster: Slurm, status: int
) -> None:
    """This also holds if the signal for the nodes reaches scancel before it has finished."""
    scancel = cluster.folder / "bin" / "scancel"
    scancel.parent.mkdir()
    scancel.write_text(f'#!/bin/sh\nkill -TERM $$\nexec {shutil.which("scancel")} "$@"\n')
    scancel.chmod(0o755)
    path = f"{scancel.parent}:{os.environ['PATH']}"
    job = _submit_launchers(cluster, node1=f"KILL {status}", PATH=path)
    wait_for(lambda: cluster.job(job)["JobState"] == "FAILED", "the job's end", every=0.5)
    assert cluster.job(job)["ExitCode"] == f"{status}:0"
    assert _notes(cluster, 0) == ["started", "stopped"]
    assert _notes(cluster, 1) == ["started", "started"]
