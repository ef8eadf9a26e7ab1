"""A program of ours as a child with a socket to talk through.

A plain program, where ``multiprocessing``'s spawn would import the parent's main module, torch
included. The child ends with its parent however that ends: its end of the socket closes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .environment import without_secrets

_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def start_child(
    module: str, *, keep: Collection[str] = (), **options: Any
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Run ``python -m module FD``; FD is the child's end of the socket.

    ``keep``: secrets that it is meant to have in its environment; ``options``: of Popen. Raises
    OSError.
    """
    ours, theirs = socket.socketpair()
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=without_secrets(keep=keep) | path | _ONE_THREAD,
            **options,
        )
    return process, Connection(ours.detach())


def wait_or_kill(process: subprocess.Popen[Any], seconds: float) -> None:
    """Wait for its end, but no longer than ``seconds``."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Said:
    """A line of a child's log, at a level of :mod:`logging`."""

    level: int
    text: str


class Parent:
    """The child's end, of the socket that its command line names."""

    def __init__(self) -> None:
        self._connection = Connection(int(sys.argv[1]))
        self._lock = threading.Lock()

    def receive(self) -> Any:
        """Raises EOFError, OSError when the parent is gone."""
        return self._connection.recv()

    def send(self, message: Any) -> None:
        """From any thread. Nothing happens if nobody listens any more: :meth:`receive` tells."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send(message)

    def take_log(self) -> None:
        """From now on the parent gets a :class:`Said` for each line of information and above; its
        log, which masks and formats them, goes where the operator looks."""
        logging.getLogger().addHandler(_Forward(self))


class _Forward(logging.Handler):
    def __init__(self, parent: Parent) -> None:
        super().__init__(logging.INFO)
        self._parent = parent

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            # The type and place only: texts of foreign exceptions may quote a request.
            error = record.exc_info[1]
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            place = (
                f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
            )
            text = f"{text}: {type(error).__name__} at {place}"
        self._parent.send(Said(record.levelno, text))
