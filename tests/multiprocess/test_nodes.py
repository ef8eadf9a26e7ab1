"""Test a miner on two machines with torchrun, on loopback and in network namespaces.

Each node is restarted whenever its torchrun ends, as pm2 does.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from distributed_training.common.ports import free_ports
from distributed_training.telemetry import read_events
from testbed.namespaces import Machine, machines
from tests.multiprocess.test_launcher_tree import COMMON, KEYS
from tests.tools import small_miner
from tests.tools.member_world import STORE_RULES
from tests.tools.network import network_file
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "tools" / "node_program.py"
FLAGS = small_miner.FLAGS
RULES = STORE_RULES | {"tokenizer.name": "bytes"}
AGAIN = 90.0  # seconds from the kill until training continues


def rank_environment(folder: Path, *, steps: int, keys: bool) -> dict[str, str]:
    """Return variables for ranks that stop after ``steps``. ``keys``: with keys, as on node 0."""
    here = f"{ROOT}{os.pathsep}{ROOT}/tests{os.pathsep}{ROOT}/tests/multiprocess"
    return (
        {name: text for name, text in os.environ.items() if not name.startswith("R2_")}
        | (KEYS if keys else {})
        | {"NODE_STEPS": str(steps), "OMP_NUM_THREADS": "1", "PYTHONPATH": here}
        | {"BT_WALLET_PATH": str(folder.with_suffix(".wallets"))}
    )


class Node:
    """A run of ops/torchrun.sh, which is restarted whenever it ends on its own."""

    def __init__(self, folder: Path, number: int, address: str, port: int, prefix: list[str]):
        self.folder, self.number = folder, number
        self.log = folder.with_suffix(".log")
        self.command = [
            *prefix, str(ROOT / "ops" / "torchrun.sh"), "--nnodes", "2", "--node_rank",
            str(number), "--master_addr", address, "--master_port", str(port),
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None
        self._keeper: threading.Thread | None = None
        self._again = False

    def start(self, *, steps: int, ranks: int = 1, again: bool = True, **changes: str) -> None:
        """Start the node. ``steps``: inner steps after which it stops; ``changes``: more flags."""
        network = network_file(self.folder.with_suffix(".network"), RULES)
        flags = FLAGS | {"network": network, "neuron.run_folder": str(self.folder)} | changes
        command = [*self.command, "--nproc_per_node", str(ranks), "--", *COMMON]
        command += [word for name, text in flags.items() for word in (f"--{name}", text)]
        environment = rank_environment(self.folder, steps=steps, keys=self.number == 0)
        environment |= {"DT_PYTHON": sys.executable, "DT_PROGRAM": str(PROGRAM)}
        self._again = again

        def launch() -> None:
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
                )

        def keep() -> None:
            while self.process is not None and self.process.wait() and self._again:
                time.sleep(1)
                launch()

        launch()
        self._keeper = threading.Thread(target=keep)
        self._keeper.start()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def tree(self) -> list[psutil.Process]:
        assert self.process is not None
        root = psutil.Process(self.process.pid)
        return [*root.children(recursive=True), root]

    def stop(self) -> None:
        """Send SIGTERM to torchrun, as pm2 and Slurm do. It is not restarted after that."""
        assert self.process is not None
        self._again = False
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill everything at once, like a machine that loses its power for a moment."""
        for process in self.tree:
            process.kill()

    def wait(self, seconds: float = 300) -> int:
        assert self._keeper is not None and self.process is not None
        self._keeper.join(seconds)
        assert not self._keeper.is_alive(), self.output[-6000:]
        return self.process.returncode

    def close(self) -> None:
        self._again = False
        if self.process is not None and self._keeper is not None:
            while self._keeper.is_alive():
                if self.process.poll() is None:
                    self.kill()
                self._keeper.join(1)

    def losses(self) -> dict[int, float]:
        """Return the loss of each inner step, by its total number; a repeated step counts once."""
        path = self.folder / "events.jsonl"
        found: list[dict[str, Any]] = list(read_events(path, "step")) if path.exists() else []
        return {event["total_inner_steps"]: event["loss"] for event in found}


Pair = list[Node]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Yield two nodes on this machine."""
    (port,) = free_ports(1)
    made = [Node(tmp_path / f"node{i}", i, "127.0.0.1", port, []) for i in range(2)]
    yield made
    for node in made:
        node.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Pair, list[Machine]]]:
    """Yield two nodes, each in its own network namespace."""
    with machines(2) as found:
        address = found[0].address
        made = [
            Node(tmp_path / f"node{i}", i, address, 29500, m.prefix) for i, m in enumerate(found)
        ]
        yield made, found
        for node in made:
            node.close()


def _start(pair: Pair, *, steps: int, past: int, **more: Any) -> None:
    for node in pair:
        node.start(steps=steps, **more)
    _trained(pair, past, seconds=240)


def _trained(pair: Pair, step: int, seconds: float) -> None:
    wait_for(lambda: max(pair[0].losses(), default=0) >= step, f"step {step}", seconds=seconds)


def _all_ended_well(pair: Pair, *, steps: int) -> None:
    assert [node.wait() for node in pair] == [0, 0], pair[0].output[-6000:]
    assert set(pair[0].losses()) == set(range(1, steps + 1)), "no step is missing"


def _straight(folder: Path, *, ranks: int, steps: int) -> dict[int, float]:
    """Return the losses of as many ranks on one machine, under torchrun."""
    (port,) = free_ports(1)
    one = Node(folder / "one", 0, "127.0.0.1", port, [])
    one.command[one.command.index("--nnodes") + 1] = "1"
    one.start(steps=steps, ranks=ranks, again=False)
    try:
        assert one.wait() == 0, one.output[-6000:]
    finally:
        one.close()
    return one.losses()


@pytest.mark.timeout(480)
def test_a_stop_of_one_node_saves_on_both(pair: Pair, tmp_path: Path) -> None:
    pair[1].start(steps=12, again=False, **{"data.prefetch_blocks": "nine"})
    assert pair[1].wait() == 2 and "--data.prefetch_blocks: 'nine' is not" in pair[1].output
    _start(pair, steps=4000, past=3, again=False)
    pair[1].stop()
    assert [node.wait() for node in pair] == [1, 1]
    saved = max(pair[0].losses())
    assert "Another node was asked to stop: saved" in pair[0].output
    for node in pair:
        node.start(steps=saved + 4)
    _all_ended_well(pair, steps=saved + 4)
    assert f"Resumed at outer step 0, inner step {saved}" in pair[0].output
    assert not (pair[1].folder / "events.jsonl").exists()
    straight = _straight(tmp_path, ranks=2, steps=saved + 4)
    assert pair[0].losses() == pytest.approx(straight, abs=1e-6)


def _resumed(node: Node) -> list[str]:
    """Return the inner steps from which the node has continued."""
    return re.findall(r"Resumed at outer step 0, inner step (\d+)", node.output)


def _listening(machine: Machine) -> set[str]:
    """Return the addresses at which a process on the machine listens."""
    command = [*machine.prefix, "ss", "-Hltn"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[3] for line in shown.splitlines()}


@pytest.mark.parametrize("lost", [1, 0])
def test_a_killed_node_comes_back_and_all_go_on_from_the_last_checkpoint(
    two: tuple[Pair, list[Machine]], lost: int
) -> None:
    """Its machine loses power for a moment, and nobody intervenes."""
    pair, found = two
    began = time.monotonic()
    _start(pair, steps=4000, past=8)
    # A start takes longer on a busy machine; the limit is meant for an idle one.
    again = max(AGAIN, 1.5 * (time.monotonic() - began))
    # gloo and NCCL listen only at the private network's address, torchrun's store at all addresses.
    for machine in found:
        wide = {a for a in _listening(machine) if not a.startswith((machine.address, "127.0.0.1"))}
        assert wide <= {"*:29500", "0.0.0.0:29500", "[::]:29500"}, wide
    pair[lost].kill()
    began = time.monotonic()
    wait_for(lambda: len(_resumed(pair[0])) == 1, "the checkpoint", seconds=again)
    events = pair[0].folder / "events.jsonl"
    taken = len(list(read_events(events, "step")))
    wait_for(
        lambda: len(list(read_events(events, "step"))) > taken,
        "training again",
        seconds=again - (time.monotonic() - began),
    )
    print(f"node {lost} killed: training again after {time.monotonic() - began:.1f} s")
    assert _resumed(pair[0]) == _resumed(pair[1])
    pair[1 - lost].stop()
    pair[lost].stop()
    for node in pair:
        node.wait()
    names = [{p.name for p in (n.folder / "checkpoints").glob("checkpoint-*")} for n in pair]
    assert max(names[0]) in names[1], "a stop saves on both"
