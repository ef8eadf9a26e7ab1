"""Test that all commands give the same verdict on a real miner, whatever trouble it has.

The miner's log, the dashboard, dt-status and the doctor are compared in each state. test_page.py
tests the dashboard in more states, and test_verdict_walks.py compares the verdict with a validator.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from distributed_training.common.processes import command_of
from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet, SubnetFailure
from tests.tools.page import Page, served
from tests.tools.subnet_tools import idle, steps_of, stop_miner
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
WAIT = timedelta(seconds=600)
STORE, REGISTRY = "weed -logtostderr server", "network_command serve"


class Journey:
    """A miner of ``subnet``, and all programs that give a verdict on it."""

    def __init__(self, subnet: LocalSubnet, folder: Path, page: Page, index: int = 0) -> None:
        self.subnet, self.folder, self.page = subnet, folder, page
        self.index, self.miner = index, subnet.miners[index]

    def run(self, *words: str) -> tuple[int, Any]:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            env=self.miner.environment,
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
        flags = ["--json", "--offline"]
        flags += ["--network", str(self.subnet.folder / "network.toml")]
        flags += ["--neuron.run_folder", str(self.folder)]
        _, rows = self.run("distributed_training", "doctor", *flags)
        (row,) = (row for row in rows if row["name"] == "miner")
        assert isinstance(row, dict)
        return row

    @property
    def log(self) -> str:
        return self.miner.log.read_text()

    def lines(self, words: str) -> list[str]:
        return [line.partition(words)[2] for line in self.log.splitlines() if words in line]

    def expect(self, verdict: str, *, bad: bool, says: str = "") -> dict[str, Any]:
        """Wait until dt-status gives this verdict, and the other programs give the same."""
        found = dict[str, Any]()

        def there() -> bool:
            found.update(self.status())
            return found["verdict"] == verdict and says in found["cause"]

        try:
            # The verdict may change while the other programs run.
            same = lambda: there() and self.all_say_the_same(found) and found["bad"] == bad
            self.subnet.wait_until(same, WAIT, verdict)
        except (pytest.fail.Exception, SubnetFailure) as error:
            raise AssertionError(f"{error}: {found}; {self.said}") from None
        return found

    said: tuple[Any, ...] = ()

    def all_say_the_same(self, found: dict[str, Any]) -> bool:
        (shown,) = httpx.get(self.page.url + "history", timeout=60).json()["neurons"]
        row, page = self.doctors_row(), shown["judgement"]
        before = found["verdict"]
        found.update(self.status())
        told = self.lines("Verdict: ")[-1:] if found["state"] == "running" else []
        self.said = page, row, told
        return (
            before == found["verdict"] == page["verdict"]
            and (page["level"] == "bad") == found["bad"] == (row["status"] == "warn")
            and page["remedy"] == found["remedy"] == row["remedy"]
            and row["finding"].startswith(f"{found['verdict']}: ")
            and all(line.startswith(f"{found['verdict']}: ") for line in told)
            and _plain(page["cause"]) == _plain(found["cause"])
            and _plain(found["cause"]) in _plain(row["finding"])
            # The log has a verdict once, but the reason of an outage may change while it lasts.
            and all(found["remedy"] in line for line in told)
        )


def _plain(text: str) -> str:
    """Return ``text`` without its numbers, which grow while one program runs after another."""
    return re.sub(r"\d+", "#", text)


@contextmanager
def stopped(journey: Journey, *servers: str) -> Iterator[None]:
    """Suspend the servers, which keep their ports but do not answer."""
    away = [
        process
        for process in journey.subnet.processes()
        if any(name in command_of(process) for name in servers)
    ]
    assert len(away) == len(servers)
    for process in away:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in away:
            process.send_signal(signal.SIGCONT)


@pytest.mark.timeout(1800)  # there is a close each minute, and each of nine states waits for closes
def test_members_are_told_of_silence_and_refused_uploads(tmp_path: Path) -> None:
    """The second of two members is hostile, since its uploads have the opposite sign."""
    options = SubnetOptions(
        folder=tmp_path / "subnet",
        exchange="store",
        ranks=(1, 1),
        period=60,
        least_miners=1,
        rules={"training.sequence_length": 64, "round.grace": "20s"},
    )
    with steps_of(1.0), LocalSubnet(options=idle(options)) as subnet:
        hostile = subnet.miners[1]
        subnet.kill_miner(1)  # in case it has begun already
        hostile.environment["HOSTILE_FACTOR"] = "-1"
        subnet.restart_miner(1)
        places = [miner.folder for miner in subnet.miners]
        with served(places[0]) as page, served(places[1]) as other:
            journey = Journey(subnet, places[0], page)
            found = journey.expect("counts", bad=False, says="was merged")
            assert not re.search("paid|incentive|earn", found["cause"] + found["remedy"])
            bad = Journey(subnet, places[1], other, 1)
            found = bad.expect("refused", bad=True, says="refused the upload")
            assert "some of the text" in found["remedy"] and "our upload was refused" in bad.log
            assert stop_miner(subnet, 1) == 0
            del hostile.environment["HOSTILE_FACTOR"]
            subnet.restart_miner(1)
            closes_pass_unused(journey, REGISTRY, "the registry has not answered")
            closes_pass_unused(journey, STORE, "the store has not answered")
            with stopped(journey, STORE, REGISTRY):
                found = journey.expect("no connection", bad=True, says="this machine's link")
                assert "this machine's network" in found["remedy"]
            journey.expect("counts", bad=False)


def closes_pass_unused(journey: Journey, server: str, says: str) -> None:
    """Suspend ``server`` during at least one close."""
    with stopped(journey, server):
        found = journey.expect("no connection", bad=True, says=says)
        assert journey.status()["status"] == 1 and "tell the founder" in found["remedy"]
        wait_for(lambda: journey.status()["missed_closes"] > 0, "a missed close", seconds=180)
        assert "passed without an upload" in journey.status()["cause"]
    journey.expect("counts", bad=False)
