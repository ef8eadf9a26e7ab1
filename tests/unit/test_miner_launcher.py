"""Test when a launcher gives up and when it tries again, with a simulated clock and ranks."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_training import status_command
from distributed_training.chain.identity import create_wallet
from distributed_training.common.files import read_json_object, write_json
from distributed_training.common.processes import ProcessId
from distributed_training.health import machine
from distributed_training.miner import launcher
from distributed_training.miner.__main__ import main as launch
from distributed_training.miner.run_folder import remembered_gpus
from distributed_training.protocol.types import ExitStatus
from distributed_training.telemetry.run_state import LauncherFile, observe, read_launcher
from distributed_training.telemetry.verdict import Verdict, judge
from tests.tools.r2_keys import KEYS
from tests.tools.settings import load_config

pytestmark = pytest.mark.timeout(60)
FAULT, REFUSED, STOPPED = ExitStatus.FAULT, ExitStatus.BAD_CONFIGURATION, ExitStatus.STOPPED
OUTSIDE = "refused by something outside"
UNWRITTEN = "ended well, and the disk has no room for the file that says so"
HALF = "a rank could not be forked, those before it run"
LONG = launcher.STEADY.total_seconds() + 5


class Played:
    """Simulate the ranks and the clock.

    ``left``: for each start to come, after how many seconds the ranks end, and with which status.
    """

    def __init__(self) -> None:
        self.left: list[tuple[float, ExitStatus | str]] = []
        self.now = 0.0
        self.half = False

    def group(self, *, world_size: int, stacks: Path, **_: object) -> Any:
        played, ends = self, 0.0

        class Group:
            def __init__(self) -> None:
                self.world_size = world_size
                self.endings: list[str] = []
                self.pids = [os.getpid()]

            def start(self) -> None:
                nonlocal ends
                assert not played.half, "two sets of ranks would run at once"
                seconds, status = played.left[0]
                ends = played.now + seconds
                if status == HALF:
                    played.left.pop(0)
                    played.half = True
                    raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

            @property
            def running(self) -> list[int]:
                _, status = played.left[0]
                if played.now < ends:
                    return list(range(world_size))
                played.left.pop(0)
                if status == UNWRITTEN:
                    return []
                told: dict[str, Any] = {"status": status, "reason": "as told"}
                if status == OUTSIDE:
                    told = {"status": FAULT, "reason": "the bucket answers 403", "outside": True}
                told["pid"] = os.getpid()
                write_json(stacks.with_name("exit_status.json"), told)
                return []

            def wait(self, timeout: timedelta) -> None:
                played.now += 1.0

            def signal(self, number: int, to: object = None) -> None:
                pass

            def end(self, **_: object) -> list[str]:
                played.half = False
                return []

        return Group()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    clock = SimpleNamespace(monotonic=lambda: played.now, sleep=time.sleep)
    monkeypatch.setattr(launcher, "time", clock)
    monkeypatch.setattr(launcher, "RankGroup", played.group)
    # Keep pytest's own log handlers.
    monkeypatch.setattr(launcher, "start_log", lambda *_, **named: None)
    for name in ("FIRST_WAIT", "LONGEST_WAIT", "LONGEST_PAUSE"):
        monkeypatch.setattr(launcher, name, timedelta(milliseconds=1))
    return played


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    create_wallet(tmp_path / "wallets", "default")
    flags = {
        "network": "local",
        "wallet.path": str(tmp_path / "wallets"),
        "neuron.run_folder": str(tmp_path / "run"),
        "neuron.page_port": "off",
        "neuron.device": "cpu",
        "dht.port": "0",
    }
    return [word for name, value in flags.items() for word in (f"--{name}", value)]


def run_folder(argv: list[str]) -> Path:
    return load_config("miner", argv).run_folder


@pytest.mark.parametrize(
    ("words", "toml", "env", "place"),
    [
        (["--neuron.run-folder=fast/run"], 'run_folder = "other"', {}, "fast/run"),
        ([], "neuron.run_folder = 'fast/run'\ndht.prot = 7", {}, "fast/run"),
        ([], "neuron.run_folder = 'fast/run'\n[oops", {}, "fast/run"),
        ([], "[neuron]\nname = \nrun_folder = 'fast/run'", {}, "fast/run"),
        ([], "", {"DT_RUN_FOLDER": "fast/run"}, "fast/run"),
        (["--neuron.name", "one"], "", {"BT_WALLET_HOTKEY": "hot"}, "runs/one-hot"),
        ([], "", {}, "runs/miner-default"),
    ],
)
def test_a_first_start_that_is_refused_is_recorded_where_it_would_have_run(
    words: list[str],
    toml: str,
    env: dict[str, str],
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Other run folders exist too; the settings decide, even if some of them are wrong."""
    monkeypatch.chdir(tmp_path)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "miner.toml").write_text(toml)
    for other in ("runs/a", "runs/b"):
        Path(other).mkdir(parents=True)
        LauncherFile(Path(other)).stopped("signal SIGINT")
    assert launch([*words, "--neuron.nproc_per_node", "many"]) == 2
    found = judge(observe(Path(place), time.time()), time.time())
    assert found.verdict is Verdict.CANNOT_START and found.bad, found
    assert found.cause in capsys.readouterr().err and found.remedy.endswith("app.config.js")
    assert judge(observe(Path("runs/a"), time.time()), time.time()).verdict is Verdict.STOPPED
    assert status_command.main([place]) == 1


def test_nothing_is_made_where_no_miner_was_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch(["--neuron.nproc_per_node", "many"]) == 2
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("before", [[], [(LONG, FAULT)]], ids=["first start", "after a run"])
def test_refusal_from_outside_is_tried_again_until_it_works(
    argv: list[str],
    ranks: Played,
    before: list[tuple[float, ExitStatus | str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A wrong R2 key may be corrected after a day: RESTARTS does not limit such attempts."""
    ranks.left = [*before, *[(0, OUTSIDE)] * 20, (0, STOPPED)]
    assert launch(argv) == STOPPED and not ranks.left
    lines = [r.getMessage() for r in caplog.records if "403" in r.getMessage()]
    assert len(lines) == 20, "one line for each try"
    full = [i for i, text in enumerate(lines, 1) if text.startswith("Cannot train: the bucket")]
    assert full == [1, 2, 4, 8, 16] and lines[15].endswith("(attempt 17)")
    assert lines[-1] == "Cannot train, still: the bucket answers 403 (attempt 21)"
    assert "ERROR" not in caplog.text
    counted = (run_folder(argv) / launcher.METRICS_FILE).read_text()
    assert "dt_starts_refused_in_a_row 20.0" in counted


def pauses(monkeypatch: pytest.MonkeyPatch, pause: Callable[[float], object]) -> None:
    """Let this thread's waits with a time limit end at once; ``pause`` gets the time limit."""
    real, ours = threading.Event.wait, threading.current_thread()

    def wait(event: threading.Event, seconds: float | None = None) -> bool:
        # For example a thread of another test.
        if seconds is None or threading.current_thread() is not ours:
            return real(event, seconds)
        pause(seconds)
        return event.is_set()

    monkeypatch.setattr(threading.Event, "wait", wait)


def test_pauses_grow_up_to_minutes_and_begin_short_after_a_long_run(
    argv: list[str], ranks: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "FIRST_WAIT", timedelta(seconds=1))
    monkeypatch.setattr(launcher, "LONGEST_PAUSE", timedelta(minutes=5))
    waits: list[float] = []

    pauses(monkeypatch, waits.append)
    ranks.left = [*[(0, OUTSIDE)] * 12, (LONG, OUTSIDE), (0, STOPPED)]
    assert launch(argv) == STOPPED
    assert waits[0] <= 1.0 and 150 <= waits[11] <= 300 and max(waits) <= 300
    assert waits[12] <= 1.0, "the ranks had run for long"


def test_ranks_that_fail_by_themselves_are_given_up_after_six_times(
    argv: list[str], ranks: Played, caplog: pytest.LogCaptureFixture
) -> None:
    ranks.left = [(LONG, FAULT), *[(0, HALF), (0, FAULT)] * 2, (0, HALF), (0, STOPPED)]
    assert launch(argv) == FAULT and ranks.left == [(0, STOPPED)]
    (error,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "failed 6 times in a row: giving up" in error.getMessage()


def test_another_version_of_the_file_starts_the_ranks_again_at_once(
    argv: list[str], ranks: Played, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    again = ExitStatus.AGAIN
    ranks.left = [(30, again), (LONG, again), (0, STOPPED)]
    assert launch(argv) == STOPPED and not ranks.left
    assert "Stopped with status 5: as told" in caplog.text and "Starting the" not in caplog.text
    launch_file = read_launcher(run_folder(argv))
    assert launch_file is not None and launch_file.restarts == 0
    # A start that cannot adopt the version must not loop without end.
    ranks.left = [(0, again)] * (3 + launcher.RESTARTS)
    assert launch(argv) == FAULT and len(ranks.left) == 1
    assert "giving up" in caplog.text


def followed_by_a_stop(supervisor: Any, follow: Any = launcher._Supervisor._follow) -> Any:
    found = follow(supervisor)
    os.kill(os.getpid(), signal.SIGTERM)
    assert supervisor._signals.stop.wait(20)
    return found


@pytest.mark.parametrize(
    ("end", "waits"), [(ExitStatus.AGAIN, False), (FAULT, False), (FAULT, True)]
)
def test_a_stop_between_ranks_that_ended_and_their_next_start_is_a_stop(
    end: ExitStatus, waits: bool, argv: list[str], ranks: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(backoff: object) -> timedelta:
        os.kill(os.getpid(), signal.SIGTERM)
        return timedelta(hours=1)

    if waits:
        monkeypatch.setattr(launcher.Backoff, "failed", failed)
    else:
        monkeypatch.setattr(launcher._Supervisor, "_follow", followed_by_a_stop)
    ranks.left = [(0, end), (0, FAULT)]
    assert launch(argv) == STOPPED and ranks.left == [(0, FAULT)]


def test_a_stop_on_a_full_disk_is_no_failure(
    argv: list[str],
    ranks: Played,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rank 0 received the stop and ended in order, but could not write its exit status."""
    monkeypatch.setattr(launcher, "listening_ranks", lambda *_: {0: ProcessId.of(os.getpid())})
    steady = launcher._Supervisor._steady

    def steadily(supervisor: Any, began: float) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return steady(supervisor, began)

    monkeypatch.setattr(launcher._Supervisor, "_steady", steadily)
    ranks.left = [(3, UNWRITTEN)]
    assert launch(argv) == STOPPED and not ranks.left
    assert "counts as failed" not in caplog.text


def test_a_file_that_cannot_be_read_is_no_line_a_look(
    argv: list[str], ranks: Played, caplog: pytest.LogCaptureFixture
) -> None:
    """A network disk may be away for hours, and the launcher checks it five times a second."""
    (run_folder(argv) / "checkpoints" / "last.json").mkdir(parents=True)
    ranks.left = [(LONG, STOPPED)]
    assert launch(argv) == STOPPED
    assert 0 < caplog.text.count("last.json cannot be read") < 5


def port_in_use(*_: object, **__: object) -> list[machine.Check]:
    return [machine.Check("port", "fail", "port 8091 is in use", "stop what listens")]


def lost_disk(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


# As on Lustre mounted without flock, or NFS without its lock service.
def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize(
    ("where", "name", "refuses", "line"),
    [
        (launcher, "start_checks", port_in_use, "port 8091 is in use: stop what listens"),
        (launcher, "write_instance", lost_disk, "Input/output error"),
        (fcntl, "flock", no_locks, "Lustre: -o flock"),
    ],
)
def test_a_machine_that_refuses_is_tried_again(
    argv: list[str],
    ranks: Played,
    where: Any,
    name: str,
    refuses: Callable[..., Any],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    right, looks = getattr(where, name), 0

    def look(*arguments: Any, **named: Any) -> Any:
        nonlocal looks
        # Do not count the shared lock, by which each attempt first checks the launcher's file.
        looks += fcntl.LOCK_SH | fcntl.LOCK_NB not in arguments
        return (refuses if looks <= 8 else right)(*arguments, **named)

    monkeypatch.setattr(where, name, look)
    ranks.left = [(0, STOPPED)]
    assert launch(argv) == STOPPED and not ranks.left
    tries = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Cannot train")]
    whole = [i for i, text in enumerate(tries, 1) if line in text and "Trying again" in text]
    assert len(tries) == 8 and whole == [1, 2, 4, 8]
    assert [int(re.findall(r"attempt (\d+)", text)[0]) for text in tries] == list(range(2, 10))


def test_the_number_of_gpus_is_remembered_while_the_driver_is_away(
    argv: list[str], ranks: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv[argv.index("cpu")] = "auto"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(launcher, "start_checks", lambda *_, **named: [])
    started: list[int] = []
    played = ranks.group

    def group(*, world_size: int, **named: Any) -> Any:
        started.append(world_size)
        return played(world_size=world_size, **named)

    monkeypatch.setattr(launcher, "RankGroup", group)

    def ranks_with(visible: int, *more: str) -> int:
        monkeypatch.setattr(launcher, "visible_gpu_count", lambda: visible)
        ranks.left = [(0, STOPPED)]
        assert launch([*argv, *more]) == STOPPED
        return started[-1]

    assert ranks_with(0) == 1
    assert ranks_with(8) == 8
    assert ranks_with(0) == 8
    assert remembered_gpus(run_folder(argv)) == 8, "for the ranks, which refuse the CPU then"
    assert ranks_with(0, "--neuron.device", "cpu") == 1
    assert ranks_with(0) == 8, "a run while the driver is away forgets nothing"
    with monkeypatch.context() as hidden:
        hidden.setenv("CUDA_VISIBLE_DEVICES", "")
        assert remembered_gpus(run_folder(argv)) == 0, "as the operator wants it"
    assert ranks_with(7) == 7, "one has died: the others train"
    file = run_folder(argv) / "instance.json"
    assert (read_json_object(file) or {})["gpus"] == 7
    for damaged in ("", "[]", '{"gpus": "x"}', '{"gpus": true}', '{"gpus": -1}'):
        file.write_text(damaged)
        assert remembered_gpus(run_folder(argv)) == 0
