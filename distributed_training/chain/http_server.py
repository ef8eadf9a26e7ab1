"""HTTP for untrusted clients: a connection carries one request at a time, all of it bounded.

A server must not let clients choose how much work it does. So bytes are counted before they are
parsed: a head is collected up to a limit, parsed once (h11) and checked
(:meth:`BoundedServer.check_head`) before any of the body is read. The body is as long as
``Content-Length`` says, a few kilobytes at most. ``Transfer-Encoding``, under which every single
byte can be made to cost 100 us, is refused, and so are bytes after the request (pipelining).
After the answer the connection is closed, which HTTP/1.1 allows a server at any time; a server that
many poll may keep it instead (``idle``), as long as half of the connections it may have are free.

*Admission.* The cheapest refusal is the earliest: connections of an address that keeps
sending bad requests are closed on accept, before a protocol object or a task exists for them. All
clients together share one budget of new connections.

Connections are accepted here, not by asyncio: a connection that :class:`Admission` does not let in
is closed before a task is made for it. 2,000 refused connections a second take 4 to 6 % of a core
here, and 19 to 21 % through asyncio's own server.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import inspect
import ipaddress
import itertools
import json
import logging
import socket
import struct
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from typing import Any

import h11

from distributed_training.common.backoff import Throttle, doubling

from .auth import HOTKEY, Refusal, Refused

log = logging.getLogger(__name__)

LOG_INTERVAL = 60.0  # seconds between two lines about one caller
_LOG_LINES = 20  # per interval, all callers together

# A signed call's head has half a KB and 11 lines.
MAX_HEAD_BYTES = 8 * 1024
MAX_HEAD_LINES = 64
SHORT_HEAD = 512  # bytes; a poller's has 200
# Between two looks at an unfinished request; doubled from the first to the longest.
FIRST_PAUSE, LONGEST_PAUSE = timedelta(milliseconds=5), timedelta(seconds=1)
MOST_AT_ONCE = 64 * 1024  # bytes
SEND_TIMEOUT = 30.0  # seconds a client has to read an answer

_END_OF_HEAD = b"\r\n\r\n"
# A head with two values of one of these deceives a program that reads the other value.
_SINGLE = ("x-bittensor-", "content-length")


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


def _parse(raw: bytes) -> tuple[str, str, dict[str, str], bool]:
    """Parse ``raw``, which ends with the empty line, into the fields of a :class:`Head`.

    Raises Refused unless it is strictly HTTP/1.
    """
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
    """One request from ``address`` to ``server``, and its answer."""

    def __init__(self, server: BoundedServer, address: str) -> None:
        self._server = server
        self._address = address
        self._received = bytearray()  # the head; then the body so far
        self._head: Head | None = None
        self._claim: Any = None
        self._length = 0

    async def run(self, connection: socket.socket, read_timeout: timedelta, first: bytes) -> bool:
        """Answer, and return whether the connection stays.

        ``read_timeout`` covers the whole request; ``first``: its bytes so far.
        Raises OSError if it hangs up.
        """
        stays = False
        self._received += first
        try:
            if not self._parse_received():
                # One deadline for all bytes: one for each read would let a drip live for ever.
                async with asyncio.timeout(read_timeout.total_seconds()):
                    await self._receive(connection)
            assert self._head is not None
            answer = self._server.answer(self._head, self._claim, bytes(self._received))
            reply = await answer if inspect.isawaitable(answer) else answer
            status: int = HTTPStatus.OK
            stays = self._head.keeps and self._server.may_stay(self._address)
        except Refused as refused:
            self._server.refused(refused.refusal, self._head, self._address)
            status, reply = refused.refusal.status, refused.fields
        except TimeoutError:
            silent = self._head is None and not self._received
            why = Refusal.SILENT if silent else Refusal.TIMEOUT
            self._server.refused(why, None, self._address)
            return False
        if isinstance(reply, bytes):
            whole = reply
        else:
            whole = whole_reply(status, json.dumps(reply).encode(), "application/json", {})
        if not stays:
            whole = whole.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            sent = connection.send(whole)  # most go out at once, without a timer
        with contextlib.suppress(TimeoutError):
            if sent < len(whole):
                async with asyncio.timeout(SEND_TIMEOUT):
                    await asyncio.get_running_loop().sock_sendall(connection, whole[sent:])
            return stays
        return False  # the client does not read it

    async def _receive(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        # Pauses double: a drip of single bytes wakes this thread a dozen times, not thousands.
        for looks in itertools.count(1):
            data = await loop.sock_recv(connection, MOST_AT_ONCE)
            if not data:
                raise ConnectionResetError("the client hung up")
            self._received += data
            if self._parse_received():
                return
            pause = doubling(looks, first=FIRST_PAUSE, longest=LONGEST_PAUSE)
            await asyncio.sleep(pause.total_seconds())

    def _parse_received(self) -> bool:
        """Return whether the request is complete. Raises Refused."""
        if self._head is None:
            end = self._received.find(_END_OF_HEAD)
            if max(end, len(self._received) if end < 0 else 0) > MAX_HEAD_BYTES:
                raise Refused(Refusal.HEADERS)
            if end < 0:
                return False
            end += len(_END_OF_HEAD)
            parse = _parse_again if end <= SHORT_HEAD else _parse
            self._head = Head(*parse(bytes(self._received[:end])), self._address)
            if "transfer-encoding" in self._head.headers:
                raise Refused(Refusal.LENGTH)
            # h11 saw that it is digits.
            self._length = int(self._head.headers.get("content-length", "0"))
            if self._length > self._server.max_body:
                raise Refused(Refusal.TOO_LARGE)
            # A head that is enough for a refusal is refused before any of the body is waited for.
            self._claim = self._server.check_head(self._head)
            del self._received[:end]
        # Bytes after the body would be a second request, before the first one is answered.
        if len(self._received) > self._length:
            raise Refused(Refusal.MALFORMED)
        return len(self._received) == self._length


def normalize(address: str) -> str:
    """Return one key per client: IPv4 also when mapped into IPv6, IPv6 by its /64."""
    if "." in address and ":" not in address:
        return address
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False).network_address) + "/64"
    return str(parsed)


BURST_SECONDS = 6.0  # a bucket holds as many tokens as its rate allows in this time
NEWCOMERS_PER_SECOND, NEWCOMERS_BURST = 25.0, 100
STRIKES = 20  # refused requests; one is forgiven every BLOCK_SECONDS / STRIKES
BLOCK_SECONDS = 60.0
_MOST_BLOCKED = 4096


class Buckets:
    """Token buckets by key, the least recently used forgotten beyond ``capacity``.

    Not thread-safe.
    """

    def __init__(
        self,
        *,
        rate: float,
        burst: float | None = None,
        capacity: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate = rate
        self._burst = max(1.0, rate * BURST_SECONDS if burst is None else burst)
        self._capacity = capacity
        self._clock = clock
        self._levels: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def _level(self, key: Hashable, now: float) -> float:
        level, then = self._levels.get(key, (self._burst, now))
        return min(self._burst, level + (now - then) * self._rate)

    def empty(self, key: Hashable) -> bool:
        return self._level(key, self._clock()) < 1.0

    def draw(self, key: Hashable) -> bool:
        """Draw one token; return False when there is none."""
        now = self._clock()
        level = self._level(key, now)
        enough = level >= 1.0
        # Also when refused: a key that went out of memory would have a full bucket again.
        self._levels[key] = (level - 1.0 if enough else level, now)
        self._levels.move_to_end(key)
        if len(self._levels) > self._capacity:
            self._levels.popitem(last=False)
        return enough


class Admission:
    """Connections and bad requests by address (a key of :func:`normalize`).

    For one thread; the counters may be read from others. ``trusted``: addresses that are never
    blocked, such as that of our own proxy. ``newcomers``: new connections per second of all others
    together, and their burst.
    """

    def __init__(
        self,
        *,
        trusted: frozenset[str],
        max_connections: int,
        max_connections_per_address: int,
        requests_per_address: float,
        newcomers: tuple[float, int] = (NEWCOMERS_PER_SECOND, NEWCOMERS_BURST),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trusted = trusted
        self._max = max_connections
        self._max_per_address = max_connections_per_address
        self._clock = clock
        self._requests = Buckets(rate=requests_per_address, clock=clock)
        self._strikes = Buckets(rate=STRIKES / BLOCK_SECONDS, burst=STRIKES, clock=clock)
        self._newcomers = Buckets(rate=newcomers[0], burst=newcomers[1], capacity=1, clock=clock)
        self._blocked: OrderedDict[str, float] = OrderedDict()  # until
        self._open: Counter[str] = Counter()
        self.connections = 0
        self.refused: Counter[str] = Counter()

    def connect(self, address: str) -> bool:
        """Return whether a new connection may be used; it counts until :meth:`disconnect`."""
        trusted = address in self._trusted
        reason = ""
        if self._blocked.get(address, 0.0) > self._clock() and not trusted:
            reason = "connection_blocked"
        # By address before all together: one client must not use up the shared budget.
        elif self._open.get(address, 0) >= self._max_per_address:
            self.strike(address)
            reason = "connections_of_address"
        elif not self._requests.draw(address):
            reason = "rate"
        elif self.connections >= self._max:
            reason = "connections"
        # Last: a connection that is refused anyway draws nothing from the shared budget.
        elif not trusted and not self._newcomers.draw("newcomers"):
            reason = "connection_rate"
        if reason:
            self.refused[reason] += 1
            return False
        self._open[address] += 1
        self.connections += 1
        return True

    def may_stay(self, address: str) -> bool:
        """Return whether a connection may wait for another request; half are kept for new ones."""
        mine = self._open.get(address, 0)
        return 2 * self.connections <= self._max and 2 * mine <= self._max_per_address

    def disconnect(self, address: str) -> None:
        self.connections -= 1
        self._open[address] -= 1
        # Else an entry would stay for every address that ever called.
        if self._open[address] <= 0:
            del self._open[address]

    def strike(self, address: str) -> None:
        """Count a request of this address that was refused unproven."""
        if address in self._trusted or self._strikes.draw(address):
            return
        self._blocked[address] = self._clock() + BLOCK_SECONDS
        self._blocked.move_to_end(address)
        if len(self._blocked) > _MOST_BLOCKED:
            self._blocked.popitem(last=False)


# Bytes of one connection that the kernel keeps unread (Linux doubles it).
RECEIVE_BUFFER = 16 * 1024
BATCH = 256  # connections accepted in one go
FLOOD_PAUSE = 0.02  # seconds, after one of them was refused
EXHAUSTED_PAUSE = 1.0  # out of file descriptors
KEEP_INTERVAL = 2.0  # seconds
_RESET = struct.pack("ii", 1, 0)  # struct linger: on, 0 s


class BoundedServer(abc.ABC):
    """Answers HTTP requests on ``sock`` in a daemon thread with its own event loop.

    A subclass decides the answer. ``read_timeout`` covers all that a client has to send;
    ``max_body`` in bytes. ``idle``: how long an answered connection waits for another request;
    None: not at all.
    """

    #: Refusals that are not held against the caller's address.
    NO_STRIKE: frozenset[Refusal] = frozenset()

    def __init__(
        self,
        *,
        sock: socket.socket,
        admission: Admission,
        read_timeout: timedelta,
        max_body: int,
        idle: timedelta | None = None,
    ) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        sock.setblocking(False)
        self.port: int = sock.getsockname()[1]
        self.max_body = max_body
        self._sock = sock
        self._admission = admission
        self._read_timeout = read_timeout
        self._idle = idle
        self._counts: Counter[str] = Counter()
        self._may_log = Throttle(LOG_INTERVAL, most=_LOG_LINES)
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._open: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._stopping = threading.Event()
        self._keeper = threading.Thread(
            target=self._write_regularly, name="server-files", daemon=True
        )

    @abc.abstractmethod
    def check_head(self, head: Head) -> Any:
        """Check the head, and return the sender that it names. Raises Refused."""

    @abc.abstractmethod
    def answer(self, head: Head, claim: Any, body: bytes) -> Reply | Awaitable[Reply]:
        """Return the fields of the reply with status 200, or a reply whole in bytes.

        An answer that may wait comes later. ``claim``: the result of :meth:`check_head`. Raises
        Refused.
        """

    @abc.abstractmethod
    def write_files(self) -> None:
        """Write files. Called every ``KEEP_INTERVAL`` seconds, in a thread of its own."""

    def refused(self, refusal: Refusal, head: Head | None, address: str) -> None:
        """Count, remember and (rarely) log a refusal; ``head`` None: it could not be read."""
        self._counts[f"refused.{refusal.reason}"] += 1
        if refusal not in self.NO_STRIKE:
            self._admission.strike(address)
        headers = head.headers if head is not None else {}
        named = headers.get("x-bittensor-hotkey", "")
        claimed = HOTKEY.fullmatch(named)
        if not self._may_log(named if claimed else address):
            return
        caller = f"{named} at {address}" if claimed else address
        log.warning("Refused a call from %s: %s [%s]", caller, refusal.message, refusal.reason)

    def counters(self) -> dict[str, int]:
        """Return the counters, which only grow, ``refused.<reason>`` among them."""
        counts = Counter(dict(self._counts))
        for reason, count in dict(self._admission.refused).items():
            counts[f"refused.{reason}"] += count
        return counts

    def may_stay(self, address: str) -> bool:
        """Return whether the connection may stay open after its answer."""
        return self._idle is not None and self._admission.may_stay(address)

    def start(self) -> None:
        self._thread.start()
        self._keeper.start()

    def close(self) -> None:
        """End the threads; open connections are cut. Idempotent."""
        if self._thread.is_alive():
            # An asyncio.Event may be set in its loop's thread only.
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(10)
        elif not self._loop.is_closed():
            self._loop.close()  # never started
        self._sock.close()
        self._stopping.set()
        if self._keeper.ident is not None:
            self._keeper.join(5)

    def _write_regularly(self) -> None:
        # Not in the event loop: an fsync on a disk that an upload keeps busy takes long.
        while not self._stopping.wait(KEEP_INTERVAL):
            self.write_files()

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
            # Meanwhile the kernel's backlog holds the flood, and other threads run.
            self._pause(FLOOD_PAUSE)

    async def _exchange(self, accepted: socket.socket, address: str) -> None:
        try:
            with accepted, contextlib.suppress(OSError):  # the client hung up
                first: bytes | None = b""
                while first is not None:
                    exchange = Exchange(self, address)
                    stays = await exchange.run(accepted, self._read_timeout, first)
                    first = await self._next(accepted) if stays else None
        finally:
            self._admission.disconnect(address)

    async def _next(self, accepted: socket.socket) -> bytes | None:
        """Return the first bytes of the next request, None if there is none."""
        assert self._idle is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._idle.total_seconds()):
                return await self._loop.sock_recv(accepted, MOST_AT_ONCE) or None
        return None
