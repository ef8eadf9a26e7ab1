"""Serve the page, its data and the metrics of one or several run folders.

    python -m distributed_training.telemetry.page runs/miner
    python -m distributed_training.telemetry.page --port 8010 runs/localnet/{miner,validator}*

To be reached from other machines: ``--host 0.0.0.0`` and a token in ``DT_PAGE_TOKEN``.

``/`` the page, ``/history`` what it begins with, ``/stream`` events as they happen (server-sent
events), ``/metrics`` for Prometheus. GET only. Without a token the page listens on loopback only
and answers only requests for its own address: a web site whose name resolves to 127.0.0.1 (DNS
rebinding) gets 403. A client that keeps a connection without asking, or does not read what it
asked for, loses it: all of them together have few.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from distributed_training.common.ports import listen
from distributed_training.common.processes import ChildLog, ParentConnection
from distributed_training.protocol.types import ExitStatus
from distributed_training.telemetry.neuron_state import NeuronState

log = logging.getLogger(__name__)

_STATIC = Path(__file__).parent / "static"
_POLL_SECONDS = 0.5
_GAUGES_SECONDS = 2.0
_QUEUED = 2000  # events that a slow reader may be behind before it is sent away
_READERS = 32
_NICENESS = 10  # training goes first
_CONNECTIONS = 256  # fewer than the usual limit of open files, 1024
_PATIENCE = 10.0  # seconds for a request, and for a client to read on
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
_HOST = re.compile(rb"([A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::([0-9]{1,5}))?")
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class Hub:
    """Polls the neurons' files and hands what is new to every open page."""

    def __init__(self, neurons: Sequence[NeuronState]) -> None:
        self.neurons = neurons
        self._readers: set[asyncio.Queue[str | None]] = set()
        self._failing: dict[str, str] = {}  # neuron -> why its events could not be read

    async def run(self) -> None:
        loop, asked = asyncio.get_running_loop(), 0.0
        while True:
            if due := loop.time() - asked >= _GAUGES_SECONDS:
                asked = loop.time()
            for neuron in self.neurons:
                # Not for nobody: it reads files of every neuron.
                self.poll(neuron, gauges=due and bool(self._readers))
            await asyncio.sleep(_POLL_SECONDS)

    def poll(self, neuron: NeuronState, *, gauges: bool) -> None:
        """Send the readers what is new of ``neuron``; a failure to read that lasts is logged once.

        No failure of a disk may end :meth:`run`: the page would stand still for good, and show so
        nowhere.
        """
        try:
            for event in neuron.poll():
                self._send(str(event.get("kind")), event)
            if gauges:
                self._send("gauges", {"neuron": neuron.name, **neuron.measured()})
        except OSError as error:
            if self._failing.get(neuron.name) != str(error):
                log.warning("%s cannot be read: %s", neuron.folder, error)
            self._failing[neuron.name] = str(error)
        else:
            self._failing.pop(neuron.name, None)

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        name = "".join(c for c in str(kind) if c.isalnum() or c == "_") or "event"
        text = f"event: {name}\ndata: {json.dumps(content)}\n\n"
        # A copy, since a reader that is too slow is taken out in this loop.
        for queue in tuple(self._readers):
            if queue.qsize() >= _QUEUED:
                self._readers.discard(queue)
                queue.put_nowait(None)  # it comes again and begins from the start
            else:
                queue.put_nowait(text)

    async def follow(self) -> AsyncIterator[str]:
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._readers.add(queue)
        try:
            yield "retry: 2000\n\n"
            while True:
                try:
                    # Proxies cut a stream that stays silent: then a comment goes out.
                    text = await asyncio.wait_for(queue.get(), timeout=15)
                except TimeoutError:
                    text = ": still here\n\n"
                if text is None:
                    return
                yield text
        finally:
            self._readers.discard(queue)

    @property
    def full(self) -> bool:
        return len(self._readers) >= _READERS


class Guard:
    """Refuse other methods than GET, requests for another address, and wrong tokens.

    With a ``token`` any name is answered, if the request carries it: ``Authorization: Bearer``, or
    ``?token=`` once, after which a cookie holds it.
    """

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Of the server itself, without a request to check.
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket would pass all checks below
            raise ValueError(f"{scope['type']} is not served")
        request = Request(scope, receive)
        refusal = self._refusal(request)
        if refusal is not None:
            await refusal(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = dict(_HEADERS)
                if self._token and request.query_params.get("token"):
                    # HttpOnly: no script reads it. SameSite=Strict: no other web site's link brings
                    # it along.
                    extra["set-cookie"] = f"token={self._token}; HttpOnly; SameSite=Strict; Path=/"
                message["headers"] += [(k.encode(), v.encode()) for k, v in extra.items()]
            await send(message)

        await self._app(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        length = request.headers.get("content-length", "0")
        if "transfer-encoding" in request.headers or length != "0":
            return PlainTextResponse("a request has no body here\n", 400, _LAST)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("only GET is answered\n", 405, _LAST)
        if self._token:
            header = request.headers.get("authorization", "").removeprefix("Bearer ")
            given = header or request.query_params.get("token") or request.cookies.get("token", "")
            # In constant time: one that stops at the first wrong letter tells how many were right.
            if hmac.compare_digest(given.encode(), self._token.encode()):
                return None
            return PlainTextResponse("the token is missing or wrong: open /?token=...\n", 401)
        # The raw bytes decide. Starlette's request.url falls back to the server's own address where
        # the header is no valid name, and a browser sends such names (a{b.example) for a web site.
        hosts = [value for name, value in request.scope["headers"] if name.lower() == b"host"]
        named = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if named is not None and request.scope.get("server"):
            address, port = request.scope["server"]
            own = _LOOPBACK | {f"[{address}]" if ":" in address else address}
            if named[1].decode().lower() in own and int(named[2] or 80) == port:
                return None
        return PlainTextResponse(_OTHER_ADDRESS, 403)


# What follows such a request may be its body, or what somebody wants to be taken for a request.
_LAST = {"connection": "close"}
_OTHER_ADDRESS = (
    "without a token the page answers only at its own loopback address and port: forward the same "
    "port number (ssh -L 8010:127.0.0.1:8010), or set DT_PAGE_TOKEN\n"
)


def application(neurons: Sequence[NeuronState], *, token: str = "") -> ASGIApp:
    """Return the ASGI application over ``neurons``; see the module."""
    hub = Hub(neurons)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(hub.run())
        yield
        task.cancel()

    async def history(request: Request) -> Response:
        # Not JSONResponse, whose UTF-8 has no half of a surrogate pair: one in the text of a peer's
        # error would leave the page empty for as long as the event is among the last.
        content = json.dumps({"neurons": [neuron.facts() for neuron in neurons]})
        return Response(content, media_type="application/json")

    async def stream(request: Request) -> Response:
        if hub.full:
            return PlainTextResponse(f"{_READERS} pages are open already\n", 503)
        return StreamingResponse(hub.follow(), media_type="text/event-stream")

    async def metrics(request: Request) -> Response:
        """Return the metrics; an empty text before the first figures.

        The miner starts then, and Prometheus sees it up.
        """
        wanted = request.query_params.get("neuron", neurons[0].name if neurons else "")
        for neuron in neurons:
            if neuron.name == wanted:
                text = b""
                for file in ("metrics.prom", "launcher.prom"):  # of the ranks, of their launcher
                    try:
                        text += (neuron.folder / file).read_bytes()
                    except FileNotFoundError:
                        pass
                    except OSError as error:
                        return PlainTextResponse(f"{file}: {error.strerror}\n", 503)
                return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
        return PlainTextResponse("no such neuron\n", 404)

    async def failed(request: Request, error: Exception) -> Response:
        # uvicorn, to which Starlette raises it again, is silent.
        why = f"{type(error).__name__}: {error}"
        log.warning("The page failed to answer %.80r (%.200s)", request.url.path, why)
        return PlainTextResponse("a defect: the log has it\n", 500)

    routes = [
        Route("/history", history),
        Route("/stream", stream),
        Route("/metrics", metrics),
        Mount("/", StaticFiles(directory=_STATIC, html=True)),
    ]
    handlers = {Exception: failed}
    pages = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    return Guard(pages, token=token)


class Connection(H11Protocol):
    """A connection whose client asks within :data:`_PATIENCE`, and reads on; else it is cut.

    uvicorn waits for a request, and for room to send in, without an end: clients that say nothing,
    or stopped reading (a laptop that sleeps), would take all connections, one after the other.
    Where too many wait to ask, a new one takes the place of the one that has waited longest: who
    sends a whole request at once is answered, however many send slow ones.
    """

    _deadline: asyncio.TimerHandle | None = None
    _since = 0.0  # of the loop's clock: when it began to wait for a request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        if len(self.connections) >= _CONNECTIONS:
            waiting = [one for one in self.connections if isinstance(one, Connection) and one.waits]
            longest = min(waiting, key=lambda one: one._since)  # this one, if no other waits
            # At once: uvicorn answers 503 while as many are counted.
            self.connections.discard(longest)
            longest.transport.abort()
        self._expect()

    @property
    def waits(self) -> bool:
        """No request of it is being answered, nor an answer on its way."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and not self.transport.get_write_buffer_size()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._since = self.loop.time()
        self._expect()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def _expect(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        unread = self.transport.get_write_buffer_size()
        self._deadline = self.loop.call_later(_PATIENCE, self._late, unread)

    def _late(self, before: int) -> None:
        """Cut the connection unless its client reads, or a request of it is being answered."""
        unread = self.transport.get_write_buffer_size()
        # An answer counts as complete while megabytes of it are still on their way.
        if 0 < unread < before:
            self._expect()
        elif self.flow.write_paused or self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


def server(neurons: Sequence[NeuronState], *, token: str = "") -> uvicorn.Server:
    """Return the server of the page over ``neurons``; see the module."""
    config = uvicorn.Config(
        application(neurons, token=token),
        http=Connection,
        log_level="critical",  # its warnings are one for each malformed request of anybody
        access_log=False,
        ws="none",
        limit_concurrency=_CONNECTIONS,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


def main(argv: list[str] | None = None) -> int:
    """Serve the dashboard; return 2 for arguments that cannot work, with one line."""
    parser = argparse.ArgumentParser(prog="python -m distributed_training.telemetry.page")
    parser.add_argument("folders", nargs="+", type=Path, help="run folders")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8010, help="0: any free port")
    parser.add_argument("--with-parent", type=int, help="socket of whoever started it")
    given = parser.parse_args(argv)
    token = os.environ.get("DT_PAGE_TOKEN", "")
    parent = None
    if given.with_parent is not None:
        parent = ParentConnection(plugins=False)
        parent.forward_log()
        secret: SecretStr | None = parent.receive()
        token = secret.get_secret_value() if secret is not None else ""
        parent.end_with_parent()

    def send_line(text: str, level: int) -> None:
        if parent is not None:
            parent.send(ChildLog(level, text))
        else:
            print(text, file=sys.stdout if level == logging.INFO else sys.stderr, flush=True)

    flags = "--neuron.page_" if parent is not None else "--"  # as the operator knows them
    host = f"[{given.host}]" if ":" in given.host else given.host
    problem = _problem(given, token, flags)
    if problem is None:
        try:
            listener = listen(given.host, given.port)
        except OSError as error:
            problem = (
                f"the page cannot be served at {host}:{given.port} ({error.strerror}), so there is "
                f"none; training is not affected: give another {flags}port"
            )
    if problem is not None:
        send_line(f"error: {problem}", logging.ERROR)
        return ExitStatus.BAD_CONFIGURATION
    os.nice(_NICENESS)
    # After the port is ours: reading takes seconds, and a port in use is told before.
    try:
        neurons = [NeuronState(folder).catch_up() for folder in given.folders]
    except OSError as error:  # of a disk, which may come back: not the status of an end for good
        send_line(f"the page cannot begin ({error}): check the run folder's disk", logging.ERROR)
        return ExitStatus.FAULT
    send_line(f"page: http://{host}:{listener.getsockname()[1]}/", logging.INFO)
    server(neurons, token=token).run(sockets=[listener])
    return ExitStatus.STOPPED


def _problem(given: argparse.Namespace, token: str, flags: str) -> str | None:
    host, port = given.host, given.port
    for folder in given.folders:
        # Who starts both makes it in a moment.
        if not folder.exists() and given.with_parent is None:
            return f"{folder} does not exist, so nothing is served: give run folders"
        if folder.exists() and not folder.is_dir():
            return f"{folder} is no folder, so nothing is served: give run folders"
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        return f"{flags}host {host} is not an IP address, so nothing is served: give e.g. 127.0.0.1"
    if not 0 <= port <= 65535:
        return f"{flags}port {port} is not within 0..65535, so nothing is served: give e.g. 8010"
    if not loopback and len(token) < 16:
        return (
            f"{flags}host {host} is reached from other machines, so nothing is served without a "
            f"token: set DT_PAGE_TOKEN to 16 characters or more, or leave {flags}host at 127.0.0.1"
        )
    return None


if __name__ == "__main__":
    sys.exit(main())
