"""Bad input: one line naming cause, consequence and remedy, nothing left behind.

Settings that cannot be right end the miner with status 2. What the chain, the store or the machine
refuse is tried again until it works. Against real services of a local subnet, through the real
launcher.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from distributed_training.chain.identity import create_wallet
from distributed_training.common.ports import free_ports
from distributed_training.localnet.services import (
    NeuronPlan,
    Services,
    SubnetOptions,
    plan_neurons,
)
from distributed_training.miner.rank_group import rank_variables
from tests.tools import forked
from tests.tools.network import network_file
from tests.tools.tree import Tree

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]


@dataclass
class Run:
    status: int
    output: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if "error:" in line]


@dataclass
class World:
    services: Services
    plan: NeuronPlan
    folder: Path
    tree: Tree
    output: str = ""  # of the last rank that was refused

    def miner(self, *more: str, drop: tuple[str, ...] = (), **environ: str) -> Run:
        """Run the miner with the plan's flags, ``more`` after them."""
        with self.started(*more, drop=drop, **environ) as process:
            output, _ = process.communicate(timeout=250)
        return Run(process.returncode, output)

    def refused(self, *more: str, **environ: str) -> str:
        """Run rank 0 only; return the reason that it ends with.

        Something outside refuses it, so the launcher would try it again."""
        (port,) = free_ports(1)
        done = forked.run(
            ROOT / "neurons" / "miner.py",
            *self.services.flags(self.plan),
            *more,
            environ=self.services.environment(self.plan)
            | rank_variables(0, world_size=1, port=port)
            | environ,
            folder=self.folder,
        )
        assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr, done
        told = json.loads((self.plan.folder / "exit_status.json").read_text())
        assert told["outside"] and done.stdout.count(told["reason"]) == 1, done.stdout
        self.output = done.stdout
        return str(told["reason"])

    @contextlib.contextmanager
    def started(
        self, *more: str, drop: tuple[str, ...] = (), **environ: str
    ) -> Iterator[subprocess.Popen[str]]:
        environment = self.services.environment(self.plan) | self.tree.environment | environ
        process = subprocess.Popen(
            [sys.executable, *self.services.arguments(self.plan), *more],
            env={k: v for k, v in environment.items() if k not in drop},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
        )
        late = threading.Timer(250, process.kill)
        late.start()
        try:
            with process:
                yield process
        finally:
            late.cancel()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    tree = Tree()
    options = SubnetOptions(folder=folder, exchange="hivemind", ranks=(1,))
    plans = plan_neurons(options, folder)
    services = Services(folder=folder, options=options, plans=plans)
    try:
        services.start()
        for plan in plans:
            plan.folder.mkdir(exist_ok=True)
        yield World(services, plans[1], folder, tree)
    finally:
        services.stop()


def assert_one_line(run: Run, *words: str) -> None:
    assert run.status == 2, run.output[-3000:]
    assert "Traceback" not in run.output, run.output[-3000:]
    assert len({re.sub(r"^.*error:", "", line) for line in run.errors}) == 1, run.output[-3000:]
    for word in words:
        assert word in run.errors[-1]


def leaves_nothing(world: World) -> bool:
    folder = str(world.plan.folder)
    return not [p for p in world.tree.processes() if folder in " ".join(p.cmdline())]


def test_missing_keys(world: World) -> None:
    run = world.miner(drop=("R2_WRITE_SECRET_ACCESS_KEY",))
    assert_one_line(run, "R2_WRITE_SECRET_ACCESS_KEY", ".env")


@pytest.mark.parametrize("tries", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_hotkey_that_is_not_registered_is_tried_again(world: World, tries: int) -> None:
    """The launcher tries it until a stop, and logs the one reason on one line each time."""
    create_wallet(world.folder / "wallets", f"stranger-{tries}")
    output = ""
    with world.started("--wallet.name", f"stranger-{tries}") as process:
        assert process.stdout is not None
        for line in process.stdout:
            output += line
            if f"(attempt {tries + 1})" in line:
                process.terminate()
    assert process.returncode == 0 and "Traceback" not in output, output[-3000:]
    reasons = re.findall(r"Cannot train: (.*)\. Trying again in", output)
    assert len(reasons) == tries and len(set(reasons)) == 1 and "| ERROR |" not in output
    assert "not registered" in reasons[0] and "dt-join INVITATION" in reasons[0]
    assert leaves_nothing(world)


def test_a_hotkey_that_is_not_there(world: World) -> None:
    reason = world.refused("--wallet.hotkey", "nobody")
    assert "nobody" in reason and "--wallet" in reason


def test_no_bucket(world: World) -> None:
    services = world.services
    rules = {"store.global_bucket": "no-such-model", "chain.url": services.chain_endpoint}
    rules |= {"store.endpoint": services.store_endpoint}
    founder = services.wallet(services.plans[0]).hotkey
    other = network_file(world.folder / "other", rules, signer=founder)
    reason = world.refused("--network", other)
    assert "no-such-model-001" in reason and "does not exist" in reason
    assert leaves_nothing(world)


def test_wrong_write_key(world: World) -> None:
    assert "R2_WRITE" in world.refused(R2_WRITE_SECRET_ACCESS_KEY="0" * 64)
    assert "0" * 64 not in world.output


def test_a_read_key_that_can_write_is_never_committed(world: World) -> None:
    keys = world.services.environment(world.plan)
    swapped = {
        f"R2_{a}_{name}": keys[f"R2_{b}_{name}"]
        for a, b in (("READ", "WRITE"), ("WRITE", "READ"))
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")
    }
    reason = world.refused(**swapped)
    for words in ("R2_READ_ACCESS_KEY_ID can write", "nothing was committed", "Read only"):
        assert words in reason
    assert "Logged To Chain" not in world.output
    assert leaves_nothing(world)


def test_the_services_were_untouched(world: World) -> None:
    with contextlib.closing(world.services.open_bucket(world.plan)) as bucket:
        assert bucket.list_objects() == []
