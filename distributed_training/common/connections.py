"""Limit what the clients of a uvicorn server may take: time, size of a head, connections.

uvicorn waits without limit for a request, for its body, and for a client that reads its answer
slowly, and no middleware sees a request before its head is complete. So a server that anybody can
reach uses a subclass of :class:`BoundedConnection` as its protocol, with its own :class:`Bounds`.
The bounds need no proxy. If the server names one, the limit per client does not apply to it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEAD_BYTES, MAX_HEAD_LINES = 8 * 1024, 64  # a signed request has half a KB and 11 lines
_END_OF_HEAD = b"\r\n\r\n"
_EARLIER_END = re.compile(rb"\n\r?\n")  # h11 would treat what follows as another request
_LINGER = 1.0  # seconds for a client to read why its request was refused
_REFUSALS = {
    "malformed": b"400 Bad Request",
    "headers_too_large": b"431 Request Header Fields Too Large",
    "no_length": b"411 Length Required",
}


@dataclass
class Bounds:
    """The limits of one server, shared by its connections, and counts of what was refused.

    ``most``: the most connections of all clients. ``of_client``: the most connections of one
    client, except our own ``proxy``. ``patience``: seconds that a client has to send a head, to
    send a body before ``pace`` applies, and to continue reading. ``pace``: the slowest allowed
    rate in bytes per second.
    """

    most: int = 256
    of_client: int = 256
    patience: float = 10.0
    pace: float = 16 * 1024
    proxy: str | None = None
    refused: Counter[str] = field(default_factory=Counter)
    # Connections by client, in order of arrival. Without this index, each arrival would search
    # through all connections, which would make a flood worse.
    held: dict[str, dict[BoundedConnection, None]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    # Connections that are waiting for a head.
    waiting: dict[BoundedConnection, None] = field(default_factory=dict)


class BoundedConnection(H11Protocol):
    """A connection whose client has to send its request and read the answer in time.

    If there are too many connections, the one that has waited longest for a request is closed: a
    client that sends a whole request at once is answered, however many others send slow requests.
    """

    bounds: Bounds

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._deadline: asyncio.TimerHandle | None = None
        self._client = ""
        self._head = bytearray()  # the head of the next request, until it is complete
        self._left = 0  # bytes of the body that are still to come
        self._began, self._body = 0.0, 0  # when the body began, and its bytes so far

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._client = normalize(self.client[0]) if self.client else ""
        bounds, mine = self.bounds, self.bounds.held[self._client]
        mine[self] = bounds.waiting[self] = None
        if len(mine) > bounds.of_client and self._client != bounds.proxy:
            bounds.refused["connections_of_address"] += 1
            self._make_room(mine)
        elif len(self.connections) > bounds.most:
            bounds.refused["connections"] += 1
            self._make_room(bounds.waiting)
        self._expect()

    def _make_room(self, among: dict[BoundedConnection, None]) -> None:
        longest = next(
            (
                one
                for one in among
                if one in self.bounds.waiting and not one.transport.get_write_buffer_size()
            ),
            self,
        )
        longest._leave()
        longest.transport.abort()

    def _leave(self) -> None:
        self.connections.discard(self)
        self.bounds.waiting.pop(self, None)
        mine = self.bounds.held[self._client]
        mine.pop(self, None)
        if not mine:  # otherwise an entry would stay for every address that ever connected
            del self.bounds.held[self._client]
        self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._leave()

    # a request

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE:
            data = self._whole_head(data)
            if not data:
                return
            self.bounds.waiting.pop(self, None)
            head, _, rest = data.partition(_END_OF_HEAD)
            super().data_received(head + _END_OF_HEAD)
            if self.transport.is_closing():
                return
            self._left = next((int(v) for n, v in self.headers or () if n == b"content-length"), 0)
            self._began, self._body, data = self.loop.time(), 0, rest
            if self._left:
                self._expect()
            else:
                self._rest()
        # Bytes beyond the body belong to another request. They are not read before this one is
        # answered.
        body = data[: self._left]
        if len(body) < len(data) and self.cycle is not None:
            self.cycle.keep_alive = False
        if body:
            self._left -= len(body)
            self._body += len(body)
            super().data_received(body)
            if not self._left:
                self._rest()

    def _whole_head(self, data: bytes) -> bytes:
        """Return all bytes so far once the head is complete and valid; until then nothing."""
        self._unset_keepalive_if_required()
        if not self._head and self._deadline is None:  # the head of a later request
            self._expect()
        searched = max(0, len(self._head) - len(_END_OF_HEAD))
        self._head += data
        end = self._head.find(_END_OF_HEAD, searched)
        # h11 takes time for each line and for each chunk of a body, so neither kind of flood may
        # reach it.
        head = self._head[: end if end >= 0 else MAX_HEAD_BYTES + 1]
        if len(head) > MAX_HEAD_BYTES or head.count(b"\n") > MAX_HEAD_LINES:
            self._refuse("headers_too_large")
        elif end >= 0 and b"\ntransfer-encoding" in head.lower():
            self._refuse("no_length")
        elif _EARLIER_END.search(head):
            self._refuse("malformed")
        elif end >= 0:
            whole, self._head = bytes(self._head), bytearray()
            return whole
        return b""

    def _refuse(self, reason: str) -> None:
        self.bounds.refused[reason] += 1
        self.transport.write(
            b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % _REFUSALS[reason]
        )
        self._head.clear()
        self.transport.close()
        self._deadline = self.loop.call_later(_LINGER, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        self.bounds.refused["malformed"] += 1
        super().send_400_response(msg)

    # the deadline

    def _rest(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expect(self) -> None:
        self._rest()
        unread = self.transport.get_write_buffer_size()
        self._deadline = self.loop.call_later(self.bounds.patience, self._late, unread)

    def _late(self, before: int) -> None:
        """Abort the connection unless its client keeps the pace that :class:`Bounds` requires."""
        self._deadline = None
        bounds, unread = self.bounds, self.transport.get_write_buffer_size()
        if self._left and not unread:
            late = self.loop.time() - self._began - bounds.patience
            # While we do not read, the client is not the slow one.
            if self.flow.read_paused or self._body >= bounds.pace * late:
                self._expect()
                return
        elif unread:
            # uvicorn considers an answer complete even if megabytes of it are still unsent.
            if unread <= before - bounds.pace * bounds.patience:
                self._expect()
                return
        elif self.cycle is not None and not self.cycle.response_complete:
            return
        bounds.refused["timeout" if self._left or self._head or unread else "silent"] += 1
        self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The request was answered before its body was read, so do not read the rest.
        if self._left:
            self.transport.close()
        if not self.transport.is_closing():
            self.bounds.waiting[self] = None
        if self.transport.get_write_buffer_size():
            self._expect()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self._left:
            self._rest()


def normalize(address: str) -> str:
    """Return one key per client: its IPv4 address, even if mapped into IPv6, or its IPv6 /64."""
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
