"""Test scripts/update.sh with real git and a stand-in for pm2, whose miner trains at once."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tools.pm2 import needs_node

pytestmark = [needs_node, pytest.mark.slow, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "core.hooksPath="]
NAME = "distributed_training_miner"

#: Keeps one app in a file. If the name of its version begins with v, its miner has taken a step
#: when `start` returns. The miners of other versions end ("broken", or "refused" as after a wrong
#: setting), take no steps ("silent"), or are not started at all ("unknown").
PM2 = """#!{python} -IS
import json, os, sys
from pathlib import Path
folder, home = Path({folder!r}), Path({home!r})
state = folder / "apps.json"
command, *words = sys.argv[1:]
apps = json.loads(state.read_text())
if command == "jlist":
    print("[PM2] Spawning PM2 daemon")
    print(json.dumps(apps))
elif command == "save" and (folder / "no-save").exists():
    sys.exit("no space left")
elif command == "delete":
    apps = [app for app in apps if app["name"] != words[0]]
elif command == "start" and words[-1].startswith("distributed_training_page"):
    apps.append({{"name": words[-1], "pm2_env": {{"pm_cwd": str(Path(words[0]).parent)}}}})
elif command == "start":
    version = Path(words[0]).parent
    kind = (version / "version").read_text()
    status = {{"broken": "stopped", "refused": "waiting restart"}}.get(kind, "online")
    env = {{"status": status, "restart_time": 0, "pm_cwd": str(home),
           "stop_exit_codes": [2, 3], **({{"exit_code": 2}} if kind == "refused" else {{}}),
           "env": {{"PYTHONPATH": {root!r}, "MINE": os.environ.get("MINE", "")}},
           "pm_exec_path": str(version / "neurons" / "miner.py")}}
    apps += [{{"name": {name!r}, "pm2_env": env}}] if kind != "unknown" else []
    if kind.startswith("v"):
        with (home / "run" / "events.jsonl").open("a") as events:
            print(json.dumps({{"kind": "step"}}), file=events)
state.write_text(json.dumps(apps))
"""

#: The files of each version: its settings for pm2, its setup and its doctor.
FILES = {
    "app.config.js": 'module.exports = {apps: [{args: ["--neuron.run_folder", "run"]}]};\n',
    "scripts/setup.sh": f"""#!/bin/sh
set -e
cd "$(dirname "$0")/.."
echo setup >>setups
mkdir -p .venv/bin
printf '#!/bin/sh\nexec {sys.executable} "$@"\n' >.venv/bin/python
chmod +x .venv/bin/python
[ ! -e ../../no-setup ]
touch .venv/.installed
""",
    "scripts/diagnose.py": """import os, pathlib, sys
print("doctor", os.environ["MINE"], pathlib.Path.cwd(), *sys.argv[1:])
sys.exit(pathlib.Path("ill").exists())
""",
}


class Machine:
    """Holds an operator's checkout at v1, from which the miner runs, and its remote."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home, self.origin = folder, folder / "ho me", folder / "origin"
        for path, content in FILES.items():
            (self.origin / path).parent.mkdir(parents=True, exist_ok=True)
            (self.origin / path).write_text(content)
        (self.origin / "scripts" / "setup.sh").chmod(0o755)
        self.git("init", "--quiet", "--initial-branch", "main", at=self.origin)
        self.commits = {tag: self.release(tag) for tag in ("v1", "v2", "v3")}
        self.git("clone", "--quiet", str(self.origin), str(self.home), at=folder)
        self.git("checkout", "--quiet", "v1", at=self.home)
        (self.home / "neurons").mkdir()
        (self.home / "run").mkdir()
        (self.home / "miner.toml").write_text('network = "local"\n')
        (self.home / "run" / "events.jsonl").write_text('{"kind": "step"}\n')
        self.pm2 = folder / "pm2"
        names = {"folder": str(folder), "home": str(self.home), "root": str(ROOT), "name": NAME}
        self.pm2.write_text(PM2.format(python=sys.executable, **names))
        self.pm2.chmod(0o755)
        (folder / "apps.json").write_text("[]")
        start = [self.pm2, "start", str(self.home / "app.config.js")]
        subprocess.run(start, check=True, env={**os.environ, "MINE": "a b\nc"})

    def git(self, *words: str, at: Path) -> str:
        done = subprocess.run([*GIT, "-C", str(at), *words], check=True, capture_output=True)
        return done.stdout.decode().strip()

    def release(self, tag: str) -> str:
        (self.origin / "version").write_text(tag)
        self.git("add", "--all", at=self.origin)
        self.git("commit", "--quiet", "--message", tag, at=self.origin)
        self.git("tag", tag, at=self.origin)
        return self.git("rev-parse", "HEAD", at=self.origin)

    @property
    def runs_from(self) -> Path:
        apps = json.loads((self.folder / "apps.json").read_text())
        (app,) = (app for app in apps if app["name"] == NAME)
        return Path(app["pm2_env"]["pm_exec_path"]).parent.parent

    def command(self, *words: str) -> list[str]:
        return [str(ROOT / "scripts" / "update.sh"), "--pm2", str(self.pm2), *words]

    def update(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the update in another shell, whose environment lacks the miner's settings."""
        plain = {k: os.environ[k] for k in ("PATH", "HOME")}
        return subprocess.run(
            self.command(*words),
            capture_output=True,
            text=True,
            env=plain,
            cwd="/",
            timeout=60,
        )

    def updated(self, *words: str) -> Path:
        done = self.update(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return self.runs_from

    def refused(self, *words: str) -> str:
        """Return why the update was refused. The miner must still run."""
        before = self.runs_from
        done = self.update(*words)
        assert done.returncode == 1, done.stdout + done.stderr
        assert self.runs_from == before
        assert done.stderr.splitlines()[-1].endswith(f"; {before.name} runs on")
        return done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        *((), ("v1", "v2"), ("v1", "--first-step"), ("v1", "--first-step", "soon")),
        *(("v1", "--round-wait", "1h30"), ("--v1",), ("v1", "--name")),
    ],
)
def test_wrong_arguments_have_status_2(machine: Machine, words: tuple[str, ...]) -> None:
    done = machine.update(*words)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: ")


def test_a_version_is_set_up_next_to_the_old_one_with_the_same_settings(machine: Machine) -> None:
    """Environment, folder and flags are those of the app, although a version has its own folder."""
    done = machine.update("v2", "--no-tests")
    assert done.returncode == 0, done.stdout + done.stderr
    new = machine.home / "versions" / f"v2-{machine.commits['v2'][:12]}"
    assert machine.runs_from == new and (new / "version").read_text() == "v2"
    (page,) = json.loads((machine.folder / "apps.json").read_text())[1:]
    assert page["name"] == "distributed_training_page" and page["pm2_env"]["pm_cwd"] == str(new)
    flags = "--neuron.run_folder run"
    assert f"doctor a b\nc {machine.home} {flags}\n" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"{NAME} runs v2 from {new}; the one before")
    assert "v2 runs already" in machine.refused("v2")
    machine.updated("v3")
    assert machine.updated("v2") == new
    assert (new / "setups").read_text() == "setup\n", "the one before is taken as it was"


def test_a_branch_and_a_commit_are_versions_and_a_tag_may_move(machine: Machine) -> None:
    commit = machine.commits["v3"]
    assert machine.updated("main").name == f"main-{commit[:12]}"
    new = machine.release("v4")  # the branch has a new commit
    assert machine.updated("main").name == f"main-{new[:12]}"
    machine.git("tag", "--force", "v2", commit, at=machine.origin)
    assert machine.updated("v2").name == f"v2-{commit[:12]}"
    assert machine.updated(machine.commits["v2"]).name.endswith(machine.commits["v2"][:12])
    assert "there is no version feature/x" in machine.refused("feature/x")
    machine.git("remote", "set-url", "origin", "/nowhere", at=machine.home)
    assert machine.updated("v3").name == f"v3-{commit[:12]}", "it is here already"


def test_failure_before_the_switch_leaves_the_old_version(machine: Machine) -> None:
    machine.updated("v2")
    (machine.home / "no-setup").touch()
    assert "setting up v3 failed" in machine.refused("v3")
    assert not list((machine.home / "versions").glob("v3-*")), "it may have filled the disk"
    (machine.home / "no-setup").unlink()
    (machine.home / "ill").touch()
    assert "the doctor of v3 failed" in machine.refused("v3")
    next_round = f"dt_next_round_timestamp_seconds {time.time() + 60}\n"
    (machine.home / "run" / "metrics.prom").write_text(next_round)
    assert "a round is near" in machine.refused("v3", "--no-doctor", "--round-wait", "1s")
    lock = os.open(machine.home, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert "another update is under way" in machine.refused("v3")
    os.close(lock)
    (machine.home / "run" / "metrics.prom").unlink()
    folder = machine.updated("v3", "--no-doctor")
    assert (folder / "setups").read_text() == "setup\n", "begun again after the failure"


def test_settings_without_a_network_are_refused_before_anything_changes(
    machine: Machine,
) -> None:
    toml = machine.home / "miner.toml"
    wanted = toml.read_text()
    toml.write_text("[axon]\nport = 7001\n")
    error = machine.refused("v2")
    assert "v2 refuses its settings" in error and "join a network with dt-join" in error
    toml.write_text(wanted + toml.read_text())
    machine.updated("v2")


def test_ctrl_c_ends_the_wait_for_a_round_and_the_update(machine: Machine) -> None:
    due = f"dt_next_round_timestamp_seconds {time.time() + 60}\n"
    (machine.home / "run" / "metrics.prom").write_text(due)
    before = machine.runs_from
    update = subprocess.Popen(
        ["env", "--default-signal=INT", *machine.command("v2", "--no-doctor")],
        stdout=subprocess.PIPE,
        process_group=0,
    )
    assert update.stdout is not None
    lines = iter(update.stdout.readline, b"")
    assert any(b"waiting: a round is near" in line for line in lines)
    os.killpg(update.pid, signal.SIGINT)
    assert update.wait(20) == 130 and machine.runs_from == before
    update.stdout.close()


def test_a_setup_that_was_killed_is_begun_again(machine: Machine) -> None:
    folder = machine.home / "versions" / f"v2-{machine.commits['v2'][:12]}"
    machine.git("worktree", "add", "--detach", str(folder), "v2", at=machine.home)
    (folder / ".venv").mkdir()
    (
        folder / "version"
    ).unlink()  # git had not written it yet, although the worktree has this commit
    assert machine.updated("v2") == folder and (folder / "version").read_text() == "v2"


@pytest.mark.parametrize("kind", ["broken", "refused", "silent", "unknown"])
def test_a_version_that_does_not_train_is_taken_back(machine: Machine, kind: str) -> None:
    """That happens at once if it ended or pm2 could not start it; otherwise after its time."""
    before = machine.updated("v2")
    machine.release(kind)
    began = time.monotonic()
    done = machine.update(kind, "--first-step", "3s" if kind == "silent" else "50s")
    assert done.returncode == 1 and machine.runs_from == before, done.stdout + done.stderr
    assert done.stderr == f"error: {kind} came to no inner step; {before.name} runs again\n"
    assert time.monotonic() - began < 45


def test_an_update_continues_when_the_reader_of_its_output_ends(machine: Machine) -> None:
    """`| tee` ends in this way when the terminal is closed."""
    with subprocess.Popen(machine.command("v2", "--no-doctor"), stdout=subprocess.PIPE) as update:
        assert update.stdout is not None
        update.stdout.close()
        assert update.wait(60) == 0 and machine.runs_from.name.startswith("v2")


def test_a_version_that_trains_stays_though_pm2_cannot_save(machine: Machine) -> None:
    (machine.folder / "no-save").touch()
    done = machine.update("v2")
    assert done.returncode == 0 and machine.runs_from.name.startswith("v2")
    assert "pm2 save failed: a reboot would not start" in done.stdout


def test_an_app_that_pm2_does_not_have_is_one_line(machine: Machine) -> None:
    for words in (("--name", "two"), ("--pm2", "/nowhere")):
        done = machine.update("v2", *words)
        assert done.returncode == 1
        assert "so there is nothing to update: pm2 start app.config.js" in done.stderr
