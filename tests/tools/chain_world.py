"""Provide the chain's tests with development keys and a server of prepared answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from bittensor.sp_core import Keypair

from distributed_training.chain.identity import Wallet
from distributed_training.chain.registry import RegistryChain
from distributed_training.config.settings import ChainSettings

LOCALHOST = "127.0.0.1"


def wallet_of(uri: str) -> Wallet:
    return Wallet(Keypair.create_from_uri(uri), None)


MINER = wallet_of("//miner")
VALIDATOR = wallet_of("//validator")  # the master
PEER = wallet_of("//peer")
STRANGER = wallet_of("//stranger")


def registry_at(
    url: str,
    wallet: Wallet | None,
    master: str | None = None,
    *,
    timeout: timedelta = timedelta(seconds=10),
    **settings: Any,
) -> RegistryChain:
    """Open the registry at ``url``. The caller must close the result."""
    return RegistryChain(
        ChainSettings(registry_url=url, **settings), wallet, master, timeout=timeout
    )


@contextmanager
def answers(
    answer: Callable[[BaseHTTPRequestHandler], tuple[Any, ...]], version: str = "HTTP/1.0"
) -> Iterator[int]:
    """Yield the port of a server. ``answer`` returns a status, the content and perhaps headers."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = version

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            status, content, *more = answer(self)
            self.send_response(status)
            for name, value in more[0].items() if more else ():
                self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_POST = do_PUT = do_HEAD = do_GET

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
