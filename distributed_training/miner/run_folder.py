"""Files in the run folder through which launcher and ranks exchange state.

    instance.json       the mark of the running (or last) launcher's tree
    pids/rank-R.json    the process of each rank, once it listens to signals
    pids/rank-R.beat    touched at each boundary: see watchdog.py
    exit_status.json    the exit status that rank 0 wants the miner to end with

Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distributed_training.common.exits import ExitStatus
from distributed_training.common.files import read_json_object, write_json
from distributed_training.common.processes import Mark

#: Of a stop, in seconds, beside its checkpoint: the micro-batch, the swarm, the uploads.
STOP_SLACK = 20.0

INSTANCE = "DT_INSTANCE"  # environment variable: the mark of one launcher's tree
RANK_STORE = "DT_RANK_STORE"  # the same: the file through which ranks of one machine meet


@dataclass(frozen=True)
class RankEnvironment:
    """This process's place among the ranks."""

    rank: int
    local_rank: int
    world_size: int


def rank_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """Raises KeyError if this process was started neither by the launcher nor by torchrun."""
    env = os.environ if environ is None else environ
    return RankEnvironment(
        rank=int(env["RANK"]),
        local_rank=int(env["LOCAL_RANK"]),
        world_size=int(env["WORLD_SIZE"]),
    )


def mark_of(run_folder: Path) -> Mark | None:
    """Of the launcher that runs there, or ran last."""
    content = read_json_object(run_folder / "instance.json") or {}
    instance = content.get("instance")
    return Mark(INSTANCE, instance) if isinstance(instance, str) and instance else None


def launcher_pid(run_folder: Path) -> int | None:
    return _pid(read_json_object(run_folder / "instance.json") or {})


def _pid(content: Mapping[str, Any]) -> int | None:
    pid = content.get("pid")
    # To a signal, 0 and negative numbers are groups of processes.
    return pid if type(pid) is int and pid > 0 else None


def write_instance(run_folder: Path, mark: Mark, *, gpus: int = 0) -> None:
    content = {"instance": mark.value, "pid": os.getpid(), "gpus": gpus}
    write_json(run_folder / "instance.json", content)


def remembered_gpus(run_folder: Path) -> int:
    """Return on how many GPUs ranks of this folder ran. Just after a reboot the driver may show
    none, and ranks on the CPU would stay there. 0 where ``CUDA_VISIBLE_DEVICES`` hides all."""
    gpus = (read_json_object(run_folder / "instance.json") or {}).get("gpus")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return gpus if type(gpus) is int and gpus > 0 and not hidden else 0


def write_pid_file(run_folder: Path, rank: int) -> None:
    """Each rank calls it once its SIGTERM handler is in place: from then on a stop reaches it."""
    content = {"pid": os.getpid(), "instance": os.environ.get(INSTANCE, "")}
    write_json(run_folder / "pids" / f"rank-{rank}.json", content)


def listening_ranks(run_folder: Path, *, instance: str) -> dict[int, int]:
    """rank -> pid of those that have written it under this launcher."""
    found = {}
    for path in run_folder.glob("pids/rank-*.json"):
        content = read_json_object(path) or {}
        pid, rank = _pid(content), path.stem.partition("-")[2]
        if content.get("instance") == instance and pid is not None and rank.isdecimal():
            found[int(rank)] = pid
    return found


class Ending(NamedTuple):
    """How the ranks ended. ``outside``: something outside this program refused, so that the same
    start may work later."""

    status: ExitStatus
    reason: str = ""
    outside: bool = False


def write_exit_status(
    run_folder: Path, status: int, reason: str = "", *, outside: bool = False
) -> None:
    """Rank 0 calls it last: what the launcher is to return, or to try again if ``outside``."""
    write_json(
        run_folder / "exit_status.json",
        {
            "status": int(status),
            "reason": reason,
            "outside": outside,
            "instance": os.environ.get(INSTANCE, ""),
            "time": time.time(),
        },
    )


def read_exit_status(run_folder: Path, *, instance: str) -> Ending | None:
    """Return what rank 0 of this instance wrote, else None."""
    content = read_json_object(run_folder / "exit_status.json") or {}
    if content.get("instance") != instance:
        return None
    try:
        status = ExitStatus(content.get("status", -1))
    except ValueError:
        return None
    return Ending(status, str(content.get("reason", "")), content.get("outside") is True)


def stop_seconds(run_folder: Path) -> float | None:
    """What a stop may take by the last checkpoint: one may still be under way when the stop's own
    begins. None before the first."""
    content = read_json_object(run_folder / "checkpoints" / "last.json") or {}
    seconds = content.get("seconds")
    return None if not isinstance(seconds, (int, float)) else 2 * float(seconds) + STOP_SLACK


def checkpoint_time(run_folder: Path) -> int | None:
    """Changes with each checkpoint that is complete. None before the first."""
    try:
        return (run_folder / "checkpoints" / "last.json").stat().st_mtime_ns
    except OSError:
        return None


def forget_ranks(run_folder: Path) -> None:
    """Remove what ranks that ended wrote."""
    for path in [*run_folder.glob("pids/rank-*"), run_folder / "exit_status.json"]:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
