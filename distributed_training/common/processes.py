"""Processes that are found again, ended as a tree, and gone with whoever needed them.

A miner is a tree of processes, and a local subnet a tree of miners. Several members start sessions
of their own and some outlive their parents, so neither a process group nor a parent id finds them
all. What they share is the environment they were started with: a :class:`Mark` is one variable of
it, with a value that nothing else has. Descendants inherit it, whatever they do.

Finding by mark needs ``/proc``; elsewhere only what belongs to this user and can be read is found.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from pathlib import Path
from typing import NoReturn

import psutil

_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Mark:
    """The environment variable ``name=value`` that every process of one tree carries."""

    name: str
    value: str

    @property
    def environment(self) -> dict[str, str]:
        return {self.name: self.value}

    def processes(self, *, spare: Collection[int] = ()) -> list[psutil.Process]:
        """Every running process of the tree, but neither this one nor those with pids ``spare``."""
        found = []
        for process in psutil.process_iter():
            if process.pid == os.getpid() or process.pid in spare:
                continue
            try:
                if process.environ().get(self.name) == self.value and is_running(process):
                    found.append(process)
            except (psutil.Error, OSError):
                continue  # gone meanwhile, or another user's
        return found

    def end(
        self,
        *,
        settle: timedelta,
        grace: timedelta,
        spare: Collection[int] = (),
        reap: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """End the tree. Returns pid and command of each process that did not end by itself.

        ``settle``: how long processes have that are ending on their own; SIGTERM follows.
        ``grace``: from there to SIGKILL, and the most that the kernel then has to end them; zero
        leaves SIGTERM out. ``reap`` is called while waiting.
        """
        self._wait(settle, spare, reap)
        left = self.processes(spare=spare)
        commands = [f"{process.pid} {command_of(process)}" for process in left]
        steps = [(signal.SIGTERM, grace)] if grace else []
        for number, wait in (*steps, (signal.SIGKILL, grace or timedelta(seconds=5))):
            for process in self.processes(spare=spare):
                send(process, number)
            if self._wait(wait, spare, reap):
                break
        return commands

    def _wait(self, longest: timedelta, spare: Collection[int], reap: Callable[[], None]) -> bool:
        """Whether none is left: in two looks, since execve leaves a process without an environment
        for a moment."""
        deadline = time.monotonic() + longest.total_seconds()
        empty = 0
        while True:
            reap()
            empty = 0 if self.processes(spare=spare) else empty + 1
            if empty == 2:
                return True
            if not empty and time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)


def is_running(process: psutil.Process) -> bool:
    """False for a process that is gone, for a zombie, and for a later one with the same pid."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def command_of(process: psutil.Process) -> str:
    """The start of the command line, for messages."""
    try:
        return " ".join(process.cmdline())[:160] or str(process.name())
    except psutil.Error:
        return "(gone)"


def send(process: psutil.Process, number: signal.Signals) -> bool:
    """Signal exactly this process; False if it is gone, or not ours to signal."""
    try:
        process.send_signal(number)
    except psutil.Error:
        return False
    return True


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and all its descendants, as a crash of the machine would."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        send(process, signal.SIGKILL)


def become_subreaper() -> bool:
    """Descendants whose parent ends become our children, so that they can be waited for."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(*, spare: Collection[int]) -> None:
    """Wait for the children that have ended. ``spare``: pids that somebody else waits for."""
    if not hasattr(os, "waitid"):
        return
    with contextlib.suppress(ChildProcessError):  # none left
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in spare:
                return  # it hides those behind it until it was waited for
            os.waitpid(ended.si_pid, 0)


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process ``number`` when the thread that started it ends.

    Call it in the main thread. Not inherited by children. Does nothing where there is no prctl.
    """
    parent = os.getppid()
    if _prctl(_PR_SET_PDEATHSIG, int(number)) and os.getppid() != parent:
        os.kill(os.getpid(), number)  # it ended before the kernel knew


def end_with_starter(number: signal.Signals = signal.SIGTERM) -> None:
    """As :func:`die_with_parent` for a process that a fork server started: whoever asked for it is
    not its parent. Starts a thread."""
    starter = parent_process()
    if starter is None:
        return

    def watch() -> None:
        starter.join()
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, name="starter-watch", daemon=True).start()


def process_folder(prefix: str) -> str:
    """A new temporary folder of this process. Those with this prefix whose process is gone, which
    could not remove them, are removed."""
    for old in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        owner = old.name.removeprefix(prefix).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(old, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-")


def leave(status: int) -> NoReturn:
    """End a process that trained. Everything it opened has been closed.

    Not by way of the interpreter's end: threads of gloo outlive their group and may hold the last
    reference to a tensor; dropping it then needs the interpreter, and the process aborts instead.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _prctl(option: int, value: int) -> bool:
    if sys.platform != "linux":
        return False
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False
