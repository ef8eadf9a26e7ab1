"""The launcher with real torchrun and real processes; only the ranks' work is left out."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distributed_training.miner.process import marked

pytestmark = pytest.mark.timeout(90)

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).with_name("launcher_fake_rank.py")
LAUNCH = (
    "import sys, pathlib\n"
    "from datetime import timedelta\n"
    "from distributed_training.miner import launcher\n"
    "launcher.LINGER = timedelta(seconds=2)\n"
    f"sys.exit(launcher.launch(sys.argv[1:], script=pathlib.Path({str(FAKE)!r})))\n"
)
COMMON = ["--preset", "local", "--axon.port", "0", "--dht.port", "0"]
KEYS = {
    "R2_ACCOUNT_ID": "a" * 32,
    "R2_READ_ACCESS_KEY_ID": "b" * 32,
    "R2_READ_SECRET_ACCESS_KEY": "c" * 64,
    "R2_WRITE_ACCESS_KEY_ID": "d" * 32,
    "R2_WRITE_SECRET_ACCESS_KEY": "e" * 64,
}


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come in {seconds} s"
        time.sleep(0.05)


class Launched:
    def __init__(self, folder: Path, mode: str, *, ranks: int = 1, flags: tuple[str, ...] = ()):
        self.folder = folder
        hotkey = folder.with_suffix(".wallets") / "default" / "hotkeys" / "default"
        hotkey.parent.mkdir(parents=True, exist_ok=True)
        hotkey.touch()  # the fake rank reads none; the launcher wants one to be there
        wallets = {"BT_WALLET_PATH": str(hotkey.parents[2])}
        self.log = folder.with_suffix(".log")
        where = ["--neuron.run_folder", str(folder), "--nproc_per_node", str(ranks)]
        arguments = [*COMMON, *where, *flags]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", LAUNCH, *arguments],
                env={**os.environ, **KEYS, **wallets, "FAKE_MODE": mode, "OMP_NUM_THREADS": "1"},
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def instance(self) -> str:
        return str(json.loads((self.folder / "instance.json").read_text())["instance"])

    def wait_ready(self, ranks: int = 1) -> None:
        wait_for(
            lambda: (
                all((self.folder / f"ready-{r}").exists() for r in range(ranks))
                or self.process.poll() is not None
            ),
            "the ranks",
        )
        assert self.process.poll() is None, self.output

    def wait(self, seconds: float = 40) -> int:
        return self.process.wait(timeout=seconds)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    running: list[Launched] = []

    def start(mode: str, name: str = "run", **options: object) -> Launched:
        running.append(Launched(tmp_path / name, mode, **options))  # type: ignore[arg-type]
        return running[-1]

    yield start
    for one in running:
        one.process.kill()
        one.process.wait()
        if (one.folder / "instance.json").exists():
            for process in marked(one.instance):
                process.send(signal.SIGKILL)


def test_a_stop_reaches_rank_zero_and_ends_all_ranks(launched: Callable[..., Launched]) -> None:
    run = launched("run", ranks=2)
    run.wait_ready(2)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 0, run.output
    assert (run.folder / "saved").exists()
    assert not marked(run.instance)
    assert "SIGINT received: stopping" in run.output and "Traceback" not in run.output


def test_a_stuck_rank_is_ended_and_strays_are_reaped(launched: Callable[..., Launched]) -> None:
    run = launched("stuck", flags=("--neuron.stop_timeout", "1"))
    run.wait_ready()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 1
    assert not marked(run.instance)
    assert "ending the ranks by force" in run.output


def test_a_stray_with_a_session_of_its_own_is_reaped(launched: Callable[..., Launched]) -> None:
    run = launched("stray")
    run.wait_ready()
    assert len(marked(run.instance)) >= 3  # torchrun, the rank, the stray
    run.process.send_signal(signal.SIGHUP)
    assert run.wait() == 0
    assert not marked(run.instance)
    assert "left behind" in run.output


@pytest.mark.parametrize("status", [3, 2])
def test_the_status_of_rank_zero_is_passed_on(
    launched: Callable[..., Launched], status: int
) -> None:
    run = launched(f"status-{status}")
    assert run.wait() == status
    assert f"Stopped with status {status}: as told" in run.output
    assert "Traceback" not in run.output and "ChildFailedError" not in run.output


def test_a_failed_rank_is_a_fault_in_one_line(launched: Callable[..., Launched]) -> None:
    run = launched("crash", ranks=2)
    assert run.wait() == 1
    assert not marked(run.instance)
    assert "torchrun: rank 1" in run.output and "ended with status 1" in run.output
    assert run.output.count("Traceback") == 1  # the rank's own; nothing of torchrun's
    assert "ChildFailedError" not in run.output


def test_ranks_that_hang_after_rank_zero_are_ended(launched: Callable[..., Launched]) -> None:
    run = launched("linger", ranks=2)
    run.wait_ready(2)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0, run.output
    assert not marked(run.instance)
    assert "other ranks hang" in run.output


def test_the_start_after_a_killed_launcher_cleans_up(launched: Callable[..., Launched]) -> None:
    first = launched("stray")
    first.wait_ready()
    instance = first.instance
    first.process.kill()
    first.wait()
    wait_for(lambda: (first.folder / "saved").exists(), "the rank's own stop", 20)
    assert marked(instance)  # the stray has nobody left that knows it
    (first.folder / "ready-0").unlink()
    (first.folder / "stop").unlink()
    second = launched("run")
    second.wait_ready()
    assert not marked(instance)
    assert "an earlier miner of this run folder left behind" in second.output
    second.process.send_signal(signal.SIGTERM)
    assert second.wait() == 0


def test_two_miners_do_not_share_a_folder(launched: Callable[..., Launched]) -> None:
    first = launched("run")
    first.wait_ready()
    second = launched("run")
    assert second.wait() == 2
    assert "is running in" in second.output and f"pid {first.process.pid}" in second.output
    assert first.process.poll() is None
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 0


def test_bad_input_is_one_line_and_starts_nothing(launched: Callable[..., Launched]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = launched("run", flags=("--axon.port", str(port)))
        assert run.wait() == 2
    (line,) = [text for text in run.output.splitlines() if text.startswith("error:")]
    assert f"port {port} (--axon.port) is in use" in line
    assert not (run.folder / "instance.json").exists()
    bad = launched("run", name="other", flags=("--neuron.upload_stepz", "5"))
    assert bad.wait() == 2 and "Traceback" not in bad.output
    assert "did you mean --neuron.upload_steps?" in bad.output
    assert not bad.folder.exists()
