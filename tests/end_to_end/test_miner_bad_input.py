"""Bad input: one line naming cause, consequence and remedy, nothing left behind.

Settings that cannot be right end the miner with status 2. What the chain, the store or the machine
refuse is tried again until it works. Against real services of a local subnet, through the real
launcher.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from distributed_training.chain.identity import create_wallet
from distributed_training.common.processes import Mark
from distributed_training.localnet.plan import NeuronPlan, SubnetOptions, plan_neurons
from distributed_training.localnet.processes import MARK
from distributed_training.localnet.services import Services

pytestmark = pytest.mark.timeout(300)


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
    mark: Mark

    def miner(self, *more: str, drop: tuple[str, ...] = (), **environ: str) -> Run:
        """Run the miner with the plan's flags, ``more`` after them."""
        with self.started(*more, drop=drop, **environ) as process:
            output, _ = process.communicate(timeout=250)
        return Run(process.returncode, output)

    def refused(self, *more: str, **environ: str) -> Run:
        """The same, of a miner that something outside refuses: it runs until that was tried three
        times, and is stopped then."""
        output = ""
        with self.started(*more, **environ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                output += line
                if "(attempt 4)" in line:
                    process.terminate()
        return Run(process.returncode, output)

    @contextlib.contextmanager
    def started(
        self, *more: str, drop: tuple[str, ...] = (), **environ: str
    ) -> Iterator[subprocess.Popen[str]]:
        environment = self.services.environment(self.plan) | environ
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
    mark = Mark(MARK, secrets.token_hex(8))
    options = SubnetOptions(folder=folder, ranks=(1,))
    plans = plan_neurons(options, folder)
    services = Services(folder=folder, options=options, plans=plans, mark=mark)
    try:
        services.start()
        for plan in plans:
            plan.folder.mkdir(exist_ok=True)
        yield World(services, plans[1], folder, mark)
    finally:
        services.stop()


def assert_one_line(run: Run, *words: str) -> None:
    assert run.status == 2, run.output[-3000:]
    assert "Traceback" not in run.output, run.output[-3000:]
    assert len({re.sub(r"^.*error:", "", line) for line in run.errors}) == 1, run.output[-3000:]
    for word in words:
        assert word in run.errors[-1]


def assert_tried_again(run: Run, *words: str) -> None:
    """The one reason is repeated, on one line each; a stop ends the miner."""
    assert run.status == 0, run.output[-3000:]
    assert "Traceback" not in run.output, run.output[-3000:]
    reasons = re.findall(r"Cannot train: (.*)\. Trying again in", run.output)
    assert len(reasons) == 3 and len(set(reasons)) == 1, run.output[-3000:]
    assert "| ERROR |" not in run.output
    for word in words:
        assert word in reasons[0]


def leaves_nothing(world: World) -> bool:
    folder = str(world.plan.folder)
    return not [p for p in world.mark.processes() if folder in " ".join(p.cmdline())]


def test_missing_keys(world: World) -> None:
    run = world.miner(drop=("R2_WRITE_SECRET_ACCESS_KEY",))
    assert_one_line(run, "R2_WRITE_SECRET_ACCESS_KEY", ".env")


def test_ports_in_use(world: World) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])  # --axon.port: test_launcher_tree.py
        assert_tried_again(world.refused("--dht.port", port), "--dht.port", port)
    assert leaves_nothing(world)


def test_a_hotkey_that_is_not_registered(world: World) -> None:
    create_wallet(world.folder / "wallets", "stranger")
    run = world.refused("--wallet.name", "stranger")
    assert_tried_again(run, "not registered", "dt-registry register")
    assert leaves_nothing(world)


def test_a_hotkey_that_is_not_there(world: World) -> None:
    assert_tried_again(world.refused("--wallet.hotkey", "nobody"), "nobody", "--wallet")
    assert leaves_nothing(world)


@pytest.mark.long  # daily: what the bucket says, and that what is outside is tried again
def test_no_bucket(world: World) -> None:
    run = world.refused("--neuron.global_model_name", "no-such-model")
    assert_tried_again(run, "no-such-model-000", "does not exist")
    assert leaves_nothing(world)


def test_wrong_write_key(world: World) -> None:
    run = world.refused(R2_WRITE_SECRET_ACCESS_KEY="0" * 64)
    assert_tried_again(run, "R2_WRITE")
    assert "0" * 64 not in run.output


def test_a_read_key_that_can_write_is_never_committed(world: World) -> None:
    keys = world.services.environment(world.plan)
    swapped = {
        f"R2_{a}_{name}": keys[f"R2_{b}_{name}"]
        for a, b in (("READ", "WRITE"), ("WRITE", "READ"))
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")
    }
    run = world.refused(**swapped)
    assert_tried_again(run, "R2_READ_ACCESS_KEY_ID can write", "nothing was committed", "Read only")
    assert "Logged To Chain" not in run.output
    assert leaves_nothing(world)


def test_the_services_were_untouched(world: World) -> None:
    with contextlib.closing(world.services.open_bucket(world.plan)) as bucket:
        assert bucket.list_objects() == []
