"""Serves the page, its data and the metrics of one or several run folders.

``/`` the page, ``/history`` what it begins with, ``/stream`` events as they happen (server-sent
events), ``/metrics`` for Prometheus. GET only. Without a token the page listens on loopback only
and answers only requests for its own address: a web site whose name resolves to 127.0.0.1 (DNS
rebinding) gets 403.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from distributed_training.telemetry.neuron_state import NeuronState

log = logging.getLogger(__name__)

_STATIC = Path(__file__).parent / "static"
_POLL_SECONDS = 0.5
_GAUGES_SECONDS = 2.0
_QUEUED = 2000  # events that a slow reader may be behind before it is sent away
_READERS = 32
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
            for neuron in self.neurons:
                for event in self._news(neuron):
                    self._send(str(event.get("kind")), event)
            if loop.time() - asked >= _GAUGES_SECONDS:
                asked = loop.time()
                # Not for nobody: it reads files of every neuron.
                for neuron in self.neurons if self._readers else ():
                    self._send("gauges", {"neuron": neuron.name, **neuron.measured()})
            await asyncio.sleep(_POLL_SECONDS)

    def _news(self, neuron: NeuronState) -> list[dict[str, Any]]:
        """Return the new events of ``neuron``; a failure that lasts is logged once."""
        try:
            news = neuron.poll()
        except OSError as error:
            if self._failing.get(neuron.name) != str(error):
                log.warning("%s cannot be read: %s", neuron.folder, error)
            self._failing[neuron.name] = str(error)
            return []
        self._failing.pop(neuron.name, None)
        return news

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        text = f"event: {_word(kind)}\ndata: {json.dumps(content)}\n\n"
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


def _word(kind: object) -> str:
    return "".join(c for c in str(kind) if c.isalnum() or c == "_") or "event"


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

        try:
            await self._app(scope, receive, with_headers)
        except Exception as error:  # noqa: BLE001 (answered with 500 and raised again by Starlette)
            why = f"{type(error).__name__}: {error}"
            log.warning("The page failed to answer %.80r (%.200s)", request.url.path, why)

    def _refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("only GET is answered\n", 405)
        if self._token:
            header = request.headers.get("authorization", "").removeprefix("Bearer ")
            given = header or request.query_params.get("token") or request.cookies.get("token", "")
            # In constant time: one that stops at the first wrong letter tells how many were right.
            if hmac.compare_digest(given.encode(), self._token.encode()):
                return None
            return PlainTextResponse("the token is missing or wrong: open /?token=...\n", 401)
        if not is_own_address(request.scope):
            return PlainTextResponse(_OTHER_ADDRESS, 403)
        return None


_OTHER_ADDRESS = (
    "without a token the page answers only at its own loopback address and port: forward the same "
    "port number (ssh -L 8010:127.0.0.1:8010), or set DT_PAGE_TOKEN\n"
)


def is_own_address(scope: Scope) -> bool:
    """Return whether the request has one ``Host`` header that names this server's loopback address.

    The raw bytes decide. Starlette's ``request.url`` falls back to the server's own address where
    the header is no valid name, and a browser sends such names (``a{b.example``) for a web site.
    """
    hosts = [value for name, value in scope["headers"] if name.lower() == b"host"]
    named = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if named is None or not scope.get("server"):
        return False
    address, port = scope["server"]
    own = _LOOPBACK | {f"[{address}]" if ":" in address else address}
    return named[1].decode().lower() in own and int(named[2] or 80) == port


def application(neurons: Sequence[NeuronState], *, token: str = "") -> ASGIApp:
    """Return the ASGI application over ``neurons``; see the module."""
    hub = Hub(neurons)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(hub.run())
        yield
        task.cancel()

    async def history(request: Request) -> Response:
        return JSONResponse({"neurons": [neuron.facts() for neuron in neurons]})

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

    routes = [
        Route("/history", history),
        Route("/stream", stream),
        Route("/metrics", metrics),
        Mount("/", StaticFiles(directory=_STATIC, html=True)),
    ]
    return Guard(Starlette(routes=routes, lifespan=lifespan), token=token)
