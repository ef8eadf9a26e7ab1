"""Stand for a rank that trains nothing. FAKE_MODE says what goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from distributed_training.common.processes import without_secrets, write_stacks_on_signal
from distributed_training.config import Config
from distributed_training.miner.run_folder import (
    RANK_STORE,
    Heartbeat,
    rank_environment,
    write_exit_status,
    write_pid_file,
)

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
CLOSING = 4.0  # seconds; longer than LINGER in the tests
# The import waits until a test removes this file.
IMPORTING = Path(os.environ.get("FAKE_IMPORTING", "/none"))

if IMPORTING.exists():
    IMPORTING.with_name(f"{IMPORTING.name}-{os.environ['RANK']}").touch()
    while IMPORTING.exists():
        time.sleep(0.05)


def run_rank(config: Config) -> int:
    mode, folder = os.environ["FAKE_MODE"], config.run_folder
    me = rank_environment()
    stop: list[int] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    write_stacks_on_signal()
    if mode == "stray" and me.rank == 0:  # like p2pd, it does not know us and outlives us
        subprocess.Popen(SLEEP, process_group=0, env=without_secrets())
    write_pid_file(folder, me.rank)
    if mode.startswith("status-"):
        if me.rank == 0:
            write_exit_status(folder, int(mode.removeprefix("status-")), "as told")
            return 1
        return 0
    if mode == "slow-close":  # the ranks stop on their own, and rank 0 takes longer to close
        if me.rank == 0:
            time.sleep(CLOSING)
            write_exit_status(folder, 3, "as told")
            return 3
        return 0
    ready = folder / f"ready-{me.rank}"
    secret = config.values["r2.write_secret_access_key"]
    ready.write_text(secret.get_secret_value() if secret else "")
    beat = Heartbeat(folder, me.rank)
    start = os.stat(os.environ[RANK_STORE]).st_ino  # the file through which these ranks meet
    until = folder / f"stop-{start}"
    while True:
        beat()
        if me.rank == 0 and stop and mode != "stuck":
            until.touch()
        if until.exists():
            if me.rank == 0:
                while mode == "slow-save" and not (folder / "save").exists():
                    time.sleep(0.05)
                (folder / "saved").touch()
                write_exit_status(folder, 0, "stopped")
            elif mode == "linger":
                time.sleep(600)
            return 0
        time.sleep(0.05)
