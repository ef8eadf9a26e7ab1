"""The verdict on one real miner through its troubles: all commands agree on it.

The launcher's log, the dashboard, dt-status and the doctor are asked in each state. test_page.py
has the dashboard in more states; test_verdict_walks.py compares the verdict with a validator.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from distributed_training.common.processes import command_of
from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet, SubnetFailure
from tests.tools.page import Page, served
from tests.tools.small_disk import small_disk
from tests.tools.subnet_tools import idle, stop_miner
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
WAIT = timedelta(seconds=180)
ROOM = 1600  # megabytes of the run folder's disk: more than what has to stay free


class Journey:
    """The miner of ``subnet``, and all that give a verdict on it."""

    def __init__(self, subnet: LocalSubnet, folder: Path, page: Page) -> None:
        self.subnet, self.folder, self.page = subnet, folder, page
        (self.miner,) = subnet.miners

    def run(self, *words: str) -> tuple[int, Any]:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            env=self.miner.child.environment,
            cwd=self.folder.parent,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, json.loads(done.stdout)

    def status(self) -> dict[str, Any]:
        code, found = self.run("distributed_training.status_command", str(self.folder), "--json")
        assert isinstance(found, dict) and code == found["status"], found
        return found

    def doctors_row(self) -> dict[str, str]:
        flags = ["--json", "--offline", "--diagnostics.measure", "0", "--preset", "local"]
        flags += ["--network", str(self.subnet.folder / "network.toml")]
        flags += ["--neuron.run_folder", str(self.folder)]
        _, rows = self.run("distributed_training", "doctor", *flags)
        (row,) = (row for row in rows if row["name"] == "miner")
        assert isinstance(row, dict)
        return row

    def lines(self, words: str) -> list[str]:
        log = self.miner.child.log.read_text()
        return [line.partition(words)[2] for line in log.splitlines() if words in line]

    def expect(self, verdict: str = "", *, bad: bool, says: str = "") -> dict[str, Any]:
        """Wait for dt-status to say this, while the miner trains if no verdict is named.

        Whoever is asked then says the same.
        """
        found = dict[str, Any]()

        def there() -> bool:
            found.update(self.status())
            if not verdict:
                return (
                    found["state"] == "running" and found["mode"] == "training" and not found["bad"]
                )
            return found["verdict"] == verdict and says in found["cause"]

        try:
            self.subnet.wait_until(there, WAIT, verdict or "that it trains")
            # It may move to the next verdict while the others are asked.
            wait_for(lambda: self.all_say_the_same(found), "one verdict", seconds=90)
        except (pytest.fail.Exception, SubnetFailure) as error:
            raise AssertionError(f"{error}: {found}; {self.said}") from None
        assert found["bad"] == bad, found
        return found

    said: tuple[Any, ...] = ()

    def all_say_the_same(self, found: dict[str, Any]) -> bool:
        (shown,) = httpx.get(self.page.url + "history", timeout=60).json()["neurons"]
        row, page = self.doctors_row(), shown["judgement"]
        before = found["verdict"]
        found.update(self.status())
        told = self.lines("Income: ")[-1:] if found["state"] == "running" else []
        self.said = page, row, told
        return (
            before == found["verdict"] == page["verdict"]
            and page["bad"] == found["bad"] == (row["status"] == "warn")
            and page["remedy"] == found["remedy"] == row["remedy"]
            and row["finding"].startswith(f"{found['verdict']}: ")
            and all(line.startswith(f"{found['verdict']}: ") for line in told)
        )

    def trains(self) -> None:
        """Wait until the miner runs, and all commands have forgotten its last end."""
        self.expect(bad=False)


def test_log_dashboard_status_and_doctor_never_contradict_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    options = SubnetOptions(
        folder=tmp_path / "subnet",
        ranks=(1,),
        blocks_per_allreduce=3000,  # no round comes between
        miner_flags=("--neuron.run_folder", str(folder)),
    )
    with (
        small_disk(folder, megabytes=ROOM) as small,
        LocalSubnet(options=idle(options)) as subnet,
        served(folder) as page,
    ):
        journey = Journey(subnet, folder, page)
        journey.trains()
        killed(journey)
        stopped(journey)
        refused(journey)
        if small:
            disk_full(journey)
        links_down(journey)
        assert stop_miner(subnet, 0) == 0


def killed(journey: Journey) -> None:
    journey.subnet.kill_miner(0)
    journey.expect("stopped", bad=True, says="SIGKILL")
    journey.subnet.restart_miner(0)
    journey.trains()
    assert journey.status()["last_crash"] is not None


def stopped(journey: Journey) -> None:
    assert stop_miner(journey.subnet, 0) == 0
    journey.expect("stopped", bad=False, says="signal SIGINT")


def refused(journey: Journey) -> None:
    """The store does not take its write key."""
    child = journey.miner.child
    (name,) = (name for name in child.environment if name.endswith("WRITE_SECRET_ACCESS_KEY"))
    right = child.environment[name]
    child.environment[name] = "0" * len(right)
    journey.subnet.restart_miner(0)
    found = journey.expect("cannot start", bad=True, says="key")
    (line, *_) = journey.lines("Cannot train: ")
    assert line[:40] in found["cause"], (line, found)
    assert stop_miner(journey.subnet, 0) == 0
    journey.expect("stopped", bad=False, says="signal SIGINT")
    child.environment[name] = right
    journey.subnet.restart_miner(0)
    journey.trains()


def disk_full(journey: Journey) -> None:
    fill, free = journey.folder / "fill", shutil.disk_usage(journey.folder).free
    with fill.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - 300_000_000)
    journey.expect("disk full", bad=True)
    # To the last byte, so that it writes no facts.
    with contextlib.suppress(OSError), fill.open("ab", buffering=0) as file:
        while file.write(bytes(1 << 20)):
            pass
    journey.expect("disk full", bad=True)
    fill.unlink()
    journey.trains()


def links_down(journey: Journey) -> None:
    servers = ("store.server", "distributed_training.registry")
    away = [
        process
        for process in journey.subnet.mark.processes()
        if any(name in command_of(process) for name in servers)
    ]
    assert len(away) == 2
    for process in away:
        process.send_signal(signal.SIGSTOP)
    try:
        found = journey.expect("offline", bad=True, says="not answered")
        assert found["store_silent_since"] is not None
    finally:
        for process in away:
            process.send_signal(signal.SIGCONT)
    journey.trains()
