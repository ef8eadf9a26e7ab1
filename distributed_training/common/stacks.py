"""Where every thread of a process stands, written when it is asked for by a signal.

A process that hangs cannot be asked in any other way: faulthandler writes from the handler of the
signal, without the interpreter. The starter of a tree names the file in :data:`STACKS`, and each of
its processes calls :func:`write_stacks_on_signal`; :func:`collect_stacks` asks one after the other.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import psutil

from .processes import command_of, send

STACKS = "DT_STACKS"  # environment variable: the file
_SIGNAL = signal.SIGUSR1
_PATIENCE = timedelta(seconds=1)  # for one process


def write_stacks_on_signal() -> None:
    """From now on SIGUSR1 appends the stacks of all threads to the file that STACKS names, and a
    library that aborts the process (NCCL, when a collective is never joined) writes them to
    stderr."""
    faulthandler.enable(all_threads=True)
    if path := os.environ.get(STACKS):
        with contextlib.suppress(OSError):  # no such folder any more
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            faulthandler.register(_SIGNAL, file=file, all_threads=True)


def collect_stacks(path: Path, processes: Iterable[psutil.Process]) -> None:
    """Write ``path`` anew: what each process is, and its stacks if it gives them.

    Only for processes that are to be ended: SIGUSR1 ends those that do not handle it, and one that
    was stopped goes on. Raises OSError if the file cannot be written.
    """
    path.write_text(time.strftime("%Y-%m-%d %H:%M:%S\n"))
    for process in processes:
        with contextlib.suppress(psutil.Error):
            head = f"\n=== {process.pid} ({process.status()}) {command_of(process)}\n"
            with path.open("a") as file:  # as the others do: nobody overwrites
                size = file.write(head) and file.tell()
            if send(process, _SIGNAL) and send(process, signal.SIGCONT):
                _await_more(path, size)


def _await_more(path: Path, size: int) -> None:
    """Until the file has grown and then grows no more, or patience is over."""
    deadline, seen = time.monotonic() + _PATIENCE.total_seconds(), size
    while time.monotonic() < deadline:
        time.sleep(0.05)
        now = path.stat().st_size
        if now == seen > size:
            return
        seen = now
