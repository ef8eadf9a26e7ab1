"""When a launcher ends for good and when it tries again; ranks and clock are played."""

from __future__ import annotations

import os
import time
from collections import namedtuple
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_training.chain.wallet import create_wallet
from distributed_training.common.exits import ExitStatus
from distributed_training.common.files import write_json
from distributed_training.config import ConfigError, load_config
from distributed_training.diagnostics import checks
from distributed_training.miner import launcher, proof
from distributed_training.miner.launcher import default_ranks, launch
from distributed_training.miner.proof import FILE, Proof
from tests.r2_keys import KEYS

pytestmark = pytest.mark.timeout(60)
Usage = namedtuple("Usage", "total used free")
FAULT, REFUSED, STOPPED = ExitStatus.FAULT, ExitStatus.BAD_CONFIGURATION, ExitStatus.STOPPED
LONG = launcher.STEADY.total_seconds() + 5
AGAIN = "The miner ran with these settings before, so it does not end"


class Killed(BaseException):
    """The launcher's process, in the middle of its work."""


class Played:
    """What comes of each start of the ranks, in order: after how many seconds, and how."""

    def __init__(self) -> None:
        self.left: list[tuple[float, ExitStatus | type[Killed]]] = []
        self.now = 0.0
        self.saves = True  # a checkpoint, when it runs for long

    def group(self, *, world_size: int, mark: Any, stacks: Path, **_: object) -> Any:
        played, ends = self, 0.0

        class Group:
            def __init__(self) -> None:
                self.world_size = world_size
                self.endings: list[str] = []

            def start(self, plan: object) -> None:
                nonlocal ends
                seconds, _ = played.left[0]
                ends = played.now + seconds

            @property
            def running(self) -> list[int]:
                seconds, status = played.left[0]
                if seconds >= LONG and played.saves:
                    save_checkpoint(stacks.parent)
                if played.now < ends:
                    return list(range(world_size))
                played.left.pop(0)
                if not isinstance(status, ExitStatus):
                    raise status
                told = {"status": status, "reason": "as told", "instance": mark.value}
                write_json(stacks.with_name("exit_status.json"), told)
                return []

            def wait(self, timeout: timedelta) -> None:
                played.now += 1.0

            def sweep(self, **_: object) -> list[str]:
                return []

        return Group()


def save_checkpoint(folder: Path) -> None:
    (folder / "checkpoints").mkdir(exist_ok=True)
    write_json(folder / "checkpoints" / "last.json", {})


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    clock = SimpleNamespace(monotonic=lambda: played.now, sleep=time.sleep)
    monkeypatch.setattr(launcher, "time", clock)
    monkeypatch.setattr(launcher, "RankGroup", played.group)
    monkeypatch.setattr(launcher, "start_log", lambda *_, **named: None)  # pytest's log stays
    for name in ("FIRST_WAIT", "LONGEST_WAIT", "LONGEST_DOUBT"):
        monkeypatch.setattr(launcher, name, timedelta(milliseconds=1))
    return played


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    create_wallet(tmp_path / "wallets", "default")
    flags = {
        "preset": "local",
        "wallet.path": str(tmp_path / "wallets"),
        "neuron.run_folder": str(tmp_path / "run"),
        "neuron.page_port": "off",
        "neuron.device": "cpu",
        "axon.port": "0",
        "dht.port": "0",
    }
    return [word for name, value in flags.items() for word in (f"--{name}", value)]


def prove(argv: Sequence[str], *, ranks: int = 1) -> None:
    config = load_config("miner", argv)
    config.run_folder.mkdir(exist_ok=True)
    Proof(config).give(ranks=ranks)


@pytest.mark.parametrize("end", ["six faults in a row", "a kill while the ranks run"])
def test_what_ranks_proved_outlives_their_launcher(
    argv: list[str], ranks: Played, end: str
) -> None:
    """The launcher after it finds the store answering 403 for a while."""
    if end.startswith("six"):
        ranks.left = [(LONG, FAULT), *[(0, FAULT)] * 5]
        assert launch(argv) == FAULT
    else:
        ranks.left = [(LONG, Killed)]
        with pytest.raises(Killed):
            launch(argv)
    ranks.left = [*[(0, REFUSED)] * 20, (0, STOPPED)]
    assert launch(argv) == STOPPED and not ranks.left


def test_settings_that_were_never_right_end_at_the_first_look(
    argv: list[str], ranks: Played
) -> None:
    ranks.left = [(LONG / 2, FAULT), (0, REFUSED), (0, STOPPED)]
    assert launch(argv) == REFUSED and len(ranks.left) == 1
    prove(argv)
    ranks.left = [(0, REFUSED), (0, STOPPED)]
    assert launch([*argv, "--neuron.upload_steps", "7"]) == REFUSED, "an operator changed it"
    assert launch(argv) == STOPPED


def test_a_long_start_proves_nothing(argv: list[str], ranks: Played) -> None:
    """On a slow line the global state alone may take longer; then a setting turns out wrong."""
    ranks.saves = False
    ranks.left = [(LONG, REFUSED), (0, STOPPED)]
    assert launch(argv) == REFUSED and len(ranks.left) == 1
    assert not Proof(load_config("miner", argv)).holds


def full_disk(*_: object) -> Any:
    return Usage(10**12, 10**12, 0)


def port_in_use(*_: object, **__: object) -> list[checks.Check]:
    return [checks.Check("port", "fail", "port 8091 is in use", "stop what listens")]


def no_hotkey(*_: object) -> None:
    raise ConfigError("no hotkey at /mnt/wallets")


@pytest.mark.parametrize(
    ("where", "name", "refuses"),
    [
        (checks.shutil, "disk_usage", full_disk),
        (launcher, "start_checks", port_in_use),
        (launcher, "require_hotkey", no_hotkey),
    ],
)
def test_a_machine_that_refuses_proven_settings_is_looked_at_again(
    argv: list[str],
    ranks: Played,
    where: Any,
    name: str,
    refuses: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    right, looks = getattr(where, name), 0

    def look(*arguments: Any, **named: Any) -> Any:
        nonlocal looks
        looks += 1
        return (refuses if looks <= 3 else right)(*arguments, **named)

    monkeypatch.setattr(where, name, look)
    ranks.left = [(0, STOPPED)]
    assert launch(argv) == REFUSED and ranks.left
    problem = capfd.readouterr().err.partition("error: ")[2].strip()
    prove(argv)
    looks = 0
    assert launch(argv) == STOPPED and not ranks.left
    assert caplog.text.count(f"{problem}. {AGAIN}") == 3


def test_a_second_launcher_in_the_folder_ends_proven_or_not(
    argv: list[str], ranks: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    prove(argv)
    ranks.left = [(0, STOPPED)]
    with launcher._lock(load_config("miner", argv).run_folder):
        assert launch(argv) == REFUSED and ranks.left
    assert "is running in" in capsys.readouterr().err


class Nodes:
    """The launchers of the other nodes."""

    leaving = joining = False

    def __init__(self, answers: list[ConfigError | None]) -> None:
        self._answers = answers

    def meet(self, stop: object) -> None:
        if (answer := self._answers.pop(0)) is not None:
            raise answer

    def trouble(self) -> None:
        return None

    def ended(self, status: ExitStatus) -> bool:
        return False

    def close(self, status: int) -> None:
        pass


def test_a_node_that_was_taken_in_before_is_not_refused_for_good(
    argv: list[str], ranks: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock is set a minute after a reboot, or node 0 is not reachable for an hour."""
    clock = ConfigError("the clock of this node is +95 s from node 0's")
    answers: list[ConfigError | None] = [clock]
    monkeypatch.setattr(launcher, "join_nodes", lambda *_, **named: Nodes(answers))
    assert launch(argv) == REFUSED
    ranks.left = [(LONG, FAULT), (0, STOPPED)]
    answers[:] = [None, clock, clock, None]
    assert launch(argv) == STOPPED and not ranks.left and not answers
    answers[:] = [clock, clock, None]
    ranks.left = [(0, STOPPED)]
    assert launch(argv) == STOPPED and not answers, "of the launcher after it"


def test_a_proof_is_of_all_settings_and_of_the_program(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove(argv)
    file = load_config("miner", argv).run_folder / FILE
    assert file.stat().st_mode & 0o077 == 0, "nobody can try secrets on it"
    assert not any(key in file.read_text() for key in KEYS.values())

    def holds(*more: str) -> bool:
        return Proof(load_config("miner", [*argv, *more])).holds

    assert holds()
    for flag in ("neuron.learning_rate", "neuron.checkpoint_steps", "chain.call_timeout"):
        assert not holds(f"--{flag}", "0.5" if "rate" in flag else "11")
    for name, key in KEYS.items():
        with monkeypatch.context() as changed:
            changed.setenv(name, "f" * len(key))
            assert not holds(), name
    # What Slurm chooses for a job tells nothing of its settings.
    assert holds("--rdzv_endpoint", "node-7:29417", "--node_rank", "1")
    with monkeypatch.context() as changed:
        (tmp_path / "sources").mkdir()
        changed.setattr(proof, "_SOURCES", tmp_path / "sources")
        assert not holds()
    for damaged in ("", "[]", "{}", '{"settings": null, "gpus": "x"}', '{"gpus": true}'):
        file.write_text(damaged)
        assert not holds() and Proof(load_config("miner", argv)).gpus == 0


def test_a_proof_that_cannot_be_written_is_a_line_and_holds_here(
    argv: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config("miner", argv)
    (config.run_folder / FILE).mkdir(parents=True)
    found = Proof(config)
    found.give(ranks=1)
    found.give(ranks=1)
    assert found.holds and not Proof(config).holds
    assert caplog.text.count("was not written") == 1 and os.listdir(config.run_folder) == [FILE]


def test_the_number_of_gpus_is_remembered_while_the_driver_is_away(
    argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv[argv.index("cpu")] = "auto"

    def driver_shows(count: int) -> None:
        for where in (launcher, proof):
            monkeypatch.setattr(where, "visible_gpu_count", lambda: count)

    def started(*more: str) -> int:
        config = load_config("miner", [*argv, *more])
        return default_ranks(config, Proof(config).gpus)

    driver_shows(0)
    assert started() == 1
    driver_shows(8)
    assert started() == 8
    prove(argv, ranks=8)
    driver_shows(0)
    assert started() == started("--neuron.upload_steps", "7") == 8
    assert started("--neuron.device", "cpu") == 1
    with monkeypatch.context() as hidden:
        hidden.setenv("CUDA_VISIBLE_DEVICES", "")
        assert started() == 1, "as the operator wants it"
    prove(argv)
    assert started() == 8, "a run while the driver is away forgets nothing"
    driver_shows(7)
    assert started() == 7, "one has died: the others train"
