"""Run a real Slurm on this machine, which pretends to be two nodes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distributed_training.common.ports import free_ports
from tests.tools.waiting import wait_for

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=n0,n1 Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=120 State=UP
PartitionName=urgent Nodes=n0,n1 MaxTime=INFINITE PriorityTier=9 PreemptMode=OFF State=UP
"""


class Slurm:
    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment

    def run(self, *command: str, **more: str) -> str:
        done = subprocess.run(
            command, env=os.environ | self.environment | more, cwd=self.folder, text=True,
            capture_output=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return the fields that `scontrol show job` prints."""
        words = self.run("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start Slurm, or skip the test and say why Slurm cannot be started."""
    programs = ("munged", "slurmctld", "slurmd", "sbatch")
    missing = [p for p in programs if shutil.which(p) is None]
    if missing or os.geteuid():
        pytest.skip(f"no {', '.join(missing)} here" if missing else "Slurm is started as root")
    host = socket.gethostname().partition(".")[0]
    for name in ("state", "spool-n0", "spool-n1"):
        (folder / name).mkdir(parents=True)
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    (folder / "slurm.conf").write_text(CONF.format(host=host, folder=folder, ports=free_ports(3)))
    world = Slurm(folder, {"SLURM_CONF": str(folder / "slurm.conf")})
    munge = [f"--{n}={folder / f}" for n, f in (
        ("key-file", "key"), ("socket", "munge.sock"), ("pid-file", "munged.pid"),
        ("log-file", "munged.log"), ("seed-file", "seed"))]  # fmt: skip
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in (
            ["munged", "--foreground", "--force", *munge],
            ["slurmctld", "-D"],
            ["slurmd", "-D", "-N", "n0"],
            ["slurmd", "-D", "-N", "n1"],
        ):
            started.append(
                subprocess.Popen(
                    command,
                    env=os.environ | world.environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
            if command[0] == "munged":
                wait_for((folder / "munge.sock").exists, "munge")

        def idle() -> bool:
            dead = [p.args for p in started if p.poll() is not None]
            if dead:
                pytest.skip(f"Slurm does not start here: {dead}, see {folder}")
            shown = subprocess.run(
                ["sinfo", "-h", "-o", "%T %D"], env=os.environ | world.environment, text=True,
                capture_output=True, check=False,
            )  # fmt: skip
            return shown.stdout.strip() == "idle 2"

        wait_for(idle, "two idle nodes", seconds=60, every=0.5)
        yield world
    finally:
        # The processes of a failed test would outlive its Slurm.
        command = ["scancel", "--full", "--signal=KILL", "--user=root"]
        subprocess.run(command, env=os.environ | world.environment, capture_output=True, timeout=60)
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
