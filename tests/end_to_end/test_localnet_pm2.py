"""A real miner of a local subnet under a real pm2, and what happens to it in a life.

An update, a restart in mid-upload, a stop in mid-round, a killed launcher, a reboot. After each it
takes the next round with everybody. At last it is deregistered for longer than it waits, and pm2
leaves it down. The same with ranks that train nothing is in test_launcher_pm2.py.
"""

from __future__ import annotations

import os
import threading
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bench import kills
from distributed_training.chain.registry import RegistryChain
from distributed_training.common.files import read_json_object
from distributed_training.common.processes import command_of, kill_tree
from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet
from distributed_training.miner.run_folder import launcher_pid, mark_of
from distributed_training.protocol.types import ExitStatus, Revision
from distributed_training.telemetry import read_events
from tests.tools.pm2 import NAME, Pm2, checkout, needs_pm2, start_update
from tests.tools.subnet_tools import stop_miner
from tests.tools.waiting import wait_for

WAIT = timedelta(seconds=120)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), needs_pm2]


class LocalMiner(Pm2):
    """The one miner of ``subnet``."""

    def __init__(self, subnet: LocalSubnet, folder: Path) -> None:
        assert subnet.services is not None
        (self.miner,) = subnet.miners
        environ = {
            **subnet.services.environment(self.miner.plan),
            "DT_PRESET": "local",
            "DT_FLAGS": " ".join(subnet.services.flags(self.miner.plan)),
        }
        super().__init__(folder, environ)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [e for e in read_events(self.miner.plan.events) if e["kind"] in kinds]


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_life_under_pm2(tmp_path: Path) -> None:
    options = SubnetOptions(
        folder=tmp_path / "subnet",
        ranks=(1,),
        blocks_per_allreduce=40,
        miner_flags=("--neuron.deregistered_wait", "10s"),
        # A stop comes in time to be in mid-round.
        rules={"round.min_matchmaking_time": "10s"},
    )
    with LocalSubnet(options=options) as subnet:
        (miner,) = subnet.miners
        subnet.wait_until(lambda: bool(miner.state.losses), WAIT, "the first step")
        assert stop_miner(subnet, 0) == 0
        pm2 = LocalMiner(subnet, tmp_path / "pm2")
        try:
            checkout(tmp_path / "miner", {})
            pm2("start", str(tmp_path / "miner" / "app.config.js"))
            kills.clean_round(subnet)
            update(subnet, pm2, tmp_path / "miner")
            restart_in_mid_upload(subnet, pm2)
            stop_in_mid_round(subnet, pm2)
            kill_the_launcher(subnet, pm2)
            reboot(subnet, pm2)
            lose_the_registration(subnet, pm2)
        finally:
            pm2("kill")
    assert subnet.problems == []


def update(subnet: LocalSubnet, pm2: LocalMiner, home: Path) -> None:
    """The new version goes on at the very next step."""
    starting = start_update(pm2, home, "v2", "--no-doctor")
    out, error = starting.communicate(timeout=300)
    assert starting.returncode == 0, out + error
    events = pm2.events("step", "stop")
    stop = max(i for i, event in enumerate(events) if event["kind"] == "stop")
    before, after = events[stop - 1], events[stop + 1]
    assert after["outer_step"] == before["outer_step"]
    assert after["inner_step"] == before["inner_step"] + 1
    kills.clean_round(subnet)


def restart_in_mid_upload(subnet: LocalSubnet, pm2: LocalMiner) -> None:
    """The store does not answer while it uploads; it does again for the start that follows."""
    (store,) = (p for p in subnet.mark.processes() if "object_store" in command_of(p))
    store.suspend()
    try:
        seen = len(pm2.events("preview"))
        wait_for(lambda: len(pm2.events("preview")) > seen, "an upload", 90)
        begun = pm2.events("preview")[-1]["revision"]
        assert pm2.events("preview", "publication")[-1]["kind"] == "preview"
        stops, starts = len(pm2.events("stop")), len(pm2.events("start"))
        restart = threading.Thread(target=pm2, args=("restart", NAME))
        restart.start()
        wait_for(lambda: len(pm2.events("stop")) > stops, "the stop", 60)
    finally:
        store.resume()
    restart.join()
    assert pm2.events("stop")[-1]["exit_status"] == 0
    before = pm2.events("step")[-1]
    subnet.wait_until(lambda: len(pm2.events("start")) > starts, WAIT, "the start")
    start = pm2.events("start")[-1]
    assert start["resumed"] and start["inner_step"] == before["inner_step"]

    def published() -> bool:
        """That revision from its journal, or a newer one that superseded it."""
        done = [e["revision"] for e in pm2.events("publication") if e["ok"]]
        return any(Revision.parse(tag) >= Revision.parse(begun) for tag in done)

    subnet.wait_until(published, WAIT, "the publication")
    kills.clean_round(subnet)


def stop_in_mid_round(subnet: LocalSubnet, pm2: LocalMiner) -> None:
    (miner,) = subnet.miners
    subnet.wait_until(lambda: miner.state.phase == "averaging", WAIT, "a round")
    pm2("stop", NAME)
    assert pm2.state[0] == "stopped"
    *_, mode, stop = pm2.events("state", "round", "stop")
    assert (mode["kind"], mode["before"]) == ("state", "averaging"), mode
    assert stop["kind"] == "stop" and stop["exit_status"] == 0
    pm2("start", NAME)
    kills.clean_round(subnet)


def kill_the_launcher(subnet: LocalSubnet, pm2: LocalMiner) -> None:
    (miner,) = subnet.miners
    launcher, restarts = launcher_pid(miner.plan.folder), pm2.state[1]
    assert launcher is not None
    os.kill(launcher, 9)
    kills.clean_round(subnet)
    assert pm2.state == ("online", restarts + 1)


def reboot(subnet: LocalSubnet, pm2: LocalMiner) -> None:
    """As a power cut: pm2's daemon and everything of the miner are gone at once."""
    (miner,) = subnet.miners
    pm2("save")
    launcher, mark = launcher_pid(miner.plan.folder), mark_of(miner.plan.folder)
    assert launcher is not None and mark is not None
    os.kill(int((pm2.folder / "pm2.pid").read_text()), 9)
    kill_tree(launcher)
    mark.end(settle=timedelta(0), grace=timedelta(0))
    pm2("resurrect")
    kills.clean_round(subnet)
    assert pm2.state == ("online", 0)
    assert pm2.events("start")[-1]["resumed"]


def lose_the_registration(subnet: LocalSubnet, pm2: LocalMiner) -> None:
    (miner,), services = subnet.miners, subnet.services
    assert services is not None
    with closing(
        RegistryChain(url=services.chain_endpoint, wallet=services.wallet(miner.plan))
    ) as us:
        us.deregister()
    pm2.wait_for(lambda: pm2.state[0] != "online", "the end")
    written = read_json_object(miner.plan.folder / "exit_status.json")
    assert written is not None and written["status"] == ExitStatus.DEREGISTERED
    pm2.outlast_a_restart()
    status, restarts = pm2.state
    assert status != "online" and restarts == 0
