"""Test the launcher with real processes, whose ranks train nothing.

The first part kills each process at each moment and checks what must hold. Other files do so with
training: ``tests/promises`` (a member's ranks at each moment of a round and of a write),
``tests/end_to_end/test_kills.py`` (every kind of process in a whole network) and ``test_nodes.py``
(a machine).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from distributed_training.common.processes import command_of
from distributed_training.miner.run_folder import listening_ranks
from distributed_training.telemetry.facts import Launch
from distributed_training.telemetry.run_state import read_launcher
from tests.tools.forked import Program
from tests.tools.r2_keys import KEYS
from tests.tools.settings import LOCAL
from tests.tools.tree import Tree
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(150)

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "tests" / "tools" / "launcher_of_fakes.py"
COMMON = ["--network", "local", *LOCAL, "--dht.port", "0"]
Start = Callable[..., "Launched"]


class Launched:
    def __init__(
        self,
        folder: Path,
        mode: str,
        *,
        ranks: int = 1,
        restarts: int = 0,
        imports: bool = False,
        flags: tuple[str, ...] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        hotkey = folder.with_suffix(".wallets") / "default" / "hotkeys" / "default"
        hotkey.parent.mkdir(parents=True, exist_ok=True)
        hotkey.touch()  # the launcher requires a hotkey, which the fake rank does not read
        wallets = {"BT_WALLET_PATH": str(hotkey.parents[2])}
        self.log = folder.with_suffix(".log")
        self.log.touch()
        self._hour = folder.with_suffix(".hour")
        self.importing = folder.with_suffix(".importing")
        # The processes that it starts; it is itself a fork with another environment.
        self.tree = Tree()
        if imports:
            self.importing.touch()
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
                "FAKE_IMPORTING": str(self.importing),
                **self.tree.environment,
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
    def listening(self) -> dict[int, int]:
        return {rank: each.pid for rank, each in listening_ranks(self.folder).items()}

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
        """Request a stop as an operator does; assert status 0, and that no process is left."""
        self.send(number)
        assert self.wait() == 0, self.output
        assert not self.tree.processes()

    def pass_an_hour(self) -> None:
        """Let an hour pass for the watchdog, so that ranks without a boundary count as hung."""
        self._hour.touch()
        wait_for(lambda: not self._hour.exists(), "the watchdog's next look")


@pytest.fixture(name="launched")
def launch_fakes(tmp_path: Path) -> Iterator[Start]:
    running: list[Launched] = []

    def start(mode: str, name: str = "run", **options: object) -> Launched:
        running.append(Launched(tmp_path / name, mode, **options))  # type: ignore[arg-type]
        return running[-1]

    yield start
    for one in running:
        one.process.kill()
        one.tree.end()


# --- who is killed, when, and what must hold ------------------------------------------------------


def importing(run: Launched, ranks: int) -> list[psutil.Process]:
    """Return the ranks once each of them is importing."""
    marks = [run.importing.with_name(f"{run.importing.name}-{rank}") for rank in range(ranks)]
    wait_for(lambda: all(mark.exists() for mark in marks), "the imports")
    for mark in marks:
        mark.unlink()
    found = [p for p in run.tree.processes() if "rank_group" in command_of(p)]
    assert len(found) == ranks
    return sorted(found, key=lambda process: process.pid)


@pytest.mark.parametrize(
    ("victim", "moment"), [(0, "training"), (1, "training"), (0, "importing"), (1, "importing")]
)
def test_a_killed_rank_ends_all_and_all_start_again(
    launched: Start, victim: int, moment: str
) -> None:
    run = launched("stray", ranks=2, restarts=2, imports=moment == "importing")
    if moment == "importing":
        ranks = importing(run, 2)
        run.importing.unlink()
    else:
        run.wait_ready(2)
        ranks = [psutil.Process(run.listening[rank]) for rank in range(2)]
    old = [*ranks, *(child for rank in ranks for child in rank.children(recursive=True))]
    ranks[victim].kill()
    wait_for(
        lambda: len(now := run.listening) == 2 and not {p.pid for p in old} & {*now.values()},
        "new ranks",
    )
    assert not [process for process in old if process in run.tree.processes()], "two of them ran"
    line = f"Rank {victim} (pid {ranks[victim].pid}) was killed by SIGKILL and left no exit status"
    assert f"{line}. Likely out of memory: dmesg -T" in run.output
    assert "Starting the ranks again" in run.output and "(1 of 2)" in run.output
    assert "| ERROR |" not in run.output, "the miner continues"
    assert run.shown.restarts == 1 and "was killed by SIGKILL" in run.shown.last_crash.text
    run.stop()


@pytest.mark.parametrize("moment", ["importing", "training", "stopping"])
def test_nothing_outlives_a_killed_launcher_and_its_ranks_save(
    launched: Start, moment: str
) -> None:
    first = launched("slow-save" if moment == "stopping" else "stray", ranks=2,
                     imports=moment == "importing")  # fmt: skip
    if moment == "importing":
        importing(first, 2)
    else:
        first.wait_ready(2)
    if moment == "stopping":
        first.send(signal.SIGTERM)
        wait_for(lambda: "SIGTERM received" in first.output, "the stop")
    first.process.kill()
    if moment == "stopping":
        (first.folder / "save").touch()
    if moment != "importing":
        wait_for(lambda: (first.folder / "saved").exists(), "the ranks' own stop")
    wait_for(
        lambda: not [p for p in first.tree.processes() if "rank_group" in command_of(p)],
        "the end of the ranks",
    )
    for file in (first.importing, first.folder / "ready-0"):
        file.unlink(missing_ok=True)
    second = launched("run")
    second.wait_ready()
    assert f"pid {first.process.pid}) was killed" in second.shown.last_crash.text
    second.stop()
    assert not first.tree.processes(), "a program that knows nothing of us is the next start's"


def test_the_start_after_a_killed_launcher_ends_ranks_that_hang(launched: Start) -> None:
    first = launched("stray", ranks=2, flags=("--neuron.stop_timeout", "1"))
    first.wait_ready(2)
    os.kill(first.listening[1], signal.SIGSTOP)
    first.process.kill()
    second = launched("run", flags=("--neuron.stop_timeout", "1"))
    wait_for(lambda: "an earlier miner of this run folder left behind" in second.output, "a line")
    wait_for(lambda: not first.tree.processes(), "their end, with what they started")
    (first.folder / "ready-0").unlink()
    second.wait_ready()
    second.stop()


def test_ranks_that_hang_start_again_after_their_stacks_were_written(launched: Start) -> None:
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
    assert not [p for p in run.tree.processes() if p.pid in before.values()]
    run.stop()


def test_a_rank_that_is_killed_in_a_stop_has_not_saved(launched: Start) -> None:
    run = launched("slow-save", ranks=2)
    run.wait_ready(2)
    run.send(signal.SIGTERM)
    wait_for(lambda: "SIGTERM received" in run.output, "the stop")
    os.kill(run.listening[0], signal.SIGKILL)
    assert run.wait() == 1
    assert "Rank 0 was ended before it had saved" in run.output and not run.tree.processes()


# --- how a start ends -----------------------------------------------------------------------------


def test_a_stop_reaches_rank_zero_and_ends_all_ranks(launched: Start) -> None:
    run = launched("stray", ranks=2)
    run.wait_ready(2)
    secret = KEYS["R2_WRITE_SECRET_ACCESS_KEY"]
    wait_for(lambda: (run.folder / "ready-0").read_text() == secret, "rank 0 has the keys")
    for process in run.tree.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since it was listed
            assert secret not in process.environ().values(), process.cmdline()
            assert secret not in " ".join(process.cmdline())
    run.stop(signal.SIGINT)
    assert (run.folder / "saved").exists() and "left behind" in run.output
    assert "SIGINT received: stopping" in run.output and "Traceback" not in run.output
    assert run.shown.state == "stopped" and run.shown.stopped_by == "signal SIGINT"


def test_a_stop_while_the_ranks_import(launched: Start) -> None:
    run = launched("run", ranks=2, imports=True)
    importing(run, 2)
    run.stop(signal.SIGINT)
    assert "Traceback" not in run.output


def test_a_stuck_rank_is_ended(launched: Start) -> None:
    run = launched("stuck", flags=("--neuron.stop_timeout", "1"))
    run.wait_ready()
    run.send(signal.SIGTERM)
    assert run.wait() == 1
    assert not run.tree.processes()
    assert "ending the ranks by force" in run.output
    assert "Rank 0 was ended before it had saved" in run.output
    assert "counts as failed" not in run.output


def test_ranks_that_hang_after_rank_zero_are_ended(launched: Start) -> None:
    run = launched("linger", ranks=2)
    run.wait_ready(2)
    run.stop()
    assert "other ranks hang" in run.output


def test_rank_zero_may_need_longer_than_the_others_to_close(
    launched: Start,
) -> None:
    run = launched("slow-close", ranks=2)
    assert run.wait() == 3, run.output
    assert "Stopped with status 3: as told" in run.output
    assert "Rank 0 (pid" not in run.output  # the line that rank 0 wrote gives the reason
    assert "ending them" not in run.output


def test_two_miners_do_not_share_a_folder(launched: Start) -> None:
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
    second.wait_ready()  # it starts by itself
    second.stop()
