"""The chain of a local subnet: registrations, commitments, endpoints, weights and a block clock.

    python -m distributed_training.localnet.chain_server --port P --seconds-per-block S

Reads are open; every write must be signed by the hotkey it is for (``btauth/1``, real sr25519).
A registration chooses its uid, stake and validator permit: this is a chain for experiments on one
machine and it listens on 127.0.0.1 only. Rules and state are the :class:`~.ledger.Ledger`'s.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn
from pydantic import validate_call
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from distributed_training.chain.base import ChainError
from distributed_training.config.arguments import Parser, ranged
from distributed_training.localnet.ledger import Ledger

MAX_BODY = 64 * 1024


def _writes(ledger: Ledger) -> dict[str, Callable[..., Any]]:
    """What a signed request may change, by path: of its hotkey and, by name, its fields."""
    return {
        "/register": validate_call(ledger.register),
        "/deregister": validate_call(ledger.deregister),
        "/commit": validate_call(ledger.commit),
        "/serve": validate_call(ledger.serve),
        "/weights": validate_call(ledger.set_weights),
    }


def build_app(ledger: Ledger) -> Starlette:
    from bittensor import http_auth

    nonces = http_auth.InMemoryNonceStore()
    writes = _writes(ledger)

    async def state(request: Request) -> JSONResponse:
        return JSONResponse(ledger.snapshot())

    async def write(request: Request) -> JSONResponse:
        raw = bytearray()
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > MAX_BODY:
                return JSONResponse({"message": "body too large"}, 413)
        path = request.url.path
        try:
            caller = http_auth.verify(
                dict(request.headers),
                bytes(raw),
                method="POST",
                path=path,
                self_hotkey_ss58="",
                require_receiver=False,
                nonce_store=nonces,
            )
        except http_auth.AuthError as error:
            return JSONResponse({"message": str(error)}, 401)
        try:
            fields = json.loads(bytes(raw) or b"{}")
            if not isinstance(fields, dict):
                raise ChainError("an object is expected")
            result = writes[path](caller.hotkey_ss58, **fields)
        except (ChainError, ValueError, TypeError) as error:
            return JSONResponse({"message": str(error)}, 400)
        return JSONResponse({"result": result, "state": ledger.snapshot()})

    routes = [Route("/state", state)]
    routes += [Route(path, write, methods=["POST"]) for path in writes]
    return Starlette(routes=routes)


def build_server(ledger: Ledger) -> uvicorn.Server:
    config = uvicorn.Config(
        build_app(ledger),
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="off",
        loop="asyncio",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=ranged(0, 65535), default=0, help="0: a free one, printed")
    parser.add_argument("--seconds-per-block", type=ranged(1e-6, 3600.0), default=1.0)
    options = parser.parse_args(argv)
    ledger = Ledger(seconds_per_block=options.seconds_per_block)
    try:
        listener = socket.create_server(("127.0.0.1", options.port))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    port = listener.getsockname()[1]
    print(f"chain at http://127.0.0.1:{port}, block {ledger.height}", flush=True)
    print(f"READY {os.getpid()}", flush=True)  # the listener's backlog takes the first client
    with contextlib.suppress(KeyboardInterrupt):  # raised again by uvicorn after its shutdown
        build_server(ledger).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    # uvicorn raises the signal again once it has shut down: a clean end then, not a
    # KeyboardInterrupt, which would end the interpreter with SIGINT's status.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    sys.exit(main())
