#!/usr/bin/env python
"""Bring the miner that runs under pm2 to another version. Started by ``scripts/update.sh``.

    scripts/update.sh v1.4.0                 a tag
    scripts/update.sh main                   a branch, or a commit
    scripts/update.sh v1.4.0 --no-doctor --first-step 1h

The new version is set up in a folder of its own under ``versions``, with its own environment, while
the old one trains. Its tests and its doctor must pass there. Then, when no round is near, pm2's app
is stopped as ``pm2 stop`` does it and started from the new folder, with the same settings, run
folder and environment. If the new version does not come to its first inner step, the old one is
started again. Afterwards ``versions`` keeps the version that runs and the one before. pm2 is only
ever asked by the app's name. Exit status: 0 the new version trains, 1 the old one runs on (or
again) and one line says why, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distributed_training.common.files import atomic_file
from distributed_training.common.processes import kill_tree
from distributed_training.config import OPERATORS_FILE, Config, ConfigError, exit_with, load_config
from distributed_training.config.loader import Parser, argument
from distributed_training.config.types import Duration
from distributed_training.health.machine import bytes_under
from distributed_training.telemetry.metrics import read_metrics
from distributed_training.telemetry.neuron_state import NeuronState, written_at

APP = "distributed_training_miner"
_ROUND_NEAR = timedelta(minutes=3)  # a round due so soon is waited for
_SPARE_BYTES = 2_000_000_000  # beyond the size of the environment that is there
_POLL = 1.0  # seconds
_FETCH_SECONDS = 600.0
_PM2_SECONDS = 120.0  # of one command
_KILL_SECONDS = 25.0  # that app.config.js gives a stop beyond its time
_NEW = ".new"  # ends the name of a version's folder until the version has passed
#: DT_UPDATE_SETUP and DT_UPDATE_TESTS replace these where they cannot be run, as in tests.
_SETUP = "scripts/setup.sh"
_TESTS = '.venv/bin/python -m pytest -q -x -n 2 -m "not long and not cuda" tests/unit'
#: What they need besides, fetched for them alone: the miner's environment gets none of it.
_TOOLS, _TOOLS_LIST = "build/tests", "requirements/test.txt"
_FETCH_TOOLS = (
    ".venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes "
    f"--no-deps --upgrade --target {_TOOLS} -r {_TOOLS_LIST}"
)
#: The GPUs belong to the miner that trains: a test that fills their memory would end its steps.
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


class UpdateError(RuntimeError):
    """There is no update: nothing has changed, or all is as before.

    The text is one line. ``remedy``: what to do, where the version that runs on is named before it.
    """

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(cause)
        self.remedy = remedy


@dataclass(frozen=True)
class App:
    """pm2's app as it runs.

    ``version`` is the folder of its program, ``home`` the one it runs in, with .env, settings and
    run folder.
    """

    name: str
    version: Path
    home: Path
    arguments: list[str]
    environment: dict[str, str]

    @cached_property
    def config(self) -> Config:
        """The miner's flags, which are read once.

        Raises ConfigError.

        A file that they name may be away later, when the old version has to be started again.
        """
        environment, dotenv = self.environment, self.home / ".env"
        with chdir(self.home):  # where the miner finds what they name
            return load_config(
                "miner",
                self.arguments,
                environ=environment,
                dotenv=dotenv,
                file=OPERATORS_FILE,
                check=False,
            )

    def state(self) -> NeuronState:
        """Return the miner's state from its run folder. Raises ConfigError the first time."""
        return NeuronState(self.home / self.config.run_folder).catch_up()

    def trains(self, miner: NeuronState, since: float) -> bool:
        """Return whether an inner step was done since the last look at ``miner``.

        Of several nodes only node 0 writes steps; the others have ranks once it took them in, whose
        files are newer than ``since``, by the wall clock.
        """
        if self.config.nodes.leads:
            return any(event["kind"] == "step" for event in miner.poll())
        ranks = miner.folder.glob("pids/rank-*.json")
        return any((written_at(path) or 0.0) > since for path in ranks)


def build_parser() -> Parser:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    add, text, duration = parser.add_argument, argument(str), argument(Duration)
    add("target", type=text, help="the version: a tag, a branch or a commit")
    most = "how long the new version may take to its first inner step (default 30m)"
    add("--first-step", type=duration, default=timedelta(minutes=30), help=most)
    most = "how long to wait for a moment without a round (default 2h)"
    add("--round-wait", type=duration, default=timedelta(hours=2), help=most)
    add("--no-tests", action="store_true", help="leave the unit tests out")
    why = "leave the doctor out, e.g. while the chain is away"
    add("--no-doctor", action="store_true", help=why)
    name = os.environ.get("DT_NAME") or None
    add("--name", type=text, default=name, help="of a second miner, as DT_NAME (default: DT_NAME)")
    add("--pm2", type=text, default="pm2", help="the command")
    return parser


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    try:
        update(options)
    except ConfigError as error:
        return exit_with(error)
    except UpdateError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def update(options: argparse.Namespace) -> None:
    """Update the miner. Raises UpdateError."""
    pm2 = Pm2(options.pm2)
    old = pm2.app(f"{APP}_{options.name}" if options.name else APP)
    tell(f"{old.name} runs from {old.version}")
    with ExitStack() as stack:
        with unchanged(old):
            stack.enter_context(only_update(old.home / "versions"))
            folder = prepare(old, options.target)
            if not options.no_tests:
                test(folder)
            if not options.no_doctor:
                examine(old, folder)
            # After the checks: only what has passed them ever has a version's name.
            folder = keep(old, folder)
            await_no_round(old.state(), options.round_wait.total_seconds())
        switch(pm2, old, folder, options.first_step.total_seconds())
        tell(f"{old.name} runs {options.target} from {folder}; the one before is {old.version}")
        # Last: until the new version trains, each of them may be the one to go back to.
        remove_others(old, folder)


@contextmanager
def unchanged(old: App) -> Iterator[None]:
    """Say of each error that the version that runs goes on."""
    on = f"{old.version.name} runs on"
    try:
        yield
    except UpdateError as error:
        raise UpdateError(": ".join(filter(None, (f"{error}; {on}", error.remedy)))) from None
    except OSError as error:  # no git, a full disk: of all that has its steps' own words
        raise UpdateError(f"the update cannot go on ({error}); {on}") from None


@contextmanager
def only_update(versions: Path) -> Iterator[None]:
    """Hold the lock of ``versions``: two updates at once would remove each other's folders."""
    versions.mkdir(exist_ok=True)
    lock = os.open(versions, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UpdateError(f"another update is under way in {versions}") from None
        yield
    finally:
        os.close(lock)


def tell(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError:
        # A terminal that was closed, or the tee behind a pipe that Ctrl-C ended: raised between two
        # versions it would leave neither of them running.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- the new version, beside the old one ----------------------------------------------------------


def prepare(old: App, target: str) -> Path:
    """Fetch the target and set it up. Return its folder.

    Setup works in a folder that no miner ever ran from, ``NAME.new``; :func:`keep` renames it.
    Hence no failure can touch the version that runs or the one to go back to. A version that ran
    before is taken as it is.
    """
    git = ["git", "-C", str(old.version)]
    commit, name = find_commit(git, target)
    folder = old.home / "versions" / name
    if folder.exists() and head_of(folder) != commit:  # a tag that was moved
        folder = folder.with_name(f"{name}-{commit[:12]}")
    if folder.exists() and folder.samefile(old.version):
        raise UpdateError(f"{target} is the version that runs already")
    if (folder / ".venv" / ".installed").exists():
        tell(f"{target} is set up in {folder}")
        return folder
    # Another miner of this machine may run from it.
    if user := process_in(folder / ".venv"):
        raise UpdateError(f"{folder} is incomplete, but process {user} runs from it")
    remove_version(git, folder)  # incomplete, and nothing runs from it
    new = folder.with_name(f"{folder.name}{_NEW}")
    if not whole(new, commit):
        remove_version(git, new)
        needed = bytes_under((old.version / ".venv").resolve()) + _SPARE_BYTES
        disk = shutil.disk_usage(new.parent)
        if disk.total and disk.free < needed:  # a total of 0: the file system does not tell
            raise UpdateError(
                f"{disk.free / 1e9:.1f} GB are free in {new.parent} and {needed / 1e9:.1f} GB are "
                "needed for the new environment"
            )
        add = [*git, "worktree", "add", "--quiet", "--force", "--detach", str(new), commit]
        run("git", add, old.home)
    tell(f"setting up {target} in {folder}")
    try:
        run("its setup", shlex.split(os.environ.get("DT_UPDATE_SETUP", _SETUP)), new)
    except UpdateError:
        remove_version(git, new)
        raise
    return new


def test(folder: Path) -> None:
    """Run the unit tests of a version. Raises UpdateError."""
    more = _NO_GPU
    tests = os.environ.get("DT_UPDATE_TESTS")
    if tests is None and (folder / _TOOLS_LIST).exists():  # older versions have them installed
        tell("fetching what its tests need")
        run("fetching what its tests need", shlex.split(_FETCH_TOOLS), folder)
        more = {**more, "PYTHONPATH": str(folder / _TOOLS)}
    tell("running its tests")
    run("its tests", shlex.split(tests or _TESTS), folder, more=more)


def keep(old: App, folder: Path) -> Path:
    """Give a new version, which has passed, its name. Return its folder."""
    if folder.suffix != _NEW:
        return folder
    named = folder.with_suffix("")
    # Before the move: a kill between the two leaves a folder that no miner runs from.
    relocate(folder / ".venv", folder, named)
    move = ["git", "-C", str(old.version), "worktree", "move", "--force", str(folder), str(named)]
    run("git", move, old.home)
    return named


def find_commit(git: Sequence[str], target: str) -> tuple[str, str]:
    """Return the target's commit and the name of its folder. Raises UpdateError."""

    def commit_of(ref: str) -> str:
        # A target that begins with "-" would be an option of git.
        words = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
        return answer(*git, *words).stdout.strip()

    failure = fetch(git)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", target)
    if commit := commit_of(f"refs/tags/{target}"):
        return commit, name
    why = "it does not exist"
    if failure:
        why = f"it could not be fetched ({failure})"
    elif commit := commit_of(f"refs/remotes/origin/{target}"):
        return commit, f"{name}-{commit[:12]}"
    if re.fullmatch("[0-9a-f]{7,40}", target) and (commit := commit_of(target)):
        return commit, commit[:12]
    raise UpdateError(f"no version {target}: {why}")


def fetch(git: Sequence[str]) -> str:
    """Bring branches and tags of the remote here. Return why that failed; empty if it did not."""
    # Without --force git keeps a tag that was moved, and the old version would be installed.
    words = [*git, "fetch", "--tags", "--force", "--quiet"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = process.communicate(timeout=_FETCH_SECONDS)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)  # git's own children, ssh for one, would wait on without it
        process.wait()
        return f"no end within {_FETCH_SECONDS:.0f} s: check the network, update again"
    done = subprocess.CompletedProcess(words, process.returncode, said, "")
    return reason(done) if done.returncode != 0 else ""


def head_of(folder: Path) -> str:
    return answer("git", "-C", str(folder), "rev-parse", "HEAD").stdout.strip()


def whole(folder: Path, commit: str) -> bool:
    """Return whether ``folder`` holds all files of ``commit``; git writes its HEAD before them."""
    if not folder.exists() or head_of(folder) != commit:
        return False
    done = answer("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return done.returncode == 0 and not done.stdout


def relocate(environment: Path, before: Path, after: Path) -> None:
    """Have an environment name the folder that it will be moved to.

    Its programs (``btcli``), ``activate`` and the link to this project hold absolute paths.
    """
    packages = "lib/python3*/site-packages"
    patterns = ("bin/*", "pyvenv.cfg", f"{packages}/*.pth", f"{packages}/__editable__*")
    for pattern in (*patterns, f"{packages}/*.dist-info/direct_url.json"):
        for path in environment.glob(pattern):
            # Not through links: bin/python is the machine's.
            if path.is_symlink() or not path.is_file():
                continue
            content = path.read_bytes()
            moved = content.replace(bytes(before), bytes(after))
            if moved == content:
                continue
            # Whole or not at all: setup would take a file that a full disk cut for installed.
            with atomic_file(path, durable=False) as file:
                os.fchmod(file.fileno(), path.stat().st_mode)
                file.write(moved)


def remove_version(git: Sequence[str], folder: Path) -> None:
    answer(*git, "worktree", "remove", "--force", str(folder))
    shutil.rmtree(folder, ignore_errors=True)


def remove_others(old: App, folder: Path) -> None:
    """Remove versions other than the one that runs now and the one before.

    Only folders of this repository, and none that a process runs from.
    """
    git = ["git", "-C", str(folder)]
    listed = answer(*git, "worktree", "list", "--porcelain").stdout
    worktrees = re.findall("^worktree (.*)$", listed, re.MULTILINE)
    kept = (folder.resolve(), old.version.resolve())
    for path in map(Path, worktrees):
        if path.resolve().parent != (old.home / "versions").resolve() or path.resolve() in kept:
            continue
        if user := process_in(path / ".venv"):
            tell(f"{path} stays: process {user} runs from it")
            continue
        tell(f"removing {path}")
        remove_version(git, path)


def process_in(environment: Path) -> int | None:
    """Return a process that has a file of ``environment`` loaded."""
    # By the files it has loaded: command lines do not tell the version of every rank.
    wanted = f" {environment.resolve()}/".encode()  # the kernel names no symbolic link
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if wanted in maps.read_bytes():
                return int(maps.parent.name)
        except OSError:  # it ended, or is another account's
            continue
    return None


def examine(old: App, folder: Path) -> None:
    """Run the new version's doctor, with the flags that it will be started with."""
    tell("asking its doctor")
    command = [
        str(folder / ".venv" / "bin" / "python"),
        str(folder / "scripts" / "diagnose.py"),
        # Not measured: the GPUs are full of the version that trains.
        *("--json", "--diagnostics.measure", "0"),
        *arguments_of(folder, old),
    ]
    try:
        done = answer(*command, cwd=old.home, env=old.environment)
    except OSError as error:
        raise UpdateError(
            f"its environment is incomplete ({error})", f"remove {folder}, update again"
        ) from None
    if done.returncode == 0:
        return
    try:
        failures = [check for check in json.loads(done.stdout) if check["status"] == "fail"]
        why = "; ".join(f"{check['name']}: {check['finding']}" for check in failures)
    except (ValueError, TypeError, KeyError):
        why = ""
    why = why or last_line(done.stderr) or f"status {done.returncode}"
    raise UpdateError(
        f"its doctor fails ({why})",
        "correct it, or update with --no-doctor if it is not this machine's fault",
    )


def arguments_of(folder: Path, old: App) -> list[str]:
    """Return the flags that the app.config.js in ``folder`` starts the miner with."""
    code = "console.log(JSON.stringify(require(process.argv[1]).apps[0].args))"
    # By running it: the file is a program, and its override is one too.
    words = ("node", "-e", code, str(folder / "app.config.js"))
    done = answer(*words, env=old.environment | {"DT_HOME": str(old.home)})
    if done.returncode != 0:
        raise UpdateError(f"its app.config.js is in error: {reason(done)}")
    return [str(word) for word in json.loads(done.stdout)]


# --- the switch -----------------------------------------------------------------------------------


def await_no_round(miner: NeuronState, patience: float) -> None:
    """Wait until the miner trains and no round is due soon."""
    deadline, told = time.monotonic() + patience, False
    while (why := round_near(miner)) and time.monotonic() < deadline:
        if not told:
            tell(f"waiting: {why}")
            told = True
        time.sleep(_POLL)
        miner.poll()
    if why:
        raise UpdateError(f"{why}, still after {patience:.0f} s (--round-wait)")


def round_near(miner: NeuronState) -> str:
    """Return the reason why this is no moment to stop; empty if it is one."""
    if miner.phase not in ("starting", "training", "stopped"):
        return f"the miner is {miner.phase}"
    figures = read_metrics(miner.folder / "metrics.prom")
    left = figures.get("dt_next_round_timestamp_seconds", 0.0) - time.time()
    return f"a round is due in {left:.0f} s" if 0 < left < _ROUND_NEAR.total_seconds() else ""


def switch(pm2: Pm2, old: App, folder: Path, patience: float) -> None:
    """Stop the old version, start the new one; the old one again if that does not train."""
    tell("switching")
    # A closed terminal or a time limit (`timeout 1h scripts/update.sh`) must not leave no version.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    problem = try_version(pm2, old, folder, patience)
    if not problem:
        return
    tell(f"the new version does not train ({problem}): back to {old.version}")
    again = try_version(pm2, old, old.version, patience)
    if again:
        raise UpdateError(
            f"neither version trains ({problem}; then: {again}), so nothing does: "
            f"pm2 logs {old.name}"
        )
    raise UpdateError(f"it did not train ({problem}); {old.version.name} runs again")


def try_version(pm2: Pm2, old: App, folder: Path, patience: float) -> str:
    """Have the app run from ``folder``. Why it does not come to an inner step; empty if it does."""
    try:
        return _try_version(pm2, old, folder, patience)
    except (UpdateError, OSError) as error:  # one more would leave the miner without a judgement
        return str(error)


def _try_version(pm2: Pm2, old: App, folder: Path, patience: float) -> str:
    miner, began = old.state(), time.time()
    if pm2.has(old.name):
        longest = old.config.miner.stop_timeout.total_seconds() + _KILL_SECONDS
        pm2("delete", old.name, stop=longest)
        # It waited for the old version's end: a step after this is the new one's. Not by the time
        # of the step: a clock that is set back meanwhile would make it the old one's for ever.
        miner.poll()
        began = time.time()
    # The old settings, run folder and .env: only the program is another one.
    environment = old.environment | {"DT_HOME": str(old.home)}
    pm2("start", str(folder / "app.config.js"), "--only", old.name, environ=environment)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if old.trains(miner, began):
            save(pm2, folder)
            return ""
        status, restarts = pm2.state(old.name)
        # A few restarts are no verdict: chain or bucket may be away for a moment.
        if status in ("stopped", "errored") or restarts > 2:
            return f"pm2 shows it as {status} after {restarts} restarts"
        time.sleep(_POLL)
    return f"no inner step in {patience:.0f} s"


def save(pm2: Pm2, folder: Path) -> None:
    """Have a reboot bring back what runs. It trains: no failure here may take it back."""
    try:
        pm2("save")
    except UpdateError as error:
        tell(f"{error}: a reboot would not start the miner from {folder}; pm2 save")


class Pm2:
    """pm2, asked by an app's name."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __call__(
        self, *words: str, environ: Mapping[str, str] | None = None, stop: float = 0.0
    ) -> str:
        """Return what pm2 says. ``stop``: seconds that it may wait for a miner's end."""
        try:
            process = subprocess.Popen(
                [self._command, *words],
                env=None if environ is None else dict(environ),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            said = process.communicate(timeout=_PM2_SECONDS + stop)
            done = subprocess.CompletedProcess(words, process.returncode, *said)
        except subprocess.TimeoutExpired as error:
            process.kill()  # not what it started: its daemon may be among that, with the miners
            raise UpdateError(
                f"pm2 {' '.join(words)}: no end within {error.timeout:.0f} s: see pm2 ping"
            ) from None
        except OSError as error:
            raise UpdateError(
                f"pm2 cannot be run ({error}), so no miner was found to update: give --pm2 its path"
            ) from None
        if done.returncode != 0:
            raise UpdateError(f"pm2 {' '.join(words)}: {reason(done)}")
        return done.stdout

    def app(self, name: str) -> App:
        found = self._find(name)
        environment = {str(k): str(v) for k, v in found["env"].items()}
        inherited = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "PM2_HOME")}
        return App(
            name=name,
            # Through links, also that which app.config.js makes for a folder with a blank:
            # setup writes resolved paths, which the move to the version's folder replaces.
            version=Path(found["pm_exec_path"]).parent.parent.resolve(),
            home=Path(found["pm_cwd"]).resolve(),
            arguments=[str(word) for word in found["args"]],
            environment=environment | inherited,
        )

    def state(self, name: str) -> tuple[str, int]:
        """Return the state as pm2 names it, and the number of restarts."""
        found = self._find(name)
        return str(found["status"]), int(found["restart_time"])

    def has(self, name: str) -> bool:
        return bool(self._apps(name))

    def _apps(self, name: str) -> list[dict[str, Any]]:
        # A daemon that this starts prints lines of its own, "[PM2] Spawning PM2 daemon".
        said = self("jlist")
        for line in said.splitlines():
            try:
                listed = json.loads(line)
            except ValueError:
                continue
            if isinstance(listed, list):
                return [app["pm2_env"] for app in listed if app["name"] == name]
        raise UpdateError(
            f"pm2 jlist gives no list of apps ({last_line(said) or 'no output'}), so the miner was "
            "not found: pm2 update"
        )

    def _find(self, name: str) -> dict[str, Any]:
        apps = self._apps(name)
        if len(apps) != 1:
            raise UpdateError(
                f"pm2 has {len(apps) or 'no'} app named {name}, so there is nothing to update: "
                "start the miner with pm2 start app.config.js"
            )
        return apps[0]


# --- small things ---------------------------------------------------------------------------------


def answer(*command: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a command that asks nothing, and keep what it prints. Raises OSError."""
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **how
    )


def run(
    what: str, command: Sequence[str], folder: Path, more: Mapping[str, str] | None = None
) -> None:
    """Run a step of the preparation. ``more``: for its environment. Raises UpdateError."""
    try:
        # Training goes first.
        done = answer("nice", "-n", "10", *command, cwd=folder, env={**os.environ, **(more or {})})
        why = "" if done.returncode == 0 else reason(done)
    except OSError as error:
        why = str(error)
    if why:
        raise UpdateError(f"{what} failed ({why})")


def reason(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of what a command printed; of a silent one, how it ended."""
    ended = f"status {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
    return last_line(done.stdout + done.stderr) or f"{ended}, no output"


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
