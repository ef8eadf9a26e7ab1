"""Files in the run folder through which launcher and ranks exchange state.

    instance.json       the running (or last) launcher, and the GPUs that it saw
    pids/rank-R.json    the process of each rank, once it listens to signals
    pids/rank-R.beat    touched at each boundary, by which ranks that hang are noticed
    exit_status.json    the exit status that rank 0 wants the miner to end with

A rank that hangs (a stopped process, a driver that does not return, a deadlock) does not end, so
nobody hears of it; the other ranks wait for it in their next collective. A rank that is well comes
to a micro-batch boundary, even when it waits for data, for a round or for an upload. There
it touches a file, once a second (:class:`Heartbeat`), and the launcher checks whether the times of
these files still change (:class:`Watchdog`); it compares none with its own clock, which may be set.

A start has no boundaries. It touches the file after each of its stages; while it asks the network,
which takes as long as it must and has timeouts of its own, a thread does so.

Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import Field

from distributed_training.common.files import read_state, write_state
from distributed_training.common.processes import ProcessId
from distributed_training.protocol.types import ExitStatus

#: Seconds of a stop without its checkpoint: for the micro-batch, the peers and the uploads.
STOP_SLACK = 20.0

RANK_STORE = "DT_RANK_STORE"  # environment variable with the file by which ranks of a machine meet


@dataclass(frozen=True)
class RankEnvironment:
    """This process's place among the ranks."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


def rank_environment() -> RankEnvironment:
    """Read a rank's variables. Raises KeyError without a launcher or torchrun."""
    rank, local, world = (int(os.environ[n]) for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    return RankEnvironment(rank, local, world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))


@dataclass(frozen=True)
class _Instance(ProcessId):
    gpus: int = 0


def launcher_of(run_folder: Path) -> _Instance | None:
    """Return the launcher that runs there, or ran last."""
    return read_state(
        run_folder / "instance.json", _Instance, lost="a driver that is late may cost the GPUs"
    )


def write_instance(run_folder: Path, *, gpus: int = 0) -> None:
    me = ProcessId.of(os.getpid())
    write_state(run_folder / "instance.json", _Instance(me.pid, me.began, gpus))


def remembered_gpus(run_folder: Path) -> int:
    """Return on how many GPUs ranks of this folder ran.

    Just after a reboot the driver may show none, and ranks on the CPU would stay there. 0 where
    ``CUDA_VISIBLE_DEVICES`` hides all.
    """
    written = launcher_of(run_folder)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return max(0, written.gpus) if written and not hidden else 0


def write_pid_file(run_folder: Path, rank: int) -> None:
    """Write this rank's pid once its SIGTERM handler is in place: a stop reaches it now."""
    write_state(run_folder / "pids" / f"rank-{rank}.json", ProcessId.of(os.getpid()))


def listening_ranks(run_folder: Path) -> dict[int, ProcessId]:
    """Return the processes of the ranks that have written it since :func:`forget_ranks`."""
    found, lost = {}, "a stop ends this rank without waiting for its checkpoint"
    for path in run_folder.glob("pids/rank-*.json"):
        written, rank = read_state(path, ProcessId, lost=lost), path.stem.partition("-")[2]
        if written is not None and rank.isdecimal():
            found[int(rank)] = written
    return found


@dataclass(frozen=True)
class Ending:
    """The end of the ranks."""

    status: ExitStatus
    reason: str = ""
    outside: bool = False  # something outside refused, so the same start may work later
    pid: int = 0  # process that wrote it


def write_exit_status(
    run_folder: Path, status: int, reason: str = "", *, outside: bool = False
) -> None:
    """Record the exit status that the launcher is to return, or to try again if ``outside``."""
    ending = Ending(ExitStatus(status), reason, outside, os.getpid())
    write_state(run_folder / "exit_status.json", ending)


def read_exit_status(run_folder: Path, *, pid: int | None = None) -> Ending | None:
    """Return what rank 0 wrote, or None; ``pid``: only of this process."""
    lost = "rank 0 counts as failed and is started again"
    written = read_state(run_folder / "exit_status.json", Ending, lost=lost)
    return None if written is None or pid not in (None, written.pid) else written


@dataclass(frozen=True)
class _LastCheckpoint:
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]


def stop_seconds(run_folder: Path) -> float | None:
    """Return the seconds that a stop may take by the last checkpoint; None before the first."""
    path = run_folder / "checkpoints" / "last.json"
    last = read_state(path, _LastCheckpoint, lost="a stop gets --neuron.stop_timeout and no more")
    # Count it twice: one checkpoint may be under way, and that of the stop waits for it.
    return None if last is None else 2 * last.seconds + STOP_SLACK


def forget_ranks(run_folder: Path) -> None:
    """Remove what ranks that ended wrote."""
    for path in [*run_folder.glob("pids/rank-*"), run_folder / "exit_status.json"]:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


# --- whether ranks hang ---------------------------------------------------------------------------

_BEAT_EVERY = 1.0  # seconds


class Heartbeat:
    """A rank calls it at each boundary, and after each stage of its start."""

    def __init__(self, run_folder: Path, rank: int) -> None:
        self._path = _beat_file(run_folder, rank)
        self._next = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        # Look seldom, since small models reach hundreds of boundaries per second.
        if now >= self._next:
            self._next = now + _BEAT_EVERY
            with contextlib.suppress(OSError):  # started without a launcher
                self._path.touch()

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Count the rank as well as long as it is not stopped, however long it waits."""
        over = threading.Event()

        def beat() -> None:
            self()
            while not over.wait(_BEAT_EVERY):
                self()

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


class Watchdog:
    """Notices ranks without a beat for ``limit``, counted from our first look at the earliest.

    ``ranks``: the ranks to watch, by their numbers on this machine.
    """

    def __init__(self, run_folder: Path, *, ranks: Iterable[int], limit: timedelta) -> None:
        self._paths = [_beat_file(run_folder, rank) for rank in ranks]
        self._limit = limit.total_seconds()
        # path -> time of the file (None if missing), and when we saw that time first
        self._seen: dict[Path, tuple[int | None, float]] = {}

    def hangs(self) -> bool:
        """Return whether a rank showed no sign of life within the limit. Call it often."""
        now, hangs = time.monotonic(), False
        for path in self._paths:
            written = None
            with contextlib.suppress(OSError):
                written = path.stat().st_mtime_ns
            # Compare the file's time only with itself, since a disk may have another clock.
            if path not in self._seen or self._seen[path][0] != written:
                self._seen[path] = written, now
            hangs |= now - self._seen[path][1] > self._limit
        return hangs


def _beat_file(run_folder: Path, rank: int) -> Path:
    return run_folder / "pids" / f"rank-{rank}.beat"
