"""Write and read the files of the run folder by which the launcher and the ranks exchange state.

    instance.json       the running (or last) launcher, and the number of GPUs that it saw
    pids/rank-R.json    the process of each rank, once it handles signals
    pids/rank-R.beat    touched at boundaries, so that ranks that hang are noticed
    exit_status.json    the exit status that rank 0 wants the miner to end with

A rank that hangs (a stopped process, a driver that does not return, a deadlock) does not end, so
nothing reports it; the other ranks wait for it in their next collective. A healthy rank keeps
reaching micro-batch boundaries, even while it waits for data, for a round or for an upload. There
it touches a file, at most once a second (:class:`Heartbeat`), and the launcher checks whether the
times of these files still change (:class:`Watchdog`). It does not compare them with its own clock,
which may be set.

A start has no boundaries. It touches the file after each of its stages. While it waits for the
network, which may take long and has its own timeouts, a thread touches the file.

This module imports nothing heavy.
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

#: Seconds that a stop takes in addition to its checkpoint: micro-batch, peers and uploads.
STOP_SLACK = 20.0

RANK_STORE = "DT_RANK_STORE"  # environment variable: the file by which one machine's ranks meet


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
    """Return the launcher that is running in ``run_folder``, or that ran there last."""
    return read_state(
        run_folder / "instance.json", _Instance, lost="a late driver may lead to a start on the CPU"
    )


def write_instance(run_folder: Path, *, gpus: int = 0) -> None:
    me = ProcessId.of(os.getpid())
    write_state(run_folder / "instance.json", _Instance(me.pid, me.began, gpus))


def remembered_gpus(run_folder: Path) -> int:
    """Return on how many GPUs the last ranks of this folder ran.

    Just after a reboot the driver may show none, and ranks that start on the CPU would stay there.
    Returns 0 if ``CUDA_VISIBLE_DEVICES`` hides all GPUs.
    """
    written = launcher_of(run_folder)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return max(0, written.gpus) if written and not hidden else 0


def write_pid_file(run_folder: Path, rank: int) -> None:
    """Write this rank's pid, once its SIGTERM handler is in place and a stop can reach it."""
    write_state(run_folder / "pids" / f"rank-{rank}.json", ProcessId.of(os.getpid()))


def listening_ranks(run_folder: Path) -> dict[int, ProcessId]:
    """Return the processes of the ranks that wrote their pid since :func:`forget_ranks`."""
    found, lost = {}, "a stop ends this rank without waiting for its checkpoint"
    for path in run_folder.glob("pids/rank-*.json"):
        written, rank = read_state(path, ProcessId, lost=lost), path.stem.partition("-")[2]
        if written is not None and rank.isdecimal():
            found[int(rank)] = written
    return found


@dataclass(frozen=True)
class Ending:
    """How the ranks ended."""

    status: ExitStatus
    reason: str = ""
    outside: bool = False  # the cause lies outside, so the same start may work later
    pid: int = 0  # pid of the process that wrote it


def write_exit_status(
    run_folder: Path, status: int, reason: str = "", *, outside: bool = False
) -> None:
    """Record the exit status for the launcher to return; if ``outside``, it retries instead."""
    ending = Ending(ExitStatus(status), reason, outside, os.getpid())
    write_state(run_folder / "exit_status.json", ending)


def read_exit_status(run_folder: Path, *, pid: int | None = None) -> Ending | None:
    """Return what rank 0 wrote, or None. ``pid``: take it only from this process."""
    lost = "rank 0 counts as failed and is started again"
    written = read_state(run_folder / "exit_status.json", Ending, lost=lost)
    return None if written is None or pid not in (None, written.pid) else written


@dataclass(frozen=True)
class _LastCheckpoint:
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]


def stop_seconds(run_folder: Path) -> float | None:
    """Return how long a stop may take, judging by the last checkpoint; None before the first."""
    path = run_folder / "checkpoints" / "last.json"
    last = read_state(path, _LastCheckpoint, lost="a stop gets only --neuron.stop_timeout")
    # Double it: one checkpoint may be in progress, and the stop's own checkpoint waits for it.
    return None if last is None else 2 * last.seconds + STOP_SLACK


def forget_ranks(run_folder: Path) -> None:
    """Remove the files that earlier ranks wrote."""
    for path in [*run_folder.glob("pids/rank-*"), run_folder / "exit_status.json"]:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


# --- whether ranks hang ---------------------------------------------------------------------------

_BEAT_EVERY = 1.0  # seconds between two touches of the file


class Heartbeat:
    """Shows that a rank is alive: called at each boundary and after each stage of its start."""

    def __init__(self, run_folder: Path, rank: int) -> None:
        self._path = _beat_file(run_folder, rank)
        self._next = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        # Do not touch it each time, since small models reach hundreds of boundaries per second.
        if now >= self._next:
            self._next = now + _BEAT_EVERY
            with contextlib.suppress(OSError):  # started without a launcher
                self._path.touch()

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Keep touching the file inside this context, unless the whole process is stopped."""
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
    """Notices ranks without a beat for ``limit``, counted from the first check at the earliest.

    ``ranks``: the ranks to watch, by their numbers on this machine.
    """

    def __init__(self, run_folder: Path, *, ranks: Iterable[int], limit: timedelta) -> None:
        self._paths = [_beat_file(run_folder, rank) for rank in ranks]
        self._limit = limit.total_seconds()
        # path -> time of the file (None if missing), and when that time was first seen
        self._seen: dict[Path, tuple[int | None, float]] = {}

    def hangs(self) -> bool:
        """Return whether a rank showed no sign of life within the limit. Call it often."""
        now, hangs = time.monotonic(), False
        for path in self._paths:
            written = None
            with contextlib.suppress(OSError):
                written = path.stat().st_mtime_ns
            # Compare a file's time only with its earlier one, since the disk may use another clock.
            if path not in self._seen or self._seen[path][0] != written:
                self._seen[path] = written, now
            hangs |= now - self._seen[path][1] > self._limit
        return hangs


def _beat_file(run_folder: Path, rank: int) -> Path:
    return run_folder / "pids" / f"rank-{rank}.beat"
