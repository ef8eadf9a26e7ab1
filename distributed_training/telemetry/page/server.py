"""Serves the page, its data and the metrics of one or several run folders.

``/`` the page, ``/history`` what it begins with, ``/stream`` events as they happen (server-sent
events), ``/metrics`` for Prometheus. GET only. Without a token only this machine is answered, and
only under a loopback name: a web site that resolves to 127.0.0.1 gets nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from .history import Neuron

log = logging.getLogger(__name__)

_STATIC = Path(__file__).parent / "static"
_POLL_SECONDS = 0.5
_GAUGES_SECONDS = 2.0
_QUEUED = 2000  # events that a slow reader may be behind before it is sent away
_READERS = 32
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
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

    def __init__(self, neurons: Sequence[Neuron]) -> None:
        self.neurons = neurons
        self._readers: set[asyncio.Queue[str | None]] = set()

    async def run(self) -> None:
        loop, asked = asyncio.get_running_loop(), 0.0
        while True:
            for neuron in self.neurons:
                try:
                    news = neuron.poll()
                except OSError as error:
                    log.warning("%s cannot be read: %s", neuron.folder, error)
                    news = []
                for event in news:
                    self._send(str(event.get("kind")), event)
            if loop.time() - asked >= _GAUGES_SECONDS:
                asked = loop.time()
                for neuron in self.neurons if self._readers else ():
                    self._send("gauges", {"neuron": neuron.name, "gauges": neuron.gauges()})
            await asyncio.sleep(_POLL_SECONDS)

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        text = f"event: {_word(kind)}\ndata: {json.dumps(content)}\n\n"
        for queue in tuple(self._readers):
            if queue.qsize() >= _QUEUED:
                self._readers.discard(queue)
                queue.put_nowait(None)  # it comes again and begins anew
            else:
                queue.put_nowait(text)

    async def follow(self) -> AsyncIterator[str]:
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._readers.add(queue)
        try:
            yield "retry: 2000\n\n"
            while True:
                try:
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
    """Refuses other methods than GET, names that are not this machine's, and wrong tokens.

    With a ``token`` any name is answered, if the request carries it: ``Authorization: Bearer``, or
    ``?token=`` once, after which a cookie holds it.
    """

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        refusal = self._refusal(request)
        if refusal is not None:
            await refusal(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = dict(_HEADERS)
                if self._token and request.query_params.get("token"):
                    extra["set-cookie"] = f"token={self._token}; HttpOnly; SameSite=Strict; Path=/"
                message["headers"] += [(k.encode(), v.encode()) for k, v in extra.items()]
            await send(message)

        await self._app(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("only GET is answered\n", 405)
        if self._token:
            header = request.headers.get("authorization", "").removeprefix("Bearer ")
            given = header or request.query_params.get("token") or request.cookies.get("token", "")
            if hmac.compare_digest(given.encode(), self._token.encode()):
                return None
            return PlainTextResponse("the token is missing or wrong: open /?token=...\n", 401)
        if request.url.hostname not in _LOOPBACK:
            return PlainTextResponse("only this machine is answered without a token\n", 403)
        return None


def application(neurons: Sequence[Neuron], *, token: str = "") -> ASGIApp:
    """The ASGI application over ``neurons``; see the module."""
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
        wanted = request.query_params.get("neuron", neurons[0].name if neurons else "")
        for neuron in neurons:
            if neuron.name == wanted:
                with contextlib.suppress(OSError):
                    text = (neuron.folder / "metrics.prom").read_bytes()
                    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
        return PlainTextResponse("no metrics were written yet\n", 503)

    routes = [
        Route("/history", history),
        Route("/stream", stream),
        Route("/metrics", metrics),
        Mount("/", StaticFiles(directory=_STATIC, html=True)),
    ]
    return Guard(Starlette(routes=routes, lifespan=lifespan), token=token)
