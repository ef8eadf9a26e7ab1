"""uvicorn on a thread of its own, with a socket and a protocol that mistrust strangers."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from distributed_training.config.flags import ConfigError

from .admission import Admission, admit, normalize
from .firewall import MAX_ADDRESSES, Firewall, accept_with_data

MAX_HEADER_BYTES = 16 * 1024
BACKLOG = 1024
# Connections accepted in one go, and the pause after one of them was refused: a flood then wakes
# this thread (and takes a core from the training) a few times a second instead of thousands.
BATCH = 256
FLOOD_PAUSE = 0.05
EXHAUSTED_PAUSE = 1.0  # out of file descriptors
SHIELD_INTERVAL = 0.5  # between two looks at who is kept out, while somebody is


def bind(*, ip: str, port: int) -> socket.socket:
    """A listening socket; ``[::]`` also takes IPv4, and falls back to it where IPv6 is off.

    Raises ConfigError with one line when the port or address cannot be had.
    """
    host = ip.strip("[]") or "::"
    try:
        return _bind(host, port)
    except OSError as error:
        first = error
        if host == "::":
            try:
                return _bind("0.0.0.0", port)
            except OSError as second:
                first = second
    raise ConfigError(
        f"cannot listen on {ip} port {port} ({first.strerror or first}), so no validator could "
        "reach this miner: stop what uses the port, or choose another one with --axon.port "
        "(and --axon.ip)"
    ) from None


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP: asyncio sets TCP_NODELAY only then, and a reply in two writes would otherwise
    # wait 40 ms for the caller's acknowledgement of the first.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def guarded_protocol(
    *, admission: Admission, read_timeout: timedelta, on_refused: Callable[[str, str], None]
) -> type[H11Protocol]:
    """An HTTP/1.1 protocol with a deadline for each request.

    ``read_timeout`` covers everything a client has to send for one request, head and body, counted
    from the connection or from the end of the previous response. ``on_refused(reason, address)`` is
    told of requests that never reach the application.
    """
    deadline = read_timeout.total_seconds()

    class GuardedProtocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _address = ""
        _silent = True  # not a byte so far

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._address = normalize(self.client[0]) if self.client else ""
            self._arm()

        def _arm(self) -> None:
            self._disarm()
            self._timer = self.loop.call_later(deadline, self._expired)

        def _disarm(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _expired(self) -> None:
            self._timer = None
            # Idle between requests is no offence; a request begun and not finished is, and so is
            # a connection opened for nothing.
            if self._silent or self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]:
                on_refused("silent" if self._silent else "timeout", self._address)
                admission.strike(self._address)
            self.transport.abort()

        def data_received(self, data: bytes) -> None:
            self._silent = False
            super().data_received(data)
            if self.conn.their_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED):
                self._disarm()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self.transport.is_closing():
                self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            on_refused("malformed", self._address)
            admission.strike(self._address)
            try:
                super().send_400_response(msg)
            except h11.LocalProtocolError:
                # Garbage behind a request whose response has begun.
                self.transport.abort()

    return GuardedProtocol


class HttpThread:
    """An ASGI application served by uvicorn in a daemon thread with its own event loop.

    Connections are accepted here, not by uvicorn, so that what :class:`Admission` does not let in
    is closed before anything is made for it.
    """

    def __init__(
        self,
        *,
        app: Any,
        sock: socket.socket,
        admission: Admission,
        protocol: type[H11Protocol],
        read_timeout: timedelta,
        name: str,
    ) -> None:
        self._sock = sock
        self._admission = admission
        self._protocol = protocol
        accept_with_data(sock, read_timeout)
        self._firewall = Firewall(sock)
        self._shielding = False
        config = uvicorn.Config(
            app,
            # A bound method does not look like one to uvicorn, which would then call it as ASGI 2.
            interface="asgi3",
            http=protocol,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
            backlog=BACKLOG,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._server.config.load()
        self._sock.setblocking(False)
        self._listen()
        try:
            await self._server.serve(sockets=[])
        finally:
            asyncio.get_running_loop().remove_reader(self._sock)

    def _listen(self) -> None:
        if not self._server.should_exit:
            asyncio.get_running_loop().add_reader(self._sock, self._accept)

    def _pause(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock)
        loop.call_later(seconds, self._listen)

    def _accept(self) -> None:
        refused = False
        for _ in range(BATCH):
            try:
                accepted, address = self._sock.accept()
            except BlockingIOError:
                break
            except ConnectionError:
                continue  # gone before it was accepted
            except OSError:
                self._pause(EXHAUSTED_PAUSE)
                return
            connection = admit(accepted, str(address[0]), self._admission)
            if connection is None:
                refused = True
                continue
            connection.setblocking(False)
            task = asyncio.get_running_loop().create_task(self._attach(connection))
            self._server.server_state.tasks.add(task)
            task.add_done_callback(self._server.server_state.tasks.discard)
        if refused:
            if not self._shielding:
                self._shield()
            self._pause(FLOOD_PAUSE)

    def _shield(self) -> None:
        """Have the kernel keep out those who would be refused here, until they would not be."""
        self._shielding = False
        if self._server.should_exit:
            return
        blocked, trusted, strangers = self._admission.rules(MAX_ADDRESSES)
        self._firewall.apply(blocked=blocked, trusted=trusted, strangers=strangers)
        if self._firewall.active:
            self._shielding = True
            asyncio.get_running_loop().call_later(SHIELD_INTERVAL, self._shield)

    def dropped(self) -> int:
        """Packets that the kernel dropped for us."""
        return self._firewall.dropped() if self._sock.fileno() >= 0 else 0

    async def _attach(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()

        def protocol() -> H11Protocol:
            return self._protocol(
                config=self._server.config,
                server_state=self._server.server_state,
                app_state={},
                _loop=loop,
            )

        try:
            await loop.connect_accepted_socket(protocol, connection)
        except OSError:
            connection.close()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Idempotent; returns when the thread has ended, after at most about two seconds."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(10)
        self._sock.close()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()
