"""Find all processes that a test has started, by a variable that they inherit. Needs /proc."""

from __future__ import annotations

import os
import secrets
import signal
from datetime import timedelta

import psutil

from distributed_training.common.processes import is_running, send
from tests.tools.waiting import wait_for

NAME = "TEST_TREE"  # not DT_, because a local subnet does not pass on variables of our settings


class Tree:
    """The processes that were started with ``environment``, directly or not."""

    def __init__(self) -> None:
        self.environment = {NAME: secrets.token_hex(8)}

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get(NAME) == self.environment[NAME]
                if ours and process.pid != os.getpid() and is_running(process):
                    found.append(process)
            except (psutil.Error, OSError):
                continue  # it has ended, or belongs to another user
        return found

    def end(self, grace: timedelta = timedelta(0)) -> None:
        """Send SIGTERM, and SIGKILL after ``grace``."""
        if grace:
            for process in self.processes():
                send(process, signal.SIGTERM)
            _, left = psutil.wait_procs(self.processes(), grace.total_seconds())
        while left := self.processes():
            for process in left:
                send(process, signal.SIGKILL)
            psutil.wait_procs(left, 10)

    def wait_for_end(self) -> None:
        # Check twice: execve leaves a process without an environment for a moment.
        wait_for(lambda: not (self.processes() or self.processes()), "the end of all processes")
