"""The chain of a local subnet: registrations, commitments, endpoints, weights and a block clock.

    python -m distributed_training.localnet.chain_server --folder DIR --port P --seconds-per-block S

Reads are open; every write must be signed by the hotkey it is for (``btauth/1``, real sr25519).
A registration chooses its uid, stake and validator permit: this is a chain for experiments on one
machine and it listens on 127.0.0.1 only. Rules and state are the :class:`~.ledger.Ledger`'s.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from distributed_training.chain.base import ChainError
from distributed_training.localnet.ledger import MAX_UIDS, Ledger, LedgerDamaged

MAX_BODY = 64 * 1024

Fields = dict[str, Any]


def _number(value: Any, name: str, low: float, high: float) -> float:
    """Raises ChainError for what is no finite number between ``low`` and ``high``."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ChainError(f"{name}: a number") from None
    if not low <= number <= high:  # NaN neither
        raise ChainError(f"{name}: between {low:g} and {high:g}")
    return number


def _uid(value: Any) -> int:
    return int(_number(value, "uid", 0, MAX_UIDS - 1))


def _text(value: Any, name: str, longest: int) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= longest:
        raise ChainError(f"{name}: a text of at most {longest} characters")
    return value


def _writes(ledger: Ledger) -> dict[str, Callable[[str, Fields], Any]]:
    """What a signed request may change, by path: functions of the hotkey and the request's fields.

    They raise ChainError for fields that are wrong.
    """

    def register(hotkey: str, fields: Fields) -> int:
        return ledger.register(
            hotkey,
            uid=None if fields.get("uid") is None else _uid(fields["uid"]),
            stake=_number(fields.get("stake", 0.0), "stake", 0.0, 1e12),
            validator_permit=bool(fields.get("validator_permit", False)),
        )

    def serve(hotkey: str, fields: Fields) -> None:
        port = int(_number(fields.get("port"), "port", 1, 65535))
        ledger.serve(hotkey, _text(fields.get("ip"), "ip", 64), port)

    def weights(hotkey: str, fields: Fields) -> None:
        given = fields.get("weights")
        if not isinstance(given, dict) or len(given) > MAX_UIDS:
            raise ChainError("weights: uids and numbers")
        row = {_uid(u): _number(w, "weight", 0.0, 1e12) for u, w in given.items()}
        ledger.set_weights(hotkey, row)

    return {
        "/register": register,
        "/deregister": lambda hotkey, fields: ledger.deregister(hotkey),
        "/commit": lambda hotkey, fields: ledger.commit(
            hotkey, _text(fields.get("text"), "text", MAX_BODY)
        ),
        "/serve": serve,
        "/weights": weights,
    }


def build_app(ledger: Ledger) -> Starlette:
    from bittensor import http_auth

    nonces = http_auth.InMemoryNonceStore()
    writes = _writes(ledger)

    def state(request: Request) -> JSONResponse:  # starlette runs a `def` in a thread
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
            # In a thread: an fsync holds nobody else up.
            result = await run_in_threadpool(writes[path], caller.hotkey_ss58, fields)
        except (ChainError, ValueError) as error:
            return JSONResponse({"message": str(error)}, 400)
        return JSONResponse({"result": result, "state": ledger.snapshot()})

    routes = [Route("/state", state)]
    routes += [Route(path, write, methods=["POST"]) for path in writes]
    return Starlette(routes=routes)


class LocalChainServer:
    """The chain server on a thread of this process, for tests; the orchestrator starts the program.

    ``port`` 0 takes a free port. ``start`` returns when requests are answered; raises OSError when
    the port is in use.
    """

    def __init__(
        self,
        *,
        folder: Path,
        port: int = 0,
        seconds_per_block: float = 1.0,
        first_block: int = 1000,
    ) -> None:
        self.ledger = Ledger(
            folder=folder, seconds_per_block=seconds_per_block, first_block=first_block
        )
        self._requested_port = port
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _bind(self) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # A restart takes the same port, so that clients find it again.
            sock.bind(("127.0.0.1", self.port or self._requested_port))
        except OSError:
            sock.close()
            raise
        self.port = sock.getsockname()[1]
        return sock

    def _build(self) -> uvicorn.Server:
        config = uvicorn.Config(
            build_app(self.ledger),
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            loop="asyncio",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        return uvicorn.Server(config)

    def start(self) -> LocalChainServer:
        sock = self._bind()
        server = self._build()
        # The socket listens from here on: the first client waits in its backlog.
        sock.listen(128)
        self._server = server
        self._thread = threading.Thread(
            target=server.run, kwargs={"sockets": [sock]}, name="chain-server", daemon=True
        )
        self._thread.start()
        return self

    def stop(self) -> None:
        """Idempotent. The state stays in the folder; ``start`` serves it again."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(10)
        self._server = self._thread = None

    def run(self) -> None:
        """Serve on this thread until SIGINT or SIGTERM."""
        sock = self._bind()
        print(f"chain at {self.url}, block {self.ledger.height}", flush=True)
        self._build().run(sockets=[sock])

    def __enter__(self) -> LocalChainServer:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the state is kept")
    parser.add_argument("--port", type=int, default=0, help="0: a free one, printed at the start")
    parser.add_argument("--seconds-per-block", type=float, default=1.0)
    parser.add_argument("--first-block", type=int, default=1000, help="of a new chain")
    options = parser.parse_args(argv)
    if not options.seconds_per_block > 0:
        parser.error("--seconds-per-block: a positive number")
    try:
        LocalChainServer(
            folder=options.folder,
            port=options.port,
            seconds_per_block=options.seconds_per_block,
            first_block=options.first_block,
        ).run()
    except LedgerDamaged as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"port {options.port} of 127.0.0.1 is not free ({error.strerror}), so there is no "
            "chain: choose another one with --port",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        # uvicorn raises the signal again once it has shut down.
        return 0
    return 0


if __name__ == "__main__":
    # uvicorn raises the signal again once it has shut down: a clean end then, not a
    # KeyboardInterrupt, which would end the interpreter with SIGINT's status.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    sys.exit(main())
