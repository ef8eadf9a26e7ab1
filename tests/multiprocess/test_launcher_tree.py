"""The launcher with real processes; only the ranks' work and its imports are left out."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from distributed_training.common.ports import free_ports
from distributed_training.common.processes import Mark, command_of
from distributed_training.miner import rank_group
from distributed_training.miner.rank_group import RankGroup
from distributed_training.miner.run_folder import listening_ranks, mark_of
from distributed_training.node.start import StopSignals
from distributed_training.telemetry.facts import Launch
from distributed_training.telemetry.run_state import read_launcher
from tests.tools.forked import Program
from tests.tools.miner_parts import config_of
from tests.tools.r2_keys import KEYS
from tests.tools.settings import LOCAL
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(150)

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "tests" / "tools" / "launcher_of_fakes.py"
COMMON = ["--network", "local", *LOCAL, "--dht.port", "0"]


class Launched:
    def __init__(
        self,
        folder: Path,
        mode: str,
        *,
        ranks: int = 1,
        restarts: int = 0,
        flags: tuple[str, ...] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        hotkey = folder.with_suffix(".wallets") / "default" / "hotkeys" / "default"
        hotkey.parent.mkdir(parents=True, exist_ok=True)
        hotkey.touch()  # the fake rank reads none; the launcher wants one to be there
        wallets = {"BT_WALLET_PATH": str(hotkey.parents[2])}
        self.log = folder.with_suffix(".log")
        self.log.touch()
        self._hour = folder.with_suffix(".hour")
        where = ["--neuron.run_folder", str(folder), "--nproc_per_node", str(ranks)]
        arguments = [*COMMON, *where, *flags]
        self.process = Program(
            LAUNCH,
            *arguments,
            environ={
                **KEYS,
                **wallets,
                "FAKE_MODE": mode,
                "FAKE_RESTARTS": str(restarts),
                "FAKE_HOUR": str(self._hour),
                **(environ or {}),
            },
            log=self.log,
            folder=ROOT,
        )

    def send(self, number: signal.Signals) -> None:
        assert self.process.poll() is None, self.output
        os.kill(self.process.pid, number)

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def mark(self) -> Mark:
        found = mark_of(self.folder)
        assert found is not None, self.output
        return found

    @property
    def listening(self) -> dict[int, int]:
        return listening_ranks(self.folder, instance=self.mark.value)

    @property
    def shown(self) -> Launch:
        found = read_launcher(self.folder)
        assert found is not None
        return found

    def wait_ready(self, ranks: int = 1) -> None:
        wait_for(
            lambda: (
                all((self.folder / f"ready-{r}").exists() for r in range(ranks))
                or self.process.poll() is not None
            ),
            "the ranks",
        )
        assert self.process.poll() is None, self.output

    def wait(self, seconds: float = 80) -> int:
        return self.process.wait(seconds)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask for a stop as an operator does, which ends it well and leaves no process."""
        mark = self.mark  # of the one that takes the folder over there is another afterwards
        self.send(number)
        assert self.wait() == 0, self.output
        assert not mark.processes()

    def pass_an_hour(self) -> None:
        """For the watchdog: ranks that came to no boundary in it hang, whatever the machine's pace.

        Returns when it has passed.
        """
        self._hour.touch()
        wait_for(lambda: not self._hour.exists(), "the watchdog's next look")


@pytest.fixture(name="launched")
def launch_fakes(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    running: list[Launched] = []

    def start(mode: str, name: str = "run", **options: object) -> Launched:
        running.append(Launched(tmp_path / name, mode, **options))  # type: ignore[arg-type]
        return running[-1]

    yield start
    for one in running:
        one.process.kill()
        if mark := mark_of(one.folder):
            mark.end(settle=timedelta(0), grace=timedelta(0))


def test_a_stop_reaches_rank_zero_and_ends_all_ranks(launched: Callable[..., Launched]) -> None:
    run = launched("run", ranks=2)
    run.wait_ready(2)
    secret = KEYS["R2_WRITE_SECRET_ACCESS_KEY"]
    wait_for(lambda: (run.folder / "ready-0").read_text() == secret, "rank 0 has the keys")
    for process in run.mark.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended since it was listed
            assert secret not in process.environ().values(), process.cmdline()
    run.stop(signal.SIGINT)
    assert (run.folder / "saved").exists()
    assert "SIGINT received: stopping" in run.output and "Traceback" not in run.output
    assert run.shown.state == "stopped" and run.shown.stopped_by == "signal SIGINT"


def test_a_stuck_rank_is_ended_and_strays_are_reaped(launched: Callable[..., Launched]) -> None:
    run = launched("stuck", flags=("--neuron.stop_timeout", "1"))
    run.wait_ready()
    run.send(signal.SIGTERM)
    assert run.wait() == 1
    assert not run.mark.processes()
    assert "ending the ranks by force" in run.output
    assert "Rank 0 was ended before it had saved" in run.output
    assert "counts as failed" not in run.output


def test_a_checkpoint_that_takes_longer_than_a_stop_may_is_said(
    launched: Callable[..., Launched],
) -> None:
    run = launched("run")
    run.wait_ready()
    last = run.folder / "checkpoints" / "last.json"
    last.parent.mkdir(exist_ok=True)
    last.write_text('{"seconds": 94.0}')
    run.stop()
    assert "SIGTERM received: stopping (at most 208 s)" in run.output
    again = launched("run")
    line = "and 235 s to systemd (TimeoutStopSec)"
    wait_for(lambda: line in again.output, "the warning")
    again.stop()


def test_a_stray_with_a_session_of_its_own_is_reaped(launched: Callable[..., Launched]) -> None:
    run = launched("stray")
    run.wait_ready()
    assert len(run.mark.processes()) >= 3  # the server, the rank, the stray
    run.stop(signal.SIGHUP)
    assert "left behind" in run.output


def test_a_failed_rank_is_a_fault_in_one_line(launched: Callable[..., Launched]) -> None:
    """One that stays is left to pm2."""
    run = launched("crash", ranks=2, restarts=1)
    assert run.wait() == 1
    assert not run.mark.processes()
    assert "Rank 1 (pid" in run.output and "ended with status 1" in run.output
    assert run.output.count("Traceback") == 2  # the rank's own, of both starts
    assert "The ranks failed 2 times in a row: giving up" in run.output


def test_ranks_that_hang_after_rank_zero_are_ended(launched: Callable[..., Launched]) -> None:
    run = launched("linger", ranks=2)
    run.wait_ready(2)
    run.stop()
    assert "other ranks hang" in run.output


def test_rank_zero_may_need_longer_than_the_others_to_close(
    launched: Callable[..., Launched],
) -> None:
    run = launched("slow-close", ranks=2)
    assert run.wait() == 3, run.output
    assert "Stopped with status 3: as told" in run.output
    assert "Rank 0 (pid" not in run.output  # its own line says why
    assert "ending them" not in run.output


def test_the_start_after_a_killed_launcher_cleans_up(launched: Callable[..., Launched]) -> None:
    first = launched("stray")
    first.wait_ready()
    mark = first.mark
    first.process.kill()
    wait_for(lambda: (first.folder / "saved").exists(), "the rank's own stop")
    assert mark.processes()  # the stray has nobody left that knows it
    (first.folder / "ready-0").unlink()
    second = launched("run")
    second.wait_ready()
    assert not mark.processes()
    assert "an earlier miner of this run folder left behind" in second.output
    assert f"pid {first.process.pid}) was killed" in second.shown.last_crash.text
    second.stop()


# One rank: it obeys its server's end and stops well, so that no other tells of it.
@pytest.mark.parametrize(("victim", "ranks"), [("a rank", 2), ("the server", 1)])
def test_killed_process_starts_again_under_the_same_launcher(
    launched: Callable[..., Launched], victim: str, ranks: int
) -> None:
    run = launched("run", ranks=ranks, restarts=2)
    run.wait_ready(ranks)
    last = psutil.Process(run.listening[ranks - 1])
    server = last.parent()
    assert server is not None and server in run.mark.processes()
    before = run.listening
    (last if victim == "a rank" else server).kill()
    new = wait_for(
        lambda: len(now := run.listening) == ranks and now != before and now, "new ranks"
    )
    again = psutil.Process(new[ranks - 1]).parent()
    assert (again == server) == (victim == "a rank")
    killed = "was killed by SIGKILL and left no exit status. Likely out of memory: dmesg -T"
    assert (killed if victim == "a rank" else "forked from ended") in run.output
    assert "| ERROR |" not in run.output, "the miner continues"
    assert "Starting the ranks again" in run.output and "(1 of 2)" in run.output
    crash = "was killed by SIGKILL" if victim == "a rank" else "was told to stop"
    assert run.shown.restarts == 1 and crash in run.shown.last_crash.text
    run.stop()


def test_ranks_that_hang_start_again_after_their_stacks_were_written(
    launched: Callable[..., Launched],
) -> None:
    run = launched("stray", ranks=2, restarts=1, flags=("--neuron.hang_timeout", "600"))
    run.wait_ready(2)
    before, beats = run.listening, run.folder / "pids"
    wait_for(lambda: len(list(beats.glob("*.beat"))) == 2, "the first boundary")
    os.kill(before[1], signal.SIGSTOP)
    run.pass_an_hour()
    wait_for(lambda: len(now := run.listening) == 2 and now != before, "new ranks")
    assert "The ranks hang" in run.output and "Starting the ranks again" in run.output
    stacks = (run.folder / "stacks.txt").read_text()
    for rank, pid in before.items():
        _, _, told = stacks.partition(f"=== {pid} (")
        assert "launcher_fake_rank.py" in told.partition("===")[0], stacks
        assert told.startswith("stopped") == (rank == 1)
    assert not [p for p in run.mark.processes() if p.pid in before.values()]
    run.stop()


@pytest.mark.long
def test_a_server_that_forks_no_ranks_is_replaced(launched: Callable[..., Launched]) -> None:
    run = launched("run", restarts=5, flags=("--neuron.hang_timeout", "4"))
    run.wait_ready()

    def stop_server() -> None:
        (rank,) = map(psutil.Process, run.listening.values())
        server = rank.parent()
        assert server is not None
        server.suspend()
        rank.kill()

    before = run.listening
    stop_server()
    wait_for(lambda: run.listening and run.listening != before, "a new rank", 60)
    assert "The fork server hangs" in run.output
    stop_server()
    wait_for(lambda: run.output.count("cannot be started") == 2, "the wait after it", 60)
    run.stop()
    assert "Traceback" not in run.output


def test_a_killed_resource_tracker_is_logged_and_replaced(
    launched: Callable[..., Launched],
) -> None:
    run = launched("run")
    run.wait_ready()

    def trackers() -> list[psutil.Process]:
        children = psutil.Process(run.process.pid).children()
        # Not p.cmdline(): one that was killed, or that execve replaces, has none for a moment.
        return [p for p in children if "resource_tracker" in command_of(p)]

    (first,) = trackers()
    assert KEYS["R2_WRITE_SECRET_ACCESS_KEY"] not in first.environ().values()
    first.kill()
    wait_for(lambda: "The resource tracker ended" in run.output, "the line")
    wait_for(lambda: [p for p in trackers() if p.pid != first.pid], "the next one")
    assert run.output.count("| WARNING |") == 1 and "UserWarning" not in run.output
    run.stop()


def test_a_stop_while_the_server_imports(launched: Callable[..., Launched]) -> None:
    run = launched("slow", ranks=2)
    wait_for(lambda: "Starting 2 ranks" in run.output, "the launcher")
    wait_for(lambda: bool(run.mark.processes()), "the server")
    run.stop(signal.SIGINT)  # long before the import ends (slow_import.py)
    assert "Traceback" not in run.output


def test_a_rank_that_ends_before_the_first_look_is_logged_with_its_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """psutil knows no process of that pid any more; the launcher said so in a traceback."""
    ended = subprocess.Popen(["false"])
    assert ended.wait(10) == 1
    rank = SimpleNamespace(pid=ended.pid, exitcode=1, start=lambda: None)
    group = RankGroup(
        config=config_of(), world_size=1, mark=Mark("X", "x"), stacks=tmp_path / "stacks"
    )
    monkeypatch.setattr(group, "_context", SimpleNamespace(Process=lambda **_: rank))
    monkeypatch.setattr(rank_group.forkserver, "ensure_running", lambda: None)
    monkeypatch.setattr(group, "_scratch", str(tmp_path))
    group.start()
    assert group.running == []
    assert group.endings == [f"rank 0 (pid {ended.pid}) ended with status 1"]
    group.signal(signal.SIGTERM)  # nobody is there


def test_a_stop_while_the_server_is_spawned_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The server is to inherit that it is deaf to Ctrl-C; the launcher must not be, meanwhile."""
    group = RankGroup(
        config=config_of(),
        world_size=1,
        mark=Mark("X", "x"),
        stacks=tmp_path / "stacks",
    )
    deaf: list[set[signal.Signals]] = []

    def spawn() -> None:
        deaf.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        os.kill(os.getpid(), signal.SIGINT)
        raise EOFError

    monkeypatch.setattr(rank_group.forkserver, "ensure_running", spawn)
    monkeypatch.setattr(group, "_scratch", str(tmp_path))
    with StopSignals() as signals:
        with pytest.raises(EOFError):
            group.start()
        assert signals.stop.wait(30) and signals.name == "SIGINT"
    assert {signal.SIGINT, signal.SIGHUP} <= deaf[0]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGINT, signal.SIGHUP}


def test_two_miners_do_not_share_a_folder(launched: Callable[..., Launched]) -> None:
    first = launched("run")
    first.wait_ready()
    before = first.listening
    second = launched("run")
    wait_for(lambda: "Cannot train: a miner" in second.output, "the second one's line")
    assert "is running in" in second.output and f"pid {first.process.pid}" in second.output
    assert first.process.poll() is None and first.listening == before
    assert first.shown.pid == first.process.pid and first.shown.state == "starting"
    (first.folder / "ready-0").unlink()
    first.stop()
    second.wait_ready()  # it continues by itself
    second.stop()


def test_a_port_in_use_is_waited_for(launched: Callable[..., Launched]) -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        run = launched("run", flags=("--dht.port", str(port)))
        wait_for(lambda: "(attempt 3)" in run.output, "two tries")
        assert f"Cannot train: port {port} (--dht.port) is in use" in run.output
        assert not run.mark.processes()
        assert run.shown.state == "refused" and f"port {port}" in run.shown.text
    run.wait_ready()
    run.stop()
