"""HTTP for strangers: one connection carries one request and one answer, all of it bounded.

A server that runs inside a training process must not let strangers choose how much work it does.
So bytes are counted before they are parsed: a head is collected up to a limit, parsed once (h11)
and checked (``SignedServer.check_head``) before any of the body is looked at. The body is as long
as ``Content-Length`` says, a few kilobytes at most. ``Transfer-Encoding``, under which every single
byte can be made to cost 100 us, is refused, and so is whatever follows the request (pipelining).
After the answer the connection is closed, which HTTP/1.1 allows a server at any time.

A request that comes in many small pieces is looked at after pauses that double, so that a drip of
single bytes wakes the thread a dozen times and not thousands.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from typing import Any, Generic, Protocol, TypeVar

import h11

from distributed_training.config.flags import ConfigError
from distributed_training.protocol.synapses import MAX_BODY_BYTES

from .admission import Admission
from .auth import Refusal, Refused
from .trust import normalize

# A dendrite's head has 1.1 KB and 22 lines, a btauth one half of it.
MAX_HEAD_BYTES = 8 * 1024
MAX_HEAD_LINES = 64
BACKLOG = 1024
# What the kernel keeps of one connection before it is read (Linux doubles it).
RECEIVE_BUFFER = 16 * 1024
# Between two looks at an unfinished request, in seconds; doubled from the first to the longest.
FIRST_PAUSE, LONGEST_PAUSE = 0.005, 1.0
# Connections accepted in one go, and the pause after one of them was refused: a flood then wakes
# this thread (and takes a core from the training) a few times a second instead of thousands.
BATCH = 256
FLOOD_PAUSE = 0.02
EXHAUSTED_PAUSE = 1.0  # out of file descriptors

_END_OF_HEAD = b"\r\n\r\n"
_RESET = struct.pack("ii", 1, 0)  # struct linger: on, 0 s
# Two values of one of these: whoever reads the other one is deceived.
_SINGLE = ("x-bittensor-", "bt_header_", "computed_body_hash", "timeout", "content-length")

C = TypeVar("C")


@dataclass(frozen=True)
class Head:
    """The head of a request; ``target`` as sent (it is signed), ``headers`` by lower-case name."""

    method: str
    target: str
    headers: dict[str, str]
    address: str

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


class Application(Protocol[C]):
    """What answers. All of it runs in the server's thread."""

    def check_head(self, head: Head) -> C:
        """What the head alone decides; what it returns goes to :meth:`answer`. Raises Refused."""
        ...

    async def answer(self, head: Head, checked: C, body: bytes) -> dict[str, Any]:
        """The fields of the reply with status 200. Raises Refused."""
        ...

    def refused(self, refusal: Refusal, head: Head | None, address: str) -> None:
        """A request was refused; ``head`` is None if it could not be read."""
        ...


def parse_head(raw: bytes, address: str) -> Head:
    """``raw`` ends with the empty line. Raises Refused for what is not strictly HTTP/1."""
    if raw.count(b"\n") > MAX_HEAD_LINES:
        raise Refused(Refusal.HEADERS)
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
    connection.receive_data(raw)
    try:
        event = connection.next_event()
        if not isinstance(event, h11.Request) or connection.trailing_data[0]:
            raise Refused(Refusal.MALFORMED)
        headers: dict[str, str] = {}
        for raw_name, value in event.headers:
            name = raw_name.decode("ascii")
            if name in headers and name.startswith(_SINGLE):
                raise Refused(Refusal.MALFORMED)
            headers[name] = value.decode("ascii")
        target = event.target.decode("ascii")
    except h11.RemoteProtocolError as error:
        chunked = error.error_status_hint == HTTPStatus.NOT_IMPLEMENTED
        raise Refused(Refusal.LENGTH if chunked else Refusal.MALFORMED) from None
    except UnicodeDecodeError:
        raise Refused(Refusal.MALFORMED) from None
    return Head(event.method.decode("ascii"), target, headers, address)


def body_length(head: Head) -> int:
    """Raises Refused for a body whose length is not told, or too large."""
    if "transfer-encoding" in head.headers:
        raise Refused(Refusal.LENGTH)
    length = int(head.headers.get("content-length", "0"))  # h11 saw that it is digits
    if length > MAX_BODY_BYTES:
        raise Refused(Refusal.TOO_LARGE)
    return length


def parse_fields(body: bytes) -> dict[str, Any]:
    """The JSON object of a body; none is an empty one. Raises Refused."""

    def refuse(_: str) -> float:
        raise ValueError("not finite")

    try:
        fields = json.loads(body or b"{}", parse_constant=refuse)
    except (ValueError, RecursionError):
        raise Refused(Refusal.MALFORMED) from None
    if not isinstance(fields, dict):
        raise Refused(Refusal.MALFORMED)
    return fields


def reply_bytes(status: int, content: dict[str, Any]) -> bytes:
    body = json.dumps(content).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        "content-type: application/json\r\n"
        f"bt_header_axon_status_code: {status}\r\n"  # what a legacy caller takes for success
        f"content-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode() + body


class Exchange(asyncio.Protocol, Generic[C]):
    """One connection. ``read_timeout`` covers everything the client has to send."""

    def __init__(
        self,
        *,
        application: Application[C],
        address: str,
        read_timeout: timedelta,
        on_close: Callable[[Exchange[C]], None],
    ) -> None:
        self.address = address
        self._application = application
        self._deadline = read_timeout.total_seconds()
        self._on_close: Callable[[Exchange[C]], None] | None = on_close
        self._received = bytearray()  # the head; then what has come of the body
        self._head: Head | None = None
        self._checked: C | None = None
        self._length = 0
        self._pause = FIRST_PAUSE
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._task: asyncio.Task[None] | None = None
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        loop = asyncio.get_running_loop()
        self._timers["deadline"] = loop.call_later(self._deadline, self._expired)

    def data_received(self, data: bytes) -> None:
        if self._task is not None or self.transport.is_closing():
            return  # behind a whole request: the answer closes the connection
        self._received += data
        try:
            complete = self._take()
        except Refused as refused:
            self._refuse(refused.refusal)
            return
        if complete:
            self._end_of_request()
            self._task = asyncio.get_running_loop().create_task(self._answer())
        else:
            self._look_later()

    def _take(self) -> bool:
        """Whether the request is complete. Raises Refused."""
        if self._head is None:
            end = self._received.find(_END_OF_HEAD)
            if max(end, len(self._received) if end < 0 else 0) > MAX_HEAD_BYTES:
                raise Refused(Refusal.HEADERS)
            if end < 0:
                return False
            end += len(_END_OF_HEAD)
            self._head = parse_head(bytes(self._received[:end]), self.address)
            self._length = body_length(self._head)
            self._checked = self._application.check_head(self._head)
            del self._received[:end]
        if len(self._received) > self._length:
            raise Refused(Refusal.MALFORMED)
        return len(self._received) == self._length

    def _look_later(self) -> None:
        self.transport.pause_reading()
        loop = asyncio.get_running_loop()
        self._timers["look"] = loop.call_later(self._pause, self.transport.resume_reading)
        self._pause = min(LONGEST_PAUSE, 2 * self._pause)

    def _expired(self) -> None:
        silent = self._head is None and not self._received
        self._end_of_request()
        self._application.refused(Refusal.SILENT if silent else Refusal.TIMEOUT, None, self.address)
        self.transport.abort()

    def _end_of_request(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self.transport.pause_reading()

    async def _answer(self) -> None:
        assert self._head is not None and self._checked is not None
        try:
            fields = await self._application.answer(
                self._head, self._checked, bytes(self._received)
            )
        except Refused as refused:
            self._refuse(refused.refusal)
            return
        self._reply(HTTPStatus.OK, fields)

    def _refuse(self, refusal: Refusal) -> None:
        self._application.refused(refusal, self._head, self.address)
        self._reply(refusal.status, {"message": refusal.message})

    def _reply(self, status: int, fields: dict[str, Any]) -> None:
        self._end_of_request()
        if not self.transport.is_closing():
            self.transport.write(reply_bytes(status, fields))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers.values():
            timer.cancel()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close(self)


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
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


class HttpThread(Generic[C]):
    """Serves ``application`` on ``sock`` in a daemon thread with its own event loop.

    Connections are accepted here, not by asyncio, so that what :class:`Admission` does not let in
    is closed before a task, a transport or a protocol is made for it.
    """

    def __init__(
        self,
        *,
        application: Application[C],
        sock: socket.socket,
        admission: Admission,
        read_timeout: timedelta,
        name: str,
    ) -> None:
        self._application = application
        self._sock = sock
        self._admission = admission
        self._read_timeout = read_timeout
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._open: set[Exchange[C]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

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
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for exchange in list(self._open):
            exchange.transport.abort()
        await asyncio.sleep(0)  # connection_lost of each

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
                self._loop.create_task(self._attach(accepted, address))
            else:
                # An RST instead of a FIN: no TIME_WAIT entry is left here for junk.
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                accepted.close()
                refused = True
        if refused:
            self._pause(FLOOD_PAUSE)

    async def _attach(self, accepted: socket.socket, address: str) -> None:
        exchange = Exchange(
            application=self._application,
            address=address,
            read_timeout=self._read_timeout,
            on_close=self._closed,
        )
        self._open.add(exchange)
        try:
            await self._loop.connect_accepted_socket(lambda: exchange, accepted)
        except OSError:
            accepted.close()
            exchange.connection_lost(None)

    def _closed(self, exchange: Exchange[C]) -> None:
        self._open.discard(exchange)
        self._admission.disconnect(exchange.address)
