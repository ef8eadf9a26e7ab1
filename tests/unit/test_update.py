"""scripts/update.sh with real git and a stand-in for pm2, whose miner trains as soon as it starts.

tests/end_to_end/test_launcher_pm2.py has real pm2 and a real launcher.
"""

from __future__ import annotations

import fcntl
import gc
import json
import mmap
import os
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import psutil
import pytest

from distributed_training.telemetry import EventLog, MetricsFile
from distributed_training.telemetry.neuron_state import NeuronState
from scripts import update
from tests.tools.pm2 import needs_node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "core.hooksPath="]

#: Keeps one app in a file. Its miner has taken a step when `start` returns.
PM2 = """#!{python} -IS
import json, os, sys, time
from pathlib import Path
folder = Path({folder!r})
state = folder / "apps.json"
command, *words = sys.argv[1:]
apps = json.loads(state.read_text())
if command == "jlist":
    print((folder / "before-the-list").read_text(), end="")
    print(json.dumps(apps))
elif command == "save" and (folder / "no-save").exists():
    sys.exit("no space left")
elif command == "delete":
    apps = []
elif command == "start":
    env = {{"status": "online", "restart_time": 0, "env": {{}}, "pm_cwd": {home!r},
           "args": ["--config", "settings.toml"],
           "pm_exec_path": str(Path(words[0]).parent / "neurons" / "miner.py")}}
    apps = [{{"name": "distributed_training_miner", "pm2_env": env}}]
    home = Path({home!r})
    if Path(words[0]).parent.name == "broken":
        (home / "settings.toml").unlink()
        os.kill(os.getppid(), 15)
    else:
        with (home / "run" / "events.jsonl").open("a") as events:
            # The clock was set back meanwhile.
            print(json.dumps({{"kind": "step", "time": time.time() - 3600}}), file=events)
state.write_text(json.dumps(apps))
"""

#: An environment whose programs name its folder, as pip writes them.
SETUP = """
mkdir -p .venv/bin .venv/lib/python3.11/site-packages
printf '#!%s/.venv/bin/python\\n' "$PWD" >.venv/bin/btcli
echo "$PWD" >.venv/lib/python3.11/site-packages/__editable__.miner.pth
touch .venv/.installed
"""


def _become_update(words: list[str], environ: dict[str, str], said: list[Path]) -> NoReturn:
    # A process group that another test left behind joins its threads when it is collected, and a
    # fork has none of them.
    gc.disable()
    status = 70
    try:
        for number, path in enumerate(said, start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.environ.update(environ)
        status = update.main(words)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


class Machine:
    """An operator's checkout at v1, from which the miner runs, and its remote."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home, self.origin = folder, folder / "home", folder / "origin"
        self.origin.mkdir()
        self.git("init", "--quiet", "--initial-branch", "main", at=self.origin)
        self.commits = {tag: self.release(tag) for tag in ("v1", "v2", "v3")}
        self.git("clone", "--quiet", str(self.origin), str(self.home), at=folder)
        self.git("checkout", "--quiet", "v1", at=self.home)
        (self.home / "run").mkdir()
        (self.home / "settings.toml").write_text('[neuron]\nrun_folder = "run"\n')
        (self.home / ".venv").mkdir()
        self.pm2 = folder / "pm2"
        self.pm2.write_text(
            PM2.format(python=sys.executable, folder=str(folder), home=str(self.home))
        )
        self.pm2.chmod(0o755)
        (folder / "before-the-list").write_text("")
        (folder / "apps.json").write_text("[]")
        subprocess.run([self.pm2, "start", str(self.home / "app.config.js")], check=True)

    def git(self, *words: str, at: Path) -> str:
        done = subprocess.run([*GIT, "-C", str(at), *words], check=True, capture_output=True)
        return done.stdout.decode().strip()

    def release(self, tag: str) -> str:
        (self.origin / "version").write_text(tag)
        self.git("add", "version", at=self.origin)
        self.git("commit", "--quiet", "--message", tag, at=self.origin)
        self.git("tag", tag, at=self.origin)
        return self.git("rev-parse", "HEAD", at=self.origin)

    @property
    def runs_from(self) -> Path:
        (app,) = json.loads((self.folder / "apps.json").read_text())
        return Path(app["pm2_env"]["pm_exec_path"]).parent.parent

    @property
    def versions(self) -> set[str]:
        return {path.name for path in (self.home / "versions").iterdir()}

    def update(
        self,
        target: str,
        *words: str,
        setup: str = SETUP,
        tests: str | None = "true",
        out: Path | None = None,
        **environ: str,
    ) -> subprocess.CompletedProcess[str]:
        """In a fork: the program would import for longer than it works."""
        program = [target, "--pm2", str(self.pm2), "--first-step", "10s", "--no-doctor", *words]
        more = {"DT_UPDATE_SETUP": f"sh -c {shlex.quote(setup)}", **environ}
        more |= {"DT_UPDATE_TESTS": f"sh -c {shlex.quote(tests)}"} if tests else {}
        said = [out or self.folder / "out", self.folder / "errors"]
        child = os.fork()
        if child == 0:
            _become_update(program, more, said)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = [path.read_text() if path != out else "" for path in said]
        return subprocess.CompletedProcess(program, status, *texts)

    def updated(self, target: str, **how: Any) -> Path:
        done = self.update(target, **how)
        assert done.returncode == 0, done.stdout + done.stderr
        return self.runs_from

    def refused(self, target: str, *, more: frozenset[str] = frozenset(), **how: Any) -> str:
        """The miner runs on and nothing but ``more`` is left."""
        before, versions = self.runs_from, self.home / "versions"
        were = self.versions if versions.exists() else set()
        done = self.update(target, **how)
        assert done.returncode == 1, done.stdout + done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ") and f"{before.name} runs on" in line
        assert self.runs_from == before and self.versions == were | more
        return line


def test_a_pm2_that_hangs_is_waited_for_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pm2").write_text("#!/bin/sh\nexec sleep 300\n")
    (tmp_path / "pm2").chmod(0o755)
    monkeypatch.setattr(update, "_PM2_SECONDS", 0.1)
    with pytest.raises(update.UpdateError, match="pm2 jlist: no end within"):
        update.Pm2(str(tmp_path / "pm2")).has("miner")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Nothing runs from a version but what a test starts: each look reads all of /proc."""
    monkeypatch.setattr(update, "process_in", lambda environment: None)
    return Machine(tmp_path)


def test_the_version_before_is_gone_back_to_as_it_was(machine: Machine) -> None:
    """Without setup, which could fail half-way in the only folder that is known to train."""
    before = machine.updated("v2")
    assert "v2 is the version that runs already" in machine.refused("v2", setup="exit 1")
    machine.updated("v3")
    assert machine.updated("v2", setup="rm -rf .venv; exit 1") == before
    assert (before / ".venv" / "bin" / "btcli").exists()


@pytest.mark.parametrize("out", [None, Path("/dev/full")])
def test_the_version_before_is_gone_back_to_though_its_files_are_away_by_now(
    machine: Machine, out: Path | None
) -> None:
    """Also where the terminal that it was begun in is gone, and somebody sends SIGTERM."""
    machine.updated("v2")
    machine.release("broken")
    done = machine.update("broken", "--first-step", "2s", out=out)
    assert done.returncode == 1 and machine.runs_from.name == "v2", done.stdout + done.stderr
    assert "it did not train (no inner step in 2 s); v2 runs again" in done.stderr


def test_a_version_that_trains_stays_though_pm2_cannot_save(machine: Machine) -> None:
    assert "No such file or directory: 'git'" in machine.refused("v2", PATH="/nowhere")
    (machine.folder / "no-save").touch()
    done = machine.update("v2")
    assert (done.returncode, machine.runs_from.name) == (0, "v2"), done.stdout + done.stderr
    assert "pm2 save: no space left: a reboot would not start the miner from" in done.stdout


def test_a_failed_setup_leaves_nothing_and_has_a_reason(machine: Machine) -> None:
    machine.updated("v2")
    line = machine.refused("v3", setup=f"{SETUP}\nexit 7")
    assert "its setup failed (status 7, no output)" in line
    assert "its setup failed (signal 9, no output)" in machine.refused("v3", setup="kill -9 $$")
    full = "echo error: No space left >&2; exit 1"
    assert "its setup failed (error: No space left)" in machine.refused("v3", setup=full)
    machine.updated("v3")


def test_a_version_whose_tests_failed_is_tried_again_with_setup(machine: Machine) -> None:
    """Its setup may have been wrong. Its tests see no GPU: the miner trains on them."""
    show, new = 'echo "GPUs: <$CUDA_VISIBLE_DEVICES>"; exit 1', frozenset({"v2.new"})
    line = machine.refused("v2", more=new, tests=show, CUDA_VISIBLE_DEVICES="0")
    assert "its tests failed (GPUs: <>)" in line
    folder = machine.updated("v2", setup=f"{SETUP}\ntouch again")
    assert (folder / "again").exists() and machine.versions == {"v2"}


def test_a_setup_that_was_killed_is_begun_again(machine: Machine) -> None:
    """That of this program in .new, that of earlier ones under the final name."""
    for name in ("v2", "v2.new"):
        folder = machine.home / "versions" / name
        machine.git("worktree", "add", "--detach", str(folder), "v2", at=machine.home)
        (folder / ".venv").mkdir()
        (folder / "version").unlink()  # not reached yet, though git calls it this commit
    folder = machine.updated("v2")
    assert (folder / "version").read_text() == "v2" and machine.versions == {"v2"}
    # Its programs name the folder that it runs in.
    assert (folder / ".venv/bin/btcli").read_text() == f"#!{folder}/.venv/bin/python\n"
    (link,) = folder.glob(".venv/lib/*/site-packages/__editable__*")
    assert link.read_text().strip() == str(folder)


def test_a_full_disk_leaves_programs_whole_and_those_that_run_are_seen_through_links(
    tmp_path: Path,
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    program = tmp_path / "a" / "bin" / "btcli"
    program.parent.mkdir(parents=True)
    program.write_text(f"{tmp_path}/a\n" * 10_000)
    program.chmod(0o755)
    before, most = program.read_text(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, most[1]))
    try:
        with pytest.raises(OSError):
            update.relocate(tmp_path / "a", tmp_path / "a", tmp_path / "b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert program.read_text() == before and len([*program.parent.iterdir()]) == 1
    update.relocate(tmp_path / "a", tmp_path / "a", tmp_path / "b")
    assert program.read_text() == f"{tmp_path}/b\n" * 10_000 and program.stat().st_mode & 0o111
    with program.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert update.process_in(tmp_path / "link" / "a") == os.getpid()


def test_a_branch_and_a_commit_are_versions_too(machine: Machine) -> None:
    main = machine.updated("main")
    commit = machine.commits["v3"]
    assert main.name == f"main-{commit[:12]}"
    new = machine.release("later")  # the branch moves on
    assert machine.updated("main").name == f"main-{new[:12]}"
    assert machine.updated(machine.commits["v2"]).name == machine.commits["v2"][:12]
    assert "no version feature/x: it does not exist" in machine.refused("feature/x")
    machine.git("remote", "set-url", "origin", "/nowhere", at=machine.home)
    assert "no version main: it could not be fetched" in machine.refused("main")


def test_a_fetch_that_hangs_has_an_end(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "_FETCH_SECONDS", 1.0)
    git = ["git", "-C", str(machine.home)]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/miner.git"
        machine.git("remote", "set-url", "origin", url, at=machine.home)
        assert update.fetch(git) == "no end within 1 s: check the network, update again"
        left = [p for p in psutil.process_iter(["cmdline"]) if url in (p.info["cmdline"] or ())]
        assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_a_tag_that_was_moved_does_not_touch_the_version_that_had_it(machine: Machine) -> None:
    before = machine.updated("v2")
    machine.git("tag", "--force", "v2", "v3", at=machine.origin)
    after = machine.updated("v2")
    assert after.name == f"v2-{machine.commits['v3'][:12]}"
    assert machine.git("rev-parse", "HEAD", at=before) == machine.commits["v2"]


def test_two_versions_stay_and_what_a_process_runs_from(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    folder = machine.updated("v2")
    program = folder / ".venv" / "bin" / "python"
    shutil.copy(shutil.which("sleep") or "", program)
    other = subprocess.Popen([str(program), "600"])
    try:
        machine.updated("v3")
        assert machine.versions == {"v2", "v3"}
        machine.release("v4")
        done = machine.update("v4")
        assert f"v2 stays: process {other.pid} runs from it" in done.stdout
        assert machine.versions == {"v2", "v3", "v4"}
    finally:
        other.kill()
        other.wait()
    (machine.home / "versions" / "notes").mkdir()  # an operator's, no version
    machine.release("v5")
    machine.updated("v5")
    assert machine.versions == {"v4", "v5", "notes"}


def test_the_lines_of_a_daemon_that_has_to_be_started_are_no_list(machine: Machine) -> None:
    said = machine.folder / "before-the-list"
    said.write_text("\n>>>> In-memory PM2 is out-of-date\n[PM2] Spawning PM2 daemon\n[PM2] Done\n")
    machine.updated("v2")
    (machine.folder / "apps.json").write_text("no list")
    done = machine.update("v3")
    assert done.returncode == 1 and "Traceback" not in done.stderr


def test_what_the_tests_need_stays_out_of_the_environment(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies beside, by hash; versions from before the lists have it installed."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python = "printf '#!/bin/sh\\necho \"$PYTHONPATH|$*\" >>calls\\n' >.venv/bin/python"
    setup = f"{SETUP}\n{python}\nchmod +x .venv/bin/python"
    folder = machine.updated("v2", setup=setup, tests=None)
    (call,) = (folder / "calls").read_text().splitlines()
    assert call.startswith("|-m pytest")
    (machine.origin / "requirements").mkdir()
    (machine.origin / "requirements" / "test.txt").write_text("pytest==1\n")
    machine.git("add", "requirements", at=machine.origin)
    machine.release("v4")
    folder = machine.updated("v4", setup=setup, tests=None)
    fetch, call = (folder / "calls").read_text().splitlines()
    assert "--require-hashes" in fetch and "--target build/tests" in fetch
    assert call.startswith(f"{folder}.new/build/tests|-m pytest")


def test_nothing_is_begun_beside_another_update_or_without_room(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = machine.home / "versions"
    versions.mkdir()
    lock = os.open(versions, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert "another update is under way" in machine.refused("v2")
    os.close(lock)
    full = SimpleNamespace(total=10**12, free=10**9)
    monkeypatch.setattr(update.shutil, "disk_usage", lambda _: full)
    line = machine.refused("v2")
    assert "1.0 GB are free in" in line and "are needed for the new environment" in line


@needs_node
def test_an_environment_without_python_is_one_line(machine: Machine) -> None:
    folder = machine.updated("v2")
    (folder / "app.config.js").write_text("module.exports = {apps: [{args: []}]};")
    old = update.App("a", machine.home, machine.home, [], dict(os.environ))
    with (
        pytest.raises(update.UpdateError, match=r"incomplete .*home runs on: remove .*v2"),
        update.unchanged(old),
    ):
        update.examine(old, folder)


@pytest.mark.parametrize(
    ("events", "round_in", "why"),
    [
        ([], None, ""),
        ([("start", {}), ("step", {})], None, ""),
        ([("state", {"after": "averaging"}), ("step", {})], None, "the miner is averaging"),
        ([("state", {"after": "awaiting_global"})], 9999, "the miner is awaiting global"),
        ([("state", {"after": "stopping"}), ("stop", {})], None, ""),
        ([("state", {"after": "averaging"}), ("start", {})], -10, ""),
        ([("state", {"after": "training"})], 100, "a round is due in"),
        ([("state", {"after": "training"})], 9999, ""),
    ],
)
def test_a_round_that_is_near_is_waited_for(
    tmp_path: Path, events: list[tuple[str, dict[str, Any]]], round_in: float | None, why: str
) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        for kind, fields in events:
            log.write(kind, **fields)
    file = MetricsFile(tmp_path / "metrics.prom")
    if round_in is not None:
        file.registry.set("next_round_timestamp_seconds", time.time() + round_in)
    file.write(lambda: None)
    found = update.round_near(NeuronState(tmp_path).catch_up())
    assert found.startswith(why) and bool(found) == bool(why)


def test_a_node_that_writes_no_steps_trains_once_it_has_ranks(tmp_path: Path) -> None:
    """Of several nodes only node 0 writes steps: an update of the others went back without end."""
    flags = "--nnodes 2 --node_rank 1 --rdzv_endpoint 10.0.0.1:1 --neuron.run_folder run"
    app = update.App("miner", tmp_path, tmp_path, flags.split(), {})
    miner, rank = app.state(), tmp_path / "run" / "pids" / "rank-0.json"
    assert not app.trains(miner, since=1000.0)
    rank.parent.mkdir(parents=True)
    rank.touch()
    for written, trains in ((999.0, False), (1001.0, True)):  # the old version's; the new one's
        os.utime(rank, (written, written))
        assert app.trains(miner, since=1000.0) is trains


def test_a_round_that_ends_is_waited_for_no_longer(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write("state", after="averaging")
        miner = NeuronState(tmp_path).catch_up()
        with pytest.raises(update.UpdateError, match=r"averaging, still after 0 s"):
            update.await_no_round(miner, 0.0)
        log.write("state", after="training")
        update.await_no_round(miner, 20.0)
