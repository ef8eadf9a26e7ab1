"""A network that somebody founds and others join, by the commands that the programs print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distributed_training.common.ports import free_ports
from tests.tools.founded import founded, outer_steps
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]
LONGEST = 900.0  # seconds for an outer step, on a busy machine


def test_founded_joined_and_trained(tmp_path: Path) -> None:
    port, dht, *ports = free_ports(5)
    with founded(tmp_path) as network:
        local = ("--preset", "local")
        network.found(
            *("--dht-port", str(dht)),
            host="127.0.0.1",
            url=f"http://127.0.0.1:{port}",
            port=port,
            flags=local,
        )
        network.refuse("stranger")

        def join(who: str) -> Path:
            network.join(who, *local, "--dht.port", str(ports.pop()))
            return network.run_folder(who)

        def alive() -> bool:
            assert all(p.status is None for p in network.running)
            return True

        folders = [join("first"), join("second")]
        wait_for(
            lambda: alive() and all(1 in outer_steps(folder) for folder in folders),
            "outer step 1 of both",
            LONGEST,
            every=0.5,
        )
        join("late")
        network.running[-1].wait_for("| Inner Step: 1 |")

        words = [str(tmp_path / "model"), "--network", str(network.file), *local]
        out = network.call("dt-export", *words, "--sample", "def ")
        assert re.search(r"exported the model of outer step \d+ ", out) and "\ndef " in out
        assert network.stop() == [0, 0, 0, 0, 0]
