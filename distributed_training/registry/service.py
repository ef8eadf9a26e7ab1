"""Answer a registry's callers over HTTP, all of it bounded (:mod:`..chain.http_server`).

Reads are open and come from an immutable view; a poller that names the ETag of what it has gets 304
and the block. Writes are checked cheapest first: path, size, rates, receiver, freshness,
signature; then a thread stores them, one after the other, while reads continue.

``GET /state``, ``/health``, ``/metrics``, ``/network.toml`` and ``/``, the page.
``POST /register``, ``/store_keys``, ``/access``, ``/deregister``, ``/commit``, ``/serve``,
``/weights``; for the founder also ``/enroll``, ``/expel``, ``/invite``, ``/invitations``,
``/revoke``, ``/allow``, ``/report``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from pydantic import ValidationError, validate_call

from distributed_training.chain import auth
from distributed_training.chain.auth import Refusal, Refused
from distributed_training.chain.base import ChainError, find
from distributed_training.chain.http_server import (
    Admission,
    BoundedServer,
    Buckets,
    Head,
    Reply,
    normalize,
    parse_fields,
    whole_reply,
)
from distributed_training.common.addresses import Reach, reach
from distributed_training.common.backoff import Throttle

from .access import Access, StoreAway
from .ledger import Address, PeerId, Port
from .page import draw_page, figures
from .store import CLOCK_SKEW, CannotStore, Registry, Replayed

log = logging.getLogger(__name__)

MAX_BODY = 256 * 1024  # bytes; weights of 4096 uids have 120 thousand
_REGISTRATIONS_PER_SECOND, _REGISTRATIONS_BURST = 1 / 60, 32.0  # of one address
_GRANTS_PER_SECOND, _GRANTS_BURST = 1.0, 64.0  # of one hotkey, of those that ask the store
_MOST_GRANTS = 256  # that wait for a thread
_PAGE_KEPT = 1.0  # seconds; one of 4096 uids takes 50 ms
_FOUNDERS = frozenset(
    {"/enroll", "/expel", "/invite", "/invitations", "/revoke", "/allow", "/report"}
)

_JSON = "application/json"
_PAGE_TYPE = "text/html; charset=utf-8"
# Hotkeys and addresses come from others: no script runs, even where an escape were forgotten.
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

    ``host_names``: names, and loopback's, at which page and metrics are shown. ``private``:
    members announce addresses of one private network, whoever the proxy names.
    """

    requests_per_address: float = 50.0
    requests_per_hotkey: float = 5.0
    max_connections: int = 8192
    max_connections_per_address: int = 64
    read_timeout: timedelta = timedelta(seconds=5)
    idle_timeout: timedelta = timedelta(seconds=30)  # longer than a client keeps a connection
    proxy: str | None = None
    host_names: tuple[str, ...] = ()
    private: bool = False


class Service(BoundedServer):
    """Serve ``registry`` on ``sock``, a listener, from :meth:`start` until :meth:`close`.

    The registry stays open. ``access``: of members to the global bucket; None: by other ways.
    ``follow``: reads what it serves again, called every few seconds.
    """

    NO_STRIKE = frozenset({Refusal.RATE, Refusal.NO_PERMIT})

    def __init__(
        self,
        registry: Registry,
        sock: socket.socket,
        limits: Limits,
        *,
        access: Access | None = None,
        follow: Callable[[], None] = lambda: None,
    ) -> None:
        self.registry = registry
        self._follow = follow
        self._names = {"127.0.0.1", "localhost", "[::1]", *map(str.lower, limits.host_names)}
        self._private = limits.private
        self._proxy = normalize(limits.proxy) if limits.proxy is not None else None
        # Behind a proxy callers come from anywhere, wherever this listens.
        self._listens_at = sock.getsockname()[0] if limits.proxy is None else ""
        self._addresses = Buckets(rate=limits.requests_per_address, capacity=16384)
        self._hotkeys = Buckets(rate=limits.requests_per_hotkey, capacity=16384)
        self._registrations = Buckets(
            rate=_REGISTRATIONS_PER_SECOND, burst=_REGISTRATIONS_BURST, capacity=16384
        )
        writes: dict[str, Callable[..., Any]] = {
            "/register": registry.join,
            "/store_keys": registry.store_keys,
            "/deregister": registry.remove,
            "/commit": registry.commit,
            "/serve": self._write_endpoint,
            "/weights": registry.set_weights,
            "/enroll": registry.enroll,
            "/expel": registry.expel,
            "/invite": registry.invite,
            "/invitations": registry.invitations,
            "/revoke": registry.revoke,
            "/allow": registry.allow,
            "/report": registry.report,
        }
        if access is not None:
            writes["/access"] = access.grant
        self._writes = {path: validate_call(write) for path, write in writes.items()}
        self._grants = Buckets(rate=_GRANTS_PER_SECOND, burst=_GRANTS_BURST, capacity=16384)
        self._granting = 0
        # Only in memory, so that no grant writes to the disk. What a call of the moment before a
        # restart granted it would grant again, to whoever could read that grant.
        self._granted = auth.NonceMemory(
            window=timedelta(seconds=auth.BTAUTH_MAX_AGE + CLOCK_SKEW),
        )
        self._granter = ThreadPoolExecutor(8, thread_name_prefix="registry-access")
        self._reads: dict[str, Callable[[Head], bytes]] = {
            "/state": self._state,
            "/health": lambda _: _json(
                200,
                {
                    "registry": registry.charter.identity,
                    "block": registry.height,
                    "store_keys": registry.object_store is not None,
                },
            ),
            "/metrics": lambda _: _text(200, figures(registry, self.counters())),
            "/": self._page,
        }
        self._made = (float("-inf"), b"")  # when, and the page
        self._may_warn = Throttle(60.0)
        # One: a slow disk holds up only writes, while the event loop answers reads.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="registry-writer")
        behind = limits.proxy is not None
        admission = Admission(
            # Or the bad requests of one of its callers would shut out everybody behind the proxy.
            trusted=frozenset(map(normalize, [limits.proxy] if limits.proxy is not None else [])),
            max_connections=limits.max_connections,
            max_connections_per_address=(
                2 * limits.max_connections if behind else limits.max_connections_per_address
            ),
            # Behind a proxy all come from its address; _addresses bounds those that it names.
            requests_per_address=1e6 if behind else limits.requests_per_address,
            # All pollers are untrusted clients, and thousands return together after an outage.
            newcomers=(5000.0, 10000),
        )
        super().__init__(
            sock=sock,
            admission=admission,
            read_timeout=limits.read_timeout,
            max_body=MAX_BODY,
            idle=limits.idle_timeout,
        )

    def close(self) -> None:
        """Close; accepted writes are stored. Idempotent."""
        # In this order: no new calls, then the accepted writes are stored.
        super().close()
        self._writer.shutdown()
        self._granter.shutdown(cancel_futures=True)  # they ask again

    def write_files(self) -> None:
        self.registry.reserve_blocks()
        self._follow()
        try:
            self.registry.let_into_store()
        except ChainError as error:
            if self._may_warn("members"):
                log.warning("%s: free its disk, or correct its permissions", error)

    def refused(self, refusal: Refusal, head: Head | None, address: str) -> None:
        if refusal is Refusal.SILENT:  # a browser opens more connections than it uses
            self._counts[f"refused.{refusal.reason}"] += 1
            return
        super().refused(refusal, head, address)

    # checks

    def check_head(self, head: Head) -> auth.Claim | None:
        """Check a request's head; return its claim, None for a read. Raises Refused."""
        address = self._caller(head)
        if not self._addresses.draw(address):
            raise Refused(Refusal.RATE)
        if head.method == "GET":
            return None
        if head.path not in self._writes:
            raise Refused(Refusal.ROUTE)
        if head.method != "POST":
            raise Refused(Refusal.METHOD)
        claim = auth.read_claim(head.headers)
        if claim.receiver != self.registry.charter.identity:
            raise Refused(Refusal.RECEIVER)
        # Only looked at. A token is taken with the proof, or anybody could use up a hotkey's rate.
        if self._hotkeys.empty(claim.hotkey):
            raise Refused(Refusal.RATE)
        _check_fresh(claim, time.time_ns())
        if head.path in _FOUNDERS and claim.hotkey != self.registry.charter.master:
            raise Refused(Refusal.NO_PERMIT, message="only the founder's hotkey may do this")
        return claim

    def _caller(self, head: Head) -> str:
        """Return the address of the caller; behind the proxy, the one that the proxy names."""
        if head.address != self._proxy:
            return head.address
        # The last one: the proxy adds it, and any caller may write the others.
        return normalize(head.headers.get("x-forwarded-for", "").rpartition(",")[2].strip())

    def answer(self, head: Head, claim: auth.Claim | None, body: bytes) -> Reply | Awaitable[Reply]:
        if claim is not None:
            return self._write(head, claim, body)
        file = self.registry.files.get(head.path[1:])
        if head.path not in self._reads and file is None:
            raise Refused(Refusal.ROUTE, message="there is nothing here")
        self._counts[f"read{head.path}"] += 1
        # A web site whose name was pointed at this address must not have a browser read it here.
        named = head.headers.get("host", "").lower()
        host = named if named.endswith("]") else named.rpartition(":")[0] or named
        if head.path in ("/", "/metrics") and host not in self._names:
            return _text(403, "this name is not the registry's: see --host-name\n")
        if head.path not in self._reads:
            return _text(200, file or "")
        return self._reads[head.path](head)

    # reads

    def _state(self, head: Head) -> bytes:
        registry, view = self.registry, self.registry.view
        # Before any body, so that they are there without one too.
        now = {
            "x-block": str(registry.height),
            "x-time": f"{time.time():.3f}",
            "x-start": registry.start,
            "x-version": str(view.version),
        }
        headers = {"cache-control": "no-cache", "etag": view.etag, **now}
        if head.headers.get("if-none-match") == view.etag:
            return whole_reply(304, b"", _JSON, headers)
        # Clients of 0.2.0 name a version instead, and take an answer without rows for no news.
        known = f"/state?since={view.version}&start={registry.start}" == head.target
        fields = {
            "registry": registry.charter.identity,
            "start": registry.start,
            "version": view.version,
            "block": registry.height,
            # By it a client tells that a refused write is its own clock's fault.
            "time": time.time(),
            "seconds_per_block": registry.seconds_per_block,
            "full": not known,
        }
        content = json.dumps(fields).encode()
        if not known:
            content = content[:-1] + b", " + view.content + b"}"
        return whole_reply(200, content, _JSON, headers)

    def _page(self, head: Head) -> bytes:
        # Whoever reloads it for ever costs no more than one page a second.
        if time.monotonic() - self._made[0] > _PAGE_KEPT:
            content = draw_page(self.registry).encode()
            self._made = time.monotonic(), whole_reply(200, content, _PAGE_TYPE, _PAGE_HEADERS)
        return self._made[1]

    # writes

    def _write(self, head: Head, claim: auth.Claim, body: bytes) -> Awaitable[bytes]:
        """Verify the call and hand it to the writer. Raises Refused."""
        registry = self.registry
        receiver = registry.charter.identity
        auth.proven(claim, head.headers, body, path=head.target, own=receiver)
        self._hotkeys.draw(claim.hotkey)
        # By address: with open admission anybody makes new hotkeys for nothing.
        if head.path == "/register" and not self._registrations.draw(self._caller(head)):
            raise Refused(Refusal.RATE)
        fields = parse_fields(body)
        if head.path == "/access":
            return self._grant(claim, fields)
        # A neuron writes for itself; the founder writes for the hotkey that the fields name.
        own: tuple[Any, ...] = () if head.path in _FOUNDERS else (claim.hotkey,)
        if head.path == "/serve":
            found = narrowest(self._listens_at, self._caller(head))
            own = claim.hotkey, max(found, Reach.NETWORK) if self._private else found
        action = partial(self._writes[head.path], *own, **fields)
        write = partial(registry.write, claim.hotkey, claim.nonce, action)
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._writer, self._answer, head.path, write)

    async def _grant(self, claim: auth.Claim, fields: dict[str, Any]) -> bytes:
        """Answer a member's request for access to the store. Raises Refused."""
        asks_store = fields.get("do") != "read"
        view = self.registry.view
        member = find(view.neurons, claim.hotkey)
        if member is None:  # before anything is kept: anybody can make hotkeys at no cost
            expelled = " was expelled" if claim.hotkey in view.expelled else " has no uid"
            self._counts["refused/access"] += 1
            reason = f"access: hotkey {claim.hotkey}{expelled}, so nothing is granted"
            return _json(400, {"message": reason})
        # The store may be slow, and members many.
        if self._granting >= _MOST_GRANTS or (asks_store and not self._grants.draw(claim.hotkey)):
            raise Refused(Refusal.RATE)
        if not self._granted.use(claim.hotkey, claim.nonce):
            raise Refused(Refusal.REPLAY)
        grant = partial(self._writes["/access"], member.uid, **fields)
        self._granting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._granter, self._answer, "/access", grant)
        finally:
            self._granting -= 1

    def _answer(self, path: str, action: Callable[[], Any]) -> bytes:
        """Run the request on a thread; return the answer, or a refusal with its reason."""
        try:
            done = action()
        except Replayed as error:
            self._counts["refused.replay"] += 1
            return _json(401, {"message": str(error)})
        except (StoreAway, CannotStore) as error:
            self._counts[f"refused{path}"] += 1
            return _json(503, {"message": str(error)})
        except (ChainError, ValueError, TypeError) as error:
            self._counts[f"refused{path}"] += 1
            reason = str(error) if isinstance(error, ChainError) else "malformed request"
            if isinstance(error, ValidationError):
                # Nothing of the input, which may hold a secret.
                first = error.errors(include_url=False, include_input=False)[0]
                reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            return _json(400, {"message": reason})
        self._counts[f"written{path}"] += 1
        return _json(200, {"result": done})

    def _write_endpoint(
        self, hotkey: str, allowed: Reach, ip: Address, port: Port, peer: PeerId = ""
    ) -> None:
        """Write an endpoint whose reach is ``allowed`` or wider.

        Validators call it. So whoever is outside of their network could have services called that
        are inside.
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
    except ValueError:  # the proxy named nobody
        return Reach.EVERYWHERE
    # Loopback is another program of this machine, such as a proxy that --proxy does not name.
    return Reach.NETWORK if found is Reach.NETWORK else Reach.EVERYWHERE


def _check_fresh(claim: auth.Claim, now: int) -> None:
    """Raise Refused unless the call was signed just now, by the clock ``now`` in ns."""
    try:
        auth.check_fresh(claim, now, skew=CLOCK_SKEW)
    except Refused as refused:
        ahead = (claim.nonce - now) / 1e9
        message = (
            f"{refused.refusal.message}: it was signed {abs(ahead):.0f} s "
            f"{'after' if ahead > 0 else 'before'} this registry's time; see whether timedatectl "
            "says 'synchronized: yes' on both machines"
        )
        raise Refused(refused.refusal, message=message) from None


def _json(status: int, fields: dict[str, Any]) -> bytes:
    return whole_reply(status, json.dumps(fields).encode(), _JSON, {})


def _text(status: int, text: str) -> bytes:
    return whole_reply(status, text.encode(), "text/plain; charset=utf-8", {})
