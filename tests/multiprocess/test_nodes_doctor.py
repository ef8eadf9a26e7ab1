"""The doctor's command of docs/several-machines.md, on two machines, and what it finds wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.multiprocess.test_nodes import ROOT, Nodes
from tests.tools.namespaces import Machine, machines
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAGE = (ROOT / "docs" / "several-machines.md").read_text()
(COMMAND,) = [line for line in PAGE.splitlines() if line.startswith("python -m ")]
SHOWN = [line for line in PAGE.splitlines() if line.startswith("✓")]


def _doctor(machine: Machine, command: str, *more: str) -> str:
    python, *words = command.split()
    assert python == "python"
    done = subprocess.run(
        [*machine.prefix, sys.executable, *words, *more],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    """The first one's launcher listens, as the guide starts it."""
    with machines(2) as found, closing(Nodes(tmp_path_factory.mktemp("nodes"))) as nodes:
        endpoint = f"{found[0].address}:29400"
        node_0 = nodes("node0", found[0], nnodes="2", rdzv_endpoint=endpoint, nproc_per_node="1")
        node_0.start()
        wait_for(lambda: "Waiting for node 1" in node_0.output, "node 0", seconds=120)
        yield found


def test_the_guides_command_prints_what_the_guide_shows(two: list[Machine]) -> None:
    printed = [line.rstrip() for line in _doctor(two[1], COMMAND).splitlines()]
    assert SHOWN and set(SHOWN) <= set(printed), "\n".join(printed)


def test_a_firewall_between_nodes_and_a_public_address_are_told(two: list[Machine]) -> None:
    quick = "--diagnostics.measure", "0"
    two[0].close_ports_but(29400)
    printed = " ".join(_doctor(two[1], COMMAND, *quick).split())
    two[0].open_ports()
    assert "✗ fail nodes node 0 answers at 10.0.0.1:29400, but not at port" in printed
    assert "let all TCP ports through from 10.0.0.2 in the firewall of node 0" in printed
    public = ["ip", "-n", two[1].name, "addr", "add", "44.0.0.1/24", "dev", "eth0"]
    subprocess.run(public, check=True)
    command = "python -m distributed_training doctor --nnodes 2 --rdzv_endpoint 44.0.0.1:29400"
    printed = " ".join(_doctor(two[1], command, "--offline", *quick).split())
    assert "! warn nodes' firewall 44.0.0.1 is a public address" in printed
    assert "→ let only the nodes reach interface eth0: docs/several-machines.md" in printed
