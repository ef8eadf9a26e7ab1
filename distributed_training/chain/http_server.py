"""HTTP for untrusted clients: a connection carries one request at a time, all of it bounded.

A server inside a training process must not let clients choose how much work it does. So bytes are
counted before they are parsed: a head is collected up to a limit, parsed once (h11) and checked
(:class:`Handlers`) before any of the body is read. The body is as long as ``Content-Length`` says,
a few kilobytes at most. ``Transfer-Encoding``, under which every single byte can be made to cost
100 us, is refused, and so is whatever follows the request (pipelining). After the answer the
connection is closed, which HTTP/1.1 allows a server at any time; a server that many poll may keep
it instead (``Handlers.idle``), as long as half of the connections it may have are free.

Connections are accepted here, not by asyncio: what :class:`~.callers.Admission` does not let in is
closed before a task is made for it. Measured by ``bench.server``: 2,000 connections a second
that are refused take 4 to 6 % of a core so, and 19 to 21 % through asyncio's own server.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import json
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from typing import Any

import h11

from distributed_training.common.backoff import doubling
from distributed_training.common.ports import listen
from distributed_training.config.types import ConfigError
from distributed_training.protocol.synapses import MAX_BODY_BYTES

from .auth import Refusal, Refused
from .callers import Admission, normalize

# A dendrite's head has 1.1 KB and 22 lines, a btauth one half of it.
MAX_HEAD_BYTES = 8 * 1024
MAX_HEAD_LINES = 64
SHORT_HEAD = 512  # bytes; a poller's has 200
# Between two looks at an unfinished request; doubled from the first to the longest.
FIRST_PAUSE, LONGEST_PAUSE = timedelta(milliseconds=5), timedelta(seconds=1)
MOST_AT_ONCE = 64 * 1024  # bytes
SEND_TIMEOUT = 30.0  # seconds a client has to read an answer

_END_OF_HEAD = b"\r\n\r\n"
# Two values of one of these: whoever reads the other one is deceived.
_SINGLE = ("x-bittensor-", "bt_header_", "computed_body_hash", "timeout", "content-length")


@dataclass(frozen=True)
class Head:
    """The head of a request; ``target`` as sent (it is signed), ``headers`` by lower-case name."""

    method: str
    target: str
    headers: Mapping[str, str]
    keeps: bool  # whether the client can use the connection again
    address: str

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


Reply = dict[str, Any] | bytes


@dataclass(frozen=True)
class Handlers:
    """The functions that answer requests, in the server's thread.

    ``check_head``: decides what the head alone allows, and returns the named sender; raises
    Refused. ``answer``: the fields of the reply with status 200, a reply whole in bytes, or one of
    these later (for an answer that may wait); gets what ``check_head`` returned; raises Refused.
    ``refused``: called for each refusal with the head (None: it could not be read) and the address.
    ``max_body`` in bytes. ``idle``: how long an answered connection waits for another request;
    None: not at all.
    """

    check_head: Callable[[Head], Any]
    answer: Callable[[Head, Any, bytes], Reply | Awaitable[Reply]]
    refused: Callable[[Refusal, Head | None, str], None]
    max_body: int = MAX_BODY_BYTES
    idle: timedelta | None = None


def parse_head(raw: bytes, address: str) -> Head:
    """Parse ``raw``, which ends with the empty line.

    Raises Refused unless it is strictly HTTP/1.
    """
    parse = _parse_again if len(raw) <= SHORT_HEAD else _parse
    return Head(*parse(raw), address)


def _parse(raw: bytes) -> tuple[str, str, dict[str, str], bool]:
    # h11 takes time for each line: they are counted before it sees one.
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
    keeps = event.http_version == b"1.1" and headers.get("connection", "").lower() != "close"
    return event.method.decode("ascii"), target, headers, keeps


# Pollers send the same few bytes all the time, and h11 takes a quarter of the work for an answer.
_parse_again = functools.lru_cache(maxsize=512)(_parse)


def body_length(head: Head, most: int = MAX_BODY_BYTES) -> int:
    """Return a body's length. Raises Refused if it is not given, or too large."""
    if "transfer-encoding" in head.headers:
        raise Refused(Refusal.LENGTH)
    length = int(head.headers.get("content-length", "0"))  # h11 saw that it is digits
    if length > most:
        raise Refused(Refusal.TOO_LARGE)
    return length


def parse_fields(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; an empty body is an empty object. Raises Refused."""

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
    # The header is what a legacy caller takes for success.
    more = {"bt_header_axon_status_code": str(status)}
    return whole_reply(status, json.dumps(content).encode(), "application/json", more)


def whole_reply(status: int, body: bytes, kind: str, headers: Mapping[str, str]) -> bytes:
    """Return the bytes of a reply of content type ``kind``."""
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        f"content-type: {kind}",
        *(f"{name}: {value}" for name, value in headers.items()),
        f"content-length: {len(body)}\r\n\r\n",
    ]
    return "\r\n".join(lines).encode() + body


class Exchange:
    """One request from ``address`` and its answer.

    ``may_stay``: whether there is room for the connection afterwards.
    """

    def __init__(self, handlers: Handlers, address: str, may_stay: Callable[[], bool]) -> None:
        self._handlers = handlers
        self._address = address
        self._may_stay = may_stay
        self._received = bytearray()  # the head; then what has come of the body
        self._head: Head | None = None
        self._claim: Any = None
        self._length = 0

    async def run(self, connection: socket.socket, read_timeout: timedelta, first: bytes) -> bool:
        """Answer, and return whether the connection stays.

        ``read_timeout`` covers everything the client has to send; ``first`` has come of it already.
        Raises OSError if it hangs up.
        """
        stays = False
        self._received += first
        try:
            if not self._take():
                # One deadline for all bytes: one for each read would let a drip live for ever.
                async with asyncio.timeout(read_timeout.total_seconds()):
                    await self._receive(connection)
            assert self._head is not None
            answer = self._handlers.answer(self._head, self._claim, bytes(self._received))
            reply = await answer if inspect.isawaitable(answer) else answer
            status: int = HTTPStatus.OK
            stays = self._head.keeps and self._may_stay()
        except Refused as refused:
            self._handlers.refused(refused.refusal, self._head, self._address)
            status, reply = refused.refusal.status, refused.fields
        except TimeoutError:
            silent = self._head is None and not self._received
            why = Refusal.SILENT if silent else Refusal.TIMEOUT
            self._handlers.refused(why, None, self._address)
            return False
        whole = reply if isinstance(reply, bytes) else reply_bytes(status, reply)
        if not stays:
            whole = whole.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
        return await _sent(connection, whole) and stays

    async def _receive(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        # Pauses double: a drip of single bytes wakes this thread a dozen times, not thousands.
        for looks in itertools.count(1):
            data = await loop.sock_recv(connection, MOST_AT_ONCE)
            if not data:
                raise ConnectionResetError("the client hung up")
            self._received += data
            if self._take():
                return
            pause = doubling(looks, first=FIRST_PAUSE, longest=LONGEST_PAUSE)
            await asyncio.sleep(pause.total_seconds())

    def _take(self) -> bool:
        """Return whether the request is complete. Raises Refused."""
        if self._head is None:
            end = self._received.find(_END_OF_HEAD)
            if max(end, len(self._received) if end < 0 else 0) > MAX_HEAD_BYTES:
                raise Refused(Refusal.HEADERS)
            if end < 0:
                return False
            end += len(_END_OF_HEAD)
            self._head = parse_head(bytes(self._received[:end]), self._address)
            self._length = body_length(self._head, self._handlers.max_body)
            # What the head alone decides is refused before any of the body is waited for.
            self._claim = self._handlers.check_head(self._head)
            del self._received[:end]
        # Bytes after the body would be a second request, before the first one is answered.
        if len(self._received) > self._length:
            raise Refused(Refusal.MALFORMED)
        return len(self._received) == self._length


async def _sent(connection: socket.socket, answer: bytes) -> bool:
    """Send an answer; return False if the client does not read it.

    Raises OSError if it hangs up.
    """
    sent = 0
    with contextlib.suppress(BlockingIOError):
        sent = connection.send(answer)  # most go out at once, without a timer
    with contextlib.suppress(TimeoutError):
        if sent < len(answer):
            async with asyncio.timeout(SEND_TIMEOUT):
                await asyncio.get_running_loop().sock_sendall(connection, answer[sent:])
        return True
    return False


BACKLOG = 1024
# What the kernel keeps of one connection before it is read (Linux doubles it).
RECEIVE_BUFFER = 16 * 1024
BATCH = 256  # connections accepted in one go
FLOOD_PAUSE = 0.02  # seconds, after one of them was refused
EXHAUSTED_PAUSE = 1.0  # out of file descriptors
_RESET = struct.pack("ii", 1, 0)  # struct linger: on, 0 s


def bind(*, ip: str, port: int) -> socket.socket:
    """Return a listening socket; ``[::]`` also takes IPv4, and falls back to it where IPv6 is off.

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
        """Stop; return when the thread has ended. Open connections are cut. Idempotent."""
        if self._thread.is_alive():
            # An asyncio.Event may be set in its loop's thread only.
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
        # First: a connection accepted after the tasks were cancelled would be nobody's.
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
                # Without a descriptor the socket stays readable: without a pause this would spin.
                self._pause(EXHAUSTED_PAUSE)
                return
            address = normalize(str(peer[0]))
            if self._admission.connect(address):
                accepted.setblocking(False)
                task = self._loop.create_task(self._exchange(accepted, address))
                self._open.add(task)
                task.add_done_callback(self._open.discard)
            else:
                # An RST instead of a FIN: an invalid request leaves no TIME_WAIT entry here.
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                accepted.close()
                refused = True
        if refused:
            # Meanwhile the kernel's backlog holds the flood, and training has the interpreter.
            self._pause(FLOOD_PAUSE)

    async def _exchange(self, accepted: socket.socket, address: str) -> None:
        def may_stay() -> bool:
            return self._handlers.idle is not None and self._admission.may_stay(address)

        try:
            with accepted, contextlib.suppress(OSError):  # the client hung up
                first: bytes | None = b""
                while first is not None:
                    exchange = Exchange(self._handlers, address, may_stay)
                    stays = await exchange.run(accepted, self._read_timeout, first)
                    first = await self._next(accepted) if stays else None
        finally:
            self._admission.disconnect(address)

    async def _next(self, accepted: socket.socket) -> bytes | None:
        """Return what the next request begins with, None if there is none."""
        assert self._handlers.idle is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._handlers.idle.total_seconds()):
                return await self._loop.sock_recv(accepted, MOST_AT_ONCE) or None
        return None
