"""A miner of two machines under torchrun, each of which is a network namespace.

Each node is started again whenever its torchrun ends, as pm2 does. Stops of such a miner are in
tests/end_to_end/test_slurm.py and tests/unit/test_miner_nodes.py.
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

import psutil
import pytest

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


class Node:
    """One ops/torchrun.sh, started again whenever it ends by itself."""

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

    def start(self) -> None:
        network = network_file(self.folder.with_suffix(".network"), RULES)
        flags = FLAGS | {"network": network, "neuron.run_folder": str(self.folder)}
        command = [*self.command, "--nproc_per_node", "1", "--", *COMMON]
        command += [word for name, text in flags.items() for word in (f"--{name}", text)]
        here = f"{ROOT}{os.pathsep}{ROOT}/tests{os.pathsep}{ROOT}/tests/multiprocess"
        environment = {n: text for n, text in os.environ.items() if not n.startswith("R2_")}
        environment |= KEYS if self.number == 0 else {}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": here}
        environment |= {"BT_WALLET_PATH": str(self.folder.with_suffix(".wallets"))}
        environment |= {"DT_PYTHON": sys.executable, "DT_PROGRAM": str(PROGRAM)}
        self._again = True

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
        """SIGTERM to torchrun, as pm2 and Slurm do; it is not started again."""
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


Pair = list[Node]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Pair, list[Machine]]]:
    """Two nodes, each a machine of its own."""
    with machines(2) as found:
        address = found[0].address
        made = [
            Node(tmp_path / f"node{i}", i, address, 29500, m.prefix) for i, m in enumerate(found)
        ]
        yield made, found
        for node in made:
            node.close()


def _resumed(node: Node) -> list[str]:
    """Return the inner steps from which training continued."""
    return re.findall(r"Resumed at outer step 0, inner step (\d+)", node.output)


def _listening(machine: Machine) -> set[str]:
    """Return the addresses at which somebody listens there."""
    command = [*machine.prefix, "ss", "-Hltn"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[3] for line in shown.splitlines()}


@pytest.mark.parametrize("lost", [1, 0])
def test_a_killed_node_comes_back_and_all_go_on_from_the_last_checkpoint(
    two: tuple[Pair, list[Machine]], lost: int
) -> None:
    """Its machine loses its power for a moment; nobody helps."""
    pair, found = two
    began = time.monotonic()
    events = pair[0].folder / "events.jsonl"

    def taken() -> int:
        return len(list(read_events(events, "step"))) if events.exists() else 0

    for node in pair:
        node.start()
    wait_for(lambda: taken() >= 8, "step 8", seconds=240)
    # On a busy machine a start takes long; the goal is that of one at rest.
    again = max(AGAIN, 1.5 * (time.monotonic() - began))
    # gloo and NCCL listen at the private network's address only, torchrun's store at all.
    for machine in found:
        wide = {a for a in _listening(machine) if not a.startswith((machine.address, "127.0.0.1"))}
        assert wide <= {"*:29500", "0.0.0.0:29500", "[::]:29500"}, wide
    pair[lost].kill()
    began = time.monotonic()
    wait_for(lambda: len(_resumed(pair[0])) == 1, "the checkpoint", seconds=again)
    before, left = taken(), again - (time.monotonic() - began)
    wait_for(lambda: taken() > before, "training again", seconds=left)
    print(f"node {lost} killed: training again after {time.monotonic() - began:.1f} s")
    assert _resumed(pair[0]) == _resumed(pair[1])
    pair[1 - lost].stop()
    pair[lost].stop()
    for node in pair:
        node.wait()
    names = [{p.name for p in (n.folder / "checkpoints").glob("checkpoint-*")} for n in pair]
    assert max(names[0]) in names[1], "a stop saves on both"
