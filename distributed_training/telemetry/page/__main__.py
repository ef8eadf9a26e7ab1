"""Serve the page, its data and the metrics of one or several run folders.

    python -m distributed_training.telemetry.page runs/miner
    python -m distributed_training.telemetry.page --port 8010 runs/* two/runs/*
    python -m distributed_training page          for the miner whose settings are here

To make it reachable from other machines, use ``--host 0.0.0.0`` and a token in ``DT_PAGE_TOKEN``.

``/`` is the page, ``/history`` is its data, which it requests every two seconds, and ``/metrics``
is for Prometheus. Only GET is allowed. Without a token, the page listens only on loopback, and it
answers only requests for its own address, so that a web site whose name resolves to 127.0.0.1 (DNS
rebinding) gets 403. All clients share a small number of connections, so a client that sends no
request, or does not read the answer, is disconnected.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hmac
import ipaddress
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from distributed_training.common.connections import BoundedConnection, Bounds
from distributed_training.common.ports import listen
from distributed_training.common.processes import ChildLog, ParentConnection, limit_resources
from distributed_training.config import ConfigError
from distributed_training.protocol.network_report import span
from distributed_training.protocol.types import ExitStatus
from distributed_training.telemetry.events import finite
from distributed_training.telemetry.metrics import MetricsRegistry, read_metrics
from distributed_training.telemetry.neuron_state import NeuronState
from distributed_training.telemetry.run_state import find_life, is_run_folder, observe
from distributed_training.telemetry.verdict import Verdict, judge

log = logging.getLogger(__name__)

_STATIC = Path(__file__).parent / "static"
_FRESH_SECONDS = 1.0  # seconds for which an answer is reused for other requests
_NICENESS = 10  # training goes first
_CONNECTIONS = 256  # fewer than the usual limit of open files, 1024
_PATIENCE = 10.0  # seconds that a client may take to send a request, or pause while reading
_TAKE_OVER_SECONDS = 1.0  # seconds between two attempts to take over the port
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


class History:
    """The data of the page, which is read from the neurons' files on request."""

    def __init__(self, neurons: Sequence[NeuronState]) -> None:
        self.neurons = neurons
        self._answers: dict[str, tuple[float, bytes]] = {}  # neuron shown -> time, answer
        self._failing: dict[str, str] = {}  # neuron -> why its files cannot be read

    def answer(self, shown: str) -> bytes:
        """Return the data as JSON, with the curves of the neuron ``shown``.

        If no neuron has that name, the curves of all neurons are included.
        """
        asked, now = time.monotonic(), time.time()
        shown = shown if any(shown == neuron.name for neuron in self.neurons) else ""
        at, known = self._answers.get(shown, (-math.inf, b""))
        if asked - at < _FRESH_SECONDS:
            return known
        found = [row for each in self.neurons if (row := self._read(each, shown, now)) is not None]
        # A peer's error may contain half of a surrogate pair, which UTF-8 cannot encode. json.dumps
        # escapes it; otherwise the page would stay empty while the event is recent.
        content = json.dumps({"now": now, "faults": _FAULTS, "neurons": found}).encode()
        self._answers[shown] = asked, content
        return content

    def _read(self, neuron: NeuronState, shown: str, now: float) -> dict[str, Any] | None:
        """Return what the page shows of a neuron; if its disk fails, log a line and return None."""
        try:
            neuron.poll()
            found = {**neuron.shown(), **describe(neuron, now)}
        except OSError as error:
            if self._failing.get(neuron.name) != str(error):
                log.warning("%s cannot be read: %s", neuron.folder, error)
            self._failing[neuron.name] = str(error)
            return None
        self._failing.pop(neuron.name, None)
        if shown and neuron.name != shown:
            found["steps"] = found["steps"][-1:]
        return found


def describe(neuron: NeuronState, now: float) -> dict[str, Any]:
    """Return the verdict on a neuron, and the facts that the page's cards show.

    ``judgement`` is None if no miner has run there, as in a validator's folder. ``verdict`` is the
    word, its cause, its colour (good, wait, bad or idle) and its remedy.
    """
    facts, life = observe(neuron.folder, now), find_life(neuron.folder)
    found = judge(facts, now)
    known = facts.looked is not None or facts.launch is not None
    verdict: tuple[str, ...] = (found.verdict, found.cause, found.level, found.remedy)
    if not known:
        verdict = neuron.phase, "", "good", ""
        with contextlib.suppress(KeyError, TypeError, ValueError):  # lines from another version
            verdict = judge_validator(neuron, life, now)
    elif found.verdict is Verdict.STOPPED and facts.launch is not None:
        verdict = (verdict[0], f"{span(now - facts.launch.at)} ago: {verdict[1]}", *verdict[2:])
    return {
        "facts": asdict(facts),
        "judgement": asdict(found) if known else None,
        "verdict": verdict,
        "next_round": facts.expected_round(now),
        "life": life,
    }


def judge_validator(neuron: NeuronState, life: Mapping[str, Any], now: float) -> tuple[str, ...]:
    """Return the verdict on a neuron without a launcher, such as a validator, from its events.

    While a validator runs, this is the verdict on its network.
    """
    newest = {kind: rows[-1] for kind, rows in neuron.tables.items() if rows}
    state, stop = neuron.phase, newest.get("stop", {})
    if neuron.known.mode == "finished" and "finished" in newest:
        return state, str(newest["finished"].get("reason", "")), "good", ""
    if neuron.known.mode in ("stopped", "finished"):
        ago = span(now - (finite(stop.get("time")) or now))
        level = "bad" if stop.get("exit_status") else "idle"
        return state, f"{ago} ago: {stop.get('reason')}", level, ""
    if life["gone"]:
        since = span(now - life["last_sign"])
        return "dead", f"no sign of life for {since}", "bad", "pm2 status, then the end of its log"
    if (network := newest.get("network")) is not None:
        written = read_metrics(neuron.folder / "metrics.prom")
        heard = [finite(network["time"]), written.get("dt_metrics_written_timestamp_seconds")]
        silent = now - max(at for at in heard if at is not None)
        if silent > network["next_report"]:
            why = f"no figures for {span(silent)}: the end of its log tells why"
            return "validator silent", why, "bad", ""
        return network["verdict"], network["words"], network["level"], ""
    if neuron.known.mode == "starting" and not newest:
        return state, "no events yet: no miner has run in this folder", "idle", ""
    return state, "", "good", ""  # a validator waits between its rounds


def refuse(request: Request, token: str) -> Response | None:
    """Return the refusal of a request, or None if the request may be answered."""
    length = request.headers.get("content-length", "0")
    if "transfer-encoding" in request.headers or length != "0":
        return PlainTextResponse("a request has no body here\n", 400, _LAST)
    if request.method not in ("GET", "HEAD"):
        return PlainTextResponse("only GET is answered\n", 405, _LAST)
    if token:
        header = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = header or request.query_params.get("token") or request.cookies.get("token", "")
        # Compare in constant time. A comparison that stops at the first wrong character would
        # reveal by its duration how many characters were right.
        if hmac.compare_digest(given.encode(), token.encode()):
            return None
        return PlainTextResponse("the token is missing or wrong: open /?token=...\n", 401)
    # Check the raw bytes of the header. If the name in it is not valid, Starlette's request.url has
    # the server's own address instead, and a browser does send such names (a{b.example).
    hosts = [value for name, value in request.scope["headers"] if name.lower() == b"host"]
    named = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if named is not None and request.scope.get("server"):
        address, port = request.scope["server"]
        own = _LOOPBACK | {f"[{address}]" if ":" in address else address}
        if named[1].decode().lower() in own and int(named[2] or 80) == port:
            return None
    return PlainTextResponse(_OTHER_ADDRESS, 403)


# Bytes after such a request may be its body, or an attempt to smuggle in another request.
_LAST = {"connection": "close"}
_OTHER_ADDRESS = (
    "without a token, the page answers only at its own loopback address and port: forward the same "
    "port number (ssh -L 8010:127.0.0.1:8010), or set DT_PAGE_TOKEN\n"
)


_FAULTS = {"LOCAL": "this miner could not apply the update"}  # texts for the faults of a round


def application(neurons: Sequence[NeuronState], *, token: str = "") -> ASGIApp:
    """Return the ASGI application that serves ``neurons``.

    It refuses methods other than GET, requests for another address, and wrong tokens. With a
    ``token``, a request for any address is answered if it has the token: in ``Authorization:
    Bearer``, in ``?token=``, or in the cookie that is set after that.
    """
    data = History(neurons)

    async def guard(request: Request, answer: RequestResponseEndpoint) -> Response:
        refusal = refuse(request, token)
        if refusal is not None:
            return refusal
        response = await answer(request)
        response.headers.update(_HEADERS)
        if token and request.query_params.get("token"):
            # With HttpOnly, no script can read the cookie. With SameSite=Strict, a browser does not
            # send it when another web site links here.
            cookie = f"token={token}; HttpOnly; SameSite=Strict; Path=/"
            response.headers["set-cookie"] = cookie
        return response

    async def history(request: Request) -> Response:
        content = data.answer(request.query_params.get("shown", ""))
        return Response(content, media_type="application/json")

    async def metrics(request: Request) -> Response:
        """Return the metrics, or an empty text if the miner has not written any yet.

        With an empty text, Prometheus counts a miner that is still starting as up.
        """
        wanted = request.query_params.get("neuron", neurons[0].name if neurons else "")
        for neuron in neurons:
            if neuron.name == wanted:
                text, seen = b"", observe(neuron.folder, time.time())
                # The page may run while the launcher does not. Only a miner has a launcher.
                if seen.launch is not None:
                    own = MetricsRegistry()
                    away = seen.launch.state == "stopped" or (seen.gone and seen.gone.value)
                    own.set("launcher_running", float(not away))
                    text = own.text().encode()
                # Add the metrics that the ranks and the launcher have written.
                for file in ("metrics.prom", "launcher.prom"):
                    try:
                        text += (neuron.folder / file).read_bytes()
                    except FileNotFoundError:
                        pass
                    except OSError as error:
                        return PlainTextResponse(f"{file}: {error.strerror}\n", 503)
                return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
        return PlainTextResponse("no such neuron\n", 404)

    async def failed(request: Request, error: Exception) -> Response:
        # Starlette raises the error again, but uvicorn would not log it.
        why = f"{type(error).__name__}: {error}"
        log.warning("The page failed to answer %.80r (%.200s)", request.url.path, why)
        return PlainTextResponse("a defect: the log has it\n", 500)

    routes = [
        Route("/history", history),
        Route("/metrics", metrics),
        Mount("/", StaticFiles(directory=_STATIC, html=True)),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)],
        exception_handlers={Exception: failed},
    )


def server(neurons: Sequence[NeuronState], *, token: str = "") -> uvicorn.Server:
    """Return the HTTP server that serves ``neurons``."""

    class PageConnection(BoundedConnection):
        bounds = Bounds(most=_CONNECTIONS, of_client=_CONNECTIONS, patience=_PATIENCE)

    config = uvicorn.Config(
        application(neurons, token=token),
        http=PageConnection,
        log_level="critical",  # it would warn about every malformed request
        access_log=False,
        ws="none",
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


def _print(text: str, level: int = logging.ERROR) -> None:
    print(text, file=sys.stdout if level == logging.INFO else sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Serve the dashboard. If the arguments are not valid, print one line and return 2."""
    parser = argparse.ArgumentParser(prog="python -m distributed_training.telemetry.page")
    parser.add_argument("folders", nargs="+", type=Path, help="run folders")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8010, help="0: any free port")
    parser.add_argument("--with-parent", type=int, help="socket of the parent process")
    parser.add_argument(
        "--beside-miner", action="store_true", help="wait for the run folder and the port"
    )
    given = parser.parse_args(argv)
    folders, of_miner = given.folders, given.beside_miner or given.with_parent is not None
    token = os.environ.get("DT_PAGE_TOKEN", "")
    send_line: Callable[[str, int], None] = _print
    if given.with_parent is not None:
        parent = ParentConnection(plugins=False)
        parent.forward_log()
        secret: SecretStr | None = parent.receive()
        token = secret.get_secret_value() if secret is not None else ""
        parent.end_with_parent()
        send_line = lambda text, level: parent.send(ChildLog(level, text))
    if not of_miner and len(folders) > 1:  # runs/* may contain other files
        folders = [folder for folder in folders if is_run_folder(folder)] or folders
    try:
        where = {"host": given.host, "port": given.port, "of_miner": of_miner}
        serve(folders, token=token, send_line=send_line, **where)
    except ConfigError as error:
        send_line(f"error: {error}", logging.ERROR)
        return ExitStatus.BAD_CONFIGURATION
    except OSError as error:  # the disk may come back, so this exit status allows a restart
        send_line(f"the page cannot start ({error}): check the run folder's disk", logging.ERROR)
        return ExitStatus.FAULT
    except KeyboardInterrupt:  # when uvicorn ends, it raises the signal of pm2 or Ctrl-C again
        pass
    return ExitStatus.STOPPED


def serve(
    folders: Sequence[Path],
    *,
    host: str,
    port: int,
    token: str = "",
    of_miner: bool = True,
    send_line: Callable[[str, int], None] = _print,
) -> None:
    """Serve the page for ``folders`` until a signal stops it. Raises ConfigError, OSError.

    With ``of_miner``, host and port are the settings of a miner, whose folder may not exist yet,
    and the page waits while the address is in use or does not exist yet. So when a miner ends and
    with it the page of its launcher, a separate page that was waiting takes over the port.
    """
    flags = "--neuron.page_" if of_miner else "--"
    for folder in folders:
        if not folder.is_dir() and (folder.exists() or not of_miner):
            raise ConfigError(f"{folder} is not a folder, so nothing is served: give run folders")
    check_address(host, port, token, flags)
    shown, told, listener = f"[{host}]" if ":" in host else host, False, None
    while listener is None:
        try:
            listener = listen(host, port)
        except OSError as error:
            if not of_miner or error.errno not in _MAY_COME:
                raise ConfigError(
                    f"the page cannot be served at {shown}:{port} ({error.strerror}), so there is "
                    f"none; training is not affected: give another {flags}port"
                ) from None
            why = _MAY_COME[error.errno].format(error.strerror)
            line = f"The page waits for {shown}:{port}, which {why}: give another {flags}port"
            if not told:
                send_line(f"{line} if it never comes", logging.WARNING)
            told = True
            time.sleep(_TAKE_OVER_SECONDS)
    os.nice(_NICENESS)
    limit_resources()  # a file stays open for each folder
    # Reading the files takes seconds, so first listen, and report a port that is in use.
    names = [folder.name for folder in folders]
    neurons = []
    for folder in folders:
        name = folder.name if names.count(folder.name) == 1 else str(folder)
        neurons.append(NeuronState(folder, name=name).catch_up())
    send_line(f"page: http://{shown}:{listener.getsockname()[1]}/", logging.INFO)
    server(neurons, token=token).run(sockets=[listener])


_MAY_COME = {
    errno.EADDRINUSE: "is in use ({}), maybe by another page of this miner",
    # This may be the address of a VPN that comes up later.
    errno.EADDRNOTAVAIL: "is not an address of this machine yet ({})",
}


def check_address(host: str, port: int, token: str, flags: str) -> None:
    """Raise ConfigError if the address is not valid, or needs a token but there is none."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise ConfigError(
            f"{flags}host {host} is not an IP address, so nothing is served: give e.g. 127.0.0.1"
        ) from None
    if not 0 <= port <= 65535:
        raise ConfigError(
            f"{flags}port {port} is not within 0..65535, so nothing is served: give e.g. 8010"
        )
    if not loopback and len(token) < 16:
        raise ConfigError(
            f"{flags}host {host} is reached from other machines, so nothing is served without a "
            f"token: set DT_PAGE_TOKEN to 16 characters or more, or leave {flags}host at 127.0.0.1"
        )


if __name__ == "__main__":
    sys.exit(main())
