"""Child processes of a local subnet: start, watch, stop in time, and leave nothing behind.

Every process of a subnet carries a mark (``common.processes``) with the subnet's id, so whatever
a neuron started is found again, also after its parent is gone.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from distributed_training.common.processes import kill_tree

MARK = "DT_LOCAL_SUBNET"  # environment variable; its value is the subnet's id
# util-linux; the kernel then ends the command when the thread that started it is gone.
_WITH_STARTER = ("setpriv", "--pdeathsig", "TERM")


class ChildFailure(RuntimeError):
    """A command did not come up. The text is for the operator."""


class Child:
    """One long-running command; what it says goes to ``log.txt`` in its folder.

    It gets a session of its own, so Ctrl-C at the terminal reaches only the orchestrator, which
    stops its children in order. If the orchestrator itself is killed, the kernel sends SIGTERM.
    """

    def __init__(
        self,
        *,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.folder = folder
        self.log = folder / "log.txt"
        self.environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self.stopping = False

    def start(self) -> None:
        """Start it, appending to the log: a restarted neuron's history stays in one file."""
        if self.running:
            raise RuntimeError(f"{self.name} is running already")
        self.stopping = False
        self.folder.mkdir(parents=True, exist_ok=True)
        # Not by preexec_fn, which runs Python between fork and exec beside our threads.
        starter = _WITH_STARTER if shutil.which(_WITH_STARTER[0]) else ()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*starter, *self.command],
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
        """The exit status; None while it runs or before its start; negative: the ending signal."""
        return self._process.poll() if self._process else None

    def wait_ready(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        """Wait until it writes ``READY`` and its pid, after its imports.

        Raises ChildFailure; it has ended then.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        # With the pid: the log is appended to and holds the READY of earlier starts.
        while f"READY {self.pid}" not in self.last_lines():
            if not self.running or time.monotonic() > deadline:
                # Before the kill, which would be all that it tells.
                obituary = self.obituary
                self.kill_tree()
                raise ChildFailure(obituary)
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        """Signal the command itself, not its descendants: passing it on is the command's task."""
        # Its end is no failure from here on.
        if number in (signal.SIGTERM, signal.SIGINT):
            self.stopping = True
        if self._process is not None and self.running:
            self._process.send_signal(number)

    def kill_tree(self) -> None:
        """Send SIGKILL to the command and everything that descends from it now."""
        self.stopping = True
        if self._process is not None and self.running:
            kill_tree(self._process.pid)
            # One that hangs in a disk's system call ends later: the others are still to be stopped.
            self.wait(timedelta(seconds=10))

    def wait(self, timeout: timedelta) -> int | None:
        """Return the exit status, or None if it still runs after ``timeout``."""
        if self._process is None:
            return None
        try:
            return self._process.wait(timeout=timeout.total_seconds())
        except subprocess.TimeoutExpired:
            return None

    @property
    def obituary(self) -> str:
        """A text on how it ended, with its last lines."""
        status = self.exit_status
        if status is None:
            how = "does not answer"
        else:
            how = f"ended with signal {-status}" if status < 0 else f"ended with status {status}"
        lines = "\n".join(f"    {line}" for line in self.last_lines())
        return f"{self.name} {how}; its log {self.log} ends:\n{lines}"

    def last_lines(self, count: int = 12) -> list[str]:
        """Return the end of the log."""
        try:
            with self.log.open("rb") as log:
                log.seek(0, os.SEEK_END)
                # The end alone: the log of a miner of days has hundreds of megabytes.
                log.seek(max(0, log.tell() - 64 * 1024))
                text = log.read().decode("utf-8", errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-count:]


def stop_together(children: Sequence[Child], grace: timedelta) -> list[str]:
    """Send SIGTERM to ``children``, wait ``grace`` for the slowest, SIGKILL the rest's trees.

    Returns one line for each that had to be killed.
    """
    running = [child for child in children if child.running]
    for child in running:
        child.signal(signal.SIGTERM)
    # One for all of them: they stop at the same time.
    deadline = time.monotonic() + grace.total_seconds()
    defects = []
    for child in running:
        if child.wait(timedelta(seconds=max(0.0, deadline - time.monotonic()))) is None:
            child.kill_tree()
            defects.append(f"{child.name} did not stop within {grace.total_seconds():.0f} s")
    return defects
