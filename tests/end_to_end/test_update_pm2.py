"""A miner of a local subnet that trains, under real pm2; scripts/update.sh with real git tags.

What else an update may meet is in tests/unit/test_update.py, with a stand-in for pm2. Nothing is
downloaded: the environment of a new version is this one's, by a link.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from distributed_training.chain.base import Neuron
from distributed_training.chain.client import SignedClient
from distributed_training.localnet.plan import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet
from distributed_training.protocol.types import RoundRequest
from distributed_training.telemetry import read_events
from tests.tools.pm2 import NAME, PM2, ROOT, Pm2, needs_pm2
from tests.tools.subnet_tools import idle
from tests.tools.waiting import wait_for

GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "core.hooksPath="]

NO_NETWORK = "https://nowhere.invalid/miner.git"

#: In the miner's program of every version: they train at the pace of the subnet's own miner.
PACE = """
from distributed_training.miner import rank_group
rank_group.PRELOAD = (*rank_group.PRELOAD, "tests.tools.paced_miner")
"""

#: No average comes of the rounds here; 10 s after the last the miner says so and trains on.
TIMEOUTS = (
    *("--neuron.next_chunk_timeout", "2", "--neuron.allreduce_timeout", "4"),
    *("--neuron.round_timeout", "9", "--neuron.round_reload_timeout", "10"),
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_pm2]


def git(folder: Path, *words: str) -> None:
    subprocess.run([*GIT, "-C", str(folder), *words], check=True, capture_output=True)


def make_repository(folder: Path) -> None:
    """This working tree as v1; v2 is as good, the others are broken in one place each."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    insert(folder / "distributed_training" / "miner" / "__main__.py", PACE)
    git(folder, "init", "--quiet")
    git(folder, "remote", "add", "origin", NO_NETWORK)
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--message", "v1")
    git(folder, "tag", "v1")
    broken = {
        "v2": ("distributed_training/__init__.py", "\n# another version\n"),
        "v3-doctor": ("scripts/diagnose.py", "\nraise RuntimeError('the doctor is ill')\n"),
        "v4-start": ("neurons/miner.py", "\nraise RuntimeError('no luck')\n"),
    }
    for tag, (path, more) in broken.items():
        git(folder, "checkout", "--quiet", "v1")
        insert(folder / path, more)
        git(folder, "commit", "--quiet", "--all", "--message", tag)
        git(folder, "tag", tag)
    git(folder, "checkout", "--quiet", "v1")


def insert(program: Path, more: str) -> None:
    """Before what it does when it is started."""
    head, main, rest = program.read_text().partition('\nif __name__ == "__main__":')
    program.write_text(head + more + main + rest)


class Machine:
    """An operator's machine: a checkout, pm2, a miner that runs."""

    def __init__(self, folder: Path, subnet: LocalSubnet) -> None:
        assert subnet.services is not None
        (self.miner,) = subnet.miners
        self.subnet = subnet
        self.home = folder / "home"
        self.home.mkdir()
        make_repository(self.home)
        (self.home / ".venv").symlink_to(sys.prefix)
        (self.home / "marker.env").touch()
        environ = {
            **subnet.services.environment(self.miner.plan),
            "PYTHONPATH": "",
            "DT_PRESET": "local",
            "DT_FLAGS": " ".join(subnet.services.flags(self.miner.plan)),
        }
        self.pm2 = Pm2(folder / "pm2", environ)

    def call_a_round(self) -> bool:
        """As the validator does. Nobody else is called, so it looks for a group until it ends."""
        assert self.subnet.services is not None
        plan = self.miner.plan
        wallet = self.subnet.services.wallet(self.subnet.validator.plan)
        request = RoundRequest(wallet.ss58, timeout=timedelta(seconds=20))
        hotkey = self.subnet.services.wallet(plan).ss58
        neuron = Neuron(uid=plan.uid, hotkey=hotkey, ip="127.0.0.1", port=plan.axon_port)
        replies = SignedClient(wallet=wallet).sweep_all_reduce([neuron], request)
        return replies[plan.uid] is not None

    @property
    def events(self) -> list[dict[str, Any]]:
        return list(read_events(self.miner.plan.events))

    @property
    def steps(self) -> list[dict[str, Any]]:
        return list(read_events(self.miner.plan.events, "step"))

    def await_steps(self, more: int = 2) -> None:
        wanted = len(self.steps) + more
        self.subnet.wait_until(
            lambda: len(self.steps) >= wanted, timedelta(seconds=300), f"{more} steps"
        )

    def update(
        self, *words: str, setup: str = f"ln -sfn {sys.prefix} .venv", tests: str = "true"
    ) -> subprocess.CompletedProcess[str]:
        process = self.begin_update(*words, setup=setup, tests=tests)
        out, err = process.communicate(timeout=600)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def begin_update(
        self, *words: str, setup: str = f"ln -sfn {sys.prefix} .venv", tests: str = "true"
    ) -> subprocess.Popen[str]:
        """From another shell: none of the miner's settings and keys are in its environment."""
        plain = {k: os.environ[k] for k in ("PATH", "HOME") if k in os.environ}
        return subprocess.Popen(
            [str(self.home / "scripts" / "update.sh"), "--pm2", str(PM2), *words],
            env=plain
            | {
                "PM2_HOME": str(self.pm2.folder),
                "DT_UPDATE_SETUP": setup,
                "DT_UPDATE_TESTS": tests,
            },
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("update")
    options = SubnetOptions(
        folder=folder / "subnet",
        ranks=(1,),
        blocks_per_allreduce=100_000,
        # rounds that nobody else takes part in
        miner_flags=("--clamp.timeout", "5:1200", *TIMEOUTS),
    )
    pauses = folder / "pauses.py"  # pm2 starts the miner, not the subnet
    pauses.write_text("import signal\nsignal.pause()\n")
    with LocalSubnet(options=replace(idle(options), miner_script=pauses)) as subnet:
        subnet.kill_miner(0)
        machine = Machine(folder, subnet)
        try:
            machine.pm2("start", str(machine.home / "app.config.js"))
            machine.await_steps()
            yield machine
        finally:
            machine.pm2("kill")


def test_a_doctor_that_fails_leaves_the_miner_alone(machine: Machine) -> None:
    before = machine.pm2.app()
    assert machine.pm2.state == ("online", 0)
    done = machine.update("v3-doctor")
    assert_left_alone(machine, before, done, "its doctor fails (RuntimeError: the doctor is ill)")


def assert_left_alone(
    machine: Machine, before: dict[str, Any], done: subprocess.CompletedProcess[str], why: str
) -> None:
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and why in line and "runs on" in line
    after = machine.pm2.app()
    assert after["pid"] == before["pid"] and after["pm2_env"]["restart_time"] == 0
    machine.await_steps(1)


def test_a_full_disk_leaves_the_miner_alone(machine: Machine) -> None:
    versions = machine.home / "versions"
    versions.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(versions)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    with ExitStack() as stack:
        stack.callback(subprocess.run, ["umount", str(versions)], check=True)
        before = machine.pm2.app()
        done = machine.update("v2")
        assert_left_alone(machine, before, done, f"GB are free in {versions}")
        assert not list(versions.iterdir())


def test_a_version_that_does_not_start_is_taken_back(machine: Machine) -> None:
    before, count = machine.pm2.app(), len(machine.steps)
    done = machine.update("v4-start", "--first-step", "240s")
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert "it did not train" in line and "runs again" in line
    after = machine.pm2.app()
    assert after["pm2_env"]["status"] == "online"
    assert after["pm2_env"]["pm_exec_path"] == before["pm2_env"]["pm_exec_path"]
    starts = list(read_events(machine.miner.plan.events, "start"))
    assert starts[-1]["resumed"] and len(machine.steps) > count


def test_an_update_trains_on_where_the_old_version_stopped(machine: Machine) -> None:
    """A round begins while the new version is tested: its end is waited for."""
    machine.await_steps()
    called = machine.home / "called"
    hold = f"sh -c 'until [ -e {called} ]; do sleep 0.1; done'"
    update = machine.begin_update("v2", "--no-doctor", tests=hold)
    assert update.stdout is not None
    said = ""
    while "running its tests" not in said and (line := update.stdout.readline()):
        said += line
    wait_for(machine.call_a_round, "the call")
    wait_for(
        lambda: [e["after"] for e in machine.events if e["kind"] == "state"][-1] == "averaging",
        "the round",
    )
    called.touch()
    out, err = update.communicate(timeout=300)
    assert update.returncode == 0, said + out + err
    assert "waiting: the miner is averaging" in out
    ended = [e for e in machine.events if e["kind"] in ("round", "stop")]
    assert [e["kind"] for e in ended[-2:]] == ["round", "stop"]
    # It loses nothing: the new version goes on at the very next step.
    stopped = machine.events.index(ended[-1])
    before = [e for e in machine.events[:stopped] if e["kind"] == "step"][-1]
    first = next(e for e in machine.events[stopped:] if e["kind"] == "step")
    assert first["outer_step"] == before["outer_step"]
    assert first["inner_step"] == before["inner_step"] + 1
    version = machine.home / "versions" / "v2"
    app = machine.pm2.app()["pm2_env"]
    assert app["pm_exec_path"] == str(version / "neurons" / "miner.py")
    assert app["pm_cwd"] == str(machine.home)
    lines = [" ".join(p.cmdline()) for p in machine.subnet.mark.processes()]
    folder = str(machine.miner.plan.folder)
    assert [line for line in lines if folder in line and str(version) in line]
    (stop, *_) = reversed(list(read_events(machine.miner.plan.events, "stop")))
    (start, *_) = reversed(list(read_events(machine.miner.plan.events, "start")))
    assert stop["exit_status"] == 0 and start["resumed"]
    before = machine.pm2.app()
    done = machine.update("v2", setup="sh -c 'rm .venv; exit 1'")  # to itself
    assert_left_alone(machine, before, done, "v2 is the version that runs already")
    assert (version / ".venv" / "bin" / "python").exists()


def test_pm2_stops_it_and_nothing_is_left(machine: Machine) -> None:
    _, restarts = machine.pm2.state
    machine.pm2("stop", NAME)
    assert machine.pm2.state == ("stopped", restarts)
    assert list(read_events(machine.miner.plan.events, "stop"))[-1]["exit_status"] == 0
    left = [" ".join(p.cmdline()) for p in machine.subnet.mark.processes()]
    folder = str(machine.miner.plan.folder)
    assert not [line for line in left if folder in line and "pm2" not in line]


def test_without_a_miner_under_pm2_there_is_nothing_to_update(machine: Machine) -> None:
    machine.pm2("delete", NAME)
    done = machine.update("v2")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"no app named {NAME}" in line
