"""Answer a registry's callers with starlette on uvicorn, within :mod:`..common.connections`.

Anybody may read. Reads are answered from an immutable view. A poller that sends the ETag of the
version that it has gets 304. Writes are checked in this order, from the cheapest check on: path,
size, rates, receiver, freshness, signature. Then one thread stores them one after another, while
reads continue.

``GET /state``, ``/health``, ``/metrics``, ``/network.toml`` and ``/``, the page; ``/store/``
(:mod:`.files`).
``POST /register``, ``/access``, ``/commit``, ``/serve``;
for the founder only ``/expel``, ``/invite``, ``/invitations``, ``/revoke``, ``/allow`` and
``/report``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import uvicorn
from pydantic import ValidationError, validate_call
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from distributed_training.chain import auth
from distributed_training.chain.auth import HOTKEY, Refusal, RefusedRequest
from distributed_training.chain.base import ChainError, find
from distributed_training.common.addresses import Reach, reach
from distributed_training.common.backoff import Buckets, Throttle
from distributed_training.common.connections import BoundedConnection, Bounds, normalize

from .access import Access, StoreAway
from .files import PREFIX, ServedFolder
from .ledger import Address, PeerId, Port
from .page import draw_page, figures
from .store import CLOCK_SKEW, CannotStore, Registry, Replayed

log = logging.getLogger(__name__)

MAX_BODY = 256 * 1024  # bytes; the MD5s of an upload's 4096 parts take about 150 KB
# Registrations per second from one address.
_REGISTRATIONS_PER_SECOND, _REGISTRATIONS_BURST = 1 / 60, 32.0
# Grants per second to one hotkey, if they ask the store.
_GRANTS_PER_SECOND, _GRANTS_BURST = 1.0, 64.0
_MOST_GRANTS = 256  # grants that may run or wait for a thread at once
_PAGE_KEPT = 1.0  # seconds for which the page is cached; drawing 4096 uids takes 50 ms
_FOLLOW_INTERVAL = 2.0  # seconds between two checks of the network's file
_STOPS_WITHIN = 2  # seconds that open requests get when the service stops
_LOG_INTERVAL = 60.0  # seconds between two log lines about the same caller
_LOG_LINES = 20  # log lines per interval, over all callers
_PIECE = 64 * 1024  # bytes

# Hotkeys and addresses come from outside, so no script may run, even if one is not escaped.
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Limits:
    """``proxy``: address of a TLS proxy, whose ``X-Forwarded-For`` names its callers.

    ``host_names``: host names under which the page and the metrics are shown, in addition to
    loopback. ``private``: members may announce addresses in a private network, whatever address
    the proxy names.
    """

    requests_per_address: float = 50.0
    requests_per_hotkey: float = 5.0
    max_connections: int = 8192
    max_connections_per_address: int = 64
    read_timeout: timedelta = timedelta(seconds=5)
    idle_timeout: timedelta = timedelta(seconds=30)  # longer than a client keeps an idle connection
    proxy: str | None = None
    host_names: tuple[str, ...] = ()
    private: bool = False


class Service:
    """Serve ``registry`` on ``sock``, a listening socket, from :meth:`start` to :meth:`close`.

    The registry itself stays open. ``access``: gives members access to the global bucket; None if
    they have access in another way. ``files``: the folder that serves as the bucket, if it is not
    in an S3 store. ``follow``: called every few seconds to reload the files that are served.
    """

    def __init__(
        self,
        registry: Registry,
        sock: socket.socket,
        limits: Limits,
        *,
        access: Access | None = None,
        files: ServedFolder | None = None,
        follow: Callable[[], None] = lambda: None,
    ) -> None:
        self.registry = registry
        self._sock = sock
        self._follow, self._files = follow, files
        self._names = {"127.0.0.1", "localhost", "[::1]", *map(str.lower, limits.host_names)}
        self._private = limits.private
        self._proxy = normalize(limits.proxy) if limits.proxy is not None else None
        # Behind a proxy, callers may come from anywhere, whatever the listening address is.
        self._listens_at = sock.getsockname()[0] if limits.proxy is None else ""
        self._addresses = Buckets(rate=limits.requests_per_address, capacity=16384)
        self._hotkeys = Buckets(rate=limits.requests_per_hotkey, capacity=16384)
        self._registrations = Buckets(
            rate=_REGISTRATIONS_PER_SECOND, burst=_REGISTRATIONS_BURST, capacity=16384
        )
        writes: dict[str, Callable[..., Any]] = {
            "/expel": registry.expel,
            "/invite": registry.invite,
            "/invitations": registry.invitations,
            "/revoke": registry.revoke,
            "/allow": registry.allow,
            "/report": registry.report,
        }
        self._founders = frozenset(writes)
        writes |= {
            "/register": registry.join,
            "/commit": registry.commit,
            "/serve": self._write_endpoint,
        }
        if access is not None:
            writes["/access"] = access.grant
        self._writes = {path: validate_call(write) for path, write in writes.items()}
        self._grants = Buckets(rate=_GRANTS_PER_SECOND, burst=_GRANTS_BURST, capacity=16384)
        self._granting = 0
        # hotkey -> nonce of its last grant. Kept in memory, so that grants do not write to the
        # disk. As a result, a call from just before a restart could be repeated after it.
        self._granted: dict[str, int] = {}
        self._granter = ThreadPoolExecutor(8, thread_name_prefix="registry-access")
        self._reads: dict[str, Callable[[Request], Response]] = {
            "/state": self._state,
            "/health": lambda _: JSONResponse({"registry": registry.charter.identity}),
            "/metrics": lambda _: PlainTextResponse(figures(registry, self.counters())),
            "/": self._page,
        }
        self._made = (float("-inf"), Response())  # when it was drawn, and the page
        self._may_warn = Throttle(60.0)
        self._may_log = Throttle(_LOG_INTERVAL, most=_LOG_LINES)
        self._counts: Counter[str] = Counter()
        # All writes run on one thread, so a slow disk delays only writes, and the event loop still
        # answers reads.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="registry-writer")
        self.bounds = Bounds(
            most=limits.max_connections,
            of_client=limits.max_connections_per_address,
            patience=limits.read_timeout.total_seconds(),
            proxy=self._proxy,
        )
        self._server = uvicorn.Server(self._configuration(limits))
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (
                ("registry", partial(self._server.run, sockets=[sock])),
                ("registry-files", self._follow_regularly),
            )
        ]

    def _configuration(self, limits: Limits) -> uvicorn.Config:
        class ServiceConnection(BoundedConnection):
            bounds = self.bounds

        app = Starlette(
            routes=[
                *(Route(path, self._read) for path in self._reads),
                *(Route(path, self._write, methods=["POST"]) for path in self._writes),
                Route(PREFIX + "{key:path}", self._store, methods=["GET", "PUT"]),
                Route("/{file:path}", self._read),
            ],
            exception_handlers={
                RefusedRequest: self._refuse,
                HTTPException: self._refuse,
                ClientDisconnect: self._refuse,
                Exception: self._fail,
            },
        )
        return uvicorn.Config(
            app,
            http=ServiceConnection,
            loop="asyncio",  # the same loop, whatever else is installed
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # otherwise it would warn about every malformed request
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=round(limits.idle_timeout.total_seconds()),
            timeout_graceful_shutdown=_STOPS_WITHIN,
        )

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop serving and store the writes that were accepted. Idempotent."""
        self._server.should_exit = True
        self._stopping.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(10)
        self._sock.close()
        # Keep this order: first accept no new calls, then store the accepted writes.
        self._writer.shutdown()
        self._granter.shutdown(cancel_futures=True)  # members ask again

    def _follow_regularly(self) -> None:
        while not self._stopping.wait(_FOLLOW_INTERVAL):
            self._follow()

    def counters(self) -> dict[str, int]:
        """Return the counters, which only grow, including ``refused.<reason>``."""
        refused = {f"refused.{reason}": n for reason, n in dict(self.bounds.refused).items()}
        return Counter(dict(self._counts)) + Counter(refused)

    # refusals

    async def _refuse(self, request: Request, error: Exception) -> Response:
        """Count a refusal, log it unless that was done recently, and return the response."""
        if isinstance(error, ClientDisconnect):
            return Response(status_code=408)  # nobody reads it
        if isinstance(error, HTTPException):
            error = RefusedRequest(Refusal.ROUTE)
        assert isinstance(error, RefusedRequest)
        refusal = error.refusal
        self._counts[f"refused.{refusal.reason}"] += 1
        named, address = request.headers.get("x-bittensor-hotkey", ""), self._caller(request)
        claimed = HOTKEY.fullmatch(named)
        if self._may_log(named if claimed else address):
            caller = f"{named} at {address}" if claimed else address
            log.warning("Refused a call from %s: %s [%s]", caller, refusal.message, refusal.reason)
        return JSONResponse(error.fields, refusal.status, {"connection": "close"})

    async def _fail(self, request: Request, error: Exception) -> Response:
        # Log it here: Starlette raises it again, but uvicorn does not log it.
        if self._may_warn("defect"):
            why = f"{type(error).__name__}: {error}"
            log.warning("A call to %.80r failed by a defect (%.200s)", request.url.path, why)
        return JSONResponse({"message": "internal error: see the registry's log"}, 500)

    # checks

    def _check_head(self, request: Request) -> auth.Claim:
        """Check the headers of a write; return their claim. Raises RefusedRequest."""
        self._draw(request)
        if int(request.headers.get("content-length", "0")) > MAX_BODY:
            raise RefusedRequest(Refusal.TOO_LARGE)
        signed = [name for name, _ in request.headers.raw if name.startswith(b"x-bittensor-")]
        # A header that is sent twice could deceive a program that reads the other value.
        if len(signed) > len(set(signed)):
            raise RefusedRequest(Refusal.MALFORMED)
        claim = auth.read_claim(request.headers)
        if claim.receiver != self.registry.charter.identity:
            raise RefusedRequest(Refusal.RECEIVER)
        # Draw from the rate only once the signature is verified. Otherwise anybody could use up
        # another hotkey's rate.
        if self._hotkeys.empty(claim.hotkey):
            raise RefusedRequest(Refusal.RATE)
        auth.check_fresh(claim, time.time_ns(), skew=CLOCK_SKEW)
        if request.scope["path"] in self._founders and claim.hotkey != self.registry.charter.master:
            raise RefusedRequest(Refusal.NO_PERMIT)
        return claim

    def _draw(self, request: Request) -> None:
        if not self._addresses.draw(self._caller(request)):
            raise RefusedRequest(Refusal.RATE)

    def _caller(self, request: Request) -> str:
        """Return the caller's address; behind the proxy, the address that the proxy names."""
        address = normalize(request.client.host if request.client is not None else "")
        if address != self._proxy:
            return address
        # Take the last value, which the proxy appends, because callers can forge the others.
        named = ",".join(request.headers.getlist("x-forwarded-for"))
        return normalize(named.rpartition(",")[2].strip())

    # reads

    async def _read(self, request: Request) -> Response:
        self._draw(request)
        path = request.scope["path"]
        file = self.registry.files.get(path[1:])
        if path not in self._reads and file is None:
            raise RefusedRequest(Refusal.ROUTE)
        self._counts[f"read{path}"] += 1
        # A web site that points its own name at this address (DNS rebinding) must not be able to
        # read this page through a visitor's browser.
        named = request.headers.get("host", "").lower()
        host = named if named.endswith("]") else named.rpartition(":")[0] or named
        if path in ("/", "/metrics") and host not in self._names:
            return PlainTextResponse("unknown host name: see the registry's --host-name\n", 403)
        if path not in self._reads:
            return PlainTextResponse(file or "")
        return self._reads[path](request)

    async def _store(self, request: Request) -> Response:
        if self._files is None:
            return await self._read(request)
        self._counts[f"store/{request.method}"] += 1
        return await self._files.answer(request, partial(self._draw, request))

    def _state(self, request: Request) -> Response:
        registry, view = self.registry, self.registry.view
        # Send these in headers too, so that answers without a body also have them.
        now = {
            "x-start": registry.start,
            "x-version": str(view.version),
        }
        headers = {"cache-control": "no-cache", "etag": view.etag, **now}
        if request.headers.get("if-none-match") == view.etag:
            return Response(status_code=304, headers=headers)
        fields = {
            "registry": registry.charter.identity,
            "start": registry.start,
            "version": view.version,
        }
        head = json.dumps(fields).encode()[:-1] + b", "
        return _Pieces(head, view.content, b"}", headers=headers, kind="application/json")

    def _page(self, request: Request) -> Response:
        # Clients that reload the page all the time cost at most one drawing per second.
        if time.monotonic() - self._made[0] > _PAGE_KEPT:
            text = draw_page(self.registry).encode()
            self._made = time.monotonic(), _Pieces(text, headers=_PAGE_HEADERS, kind="text/html")
        return self._made[1]

    # writes

    async def _write(self, request: Request) -> Response:
        """Verify the call and hand it to the writer. Raises RefusedRequest."""
        claim, path = self._check_head(request), request.scope["path"]
        body = await request.body()
        registry = self.registry
        # Use the query as it was sent, since the caller signed it in that form.
        query = request.scope["query_string"]
        target = (request.scope["raw_path"] + (b"?" + query if query else b"")).decode()
        auth.proven(claim, request.headers, body, path=target, own=registry.charter.identity)
        self._hotkeys.draw(claim.hotkey)
        # Count by address, because with open admission anybody can create hotkeys at no cost.
        if path == "/register" and not self._registrations.draw(self._caller(request)):
            raise RefusedRequest(Refusal.RATE)
        fields = _parse_fields(body)
        if path == "/access":
            return await self._grant(claim, fields)
        # A neuron writes for itself; the founder writes for the hotkey that the fields name.
        own: tuple[Any, ...] = () if path in self._founders else (claim.hotkey,)
        if path == "/serve":
            found = narrowest(self._listens_at, self._caller(request))
            own = claim.hotkey, max(found, Reach.NETWORK) if self._private else found
        action = partial(self._writes[path], *own, **fields)
        write = partial(registry.write, claim.hotkey, claim.nonce, action)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._writer, self._answer, path, write)

    async def _grant(self, claim: auth.Claim, fields: dict[str, Any]) -> Response:
        """Answer a member's request for access to the store. Raises RefusedRequest."""
        asks_store = fields.get("do") != "read"
        view = self.registry.view
        member = find(view.neurons, claim.hotkey)
        # Refuse before anything is stored, since anybody can create hotkeys at no cost.
        if member is None:
            expelled = " was expelled" if claim.hotkey in view.expelled else " has no uid"
            self._counts["refused/access"] += 1
            reason = f"access: hotkey {claim.hotkey}{expelled}, so nothing is granted"
            return JSONResponse({"message": reason}, 400)
        # The store may be slow, and there may be many members.
        if self._granting >= _MOST_GRANTS or (asks_store and not self._grants.draw(claim.hotkey)):
            raise RefusedRequest(Refusal.RATE)
        last, latest = self._granted.get(claim.hotkey, -1), time.time_ns() + CLOCK_SKEW * 1e9
        # A last nonce in the future was accepted while both clocks were ahead; it must not lock its
        # member out.
        if claim.nonce <= last <= latest:
            raise RefusedRequest(Refusal.REPLAY)
        self._granted[claim.hotkey] = claim.nonce
        grant = partial(self._writes["/access"], member.uid, **fields)
        self._granting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._granter, self._answer, "/access", grant)
        finally:
            self._granting -= 1

    def _answer(self, path: str, action: Callable[[], Any]) -> Response:
        """Run the request (on a worker thread); return the answer, or a refusal with its reason."""
        try:
            done = action()
        except Replayed as error:
            self._counts["refused.replay"] += 1
            return JSONResponse({"message": str(error)}, 401)
        except (StoreAway, CannotStore) as error:
            self._counts[f"refused{path}"] += 1
            return JSONResponse({"message": str(error)}, 503)
        except (ChainError, ValueError, TypeError) as error:
            self._counts[f"refused{path}"] += 1
            reason = str(error) if isinstance(error, ChainError) else "malformed request"
            if isinstance(error, ValidationError):
                # Do not repeat the input, which may contain a secret.
                first = error.errors(include_url=False, include_input=False)[0]
                reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            return JSONResponse({"message": reason}, 400)
        self._counts[f"written{path}"] += 1
        return JSONResponse({"result": done})

    def _write_endpoint(
        self, hotkey: str, allowed: Reach, ip: Address, port: Port, peer: PeerId = ""
    ) -> None:
        """Store an endpoint whose reach is ``allowed`` or wider.

        DHT peers connect to it. Without this limit, a caller from outside a private network could
        make them connect to services inside.
        """
        if reach(ip) > allowed:
            raise ChainError(
                f"serve: {ip} cannot be reached from everywhere, and this call did not come from a "
                "private network: give the public address with --dht.ip, or call the "
                "registry by its own private address"
            )
        self.registry.serve(hotkey, ip, port, peer)


def narrowest(listens_at: str, caller: str) -> Reach:
    """Return the narrowest reach that the endpoint of a caller may have: the caller's own."""
    if listens_at and reach(listens_at) is Reach.MACHINE:
        return Reach.MACHINE
    try:
        found = reach(caller)
    except ValueError:  # the proxy named no address
        return Reach.EVERYWHERE
    # A loopback caller is a program on this machine, such as a proxy that --proxy does not name.
    return Reach.NETWORK if found is Reach.NETWORK else Reach.EVERYWHERE


class _Pieces(Response):
    """A response made of several parts, which other responses may share.

    For a client that reads slowly, only one piece is held in memory. Starlette's StreamingResponse
    takes twice the CPU time, because it also waits for the client to disconnect.
    """

    def __init__(self, *parts: bytes, headers: Mapping[str, str], kind: str) -> None:
        length = {"content-length": str(sum(map(len, parts)))}
        super().__init__(headers={**headers, **length}, media_type=kind)
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        for part in self._parts:
            for at in range(0, len(part), _PIECE):
                piece = memoryview(part)[at : at + _PIECE]
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _parse_fields(body: bytes) -> dict[str, Any]:
    """Return a body's JSON object; an empty body means an empty object. Raises RefusedRequest."""

    def refuse(_: str) -> float:
        raise ValueError("not finite")

    try:
        fields = json.loads(body or b"{}", parse_constant=refuse)
    except (ValueError, RecursionError):
        raise RefusedRequest(Refusal.MALFORMED) from None
    if not isinstance(fields, dict):
        raise RefusedRequest(Refusal.MALFORMED)
    return fields
