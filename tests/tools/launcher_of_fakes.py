"""Run the miner's launcher with ranks that train nothing (``launcher_fake_rank.py``)."""

import os
import sys
import time
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

from distributed_training.miner import launcher, run_folder
from distributed_training.miner.__main__ import main

_passed, _look = 0.0, run_folder.Watchdog.hangs


def _hangs(dog: run_folder.Watchdog) -> bool:
    """Let an hour pass between two checks of the watchdog if a test asks for it (pass_an_hour)."""
    global _passed
    _look(dog)
    if (hour := Path(os.environ["FAKE_HOUR"])).exists():
        hour.unlink()
        _passed += 3600
    return _look(dog)


if __name__ == "__main__":
    clock: Any = types.SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + _passed)
    run_folder.time, run_folder.Watchdog.hangs = clock, _hangs
    launcher.LINGER = timedelta(seconds=2)
    launcher.RESTARTS = int(os.environ["FAKE_RESTARTS"])
    sys.exit(main(program="tests.tools.launcher_fake_rank"))
