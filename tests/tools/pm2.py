"""Run a separate pm2 daemon for a test. ``make pm2`` installs pm2; without it tests are skipped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.tools.waiting import wait_for

ROOT = Path(__file__).parents[2]
PM2 = ROOT / "build" / "node" / "node_modules" / ".bin" / "pm2"
NAME = "distributed_training_miner"  # of the app in app.config.js

#: Code for the miner's program: its ranks train nothing, and it soon stops restarting them.
FAKE_RANKS = """
from distributed_training.miner import launcher
launcher.RESTARTS = 1
main = __import__("functools").partial(main, program="tests.tools.launcher_fake_rank")
"""

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
needs_pm2 = pytest.mark.skipif(not PM2.exists(), reason="pm2 is not installed: make pm2")


class Pm2:
    """The daemon in ``folder``, whose apps get ``environ``. Call it with pm2's arguments."""

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
        """Return an app as pm2 lists it, with ``pid``, ``pm2_env`` and more."""
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
        """Wait for a condition on pm2's output; each check takes half a second of a core."""
        wait_for(condition, what, every=1.5)

    def outlast_a_restart(self) -> None:
        """Wait until pm2 would have restarted the ended miner, if it were going to.

        Another app with the same delay fails now, and this waits until pm2 has restarted it.
        """
        delay = self.app()["pm2_env"]["prev_restart_delay"]
        words = ("--name", "witness", "--interpreter", "none", "--exp-backoff-restart-delay")
        self("start", "/bin/false", *words, str(delay))
        self.wait_for(
            lambda: self.app("witness")["pm2_env"]["restart_time"] >= 1, "the other's restart"
        )
        self("delete", "witness")
