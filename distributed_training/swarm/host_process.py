"""The swarm host as rank 0 sees it: a process group, and a socket for orders and answers."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from distributed_training.common.environment import without_secrets
from distributed_training.common.processes import process_folder

from .messages import (
    Average,
    Beat,
    Close,
    Ended,
    Failed,
    Found,
    HostConfig,
    Message,
    Ready,
    RoundOrder,
    from_line,
    to_line,
)

log = logging.getLogger(__name__)

#: Without a sign of life for so long (they come every 2 s) the host is taken for hung.
HANG = 20.0
_CLOSE = 6.0  # seconds to leave the swarm
_TENSORS = b"T"  # the first byte to the host: with it comes the descriptor of the tensors


class HostLaunch:
    """A host's process that does not know yet what it is to do, and imports meanwhile: seconds that
    a start uses otherwise. ``log``: file for what hivemind prints; ``module``: the host's program.
    Raises OSError."""

    def __init__(self, log: Path, module: str = "distributed_training.swarm.host") -> None:
        self._ended = False
        log.parent.mkdir(parents=True, exist_ok=True)
        self.connection, theirs = socket.socketpair()
        with theirs, log.open("ab") as log_file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                cwd=Path(__file__).resolve().parents[2],
                env=without_secrets() | {"HIVEMIND_COLORS": "false", "CUDA_VISIBLE_DEVICES": ""},
            )

    def end(self) -> None:
        """Kill it and what it started. Idempotent."""
        if not self._ended:
            self._ended = True
            # It leads its session: p2pd is in this group, and nobody else.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class HostProcess:
    """A host that does what ``config`` says. :meth:`end` it, whatever became of it.

    ``ended`` is set once it is gone or has to be ended; ``why`` says why then.
    """

    def __init__(self, config: HostConfig, launch: HostLaunch) -> None:
        self.ended = threading.Event()
        self.why = ""
        self._sockets = config.sockets
        self.found_group = False  # in the round that was ordered last
        self.peers: int | None = None  # others that the DHT node knows
        self._ready: queue.SimpleQueue[Ready | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Average | Failed | None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._launch, self._process = launch, launch.process
        self._connection = launch.connection
        threading.Thread(target=self._read, name="swarm-answers", daemon=True).start()
        with contextlib.suppress(OSError):  # it is gone: `ended` tells
            socket.send_fds(self._connection, [_TENSORS], [config.tensors])
        self.send(config)

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return not self.ended.is_set()

    def send(self, message: Message) -> None:
        """Nothing happens if the host is gone: ``ended`` tells."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(to_line(message))

    def wait_ready(self, timeout: float) -> Ready | None:
        """None: it did not get ready; ``why`` says why."""
        with contextlib.suppress(queue.Empty):
            return self._ready.get(timeout=timeout)
        self.why = self.why or "no answer in time"
        return None

    def order(self, order: RoundOrder) -> None:
        self.found_group = False
        self.send(order)

    def answer(self, timeout: float) -> Average | Failed | None:
        """Of the round that was ordered. None: the host ended. Raises queue.Empty."""
        return self._answers.get(timeout=timeout)

    def _read(self) -> None:
        """Until the host is gone, or says nothing for so long that it must be hung."""
        try:
            with self._connection.makefile("rb") as lines:
                for line in lines:
                    self._take(from_line(line))
        except TimeoutError:
            self.why = f"it hung: no sign of life for {HANG:.0f} s"
        except (OSError, ValueError) as error:
            self.why = self.why or str(error)
        self.why = self.why or self._how_it_ended()
        self.ended.set()
        self._ready.put(None)
        self._answers.put(None)

    def _take(self, message: Message) -> None:
        match message:
            case Beat(peers):
                self.peers = peers
            case Ready():
                self._connection.settimeout(HANG)  # its life begins; the start has its own timeout
                self._ready.put(message)
            case Found():
                self.found_group = True
            case Average() | Failed():
                self._answers.put(message)
            case Ended(detail):
                self.why = detail

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"it {describe_end(self._process.wait(2))}"
        return "it closed its socket"

    def close(self) -> None:
        """Leave the swarm within seconds, then :meth:`end`."""
        self.send(Close())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE)
        self.end()

    def end(self, why: str = "") -> None:
        """Kill the host and p2pd. Idempotent."""
        self.why = self.why or why
        self.ended.set()
        self._launch.end()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # ends the thread that reads
        shutil.rmtree(self._sockets, ignore_errors=True)


def describe_end(status: int) -> str:
    """How a process ended, by its return code."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def make_socket_folder() -> str:
    """For p2pd's Unix sockets, whose paths must be short."""
    return process_folder("swarm-sockets-")
