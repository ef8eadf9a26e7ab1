#!/usr/bin/env python
"""Brings the miner that runs under pm2 to another version. Started by ``scripts/update.sh``.

    scripts/update.sh v1.4.0
    scripts/update.sh v1.4.0 --no-tests --first-step 1h

The new version is set up in ``versions/TAG`` beside the old one, with an environment of its own,
while the old one trains. Its tests and its doctor must pass there. Then, when no round is near,
pm2's app is stopped as ``pm2 stop`` does it and started from the new folder, with the same
settings, run folder and environment. If the new version does not come to its first inner step, the
old one is started again. pm2 is only ever asked by the app's name. Exit status: 0 the new version
trains, 1 the old one runs on (or again) and one line says why, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distributed_training.config import ConfigError, exit_with, load_config
from distributed_training.config.arguments import Parser, argument
from distributed_training.config.values import Duration
from distributed_training.telemetry import read_events

APP = "distributed_training_miner"
_ROUND_NEAR = timedelta(minutes=3)  # a round due so soon is waited for
_SPARE_BYTES = 2_000_000_000  # beyond the size of the environment that is there
_POLL = 1.0  # seconds
#: What stands in for these commands where they cannot be run, as in tests: DT_UPDATE_SETUP, _TESTS.
_SETUP = "scripts/setup.sh"
_TESTS = '.venv/bin/python -m pytest -q -x -n 2 -m "not slow and not long" tests/unit'


class UpdateError(RuntimeError):
    """Why there is no update. One line; nothing has changed, or all is as before."""


@dataclass(frozen=True)
class App:
    """pm2's app as it runs: ``version`` is the folder of its program, ``home`` the one it runs in,
    with .env, settings and run folder."""

    name: str
    version: Path
    home: Path
    arguments: list[str]
    environment: dict[str, str]

    @property
    def events(self) -> Path:
        environment = self.environment
        dotenv = self.home / ".env"
        config = load_config(
            "miner", self.arguments, environ=environment, dotenv=dotenv, check=False
        )
        return self.home / config.run_folder / "events.jsonl"


def build_parser() -> Parser:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tag", type=argument(str), help="the version: a tag of the repository")
    parser.add_argument(
        "--first-step",
        type=argument(Duration),
        default=timedelta(minutes=30),
        help="how long the new version may take to its first inner step (default 30m)",
    )
    parser.add_argument(
        "--round-wait",
        type=argument(Duration),
        default=timedelta(hours=2),
        help="how long to wait for a moment without a round (default 2h)",
    )
    parser.add_argument("--no-tests", action="store_true", help="leave the unit tests out")
    parser.add_argument("--pm2", type=argument(str), default="pm2", help="the command")
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
    """Raises UpdateError."""
    pm2 = Pm2(options.pm2)
    old = pm2.app(APP)
    unchanged = f"{old.version.name} runs on"
    tell(f"{old.name} runs from {old.version}")
    folder = prepare(old, options.tag, unchanged)
    if not options.no_tests:
        tests = os.environ.get("DT_UPDATE_TESTS", _TESTS)
        run("its tests", shlex.split(tests), folder, unchanged)
    examine(old, folder, unchanged)
    await_no_round(old.events, options.round_wait.total_seconds(), unchanged)
    switch(pm2, old, folder, options.first_step.total_seconds())
    tell(f"{old.name} runs {options.tag} from {folder}; the one before lies in {old.version}")


def tell(line: str) -> None:
    print(line, flush=True)


# --- the new version, beside the old one ----------------------------------------------------------


def prepare(old: App, tag: str, unchanged: str) -> Path:
    """Fetch the tag, and set its version up in a folder of its own."""
    git = ["git", "-C", str(old.version)]
    fetched = subprocess.run([*git, "fetch", "--tags", "--quiet"], capture_output=True, text=True)
    commit = subprocess.run(
        [*git, "rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}"],
        capture_output=True,
        text=True,
    )
    if commit.returncode != 0:
        why = "it does not exist"
        if fetched.returncode != 0:
            why = f"it could not be fetched ({last_line(fetched.stderr)})"
        raise UpdateError(f"no version {tag}: {why}; {unchanged}")
    needed = size_of(old.version / ".venv") + _SPARE_BYTES
    folder = old.home / "versions" / tag
    if not folder.exists():
        try:
            folder.parent.mkdir(exist_ok=True)
            free = shutil.disk_usage(folder.parent).free
        except OSError as error:
            raise UpdateError(f"the new version has no room: {error}; {unchanged}") from None
        if free < needed:
            raise UpdateError(
                f"{free / 1e9:.1f} GB are free in {folder.parent} and {needed / 1e9:.1f} GB are "
                f"needed for the new environment; {unchanged}"
            )
        add = [*git, "worktree", "add", "--quiet", "--force", "--detach", str(folder)]
        run("git", [*add, commit.stdout.strip()], old.home, unchanged)
    tell(f"setting up {tag} in {folder}")
    try:
        setup = os.environ.get("DT_UPDATE_SETUP", _SETUP)
        run("its setup", shlex.split(setup), folder, unchanged)
    except UpdateError:
        subprocess.run([*git, "worktree", "remove", "--force", str(folder)], capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def examine(old: App, folder: Path, unchanged: str) -> None:
    """The new version's doctor, with the flags that it will be started with."""
    tell("asking its doctor")
    done = subprocess.run(
        [
            str(folder / ".venv" / "bin" / "python"),
            str(folder / "scripts" / "diagnose.py"),
            *("--json", "--diagnostics.measure", "0"),
            *arguments_of(folder, old),
        ],
        cwd=old.home,
        env=old.environment,
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return
    try:
        failures = [check for check in json.loads(done.stdout) if check["status"] == "fail"]
        why = "; ".join(f"{check['name']}: {check['finding']}" for check in failures)
    except (ValueError, TypeError, KeyError):
        why = last_line(done.stderr) or f"status {done.returncode}"
    raise UpdateError(f"its doctor fails ({why}); {unchanged}")


def arguments_of(folder: Path, old: App) -> list[str]:
    """What the app.config.js in ``folder`` starts the miner with."""
    code = "console.log(JSON.stringify(require(process.argv[1]).apps[0].args))"
    done = subprocess.run(
        ["node", "-e", code, str(folder / "app.config.js")],
        env=old.environment | {"DT_HOME": str(old.home)},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise UpdateError(f"its app.config.js is in error: {last_line(done.stderr)}")
    return [str(word) for word in json.loads(done.stdout)]


# --- the switch -----------------------------------------------------------------------------------


def await_no_round(events: Path, patience: float, unchanged: str) -> None:
    """Until the miner trains and no round is due soon."""
    deadline, told = time.monotonic() + patience, False
    while (why := round_near(events)) and time.monotonic() < deadline:
        if not told:
            tell(f"waiting: {why}")
            told = True
        time.sleep(_POLL)
    if why:
        raise UpdateError(f"{why}, still after {patience:.0f} s (--round-wait); {unchanged}")


def round_near(events: Path) -> str:
    """Why this is no moment to stop; empty if it is one."""
    mode = ""
    for event in read_events(events):
        if event["kind"] in ("state", "start"):
            mode = str(event.get("after") or "training")
    if mode not in ("", "training"):
        return f"the miner is {mode}"
    due = metric(events.with_name("metrics.prom"), "dt_next_round_timestamp_seconds")
    if due is not None and 0 < due - time.time() < _ROUND_NEAR.total_seconds():
        return f"a round is due in {due - time.time():.0f} s"
    return ""


def metric(path: Path, name: str) -> float | None:
    try:
        lines = path.read_text().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))
    except (OSError, ValueError, StopIteration):
        return None


def switch(pm2: Pm2, old: App, folder: Path, patience: float) -> None:
    """Stop the old version, start the new one; the old one again if that does not train."""
    tell("switching")
    for number in (signal.SIGINT, signal.SIGHUP):  # a closed terminal must not leave no version
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
    except UpdateError as error:
        return str(error)


def _try_version(pm2: Pm2, old: App, folder: Path, patience: float) -> str:
    events, began = old.events, time.time()
    if pm2.has(old.name):
        pm2("delete", old.name)
        began = time.time()
    environment = old.environment | {"DT_HOME": str(old.home)}
    pm2("start", str(folder / "app.config.js"), "--only", old.name, environ=environment)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if any(event["time"] > began for event in read_events(events, "step")):
            pm2("save")  # what a reboot brings back
            return ""
        status, restarts = pm2.state(old.name)
        if status in ("stopped", "errored") or restarts > 2:
            return f"pm2 shows it as {status} after {restarts} restarts"
        time.sleep(_POLL)
    return f"no inner step in {patience:.0f} s"


class Pm2:
    """pm2, asked by an app's name."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __call__(self, *words: str, environ: Mapping[str, str] | None = None) -> str:
        try:
            done = subprocess.run(
                [self._command, *words],
                env=None if environ is None else dict(environ),
                capture_output=True,
                text=True,
            )
        except OSError as error:
            raise UpdateError(
                f"pm2 cannot be run ({error}), so no miner was found to update: give --pm2 its path"
            ) from None
        if done.returncode != 0:
            raise UpdateError(f"pm2 {' '.join(words)}: {last_line(done.stdout + done.stderr)}")
        return done.stdout

    def app(self, name: str) -> App:
        found = self._find(name)
        environment = {str(k): str(v) for k, v in found["env"].items()}
        inherited = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "PM2_HOME")}
        return App(
            name=name,
            version=Path(found["pm_exec_path"]).parent.parent,
            home=Path(found["pm_cwd"]),
            arguments=[str(word) for word in found["args"]],
            environment=environment | inherited,
        )

    def state(self, name: str) -> tuple[str, int]:
        """As pm2 names it, and restarts."""
        found = self._find(name)
        return str(found["status"]), int(found["restart_time"])

    def has(self, name: str) -> bool:
        return bool(self._apps(name))

    def _apps(self, name: str) -> list[dict[str, Any]]:
        line = next((x for x in self("jlist").splitlines() if x.startswith("[")), "[]")
        return [app["pm2_env"] for app in json.loads(line) if app["name"] == name]

    def _find(self, name: str) -> dict[str, Any]:
        apps = self._apps(name)
        if len(apps) != 1:
            raise UpdateError(
                f"pm2 has {len(apps) or 'no'} app named {name}, so there is nothing to update: "
                "start the miner with pm2 start app.config.js"
            )
        return apps[0]


# --- small things ---------------------------------------------------------------------------------


def run(what: str, command: Sequence[str], folder: Path, unchanged: str) -> None:
    try:
        done = subprocess.run(
            ["nice", "-n", "10", *command],  # training goes first
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        why = "" if done.returncode == 0 else last_line(done.stdout + done.stderr)
        failed = done.returncode != 0
    except OSError as error:
        failed, why = True, str(error)
    if failed:
        raise UpdateError(f"{what} failed ({why}); {unchanged}")


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def size_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.resolve().rglob("*"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
