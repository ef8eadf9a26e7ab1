"""The listening socket of the signed server, and the thread that answers on it.

Connections are accepted here, not by asyncio: what :class:`~.admission.Admission` does not let in
is closed before a task is made for it, and a flood wakes the thread some
fifty times a second instead of thousands. Measured by ``bench/server.py``: 2,000 connections a
second that are refused take 4 to 6 % of a core so, and 19 to 21 % through asyncio's own server.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from datetime import timedelta

from distributed_training.common.ports import listen
from distributed_training.config.flags import ConfigError

from .admission import Admission
from .http import Exchange, Handlers
from .trust import normalize

BACKLOG = 1024
# What the kernel keeps of one connection before it is read (Linux doubles it).
RECEIVE_BUFFER = 16 * 1024
BATCH = 256  # connections accepted in one go
FLOOD_PAUSE = 0.02  # seconds, after one of them was refused
EXHAUSTED_PAUSE = 1.0  # out of file descriptors
_RESET = struct.pack("ii", 1, 0)  # struct linger: on, 0 s


def bind(*, ip: str, port: int) -> socket.socket:
    """A listening socket; ``[::]`` also takes IPv4, and falls back to it where IPv6 is off.

    Raises ConfigError with one line when the port or address cannot be had.
    """
    host = ip.strip("[]") or "::"
    problem = ""
    for candidate in (host, "0.0.0.0") if host == "::" else (host,):
        try:
            sock = listen(candidate, port, backlog=BACKLOG)
        except OSError as error:
            problem = error.strerror or str(error)
            continue
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        sock.setblocking(False)
        return sock
    raise ConfigError(
        f"cannot listen on {ip} port {port} ({problem}), so no validator could reach this miner: "
        "stop what uses the port, or choose another one with --axon.port (and --axon.ip)"
    )


class HttpThread:
    """Serves ``handlers`` on ``sock`` in a daemon thread with its own event loop.

    Connections are accepted here, not by asyncio, so that what :class:`Admission` does not let in
    is closed before a task is made for it.
    """

    def __init__(
        self,
        *,
        handlers: Handlers,
        sock: socket.socket,
        admission: Admission,
        read_timeout: timedelta,
    ) -> None:
        self._handlers = handlers
        self._sock = sock
        self._admission = admission
        self._read_timeout = read_timeout
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._open: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="signed-server", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Idempotent; returns when the thread has ended. Open connections are cut."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(10)
        elif not self._loop.is_closed():
            self._loop.close()  # never started
        self._sock.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._listen()
        await self._stopped.wait()
        self._loop.remove_reader(self._sock)
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _listen(self) -> None:
        if not self._stopped.is_set():
            self._loop.add_reader(self._sock, self._accept)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._sock)
        self._loop.call_later(seconds, self._listen)

    def _accept(self) -> None:
        refused = False
        for _ in range(BATCH):
            try:
                accepted, peer = self._sock.accept()
            except BlockingIOError:
                break
            except ConnectionError:
                continue  # gone before it was accepted
            except OSError:
                self._pause(EXHAUSTED_PAUSE)
                return
            address = normalize(str(peer[0]))
            if self._admission.connect(address):
                accepted.setblocking(False)
                task = self._loop.create_task(self._exchange(accepted, address))
                self._open.add(task)
                task.add_done_callback(self._open.discard)
            else:
                # An RST instead of a FIN: no TIME_WAIT entry is left here for junk.
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                accepted.close()
                refused = True
        if refused:
            self._pause(FLOOD_PAUSE)

    async def _exchange(self, accepted: socket.socket, address: str) -> None:
        try:
            with accepted, contextlib.suppress(OSError):  # the client hung up
                await Exchange(self._handlers, address).run(accepted, self._read_timeout)
        finally:
            self._admission.disconnect(address)
