"""HTTP for strangers: one connection carries one request and one answer, all of it bounded.

A server that runs inside a training process must not let strangers choose how much work it does.
So bytes are counted before they are parsed: a head is collected up to a limit, parsed once (h11)
and checked (:class:`Handlers`) before any of the body is looked at. The body is as long
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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from typing import Any

import h11

from distributed_training.protocol.synapses import MAX_BODY_BYTES

from .auth import Claim
from .refusals import Refusal, Refused

# A dendrite's head has 1.1 KB and 22 lines, a btauth one half of it.
MAX_HEAD_BYTES = 8 * 1024
MAX_HEAD_LINES = 64
# Between two looks at an unfinished request, in seconds; doubled from the first to the longest.
FIRST_PAUSE, LONGEST_PAUSE = 0.005, 1.0
MOST_AT_ONCE = 64 * 1024  # bytes

_END_OF_HEAD = b"\r\n\r\n"
# Two values of one of these: whoever reads the other one is deceived.
_SINGLE = ("x-bittensor-", "bt_header_", "computed_body_hash", "timeout", "content-length")


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


@dataclass(frozen=True)
class Handlers:
    """What answers, in the server's thread.

    ``check_head``: what the head alone decides, and whom it names as its sender; raises Refused.
    ``answer``: the fields of the reply with status 200; raises Refused. ``refused``: told of each
    refusal with the head (None: it could not be read) and the address.
    """

    check_head: Callable[[Head], Claim]
    answer: Callable[[Head, Claim, bytes], dict[str, Any]]
    refused: Callable[[Refusal, Head | None, str], None]


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


class Exchange:
    """One connection from ``address``."""

    def __init__(self, handlers: Handlers, address: str) -> None:
        self._handlers = handlers
        self._address = address
        self._received = bytearray()  # the head; then what has come of the body
        self._head: Head | None = None
        self._claim: Claim | None = None
        self._length = 0

    async def run(self, connection: socket.socket, read_timeout: timedelta) -> None:
        """The request and its answer. ``read_timeout`` covers everything the client has to send.
        Raises OSError if it hangs up."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(read_timeout.total_seconds()):
                await self._receive(loop, connection)
            assert self._head is not None and self._claim is not None
            fields = self._handlers.answer(self._head, self._claim, bytes(self._received))
            status: int = HTTPStatus.OK
        except Refused as refused:
            self._handlers.refused(refused.refusal, self._head, self._address)
            status, fields = refused.refusal.status, {"message": refused.refusal.message}
        except TimeoutError:
            silent = self._head is None and not self._received
            why = Refusal.SILENT if silent else Refusal.TIMEOUT
            self._handlers.refused(why, None, self._address)
            return
        await loop.sock_sendall(connection, reply_bytes(status, fields))

    async def _receive(self, loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
        pause = FIRST_PAUSE
        while True:
            data = await loop.sock_recv(connection, MOST_AT_ONCE)
            if not data:
                raise ConnectionResetError("the client hung up")
            self._received += data
            if self._take():
                return
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    def _take(self) -> bool:
        """Whether the request is complete. Raises Refused."""
        if self._head is None:
            end = self._received.find(_END_OF_HEAD)
            if max(end, len(self._received) if end < 0 else 0) > MAX_HEAD_BYTES:
                raise Refused(Refusal.HEADERS)
            if end < 0:
                return False
            end += len(_END_OF_HEAD)
            self._head = parse_head(bytes(self._received[:end]), self._address)
            self._length = body_length(self._head)
            self._claim = self._handlers.check_head(self._head)
            del self._received[:end]
        if len(self._received) > self._length:
            raise Refused(Refusal.MALFORMED)
        return len(self._received) == self._length
