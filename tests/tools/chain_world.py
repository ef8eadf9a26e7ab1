"""Share among the tests of the chain: development keys, a server of signed calls, answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from bittensor import http_auth
from bittensor.sp_core import Keypair

from distributed_training.chain.auth import (
    BTAUTH_MAX_AGE,
    Claim,
    NonceMemory,
    Refusal,
    Refused,
    check_fresh,
    proven,
    read_claim,
)
from distributed_training.chain.http_server import Admission, BoundedServer, Head, parse_fields
from distributed_training.chain.identity import Wallet
from distributed_training.common.ports import listen

LOCALHOST = "127.0.0.1"
CALL = "/call"  # the one route of a :class:`World`
MAX_BODY = 4096  # bytes
SKEW = 4.0  # seconds


def wallet_of(uri: str) -> Wallet:
    return Wallet(Keypair.create_from_uri(uri), None)


MINER = wallet_of("//miner")
VALIDATOR = wallet_of("//validator")  # the master
POOR = wallet_of("//poor-validator")  # permit, no stake
PEER = wallet_of("//peer")  # stake, no permit
STRANGER = wallet_of("//stranger")


@dataclass(frozen=True)
class Bounds:
    """By default nothing is in the way of tests that send much from one address."""

    max_connections: int = 256
    max_connections_per_address: int = 16
    requests_per_address: float = 10_000.0
    read_timeout: timedelta = timedelta(seconds=5)
    trusted: frozenset[str] = frozenset()


class _Signed(BoundedServer):
    """Keeps the fields of each call that is signed, fresh and new."""

    def __init__(self, bounds: Bounds) -> None:
        self.admission = Admission(
            trusted=bounds.trusted,
            max_connections=bounds.max_connections,
            max_connections_per_address=bounds.max_connections_per_address,
            requests_per_address=bounds.requests_per_address,
        )
        super().__init__(
            sock=listen(LOCALHOST, 0),
            admission=self.admission,
            read_timeout=bounds.read_timeout,
            max_body=MAX_BODY,
        )
        self._memory = NonceMemory(window=timedelta(seconds=BTAUTH_MAX_AGE + SKEW))
        self.calls: list[Mapping[str, Any]] = []

    def check_head(self, head: Head) -> Claim:
        if head.path != CALL:
            raise Refused(Refusal.ROUTE)
        if head.method != "POST":
            raise Refused(Refusal.METHOD)
        return read_claim(head.headers)

    def answer(self, head: Head, claim: Claim, body: bytes) -> dict[str, Any]:
        check_fresh(claim, time.time_ns(), skew=SKEW)
        proven(claim, head.headers, body, path=head.target, own=MINER.ss58)
        if not self._memory.use(claim.hotkey, claim.nonce):
            raise Refused(Refusal.REPLAY)
        self.calls.append(parse_fields(body))
        return {"answer": True}

    def write_files(self) -> None:
        """There are none."""

    def counters(self) -> dict[str, int]:
        return {**super().counters(), "connections": self.admission.connections}


class World:
    """A server of signed calls with these bounds, and the calls that it has accepted."""

    def __init__(self, bounds: Bounds = Bounds()) -> None:
        self.server = _Signed(bounds)
        self.calls = self.server.calls

    def refused(self, reason: str) -> int:
        return self.server.counters().get(f"refused.{reason}", 0)


@contextmanager
def running(made: World) -> Iterator[World]:
    made.server.start()
    try:
        yield made
    finally:
        made.server.close()


def world(bounds: Bounds = Bounds()) -> AbstractContextManager[World]:
    return running(World(bounds))


def sign(wallet: Wallet, body: bytes) -> dict[str, str]:
    """Headers of a call that ``wallet`` signed, by the SDK's own ``sign``."""
    return http_auth.sign(
        wallet.hotkey, method="POST", path=CALL, body=body, receiver_ss58=MINER.ss58
    )


@contextmanager
def answers(answer: Callable[[BaseHTTPRequestHandler], tuple[int, bytes]]) -> Iterator[int]:
    """The port of a server that answers each request with a status and content."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            status, content = answer(self)
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            return None

    with ThreadingHTTPServer((LOCALHOST, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join(5)
