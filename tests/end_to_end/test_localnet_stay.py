"""`make run ARGS="--stay"`: a miner joins by the printed command, and takes an outer step.

Doctor and score take the settings of its folder, as an operator's do. Other files have the rest of
an operator's days:

- restart, stop, kill, reboot under pm2: test_pm2.py (promises), test_kills.py
- an update: test_pm2.py
- the page in each state: test_page.py
- the doctor's rows, a lost uid: test_running_miner.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from distributed_training.localnet.services import FOREIGN_PREFIXES
from distributed_training.telemetry import read_events
from tests.tools.waiting import wait_for

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_a_miner_joins_by_the_printed_command_and_ctrl_c_ends_it_well(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN_PREFIXES)}
    environment["HF_HUB_OFFLINE"] = "1"
    subnet = subprocess.Popen(
        [
            *(sys.executable, "scripts/localnet.py", "--stay", "--miners=1", "--ranks=1"),
            *("--outer-steps=1", "--period=120"),  # a busy machine is slow
            *("--folder", str(tmp_path / "subnet")),
        ],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    printed: list[str] = []
    assert subnet.stdout is not None
    reader = threading.Thread(target=lambda: printed.extend(subnet.stdout or ()), daemon=True)
    reader.start()
    guest = None
    try:
        wait_for(lambda: any(" && " in line for line in printed), "the command", seconds=120)
        command = next(line[line.index("cd ") :] for line in printed if " && " in line)
        with (tmp_path / "guest.log").open("wb") as log:
            guest = subprocess.Popen(
                ["bash", "-c", command], env=environment, stdout=log, start_new_session=True
            )
        events = tmp_path / "subnet" / "guest" / "run" / "events.jsonl"

        def averaged() -> bool:
            assert guest.poll() is None, (tmp_path / "guest.log").read_text()[-2000:]
            found = read_events(events) if events.exists() else ()
            return any(e["ok"] for e in found if e["kind"] == "round")

        wait_for(averaged, "its round", seconds=300, every=0.5)
        for words in (
            ("-m", "distributed_training", "doctor"),
            (str(ROOT / "scripts" / "score.py"),),
        ):  # while the miner runs, with the settings of its folder
            done = subprocess.run(
                [sys.executable, *words],
                cwd=events.parents[1],
                env={**environment, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=240,
            )
            assert done.returncode == 0, done.stdout + done.stderr
        wait_for(lambda: any("until Ctrl-C" in line for line in printed), "the step", seconds=120)
        subnet.send_signal(signal.SIGINT)
        assert subnet.wait(120) == 130, "".join(printed[-20:])
        reader.join(10)
        assert not [line for line in printed if "PROBLEM" in line], "it was asked to end"
        assert (tmp_path / "subnet" / "sample.txt").exists(), "it had done what was wanted"
        assert not (tmp_path / "subnet" / "s3").exists()
    finally:
        for process in (subnet, guest):
            if process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM) if process is guest else process.kill()
                process.wait(60)
