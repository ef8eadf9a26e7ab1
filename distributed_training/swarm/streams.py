"""Streams between peers as p2pd hands them out: one Unix socket each, bytes in and bytes out.

p2pd, the libp2p daemon, speaks to the network; a program asks it over its control socket to open a
stream to a peer, or to deliver streams that peers open. hivemind puts asyncio's StreamReader and
StreamWriter on these sockets, which is fine for small messages; the parts of an all-reduce would be
copied several times. A :class:`Stream` moves bytes between a tensor's memory and the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from google.protobuf.message import DecodeError, Message
from hivemind.p2p import PeerID
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

log = logging.getLogger(__name__)

_INTRODUCTION = 10.0  # seconds p2pd may take to say whose stream it delivers
_MOST_CONTROL_BYTES = 1 << 20  # of one message of p2pd
_BACKLOG = 128
_ACCEPT_AGAIN = 1.0  # seconds, after a stream could not be accepted


class StreamError(ConnectionError):
    """The stream could not be opened, or ended before what was expected."""


class Stream:
    """One libp2p stream. ``peer`` is who is at the other end, as libp2p authenticated it.

    One task may send while another receives. Both raise OSError (StreamError is one) when the
    stream breaks. Close it only when neither is running.
    """

    def __init__(self, connection: socket.socket, peer: PeerID) -> None:
        self.peer = peer
        self._socket = connection
        self._loop = asyncio.get_running_loop()

    async def receive_into(self, view: memoryview) -> None:
        """Fills all of ``view``, a view of bytes."""
        while view:
            count = await self._loop.sock_recv_into(self._socket, view)
            if not count:
                raise StreamError("the stream ended in the middle of a message")
            view = view[count:]

    async def receive(self, count: int) -> bytes:
        data = bytearray(count)
        await self.receive_into(memoryview(data))
        return bytes(data)

    async def receive_end(self) -> None:
        """Waits until the other side has closed. Raises StreamError if it sends anything."""
        if await self._loop.sock_recv(self._socket, 1):
            raise StreamError("more than was expected")

    async def send(self, *chunks: bytes | memoryview) -> None:
        """All ``chunks`` (views of bytes) one after the other, without joining them first."""
        left = [memoryview(chunk) for chunk in chunks]
        while left:
            try:
                count = self._socket.sendmsg(left)
            except (BlockingIOError, InterruptedError):
                await self._until_writable()
                continue
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    async def _until_writable(self) -> None:
        ready = asyncio.Event()
        self._loop.add_writer(self._socket, ready.set)
        try:
            await ready.wait()
        finally:
            self._loop.remove_writer(self._socket)

    async def send_message(self, message: Message) -> None:
        """To p2pd itself: length as a varint, then the message."""
        data = message.SerializeToString()
        await self.send(varint(len(data)), data)

    async def receive_message(self, message: Message) -> None:
        """From p2pd itself."""
        length = shift = 0
        while True:
            byte = (await self.receive(1))[0]
            length |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                break
            if shift > 28:
                raise StreamError("p2pd sent a length that is none")
        if length > _MOST_CONTROL_BYTES:
            raise StreamError("p2pd sent a message that is too long")
        data = await self.receive(length)
        try:
            message.ParseFromString(data)
        except DecodeError as error:
            raise StreamError(f"p2pd sent what is no message: {error}") from None

    def end_sending(self) -> None:
        """The other side reads the end after what was sent.

        p2pd may reset the stream instead, which overtakes what was sent last: let the other side
        take that first.
        """
        with contextlib.suppress(OSError):  # it is broken already
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


def varint(number: int) -> bytes:
    """Protobuf's encoding of an unsigned number: seven bits a byte, the lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


class Daemon:
    """p2pd, by the path of its control socket."""

    def __init__(self, control: str) -> None:
        self._control = control

    @contextlib.asynccontextmanager
    async def open_stream(self, peer: PeerID, protocol: str) -> AsyncIterator[Stream]:
        """A stream to ``peer``, closed at the end. Raises OSError, also if the peer refuses it."""
        request = p2pd_pb2.StreamOpenRequest(peer=peer.to_bytes(), proto=[protocol])
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream = Stream(connection, peer)
        try:
            await self._call(
                stream,
                p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request),
            )
            yield stream
        finally:
            stream.close()

    @contextlib.asynccontextmanager
    async def serve(
        self, protocol: str, path: Path, handle: Callable[[Stream], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """Inside, each stream that a peer opens for ``protocol`` is handled by a task of its own.

        ``path``: of the Unix socket on which p2pd delivers them; it must not exist.
        """
        loop = asyncio.get_running_loop()
        handlers: set[asyncio.Task[None]] = set()

        async def accept() -> None:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:  # no descriptor or no memory is left
                    log.warning("What peers send cannot be accepted now: %s", error)
                    await asyncio.sleep(_ACCEPT_AGAIN)
                    continue
                task = asyncio.create_task(self._deliver(connection, handle))
                handlers.add(task)
                task.add_done_callback(handlers.discard)

        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.setblocking(False)
            listener.bind(str(path))
            listener.listen(_BACKLOG)
            accepting = asyncio.create_task(accept())
            try:
                await self._register(protocol, path)
                yield
            finally:
                for task in (accepting, *handlers):
                    task.cancel()
                await asyncio.gather(accepting, *handlers, return_exceptions=True)
                path.unlink(missing_ok=True)

    async def _register(self, protocol: str, path: Path) -> None:
        address = Multiaddr(f"/unix{path}").to_bytes()
        request = p2pd_pb2.StreamHandlerRequest(addr=address, proto=[protocol], balanced=False)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.closing(connection):
            await self._call(
                Stream(connection, PeerID(b"")),
                p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=request),
            )

    async def _call(self, stream: Stream, request: p2pd_pb2.Request) -> None:
        """Connects ``stream`` to p2pd and puts ``request`` to it. Raises OSError."""
        stream._socket.setblocking(False)
        await asyncio.get_running_loop().sock_connect(stream._socket, self._control)
        await stream.send_message(request)
        response = p2pd_pb2.Response()
        await stream.receive_message(response)
        if response.type != p2pd_pb2.Response.OK:
            raise StreamError(response.error.msg)

    async def _deliver(
        self, connection: socket.socket, handle: Callable[[Stream], Awaitable[None]]
    ) -> None:
        connection.setblocking(False)
        with connection:
            try:
                stream = Stream(connection, PeerID(b""))
                whose = p2pd_pb2.StreamInfo()
                async with asyncio.timeout(_INTRODUCTION):
                    await stream.receive_message(whose)
                stream.peer = PeerID(whose.peer)
                await handle(stream)
            except (OSError, TimeoutError) as error:
                log.debug("A stream that a peer opened ended: %s", error)
