"""A program of ours as a child with a socket to talk through.

A plain program, where ``multiprocessing``'s spawn would import the parent's main module, torch
included. The child ends with its parent however that ends: its end of the socket closes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Collection
from multiprocessing.connection import Connection
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
