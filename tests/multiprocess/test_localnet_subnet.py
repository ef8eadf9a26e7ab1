"""Test the orchestrator with real services, and with neurons that misbehave on purpose."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from distributed_training.common.processes import command_of
from distributed_training.config.types import ConfigError
from distributed_training.localnet.command import INTERRUPT_GRACE, main
from distributed_training.localnet.services import SubnetOptions, parse_ranks
from distributed_training.localnet.subnet import LocalSubnet, SubnetFailure
from distributed_training.scoring.command import subnet_flags
from distributed_training.store.errors import TransientError
from distributed_training.store.s3 import S3ObjectStore
from tests.tools.subnet_tools import stop_miner
from tests.tools.tree import Tree
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).parents[1] / "tools" / "localnet_fake_neuron.py"
LONG = timedelta(seconds=80)  # only how long a broken test takes


def options(folder: Path, behaviour: str = "good") -> SubnetOptions:
    return SubnetOptions(
        folder=folder, miner_script=FAKE, validator_script=FAKE, miner_flags=("--fake", behaviour)
    )


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    one = Tree()
    for name, value in one.environment.items():
        monkeypatch.setenv(name, value)
    yield one
    one.end()


def command_line(folder: Path, behaviour: str, *more: str) -> list[str]:
    flags = ["--folder", str(folder), "--miner-flags", f"--fake {behaviour}"]
    flags += ["--period", "60"]  # otherwise the machine is measured first
    scripts = ["--miner-script", str(FAKE), "--validator-script", str(FAKE)]
    return [*flags, *scripts, *more]


class TestPlan:
    def test_world_sizes(self) -> None:
        assert parse_ranks(None, None) == (2, 1)
        assert parse_ranks(None, 3) == (2, 1, 1)
        assert parse_ranks(None, 1) == (2,)
        assert parse_ranks("1,2,4", None) == (1, 2, 4)
        assert parse_ranks("4", 2) == (4, 1)

    @pytest.mark.parametrize(
        ("text", "miners"), [("a", None), ("0", None), ("11", None), ("1,1,1", 2)]
    )
    def test_bad_world_sizes_are_one_line(self, text: str | None, miners: int | None) -> None:
        with pytest.raises(ConfigError) as error:
            parse_ranks(text, miners)
        assert "\n" not in str(error.value) and "--" in str(error.value)


class TestSubnet:
    def test_missed_steps_kills_deadlines_and_a_service_that_dies(
        self, tmp_path: Path, tree: Tree
    ) -> None:
        subnet = LocalSubnet(
            options=options(tmp_path / "run", "misses"), settle=timedelta(seconds=1)
        )
        with pytest.raises(SubnetFailure, match="registry has ended"), subnet:
            subnet.wait_for_outer_steps(2, LONG)
            assert subnet_flags(subnet.folder)  # it is found by scripts/score.py
            assert not subnet.summary().ok
            assert subnet.summary().outer_steps[1].missed_by == ("miner-1", "miner-2")
            with pytest.raises(SubnetFailure, match="outer step 99 did not come within 1 s"):
                subnet.wait_for_outer_steps(99, timedelta(seconds=1))
            subnet.kill_miner(0)
            subnet.poll()  # a death we caused is no failure
            assert subnet.miners[0].exit_status == -signal.SIGKILL
            subnet.restart_miner(0)
            subnet.wait_until(lambda: subnet.miners[0].state.starts == 2, LONG, "the restart")
            assert stop_miner(subnet, 1) == 0
            (registry,) = (p for p in tree.processes() if "network_command serve" in command_of(p))
            registry.kill()
            subnet.wait_for_outer_steps(9, LONG)
        assert not tree.processes()

    def test_a_store_that_fails_at_the_start_is_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fails(store: S3ObjectStore) -> None:
            raise TransientError(f"create {store.bucket}: no answer")

        monkeypatch.setattr(S3ObjectStore, "create_bucket", fails)
        assert main(command_line(tmp_path / "run", "good")) == 1
        said = capsys.readouterr()
        assert "PROBLEM: create local" in said.out and "Traceback" not in said.err


class TestFolder:
    def test_a_foreign_folder_is_not_changed(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        assert main(command_line(tmp_path, "good")) == 2
        assert "not used" in capsys.readouterr().err
        assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]

    @pytest.mark.parametrize(
        ("bad", "words"),
        [
            (["--folder", __file__], "cannot be used"),
            (["--folder", f"{__file__}/new"], "cannot be used"),
            (["--resume"], "unrecognized arguments: --resume"),
            (["--outer-steps", "0"], "--outer-steps"),
            (["--period", "0"], "--period"),
            (["--ranks", "x"], "--ranks"),
        ],
    )
    def test_bad_arguments_are_one_line(
        self, tmp_path: Path, bad: list[str], words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        try:
            status = main(["--folder", str(tmp_path / "new"), *bad])
        except SystemExit as stop:  # as argparse ends a program
            status = stop.code
        (line,) = capsys.readouterr().err.splitlines()
        assert status == 2 and line.startswith("error: ") and words in line


class TestCommand:
    def start(self, folder: Path, behaviour: str, *more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "scripts/localnet.py", *command_line(folder, behaviour, *more)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )

    def test_ctrl_c_stops_everything_in_15_seconds_even_a_stubborn_miner(
        self, tmp_path: Path, tree: Tree
    ) -> None:
        run = self.start(tmp_path / "run", "stubborn", "--outer-steps", "9")
        logs = [tmp_path / "run" / name / "log.txt" for name in ("miner-1", "miner-2")]
        wait_for(lambda: all(log.exists() and log.read_text() for log in logs), "the miners")
        second = self.start(tmp_path / "run", "good")
        text, _ = second.communicate(timeout=180)
        assert second.returncode == 2 and "is running in" in text, text
        assert len(tree.processes()) >= 2
        run.send_signal(signal.SIGINT)
        text, _ = run.communicate(timeout=180)
        assert run.returncode == 130, text
        # The miners get this time, then the founder's programs get it too, and the rest gets 1 s.
        # The stop itself is not timed, because a busy machine may take longer.
        assert 2 * INTERRUPT_GRACE.total_seconds() + 1 < 15
        given = f"within {INTERRUPT_GRACE.total_seconds():.0f} s"
        assert all(f"{name} did not stop {given}" in text for name in ("miner-1", "miner-2"))
        assert "were wanted" not in text and "published nothing" not in text, "not come yet"
        assert not tree.processes()
