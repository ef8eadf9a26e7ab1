"""Child processes of a local subnet: start, watch, stop in time, and leave nothing behind.

A neuron is a tree (launcher, torchrun, ranks, swarm host, p2pd, uploader, data workers), and
several of its members start sessions of their own, so neither a process group nor a parent id finds
them all. What they do share is the environment they were started with: every process of a subnet
carries :data:`MARK` with the subnet's id, and :func:`marked` finds them by it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil

MARK = "DT_LOCAL_SUBNET"  # environment variable; its value is the subnet's id


@dataclass(frozen=True)
class Stray:
    """A process of the subnet that outlived the one that should have ended it."""

    pid: int
    command: str


class Child:
    """One long-running command with its log file.

    It gets a session of its own, so Ctrl-C at the terminal reaches only the orchestrator, which
    stops its children in order.
    """

    def __init__(
        self,
        *,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        log: Path,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.folder = folder
        self.log = log
        self.environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self.stopping = False

    def start(self) -> None:
        """Start it, appending to the log: a restarted neuron's history stays in one file."""
        if self.running:
            raise RuntimeError(f"{self.name} is running already")
        self.stopping = False
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def exit_status(self) -> int | None:
        """None while it runs or before it was started; negative: the signal that ended it."""
        return self._process.poll() if self._process else None

    def signal(self, number: signal.Signals) -> None:
        """Signal the command itself, not its descendants: passing it on is the command's task."""
        if number in (signal.SIGTERM, signal.SIGINT):
            self.stopping = True
        if self._process is not None and self.running:
            self._process.send_signal(number)

    def kill_tree(self) -> None:
        """SIGKILL to the command and all that descends from it, as a power cut would."""
        self.stopping = True
        if self._process is None:
            return
        try:
            root = psutil.Process(self._process.pid)
            tree = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in tree:
            _kill(process)
        self._process.wait(timeout=10)

    def wait(self, timeout: timedelta) -> int | None:
        """The exit status, or None if it still runs when ``timeout`` (for its exit) is over."""
        if self._process is None:
            return None
        try:
            return self._process.wait(timeout=timeout.total_seconds())
        except subprocess.TimeoutExpired:
            return None

    def last_lines(self, count: int = 12) -> list[str]:
        """The end of the log, for a message about a failure."""
        try:
            with self.log.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - 64 * 1024))
                text = log.read().decode("utf-8", errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-count:]


def stop_together(children: Sequence[Child], grace: timedelta) -> list[str]:
    """SIGTERM to all of ``children``, wait ``grace`` for the slowest, SIGKILL the rest's trees.

    Returns one line for each that had to be killed.
    """
    running = [child for child in children if child.running]
    for child in running:
        child.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace.total_seconds()
    defects = []
    for child in running:
        if child.wait(timedelta(seconds=max(0.0, deadline - time.monotonic()))) is None:
            child.kill_tree()
            defects.append(f"{child.name} did not stop within {grace.total_seconds():.0f} s")
    return defects


def marked(subnet_id: str) -> list[psutil.Process]:
    """Every live process but this one that carries the mark of ``subnet_id``."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK) == subnet_id:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue  # gone meanwhile, or another user's
    return found


def sweep(subnet_id: str, *, settle: timedelta, spare: frozenset[int] = frozenset()) -> list[Stray]:
    """Kill what is left of a subnet after everything was stopped, and say what it was.

    ``settle`` bounds the wait for processes that are ending by themselves. ``spare``: process ids
    that may stay (the guardian, which ends with us).
    """
    deadline = time.monotonic() + settle.total_seconds()
    while left := [p for p in marked(subnet_id) if p.pid not in spare]:
        if time.monotonic() >= deadline:
            break
        time.sleep(0.1)
    strays = []
    for process in left:
        strays.append(Stray(process.pid, _command(process)))
        _kill(process)
    psutil.wait_procs(left, timeout=5)
    return strays


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:160] or process.name()
    except psutil.Error:
        return "(gone)"


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


class Guardian:
    """A small process that ends the subnet's processes if the orchestrator itself is killed.

    It reads a pipe that only the orchestrator holds open; end of file means the orchestrator is
    gone, whatever ended it.
    """

    def __init__(self, subnet_id: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "distributed_training.localnet.guardian", subnet_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End it without a sweep: the orchestrator has made its own."""
        self._process.kill()
        self._process.wait(timeout=5)
        if self._process.stdin:
            self._process.stdin.close()
