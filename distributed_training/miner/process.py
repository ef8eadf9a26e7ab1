"""What launcher and ranks tell each other through the run folder, and finding one's own processes.

The launcher marks its tree by the environment variable :data:`MARK`; children inherit it, so a
process is proven ours by ``/proc/PID/environ``, whatever its parent or session. Files:

    <run folder>/instance.json       the mark of the running (or last) launcher
    <run folder>/pids/rank-R.json    pid and start time of each rank
    <run folder>/exit_status.json    what rank 0 wants the miner's exit status to be

Linux only where it looks into /proc; elsewhere nothing is found and only direct children end.
Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

MARK = "DT_INSTANCE"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class RankEnvironment:
    """What torchrun told this rank. ``instance`` is empty if no launcher stands above."""

    rank: int
    local_rank: int
    world_size: int
    instance: str


def rank_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """Raises KeyError if this process was not started by torchrun."""
    env = os.environ if environ is None else environ
    return RankEnvironment(
        rank=int(env["RANK"]),
        local_rank=int(env["LOCAL_RANK"]),
        world_size=int(env["WORLD_SIZE"]),
        instance=env.get(MARK, ""),
    )


def leave(status: int) -> NoReturn:
    """End a process that trained. Everything it opened has been closed.

    Not by way of the interpreter's end: threads of gloo outlive their group and may hold the last
    reference to a tensor; dropping it then needs the interpreter, and the process aborts instead.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@dataclass(frozen=True)
class ProcessId:
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    started: int  # clock ticks after boot, field 22 of /proc/PID/stat; 0: unknown

    @property
    def alive(self) -> bool:
        return is_running(self.pid) and (not self.started or start_time(self.pid) == self.started)

    def send(self, number: signal.Signals) -> bool:
        """Signal it; False if it is gone."""
        if not self.alive:
            return False
        try:
            os.kill(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def start_time(pid: int) -> int:
    """Field 22 of ``/proc/PID/stat``; 0 if there is no such process (or no /proc)."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def is_running(pid: int) -> bool:
    """False for processes that are gone and for zombies."""
    fields = _stat(pid)
    if fields:
        return fields[0] not in ("Z", "X")
    if sys.platform == "linux":
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third (state) on; empty if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (OSError, ValueError):
        return []
    return text.rpartition(")")[2].split()  # the second field may hold spaces and brackets


def marked(instance: str) -> list[ProcessId]:
    """Every running process of this user that bears ``instance`` as its mark, ourselves excepted.

    A process that cannot be read (another user's, or one that just ended) is not ours.
    """
    wanted = f"{MARK}={instance}".encode()
    found = []
    try:
        entries = os.listdir("/proc")
    except OSError:
        return []
    for entry in entries:
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        started = start_time(int(entry))  # before environ: a reused pid then differs at send()
        try:
            environ = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:
            continue
        if wanted in environ.split(b"\0") and is_running(int(entry)):
            found.append(ProcessId(int(entry), started))
    return found


def command_of(pid: int) -> str:
    """For messages: the start of the command line."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    return b" ".join(words).decode(errors="replace").strip()[:80]


def _prctl(option: int, value: int) -> bool:
    if sys.platform != "linux":
        return False
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def become_subreaper() -> bool:
    """Descendants whose parent ends become our children, so they can be waited for."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process ``number`` when the thread that started it ends.

    For ranks: call it in the main thread at the start; SIGTERM then is a request to stop. Not
    inherited by children. Does nothing where there is no prctl.
    """
    parent = os.getppid()
    if _prctl(_PR_SET_PDEATHSIG, int(number)) and os.getppid() != parent:
        os.kill(os.getpid(), number)  # it ended before the kernel knew


def write_durably(path: Path, content: Mapping[str, Any]) -> None:
    """Replace ``path`` by ``content`` as JSON: whole or not at all, whatever is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    """Empty if the file is missing or broken."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def pid_file(run_folder: Path, rank: int) -> Path:
    return run_folder / "pids" / f"rank-{rank}.json"


def write_pid_file(run_folder: Path, rank: int) -> None:
    """Each rank calls it once its SIGTERM handler is in place: from then on a stop reaches it."""
    write_durably(
        pid_file(run_folder, rank),
        {
            "pid": os.getpid(),
            "started": start_time(os.getpid()),
            "instance": os.environ.get(MARK, ""),
        },
    )


def read_pid_file(run_folder: Path, rank: int, *, instance: str) -> ProcessId | None:
    """None if the rank of this instance has not (yet) written it."""
    content = read_json(pid_file(run_folder, rank))
    if content.get("instance") != instance or not isinstance(content.get("pid"), int):
        return None
    return ProcessId(content["pid"], int(content.get("started", 0)))


def write_exit_status(run_folder: Path, status: int, reason: str = "") -> None:
    """Rank 0 calls it last: what the launcher returns (torchrun would turn all failures into 1)."""
    write_durably(
        run_folder / "exit_status.json",
        {
            "status": status,
            "reason": reason,
            "instance": os.environ.get(MARK, ""),
            "time": time.time(),
        },
    )


def read_exit_status(run_folder: Path, *, instance: str) -> tuple[int, str] | None:
    """(status, reason) as rank 0 of this instance wrote it, else None."""
    content = read_json(run_folder / "exit_status.json")
    if content.get("instance") != instance or not isinstance(content.get("status"), int):
        return None
    return content["status"], str(content.get("reason", ""))


def forget_ranks(run_folder: Path) -> None:
    """Remove what the ranks of an earlier instance wrote."""
    for path in [*run_folder.glob("pids/rank-*"), run_folder / "exit_status.json"]:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
