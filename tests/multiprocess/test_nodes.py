"""A miner of two machines: network namespaces with run folders of their own, the real launcher.

What the doctor finds between two machines comes last.

Either machine's death at each point of a round and of an upload, and a node 0 that goes on alone,
are in tests/end_to_end/test_kills.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed_training.common.ports import free_ports
from distributed_training.miner.run_folder import mark_of
from distributed_training.telemetry import read_events
from tests.multiprocess.test_launcher_tree import COMMON, KEYS
from tests.tools import small_miner
from tests.tools.namespaces import Machine, machines
from tests.tools.network import network_file
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "tests" / "tools" / "node_launch.py"
PAGE = (ROOT / "docs" / "several-machines.md").read_text()
RULES = small_miner.RULES | {"tokenizer.name": "bytes"}
FLAGS = small_miner.FLAGS | {
    "diagnostics.start_check": "false",
    "node_timeout": "6",
}


class Node:
    """One launcher, in a namespace or here."""

    def __init__(self, folder: Path, *, machine: Machine | None, flags: dict[str, str]) -> None:
        self.folder, self._machine, self._flags = folder, machine, flags
        self.log = folder.with_suffix(".log")
        self.steps = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        *,
        steps: int = 0,
        environ: Mapping[str, str] | None = None,
        **changes: str,
    ) -> Node:
        """``steps``: inner steps after which the miner stops; ``environ``: see node_launch.py;
        ``changes``: of flags."""
        wallets = self.folder.with_suffix(".wallets")
        if self._flags.get("node_rank", "0") == "0":
            for name, key in (("default", "default"), ("W", "H")):
                hotkey = wallets / name / "hotkeys" / key
                hotkey.parent.mkdir(parents=True, exist_ok=True)
                hotkey.touch()
        network = network_file(self.folder.with_suffix(".network"), RULES)
        own = {"network": network, "neuron.run_folder": str(self.folder)}
        flags = FLAGS | self._flags | own | changes
        arguments = [part for name, text in flags.items() for part in (f"--{name}", text)]
        secret = KEYS if self._flags.get("node_rank", "0") == "0" else {}
        prefix = self._machine.prefix if self._machine else []
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, str(LAUNCH), *COMMON, *arguments],
                env=os.environ
                | secret
                | {"BT_WALLET_PATH": str(wallets), "NODE_STEPS": str(steps)}
                | (environ or {})
                | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/tests"
                   f"{os.pathsep}{ROOT}/tests/multiprocess"},
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        return self

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait(self, seconds: float = 240) -> int:
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.folder.name} runs on:\n{self.output[-6000:]}")

    def inner_steps(self) -> dict[int, float]:
        """Step in all -> loss, of the last time it was taken."""
        return {e["total_inner_steps"]: e["loss"] for e in self.events("step")}

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        return list(read_events(path, kind)) if path.exists() else []

    def kill(self) -> None:
        """As a machine that loses its power: launcher and ranks at once."""
        assert self.process is not None
        if mark := mark_of(self.folder):
            for process in mark.processes():
                process.kill()
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        if mark := mark_of(self.folder):
            mark.end(settle=timedelta(0), grace=timedelta(0))


class Nodes:
    """Makes nodes of one test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[Node] = []

    def __call__(self, name: str, machine: Machine | None = None, **flags: str) -> Node:
        self._made.append(Node(self._folder / name, machine=machine, flags=flags))
        return self._made[-1]

    def close(self) -> None:
        for one in self._made:
            one.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.close()


@pytest.fixture
def two(nodes: Nodes) -> Iterator[Callable[..., list[Node]]]:
    """Two nodes, each a machine with one rank unless flags say otherwise."""
    with machines(2) as found:

        def pair(**flags: str) -> list[Node]:
            own = {"nnodes": "2", "rdzv_endpoint": f"{found[0].address}:29400"}
            own |= {"nproc_per_node": "1"} | flags
            return [nodes(f"node{i}", m, node_rank=str(i), **own) for i, m in enumerate(found)]

        yield pair
        nodes.close()  # or the namespaces live on with what runs in them


def _flags_of_the_guide() -> list[dict[str, str]]:
    """Return what docs/several-machines.md has people type on each node."""
    found = [line.split() for line in PAGE.splitlines() if line.startswith("python neurons/miner")]
    return [
        {name.removeprefix("--"): value for name, value in zip(w[2::2], w[3::2], strict=True)}
        for w in found
    ]


@pytest.mark.slow
@pytest.mark.parametrize("compared", [False, pytest.param(True, marks=pytest.mark.long)])
def test_two_nodes_train_as_one_with_as_many_ranks(nodes: Nodes, compared: bool) -> None:
    """Started with the guide's commands, node 1 at first with wrong ones: node 0 waits for it."""
    with machines(2) as found:
        flags = [one | {"nproc_per_node": "1"} for one in _flags_of_the_guide()]
        pair = [nodes(f"node{i}", m, **flags[i]) for i, m in enumerate(found)]
        pair[0].start(steps=12)
        wait_for(lambda: "Waiting for node 1" in pair[0].output, "node 0 listens", seconds=60)
        line = "--neuron.seed is 9 on node 1 and 42 on node 0"
        pair[1].start(environ={"NODE_PATIENCE": "0"}, **{"neuron.seed": "9"})
        assert pair[1].wait() == 2, pair[1].output
        assert f"Stopped with status 2: {line}" in pair[1].output
        assert f"Node 1 is refused: {line}" in pair[0].output
        assert pair[0].process is not None and pair[0].process.poll() is None, "node 0 waits"
        pair[1].start(steps=12)
        _all_ended_well(pair, steps=12)
        assert not (pair[1].folder / "events.jsonl").exists()
        assert not list((pair[1].folder / "snapshots").glob("*"))
        if compared:
            _trained_as_one(pair, nodes)
        nodes.close()


def _trained_as_one(pair: list[Node], nodes: Nodes) -> None:
    one = nodes("one", nproc_per_node="2").start(steps=12)
    assert one.wait() == 0, one.output
    # To the bit, but for the norm that gradients are clipped to: its squares are added up by shard.
    assert pair[0].inner_steps() == pytest.approx(one.inner_steps(), abs=1e-5)
    assert len(one.inner_steps()) == 12
    rows = torch.load(pair[0].folder / "rows-0.pt", weights_only=True)
    whole = torch.load(one.folder / "whole.pt", weights_only=True)
    for a, b in zip(rows, whole, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def _step(nodes: list[Node]) -> int:
    return max(nodes[0].inner_steps(), default=0)


def _under_way(nodes: list[Node], *, steps: int, past: int = 7) -> None:
    """All started, to take ``steps``; ``past`` are taken."""
    for node in reversed(nodes):
        node.start(steps=steps)
    wait_for(lambda: _step(nodes) >= past, "steps", seconds=200)


def _all_ended_well(nodes: list[Node], *, steps: int) -> None:
    assert [node.wait() for node in nodes] == [0] * len(nodes), nodes[0].output[-6000:]
    assert set(nodes[0].inner_steps()) == set(range(1, steps + 1)), "no step is missing"
    _copies_are_equal(nodes)


class Again:
    """Time until training goes on: within 60 s, or about the time that a busy machine took for the
    first start: a node that comes back imports everything once more."""

    def __init__(self) -> None:
        self._began = self._gone = time.monotonic()
        self._limit = 60.0

    def lost(self) -> None:
        self._gone = time.monotonic()
        self._limit = max(60.0, 1.5 * (self._gone - self._began))

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        wait_for(condition, what, seconds=self._limit - (time.monotonic() - self._gone))


def _copies_are_equal(nodes: list[Node]) -> None:
    first, *others = (torch.load(n.folder / "rows-0.pt", weights_only=True) for n in nodes)
    assert all(torch.equal(a, b) for rows in others for a, b in zip(first, rows, strict=True))


@pytest.mark.long
def test_a_killed_node_comes_back_and_all_go_on_exactly(
    two: Callable[..., list[Node]], nodes: Nodes
) -> None:
    """Killed three steps past a checkpoint: the losses are those of a miner that was never killed,
    and training goes on within 60 s."""
    pair, again = two(), Again()
    _under_way(pair, steps=30, past=8)
    before = pair[0].inner_steps()
    pair[1].kill()
    again.lost()
    pair[1].start(steps=30)
    again.wait_for(lambda: _step(pair) > max(before) + 1, "training again")
    assert "Resumed at outer step 0, inner step 5" in pair[0].output
    for node in pair:
        assert node.wait() == 0, node.output
    straight = nodes("one", nproc_per_node="2").start(steps=30)
    assert straight.wait() == 0, straight.output
    assert pair[0].inner_steps() == pytest.approx(straight.inner_steps(), abs=1e-4)
    _copies_are_equal(pair)


@pytest.mark.long
def test_three_launchers_go_on_without_one_and_take_it_in_again(nodes: Nodes) -> None:
    """``--nnodes 2:3``: the two that are left connect to each other again, and so do all three."""
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    own = {"nnodes": "2:3", "node_wait": "5", "rdzv_endpoint": endpoint, "nproc_per_node": "1"}
    three = [nodes(f"node{i}", node_rank=str(i), **own) for i in range(3)]
    _under_way(three, steps=60)
    again = Again()
    for number in (2, 1):
        three[number].kill()
        again.lost()
        left = f"Nodes 0, {3 - number}: 2 ranks"
        again.wait_for(lambda line=left: line in three[0].output, left)
        fewer = _step(three)
        again.wait_for(lambda at=fewer: _step(three) > at, "training again")
        three[number].start(steps=60)
        whole = 4 - number
        wait_for(
            lambda n=whole: three[0].output.count("Nodes 0, 1, 2: 3 ranks") == n,
            "taken in",
            seconds=200,
        )
    _all_ended_well(three, steps=60)


@pytest.mark.long
def test_an_outage_that_is_over_when_ranks_are_ended_is_no_stop(
    two: Callable[..., list[Node]],
) -> None:
    """The ranks' connections live on, so they save and end as if asked to; the miner goes on."""
    pair = two()
    _under_way(pair, steps=300)  # not over before the ranks are ended
    machine = pair[1]._machine
    assert machine is not None
    machine.unplug()
    wait_for(lambda: "Node 1 is gone: nothing was heard" in pair[0].output, "noticed", seconds=60)
    machine.plug()
    _all_ended_well(pair, steps=300)
    assert pair[0].output.count("Nodes 0, 1: 2 ranks") == 2


@pytest.mark.long
def test_a_node_that_is_stopped_saves_first_and_node_0_says_what_all_end_with(
    two: Callable[..., list[Node]],
) -> None:
    pair = two()
    _under_way(pair, steps=40)
    assert pair[1].process is not None
    pair[1].process.send_signal(signal.SIGTERM)
    assert pair[1].wait() == 0, pair[1].output
    saved = max(pair[0].inner_steps())
    assert "A node leaves: saving, then all nodes start again" in pair[0].output
    pair[1].start(steps=40)
    wait_for(lambda: f"inner step {saved}" in pair[0].output, "no step is lost", seconds=200)
    _all_ended_well(pair, steps=40)


@pytest.mark.long
def test_with_a_copy_on_each_node_neither_disk_is_needed(
    two: Callable[..., list[Node]], nodes: Nodes
) -> None:
    """Each node has a copy over two ranks. Nothing is kept for previews: a new disk has no
    such sequences, and others are taken."""
    plain = {"neuron.preview_sequences": "0"}
    pair = two(**plain, nproc_per_node="2")
    got: dict[int, float] = {}
    for steps, lost in ((6, None), (12, 0), (18, 1)):
        if lost is not None:
            shutil.rmtree(pair[lost].folder)
        for node in reversed(pair):
            node.start(steps=steps)
        for node in pair:
            assert node.wait() == 0, node.output[-6000:]
        got |= pair[0].inner_steps()
    straight = nodes("one", nproc_per_node="4", **plain).start(steps=18)
    assert straight.wait() == 0, straight.output
    assert got == pytest.approx(straight.inner_steps(), abs=1e-4)
    listed = [_blocks(each.folder) for each in (pair[0], straight)]
    assert "The state comes from node 1, since another has none" in pair[0].output
    assert "The state comes from the first node" in pair[1].output
    assert listed[0] >= listed[1] > set(), "what was trained on since the last publication"


def _blocks(folder: Path) -> set[int]:
    manifest = json.loads(
        (max(folder.glob("checkpoints/checkpoint-*")) / "rank-0.json").read_text()
    )
    return {block for block, _ in manifest["extra"]["rank_zero"]["blocks"]["blocks"]}


# --- the doctor's command of the guide ------------------------------------------------------------

(DOCTOR,) = [line for line in PAGE.splitlines() if line.startswith("python -m ")]
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
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    """The first one's launcher listens, as the guide starts it.

    Last in this module: other machines made by this process would have the same names.
    """
    with machines(2) as found, closing(Nodes(tmp_path_factory.mktemp("nodes"))) as nodes:
        endpoint = f"{found[0].address}:29400"
        node_0 = nodes("node0", found[0], nnodes="2", rdzv_endpoint=endpoint, nproc_per_node="1")
        node_0.start()
        wait_for(lambda: "Waiting for node 1" in node_0.output, "node 0", seconds=120)
        yield found


@pytest.mark.slow
def test_the_guides_command_prints_what_the_guide_shows(listening: list[Machine]) -> None:
    printed = [line.rstrip() for line in _doctor(listening[1], DOCTOR).splitlines()]
    assert SHOWN and set(SHOWN) <= set(printed), "\n".join(printed)


@pytest.mark.slow
def test_a_firewall_between_nodes_and_a_public_address_are_told(listening: list[Machine]) -> None:
    quick = "--diagnostics.measure", "0"
    listening[0].close_ports_but(29400)
    printed = " ".join(_doctor(listening[1], DOCTOR, *quick).split())
    listening[0].open_ports()
    assert "✗ fail nodes node 0 answers at 10.0.0.1:29400, but not at port" in printed
    assert "let all TCP ports through from 10.0.0.2 in the firewall of node 0" in printed
    public = ["ip", "-n", listening[1].name, "addr", "add", "44.0.0.1/24", "dev", "eth0"]
    subprocess.run(public, check=True)
    command = "python -m distributed_training doctor --nnodes 2 --rdzv_endpoint 44.0.0.1:29400"
    printed = " ".join(_doctor(listening[1], command, "--offline", *quick).split())
    assert "! warn nodes' firewall 44.0.0.1 is a public address" in printed
    assert "→ let only the nodes reach interface eth0: docs/several-machines.md" in printed
