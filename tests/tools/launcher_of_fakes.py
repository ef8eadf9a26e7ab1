"""The miner's launcher over ranks that train nothing (``launcher_fake_rank.py``), warm.

It is forked (``forked.py``), and nothing of the server that it is forked from serves it.
"""

import os
import sys
import time
import types
from datetime import timedelta
from multiprocessing import forkserver, process, resource_tracker
from pathlib import Path
from typing import Any

from distributed_training.miner import launcher, rank_group, run_folder
from distributed_training.miner.__main__ import main

_passed, _look = 0.0, run_folder.Watchdog.hangs


def _hangs(dog: run_folder.Watchdog) -> bool:
    """Between two looks of the watchdog an hour passes, when a test says so (pass_an_hour)."""
    global _passed
    _look(dog)
    if (hour := Path(os.environ["FAKE_HOUR"])).exists():
        hour.unlink()
        _passed += 3600
    return _look(dog)


def _forget_the_server() -> None:
    """Forget whose fork this is, so that ranks are forked from a server of our own."""
    server: Any = forkserver._forkserver
    server.__init__()
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    config: Any = vars(process.current_process())["_config"]
    config.pop("tempdir", None)
    del vars(sys.modules["__main__"])["__file__"]  # or each rank imports this file


def _begin() -> int:
    _forget_the_server()
    clock: Any = types.SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + _passed)
    run_folder.time, run_folder.Watchdog.hangs = clock, _hangs
    launcher.LINGER = timedelta(seconds=2)
    launcher.RESTARTS = int(os.environ["FAKE_RESTARTS"])
    preload = "slow_import" if os.environ["FAKE_MODE"] == "slow" else "launcher_fake_rank"
    rank_group.PRELOAD = (f"tests.tools.{preload}",)
    return main(program="tests.tools.launcher_fake_rank")


if __name__ == "__main__":
    sys.exit(_begin())
