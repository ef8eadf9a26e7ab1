"""A real miner of a local subnet under a real pm2: a restart in mid-upload, a stop in mid-round.

After each it takes the next round with everybody. The rest of a life (an update, a reboot, a lost
registration) is in tests/promises/test_pm2.py, with ranks that train nothing.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bench import kills
from distributed_training.common.processes import command_of
from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet
from distributed_training.protocol.types import Revision
from distributed_training.telemetry import read_events
from tests.tools.pm2 import NAME, Pm2, checkout, needs_pm2
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
def test_a_restart_in_mid_upload_and_a_stop_in_mid_round(tmp_path: Path) -> None:
    options = SubnetOptions(
        folder=tmp_path / "subnet",
        ranks=(1,),
        blocks_per_allreduce=40,
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
            restart_in_mid_upload(subnet, pm2)
            stop_in_mid_round(subnet, pm2)
        finally:
            pm2("kill")
    assert subnet.problems == []


def restart_in_mid_upload(subnet: LocalSubnet, pm2: LocalMiner) -> None:
    """The store does not answer while it uploads; it does again for the start that follows."""
    (store,) = (p for p in subnet.mark.processes() if "store.server" in command_of(p))
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
        """Return that revision from the miner's journal, or a newer one that superseded it."""
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
