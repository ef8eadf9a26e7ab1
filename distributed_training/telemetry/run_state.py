"""Observe a miner through its run folder, even while no miner runs there.

    launcher.json   from the launcher: starting, running, refused, stopping or stopped, and why
    stage.json      from rank 0: the stage of its start
    facts.json      from rank 0 every 15 s: facts about itself and its network (facts.py)

The dashboard, ``dt-status``, the webhook and the doctor all call :func:`observe`, so they agree. It
adds what it observes itself, which is whether the processes run and how much disk space is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from distributed_training.common.backoff import Repeats
from distributed_training.common.files import is_full, read_json_object, write_bytes
from distributed_training.telemetry.events import EventLog
from distributed_training.telemetry.facts import (
    DAMAGED,
    FACTS_FILE,
    TORCHRUN,
    Crash,
    Fact,
    Facts,
    Launch,
    measure_disk,
    parse,
)
from distributed_training.telemetry.logs import mask

log = logging.getLogger(__name__)

LAUNCHER_FILE, STAGE_FILE, LOCK_FILE = "launcher.json", "stage.json", "launcher.lock"
_SIGNS = (LAUNCHER_FILE, FACTS_FILE, "instance.json", "events.jsonl", "config.txt")
STAGES = 5  # stages of a start
#: The ``stopped_by`` of a launcher that gave up on its ranks; pm2 then starts another launcher.
FAILURES = "failures"
# Each state file is filled up to this many bytes, so that it can be overwritten on a full disk.
_BYTES = 4096
_LONGEST = 600  # the most characters of a text in such a file
# Seconds without a sign of life, after which a process that is not visible counts as gone.
_SILENT_SECONDS = 6.0
_CLOCK_STEP = 60.0  # seconds by which the clock may have been set since a process began

_unwritten = Repeats(600.0)


class LauncherState(StrEnum):
    """The states of a launcher."""

    STARTING = "starting"  # the launcher runs its checks, or its ranks are starting
    RUNNING = "running"  # its ranks train
    REFUSED = "refused"  # something external refuses, and the launcher waits for its next attempt
    STOPPING = "stopping"
    STOPPED = "stopped"


def is_run_folder(folder: Path) -> bool:
    """Return whether a miner or validator has run in ``folder``; False if it cannot be read."""
    return any(os.path.exists(folder / name) for name in _SIGNS)


def read_launcher(folder: Path) -> Launch | None:
    """Return the launcher's last state, with the stage of rank 0's start.

    Return None if neither the launcher nor rank 0 has written anything.
    """
    found, stage = (read_json_object(folder / name) for name in (LAUNCHER_FILE, STAGE_FILE))
    if found is None and stage is None:
        return None
    found = found or {"state": LauncherState.STARTING.value}  # torchrun has no launcher of ours
    # The launcher rewrites the stage file before its ranks begin, so it belongs to this start.
    if stage is not None and found.get("state") == LauncherState.STARTING:
        if not stage.get("stage"):
            found |= {"state": LauncherState.RUNNING.value, "at": stage.get("stage_at")}
        found |= stage
    return parse(Launch, found)


class LauncherFile:
    """Writes ``launcher.json`` for the launcher, and records an event when a start is refused.

    Nothing is written if ``folder`` does not exist, as when its disk is not mounted, or while
    another launcher holds the lock of the folder. ``owned`` is True if this launcher holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.owned = False
        before = read_launcher(folder) or Launch()
        self.state = Launch(at=time.time(), pid=os.getpid(), last_crash=before.last_crash)
        killed = before.state not in ("", LauncherState.REFUSED, LauncherState.STOPPED)
        if before.stopped_by == FAILURES or (killed and not self.taken()):
            self.state = replace(self.state, restarts=before.restarts)
            self.crashed(before.text or f"the launcher (pid {before.pid}) was killed")

    def crashed(self, text: str) -> None:
        """Record a crash after which the ranks are restarted."""
        crash = Crash(time.time(), _clip(text))
        self.state = replace(self.state, restarts=self.state.restarts + 1, last_crash=crash)

    def enter(self, state: LauncherState, **more: Any) -> None:
        """Write that ``state`` begins now; ``more`` are other fields of :class:`Launch`."""
        kept = self.state
        self.state = Launch(
            state=state.value,
            at=time.time(),
            pid=os.getpid(),
            restarts=kept.restarts,
            last_crash=kept.last_crash,
            **more,
        )
        if not self._folder.is_dir() or self.taken():
            return
        if state is LauncherState.STARTING:
            # Do not remove the stage file. If the disk is full, rank 0 can only overwrite it.
            _write_stage(self._folder, "the ranks are being started")
        _write(self._folder / LAUNCHER_FILE, asdict(self.state))
        if state is LauncherState.REFUSED:
            _append(self._folder, "refused", **more)

    def refused(self, text: str, *, attempt: int, wait: float) -> None:
        """Write that something external refused this attempt, and when the next one follows."""
        again = time.time() + wait
        self.enter(LauncherState.REFUSED, text=_clip(text), attempt=attempt, next_try_at=again)

    def start(self) -> None:
        """Write that the ranks are starting, and keep the cause of an earlier refusal."""
        kept = self.state
        self.enter(LauncherState.STARTING, text=kept.text, attempt=kept.attempt)

    def stopped(self, by: str, text: str = "") -> None:
        self.enter(LauncherState.STOPPED, stopped_by=by, text=_clip(text))

    def taken(self) -> bool:
        """Return whether another launcher is running in the folder."""
        if self.owned:
            return False
        try:
            with (self._folder / LOCK_FILE).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no file yet, or a file system without locks
            pass
        return False


def report_stage(
    folder: Path,
    number: int,
    stage: str,
    *,
    done: int = 0,
    total: int = 0,
    eta: float | None = None,
) -> None:
    """Report in the log, a file and an event that a start is in stage ``number`` of :data:`STAGES`.

    The launcher calls this first, and later rank 0. ``done`` of ``total`` bytes have been
    transferred, and the rest takes ``eta`` seconds. With an ``eta`` nothing is logged, because the
    transfer itself logs its progress.
    """
    if total:
        stage += f", {done / 1e9:.1f} of {total / 1e9:.1f} GB"
    if eta is None:
        log.info("Start, %d of %d: %s", number, STAGES, stage)
    _write_stage(folder, f"{stage} ({number} of {STAGES})", eta)
    _append(folder, "starting", stage=stage, number=number, of=STAGES, eta_seconds=eta)


def report_running(folder: Path) -> None:
    """Report that rank 0's start is complete."""
    _write_stage(folder, "")


def _write_stage(folder: Path, stage: str, eta: float | None = None) -> None:
    _write(folder / STAGE_FILE, {"stage": stage, "stage_at": time.time(), "eta_seconds": eta})


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Replace the file at ``path``; if the disk is full, overwrite it in place."""
    data = json.dumps(content).encode().ljust(_BYTES)
    try:
        write_bytes(path, data, durable=False)
    except OSError as error:
        if is_full(error) and len(data) <= _BYTES:
            # Overwrite the file in place, because its blocks are reserved. A concurrent reader may
            # see a half-written file.
            with contextlib.suppress(OSError), path.open("r+b") as file:
                file.write(data)
                file.truncate()  # the old text may have been longer
                return
        if (again := _unwritten(path)) is not None:
            log.warning(
                "%s was not written (%s): dt-status shows older facts%s",
                path,
                error.strerror,
                again,
            )


def _append(folder: Path, kind: str, **fields: Any) -> None:
    with contextlib.suppress(OSError):  # on a full disk there is only the state file
        _events(folder).write(kind, **fields)


@functools.cache
def _events(folder: Path) -> EventLog:
    # A process has only one such log, so that it warns only once about a failing disk.
    return EventLog(folder / "events.jsonl")


def observe(folder: Path, now: float) -> Facts:
    """Return the facts about the miner in ``folder``: its own, and those observed from outside.

    ``now`` is in Unix seconds. If the folder is missing or cannot be read, no error is raised, and
    most facts are unknown.
    """
    facts, launch, life = Facts.read(folder), read_launcher(folder), find_life(folder)
    gone = bool(life["gone"])
    if launch is not None:
        # A launcher that waits for its next attempt may be in a container, where this process
        # cannot see its pids.
        waits = launch.state == LauncherState.REFUSED and now < (launch.next_try_at or 0) + 60
        gone = gone and not waits
        if gone and launch.state != LauncherState.STOPPED:
            killed = f"SIGKILL or power loss: its launcher (pid {launch.pid}) is gone"
            by = launch.stopped_by or (killed if launch.pid else TORCHRUN)
            launch = replace(
                launch, state=LauncherState.STOPPED, at=life["last_sign"], stopped_by=by
            )
    needed = facts.disk.value.needed if facts.disk else 0.0
    disk = measure_disk(folder, needed, now) or facts.disk
    return replace(facts, launch=launch, gone=Fact(gone, now), disk=disk)


def find_life(folder: Path) -> dict[str, Any]:
    """Return when the neuron last wrote anything, and whether it is gone.

    A neuron is gone if the launcher and the ranks that the run folder names do not run on this
    machine, and nothing was written for some seconds. The second condition is needed because they
    may run in another container, where this process cannot see them. A neuron whose run folder
    names no processes, such as a validator, never counts as gone.
    """
    launcher = ("instance.json", "launcher.json")
    named = [folder / name for name in launcher]
    named += folder.glob("pids/rank-*.json")
    written = [*named, *folder.glob("pids/rank-*.beat")]
    written += [folder / name for name in ("events.jsonl", "metrics.prom")]
    signs = []
    for path in written:
        with contextlib.suppress(OSError):
            signs.append(path.stat().st_mtime)
    last = max(signs, default=None)
    # If the clock was set back, the last sign is in the future, and the neuron counts as alive.
    silent = last is not None and time.time() - last > _SILENT_SECONDS
    gone = silent and any(path.exists() for path in named)
    for path in named if gone else ():
        with contextlib.suppress(*DAMAGED, OSError, psutil.Error):
            process = psutil.Process(int(json.loads(path.read_bytes())["pid"]))
            # If a process began after the file was written, it got the same pid by chance.
            if process.create_time() <= path.stat().st_mtime + _CLOCK_STEP:
                gone = False
    return {"last_sign": last, "gone": gone}


def _clip(text: str) -> str:
    return mask(text)[:_LONGEST]
