"""A pm2 daemon of a test's own. ``make pm2`` installs pm2; without it the tests are skipped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.tools.waiting import wait_for

ROOT = Path(__file__).parents[2]
PM2 = ROOT / "build" / "node" / "node_modules" / ".bin" / "pm2"
NAME = "distributed_training_miner"  # of the app in app.config.js

#: In the miner's program: ranks that train nothing; none is started again for long.
FAKE_RANKS = """
from distributed_training.miner import launcher
launcher.RESTARTS = 1
main = __import__("functools").partial(main, program="tests.tools.launcher_fake_rank")
"""

#: Changes of each version of a checkout against v1.
VERSIONS = {
    "v2": {"distributed_training/__init__.py": "\n# another version\n"},
    "v3-doctor": {"scripts/diagnose.py": "\nraise RuntimeError('the doctor is ill')\n"},
    "v4-start": {"neurons/miner.py": "\nraise SystemExit(2)\n"},  # as for a wrong setting
}

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
needs_pm2 = pytest.mark.skipif(not PM2.exists(), reason="pm2 is not installed: make pm2")


def checkout(home: Path, changes: Mapping[str, str]) -> None:
    """Make an operator's checkout of this working tree at v1, with a tag for each of VERSIONS.

    ``changes``: code that all versions have, by file. Nothing is downloaded: the
    environment of each version is this one's, by a link.
    """

    def git(*words: str) -> None:
        known = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "core.hooksPath=")
        subprocess.run(["git", *known, "-C", str(home), *words], check=True, capture_output=True)

    def release(tag: str, changes: Mapping[str, str]) -> None:
        """Insert the changes before what a program does when it is started."""
        for path, more in changes.items():
            head, main, rest = (home / path).read_text().partition('\nif __name__ == "__main__":')
            (home / path).write_text(head + more + main + rest)
        git("add", "--all", "--force")
        git("commit", "--quiet", "--message", tag)
        git("tag", tag)

    for name in ("distributed_training", "neurons", "scripts", "tests/tools"):
        shutil.copytree(ROOT / name, home / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "app.config.js", home)
    git("init", "--quiet")
    git("remote", "add", "origin", "https://nowhere.invalid/miner.git")
    setup = f'#!/bin/sh\nln -sfn {sys.prefix} "$(dirname "$0")/../.venv"\n'
    (home / "scripts" / "setup.sh").write_text(setup)
    release("v1", changes)
    for tag, broken in VERSIONS.items():
        git("checkout", "--quiet", "v1")
        release(tag, broken)
    git("checkout", "--quiet", "v1")
    (home / ".venv").symlink_to(sys.prefix)


def start_update(pm2: Pm2, home: Path, *words: str) -> subprocess.Popen[str]:
    """From another shell: none of the miner's settings and keys are in its environment."""
    plain = {k: os.environ[k] for k in ("PATH", "HOME") if k in os.environ}
    return subprocess.Popen(
        [str(home / "scripts" / "update.sh"), "--pm2", str(PM2), *words],
        env=plain | {"PM2_HOME": str(pm2.folder)},
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Pm2:
    """The daemon of ``folder``, whose apps get ``environ``. Call it with pm2's words."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.folder = folder
        self.environ = {**os.environ, **environ, "PM2_HOME": str(folder)}

    def __call__(self, *words: str, **environ: str) -> str:
        done = subprocess.run(
            [str(PM2), *words],
            env={**self.environ, **environ},
            capture_output=True,
            text=True,
            timeout=90,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def app(self, name: str = NAME) -> dict[str, Any]:
        """As pm2 lists it: ``pid``, ``pm2_env`` and more."""
        lines = self("jlist").splitlines()
        apps = json.loads(next(line for line in lines if line.startswith("[")))
        (one,) = (app for app in apps if app["name"] == name)
        return dict(one)

    @property
    def state(self) -> tuple[str, int]:
        """The miner's status, as pm2 names it, and how often pm2 started it again."""
        env = self.app()["pm2_env"]
        return env["status"], env["restart_time"]

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Of what pm2 says: each look starts Node.js, half a second of a core."""
        wait_for(condition, what, every=1.5)

    def outlast_a_restart(self) -> None:
        """The miner ended: wait until pm2 would have started it again, if it were to.

        Another app fails after it and has the same delay, and pm2 starts that one again.
        """
        delay = self.app()["pm2_env"]["prev_restart_delay"]
        words = ("--name", "witness", "--interpreter", "none", "--exp-backoff-restart-delay")
        self("start", "/bin/false", *words, str(delay))
        self.wait_for(
            lambda: self.app("witness")["pm2_env"]["restart_time"] >= 1, "the other's restart"
        )
        self("delete", "witness")
