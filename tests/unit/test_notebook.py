"""A kernel of a notebook joins, is interrupted and joins again; its loop runs all the time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.chain_server_thread import RegistryServer

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).resolve().parents[2]

ASK = """
from datetime import timedelta
from distributed_training.chain.registry import RegistryChain
from distributed_training import network
from tests.tools.chain_world import VALIDATOR
chain = RegistryChain(url={url!r}, wallet=VALIDATOR, poll_interval=timedelta(milliseconds=50))
assert chain.wait_ready(timedelta(seconds=20))
print("uid", chain.register())
chain.close()
"""

WORLD = """
import logging, threading
from pathlib import Path
import torch, distributed_training
from tests.tools.member_world import MemberWorld, played, script_model, train_step
from tests.tools.store_ranks import UID
logging.basicConfig(level=logging.INFO, format="%(message)s")
world = MemberWorld(Path({folder!r}))
stack = played(world.bucket)
stack.__enter__()
model = script_model(world.model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
number = 0
def train():
    global number
    number += 1
    net.step(loss=train_step(model, optimizer, number), tokens=64)
"""

JOIN = "net = distributed_training.join(world.network, model, optimizer, **world.settings())"

TRAIN = """
while True:
    train()
    if number % 10 == 0:
        print("trained", number, flush=True)
"""

CLOSE = """
leader = world.leader
leader.open_close()
upload = world.bucket / f"uploads/{UID}/{leader.outer_step}.{leader.serial}.safetensors"
while not upload.exists():
    train()
leader.take_outer_step(UID)
while net.outer_step < 1:
    train()
print("outer step", net.outer_step, flush=True)
net.close()
"""


class Kernel:
    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.tools.kernel"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )

    def run(self, cell: str, *, interrupt_at: str = "") -> list[str]:
        """Return what a cell prints, the last line how it ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(cell) + "\n")
        self.process.stdin.flush()
        lines: list[str] = []
        for line in self.process.stdout:
            lines.append(line.rstrip("\n"))
            if interrupt_at and line.startswith(interrupt_at):
                interrupt_at = ""
                self.process.send_signal(signal.SIGINT)
            if line.startswith("cell: "):
                return lines
        raise AssertionError(f"the kernel ended: {lines}")


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    made = Kernel(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()


def test_a_cell_writes_to_the_registry(kernel: Kernel, tmp_path: Path) -> None:
    with RegistryServer(tmp_path / "registry") as server:
        found = kernel.run(ASK.format(url=server.url))
    assert found[-2:] == ["uid 0", "cell: done"], found


def test_a_kernel_joins_is_interrupted_and_joins_again(kernel: Kernel, tmp_path: Path) -> None:
    for cell in (WORLD.format(folder=str(tmp_path / "world")), JOIN):
        assert (found := kernel.run(cell))[-1] == "cell: done", found
    for _ in range(2):
        assert kernel.run(TRAIN, interrupt_at="trained")[-1].startswith("cell: KeyboardInterrupt")
        found = kernel.run(JOIN)
        assert found[-1] == "cell: done", found
        assert any("join() is called again" in line for line in found)
        assert any(line.startswith("Resumed at outer step 0, inner step") for line in found)
    found = kernel.run(CLOSE)
    assert found[-1] == "cell: done" and "outer step 1" in found, found
