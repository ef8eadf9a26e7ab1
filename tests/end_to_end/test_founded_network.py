"""A network that somebody founds and others join, by the commands that the programs print."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from distributed_training.common.ports import free_ports
from tests.tools.founded import RULES, founded, outer_steps, printed, wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_founded_joined_and_trained(tmp_path: Path) -> None:
    port, dht, *ports = free_ports(8)
    url = f"http://127.0.0.1:{port}"
    with founded(tmp_path) as network:
        network.write_keys("founder")
        words = ["init", "lab", "--name", "lab", "--host", "127.0.0.1", "--dht-port", str(dht)]
        words += ["--registry", url, "--data-source", "stdlib", *RULES]
        words += ["--store", network.keys["R2_ENDPOINT_URL"]]
        out = network.call("dt-network", *words)
        serve, invite, validate, join, mine = printed(out)
        served = network.start(serve, "--port", str(port), home="founder")
        wait_for(served, "READY", 60)
        invitation = re.search(r"^DT_INVITATION=(\S+)$", network.call(invite), re.M)
        assert invitation is not None

        network.make_bucket("lab")
        local = ("--preset", "local")
        network.start(validate, *local, "--axon.port", str(ports[0]), home="founder")

        file = tmp_path / "founder" / "lab" / "network.toml"
        join, mine = (line.replace("network.toml", str(file)) for line in (join, mine))
        network.write_keys("stranger")
        refused = network.call(join, home="stranger", status=1)
        assert refused.startswith("network lab version 1") and "nvit" in refused.splitlines()[-1]
        folders = []
        for index in (0, 1):
            home = f"joiner-{index}"
            network.write_keys(home, DT_INVITATION=invitation[1])
            said = network.call(join, home=home)
            bucket = re.search(r"^bucket (lab-\d{3}):", said, re.M)
            assert bucket is not None and "missing in .env" not in said, said
            network.make_bucket(bucket[1])
            folders.append(tmp_path / home / "run")
            network.start(
                mine, *local, "--neuron.run_folder", str(folders[-1]),
                "--axon.port", str(ports[1 + 2 * index]), "--dht.port", str(ports[2 + 2 * index]),
                home=home,
            )  # fmt: skip

        deadline = time.monotonic() + 480
        while not all(1 in outer_steps(folder) for folder in folders):
            assert time.monotonic() < deadline, network.logs()
            assert all(p.status is None for p in network.running), network.logs()
            time.sleep(1)
        out = network.call(
            "dt-export", str(tmp_path / "model"), "--network", str(file), *local, "--sample", "def "
        )
        assert re.search(r"exported the model of outer step \d+ ", out) and "\ndef " in out
        assert network.stop() == [0, 0, 0, 0]
