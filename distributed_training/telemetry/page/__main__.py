"""Serve the page, its data and the metrics of one or several run folders.

    python -m distributed_training.telemetry.page runs/miner
    python -m distributed_training.telemetry.page --port 8010 runs/* two/runs/*
    python -m distributed_training page          of the miner whose settings are here

To be reached from other machines: ``--host 0.0.0.0`` and a token in ``DT_PAGE_TOKEN``.

``/`` is the page, ``/history`` its first data, ``/stream`` events as they happen (server-sent
events), ``/metrics`` for Prometheus. GET only. Without a token the page listens on loopback only
and answers only requests for its own address: a web site whose name resolves to 127.0.0.1 (DNS
rebinding) gets 403. A client that keeps a connection without a request, or does not read the
answer, loses the connection: there are few for all clients together.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import hmac
import http.client
import ipaddress
import json
import logging
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
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

from distributed_training.common.connections import BoundedConnection, Bounds
from distributed_training.common.ports import listen
from distributed_training.common.processes import ChildLog, ParentConnection, limit_resources
from distributed_training.protocol.types import ExitStatus
from distributed_training.telemetry.metrics import MetricsRegistry
from distributed_training.telemetry.neuron_state import NeuronState
from distributed_training.telemetry.run_state import is_run_folder, observe
from distributed_training.telemetry.verdict import judge

log = logging.getLogger(__name__)

_STATIC = Path(__file__).parent / "static"
_POLL_SECONDS = 0.5
_GAUGES_SECONDS = 2.0
_QUEUED = 2000  # events that a slow reader may be behind before it is sent away
_READERS = 32
_NICENESS = 10  # training goes first
_CONNECTIONS = 256  # fewer than the usual limit of open files, 1024
_PATIENCE = 10.0  # seconds for a request, and for a client to read on
_TAKE_OVER_SECONDS = 1.0  # between two looks whether the page before is gone
_LONGEST_ANSWER = 2**20
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
    """Polls the neurons' files and hands new events to every open page."""

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
        """Send the readers the new events of ``neuron``; log a lasting failure to read once.

        No failure of a disk may end :meth:`run`: the page would stand still for good, and show so
        nowhere.
        """
        try:
            for event in neuron.poll():
                self._send(str(event.get("kind")), event)
            if gauges:
                now = {**neuron.measured(), **verdict_of(neuron.folder, time.time())}
                self._send("gauges", {"neuron": neuron.name, **now})
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


def verdict_of(folder: Path, now: float) -> dict[str, Any]:
    """Return the verdict on the miner of ``folder``, and the facts that cards show.

    ``judgement`` is None where no miner has run: in a validator's folder.
    """
    facts = observe(folder, now)
    verdict = judge(facts, now)
    known = facts.looked is not None or facts.launch is not None
    return {
        "facts": asdict(facts),
        "judgement": asdict(verdict) if known else None,
        "next_round": facts.expected_round(now),
    }


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
            # Another page asks only for the folders, and does not give its token away for them.
            proves = request.scope["path"] == "/folders"
            good = (self._token, *([_proof(self._token)] if proves else []))
            # In constant time: one that stops at the first wrong letter tells how many were right.
            if any(hmac.compare_digest(given.encode(), each.encode()) for each in good):
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


# The bytes after such a request may be its body, or an attempt to smuggle in another request.
_LAST = {"connection": "close"}
_OTHER_ADDRESS = (
    "without a token the page answers only at its own loopback address and port: forward the same "
    "port number (ssh -L 8010:127.0.0.1:8010), or set DT_PAGE_TOKEN\n"
)


_FAULTS = {"LOCAL": "this miner could not apply the update"}  # of a round that failed


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
        now = time.time()
        found = [{**neuron.facts(), **verdict_of(neuron.folder, now)} for neuron in neurons]
        content = json.dumps({"faults": _FAULTS, "neurons": found})
        return Response(content, media_type="application/json")

    async def folders(request: Request) -> Response:
        """Return the folders, which another page asks for before it leaves this one its address."""
        shown = [str(neuron.folder.resolve()) for neuron in neurons]
        return Response(json.dumps(shown), media_type="application/json")

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
                text, seen = b"", observe(neuron.folder, time.time())
                # Of a miner, whose page may be there without it.
                if seen.launch is not None:
                    own = MetricsRegistry()
                    away = seen.launch.state == "stopped" or (seen.gone and seen.gone.value)
                    own.set("launcher_running", float(not away))
                    text = own.text().encode()
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
        Route("/folders", folders),
        Route("/stream", stream),
        Route("/metrics", metrics),
        Mount("/", StaticFiles(directory=_STATIC, html=True)),
    ]
    handlers = {Exception: failed}
    pages = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    return Guard(pages, token=token)


def server(neurons: Sequence[NeuronState], *, token: str = "") -> uvicorn.Server:
    """Return the server of the page over ``neurons``; see the module."""

    class PageConnection(BoundedConnection):
        bounds = Bounds(most=_CONNECTIONS, of_client=_CONNECTIONS, patience=_PATIENCE)

    config = uvicorn.Config(
        application(neurons, token=token),
        http=PageConnection,
        log_level="critical",  # its warnings are one for each malformed request of anybody
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


def _print(text: str, level: int = logging.ERROR) -> None:
    print(text, file=sys.stdout if level == logging.INFO else sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Serve the dashboard; return 2 for arguments that cannot work, with one line."""
    parser = argparse.ArgumentParser(prog="python -m distributed_training.telemetry.page")
    parser.add_argument("folders", nargs="+", type=Path, help="run folders")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8010, help="0: any free port")
    parser.add_argument("--with-parent", type=int, help="socket of whoever started it")
    parser.add_argument(
        "--beside-miner", action="store_true", help="wait for the run folder and the port"
    )
    given = parser.parse_args(argv)
    token, folders = os.environ.get("DT_PAGE_TOKEN", ""), given.folders
    if given.beside_miner:
        return serve(folders, host=given.host, port=given.port, token=token)
    if given.with_parent is None:
        if len(folders) > 1:  # of runs/*, which holds more than run folders
            folders = [folder for folder in folders if is_run_folder(folder)] or folders
        for folder in folders:
            if not folder.exists():
                _print(f"error: {folder} does not exist, so nothing is served: give run folders")
                return ExitStatus.BAD_CONFIGURATION
        return serve(
            folders, host=given.host, port=given.port, token=token, flags="--", waits=False
        )
    parent = ParentConnection(plugins=False)
    parent.forward_log()
    secret: SecretStr | None = parent.receive()
    parent.end_with_parent()
    return serve(
        given.folders,
        host=given.host,
        port=given.port,
        token=secret.get_secret_value() if secret is not None else "",
        send_line=lambda text, level: parent.send(ChildLog(level, text)),
    )


def serve(
    folders: Sequence[Path],
    *,
    host: str,
    port: int,
    token: str = "",
    flags: str = "--neuron.page_",
    waits: bool = True,
    send_line: Callable[[str, int], None] = _print,
) -> int:
    """Serve the page of ``folders``, which may not exist yet; return the exit status.

    ``flags``: how the operator knows host and port. ``waits``: wait for an address that is in use
    or does not exist yet. A miner's own page ends with the miner, and the separate page, which
    waited, takes over the port.
    """
    problem = _problem(folders, host, port, token, flags)
    if problem is not None:
        send_line(f"error: {problem}", logging.ERROR)
        return ExitStatus.BAD_CONFIGURATION
    shown, told = f"[{host}]" if ":" in host else host, False
    while True:
        try:
            listener = listen(host, port)
            break
        except OSError as error:
            # Another program has it, or a VPN whose address it is comes up later.
            waits = waits and error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
            if waits and not told and _is_shown(host, port, folders, token):
                send_line(f"page: http://{shown}:{port}/ is served already", logging.INFO)
            elif not told:
                problem = (
                    f"error: the page cannot be served at {shown}:{port} ({error.strerror}), so "
                    f"there is none; training is not affected: give another {flags}port"
                )
                send_line(problem, logging.ERROR)
        if not waits:
            return ExitStatus.BAD_CONFIGURATION
        told = True
        try:
            time.sleep(_TAKE_OVER_SECONDS)
        except KeyboardInterrupt:
            return ExitStatus.STOPPED
    os.nice(_NICENESS)
    limit_resources()  # a file stays open for each folder
    # After the port is ours: reading takes seconds, and a port in use is reported before.
    names = [folder.name for folder in folders]
    try:
        neurons = [
            NeuronState(
                folder, name=folder.name if names.count(folder.name) == 1 else str(folder)
            ).catch_up()
            for folder in folders
        ]
        send_line(f"page: http://{shown}:{listener.getsockname()[1]}/", logging.INFO)
        server(neurons, token=token).run(sockets=[listener])
    except OSError as error:  # of a disk, which may come back: not the status of an end for good
        send_line(f"the page cannot begin ({error}): check the run folder's disk", logging.ERROR)
        return ExitStatus.FAULT
    except KeyboardInterrupt:  # uvicorn raises the signal again, of pm2 or Ctrl-C, at its end
        pass
    return ExitStatus.STOPPED


def _proof(token: str) -> str:
    """Return a proof for ``/folders``, and for nothing else, that the sender knows ``token``."""
    return hmac.new(token.encode(), b"/folders", "sha256").hexdigest()


def _is_shown(host: str, port: int, folders: Sequence[Path], token: str) -> bool:
    """Return whether the program at this address is a page that shows all of ``folders``."""
    asked = http.client.HTTPConnection(host, port, timeout=_PATIENCE)
    try:
        # Whoever has the port gets it: not the token, which shows all of a page.
        asked.request("GET", "/folders", headers={"authorization": f"Bearer {_proof(token)}"})
        found = json.loads(asked.getresponse().read(_LONGEST_ANSWER))
        return {str(folder.resolve()) for folder in folders} <= set(found)
    except (OSError, ValueError, TypeError, RecursionError, http.client.HTTPException):
        return False
    finally:
        asked.close()


def _problem(folders: Sequence[Path], host: str, port: int, token: str, flags: str) -> str | None:
    for folder in folders:
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
