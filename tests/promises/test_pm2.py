"""Test app.config.js with a real pm2: a clean stop, and restarts after failures.

tests/unit/test_ops.py tests its settings, and tests/unit/test_update.py tests updates.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from distributed_training.common.processes import kill_tree
from distributed_training.miner.run_folder import launcher_of
from tests.tools.pm2 import (
    FAKE_RANKS,
    NAME,
    ROOT,
    Pm2,
    needs_pm2,
)
from tests.tools.r2_keys import KEYS
from tests.tools.settings import LOCAL
from tests.tools.tree import Tree
from tests.tools.waiting import wait_for


class FakeMiner(Pm2):
    """Run app.config.js with ranks that train nothing."""

    def __init__(self, home: Path) -> None:
        self.home = home
        hotkey = home / "wallets" / "default" / "hotkeys" / "default"
        hotkey.parent.mkdir(parents=True, exist_ok=True)
        hotkey.touch()  # the launcher requires a hotkey, which the fake rank does not read
        environ = {
            **KEYS,
            "BT_WALLET_PATH": str(hotkey.parents[2]),
            "DT_NETWORK": "local",
            "DT_FLAGS": f"{' '.join(LOCAL)} --neuron.run_folder {home / 'run'} --nproc_per_node 1 "
            "--dht.port 0",
            "OMP_NUM_THREADS": "1",
        }
        self.tree = Tree()
        super().__init__(home / "pm2", environ | self.tree.environment)

    def write_app(self) -> Path:
        """Write an app.config.js that runs the launcher with a fake rank."""
        script = self.home / "miner.py"
        neuron = (ROOT / "neurons" / "miner.py").read_text()
        here = neuron.replace("Path(__file__).resolve().parent.parent", f"Path({str(ROOT)!r})")
        script.write_text(here.replace("\nif __name__", FAKE_RANKS + "\nif __name__"))
        path = self.home / "test.config.js"
        path.write_text(
            f"const config = require({str(ROOT / 'app.config.js')!r});\n"
            f"config.apps[0].script = {str(script)!r};\n"
            "module.exports = config;\n"
        )
        return path

    @property
    def log(self) -> str:
        return "".join(p.read_text() for p in sorted((self.folder / "logs").glob("*.log")))

    @property
    def launcher(self) -> int:
        found = launcher_of(self.home / "run")
        assert found is not None, self.log
        return found.pid

    @property
    def processes(self) -> list[psutil.Process]:
        return [p for p in self.tree.processes() if "God Daemon" not in " ".join(_words(p))]


@pytest.fixture
def pm2(tmp_path: Path) -> Iterator[FakeMiner]:
    one = FakeMiner(tmp_path)
    yield one
    one("kill")


@needs_pm2
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_start_and_stop(pm2: FakeMiner) -> None:
    pm2("start", str(pm2.write_app()), FAKE_MODE="stray")
    wait_for((pm2.home / "run" / "ready-0").exists, "the rank")
    assert pm2.state == ("online", 0)
    pm2("stop", NAME)
    assert pm2.state == ("stopped", 0)
    assert (pm2.home / "run" / "saved").exists()
    assert not pm2.processes
    assert "SIGINT received: stopping" in pm2.log and "Traceback" not in pm2.log


@needs_pm2
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_pm2_restarts_by_exit_status(pm2: FakeMiner) -> None:
    path = pm2.write_app()
    pm2("start", str(path), FAKE_MODE="status-3")
    pm2.wait_for(lambda: pm2.state[0] != "online", "the end after deregistration")
    pm2.outlast_a_restart()
    status, restarts = pm2.state
    assert status != "online" and restarts == 0
    pm2("delete", NAME)
    pm2("start", str(path), FAKE_MODE="status-1")
    pm2.wait_for(lambda: pm2.state[1] >= 1, "the restart after a fault")
    pm2("stop", NAME)


@needs_pm2
@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_reboot_brings_the_miner_back(pm2: FakeMiner) -> None:
    """Like a power cut, this ends pm2's daemon and all processes of the miner at once."""
    pm2("start", str(pm2.write_app()), FAKE_MODE="stray")
    ready = pm2.home / "run" / "ready-0"
    wait_for(ready.exists, "the rank")
    pm2("save")
    first = pm2.launcher
    launcher = json.loads((pm2.home / "run" / "instance.json").read_text())["pid"]
    os.kill(int((pm2.folder / "pm2.pid").read_text()), 9)
    kill_tree(launcher)
    pm2.tree.end()
    ready.unlink()
    pm2("resurrect")
    wait_for(ready.exists, "the rank after the reboot")
    assert pm2.state == ("online", 0) and pm2.launcher != first
    pm2("stop", NAME)
    assert (pm2.home / "run" / "saved").exists() and not pm2.processes


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []
