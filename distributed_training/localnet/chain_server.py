"""The chain of a local subnet: registrations, commitments, endpoints, weights and a block clock.

    python -m distributed_training.localnet.chain_server --port P --seconds-per-block S

:class:`Ledger` holds rules and state, with the public chain's limits; tests use it directly or put
it behind the SDK's own seam. The server offers it over HTTP. Reads are open; every write must be
signed by the hotkey it is for (``btauth/1``, real sr25519). A registration chooses its uid, stake
and validator permit: this is a chain for experiments on one machine, and it listens on 127.0.0.1
only. Its state lives as long as its process.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Annotated, Any

import uvicorn
from pydantic import Field, validate_call
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from distributed_training.chain.base import ChainError, Neuron, find
from distributed_training.config.loader import Parser, ranged

MAX_COMMITMENT = 128  # bytes, as on the public chain
MAX_UIDS = 256

# What a write over HTTP is held against (:mod:`.chain_server`).
Uid = Annotated[int, Field(ge=0, lt=MAX_UIDS)]
Port = Annotated[int, Field(ge=1, le=65535)]
Address = Annotated[str, Field(min_length=1, max_length=64)]
Amount = Annotated[float, Field(ge=0.0, le=1e12)]  # NaN neither


class Ledger:
    """Thread-safe. Writes raise ChainError when the chain does not accept them.

    Blocks pass by the clock, one every ``seconds_per_block`` (``math.inf``: only by
    :meth:`advance`). A wall clock that is set changes nothing.
    """

    def __init__(self, *, seconds_per_block: float = math.inf, first_block: int = 1000) -> None:
        self.seconds_per_block = seconds_per_block
        self.entries: dict[int, Neuron] = {}
        self.commitments: dict[str, str] = {}  # by hotkey
        self.weights: dict[int, dict[int, float]] = {}  # of each validator
        self.version = 0  # lets clients tell a late answer
        self._lock = threading.RLock()
        self._origin = (first_block, time.monotonic())

    # blocks

    @property
    def height(self) -> int:
        """Number of the current block."""
        block, since = self._origin
        return block + int((time.monotonic() - since) / self.seconds_per_block)

    def advance(self, blocks: int = 1) -> None:
        """Let blocks pass at once; a negative number is a reorganization."""
        block, since = self._origin
        self._origin = (block + blocks, since)

    def snapshot(self) -> dict[str, Any]:
        """All of the state, as JSON has it."""
        with self._lock:
            return {
                "block": self.height,
                "time": time.time(),
                "version": self.version,
                "neurons": [asdict(self.entries[uid]) for uid in sorted(self.entries)],
                "commitments": dict(self.commitments),
                "weights": {str(uid): dict(row) for uid, row in self.weights.items()},
            }

    @contextmanager
    def _change(self) -> Iterator[None]:
        """What is refused is refused before anything has changed."""
        with self._lock:
            yield
            self._score()
            self.version += 1

    def _own(self, kind: str, hotkey: str) -> Neuron:
        neuron = find(list(self.entries.values()), hotkey)
        if neuron is None:
            raise ChainError(f"{kind}: hotkey {hotkey} is not registered")
        return neuron

    # writes

    def register(
        self,
        hotkey: str,
        *,
        uid: Uid | None = None,
        stake: Amount = 0.0,
        validator_permit: bool = False,
    ) -> int:
        """Give ``hotkey`` a uid: the one it has, or the lowest free one. Returns it.

        A hotkey that is registered keeps its endpoint. A uid that is taken goes to the new hotkey,
        whose owner is thereby deregistered, as on the public chain.
        """
        with self._change():
            old = find(list(self.entries.values()), hotkey)
            if uid is None:
                free = (i for i in range(MAX_UIDS) if i not in self.entries)
                uid = old.uid if old is not None else next(free, None)
            if uid is None:
                raise ChainError("register: all uids are taken: choose one")
            if old is None or old.uid != uid:
                self.weights.pop(uid, None)
            if old is not None:
                del self.entries[old.uid]
            self.entries[uid] = replace(
                old or Neuron(uid=uid, hotkey=hotkey),
                uid=uid,
                stake=stake,
                validator_permit=validator_permit,
                last_update=self.height,
            )
            return uid

    def deregister(self, hotkey: str) -> None:
        with self._change():
            uid = self._own("deregister", hotkey).uid
            del self.entries[uid]
            self.weights.pop(uid, None)

    def commit(self, hotkey: str, text: str) -> None:
        with self._change():
            self._own("commit", hotkey)
            if len(text.encode()) > MAX_COMMITMENT:
                raise ChainError(f"commit: a commitment has at most {MAX_COMMITMENT} bytes")
            self.commitments[hotkey] = text

    def serve(self, hotkey: str, ip: Address, port: Port) -> None:
        with self._change():
            neuron = self._own("serve", hotkey)
            self.entries[neuron.uid] = replace(neuron, ip=ip, port=port)

    def set_weights(self, hotkey: str, weights: Mapping[Uid, Amount]) -> None:
        with self._change():
            neuron = self._own("weights", hotkey)
            if not neuron.validator_permit:
                raise ChainError("weights: only a validator with a permit sets weights")
            unknown = sorted(set(weights) - set(self.entries))
            if unknown:
                raise ChainError(f"weights: no such uids: {unknown}")
            self.weights[neuron.uid] = dict(weights)
            self.entries[neuron.uid] = replace(neuron, last_update=self.height)

    def _score(self) -> None:
        """Incentive = mean of the validators' normalized weights, weighted by stake.

        Simpler than Yuma consensus (no clipping, no bonds), enough to see who is paid.
        """
        totals = dict.fromkeys(self.entries, 0.0)
        for voter, row in self.weights.items():
            total = sum(row.values())
            for uid, weight in row.items():
                if voter in self.entries and uid in totals and total > 0:
                    totals[uid] += self.entries[voter].stake * weight / total
        everything = sum(totals.values())
        for uid, neuron in self.entries.items():
            share = totals[uid] / everything if everything > 0 else 0.0
            self.entries[uid] = replace(neuron, incentive=share, consensus=share)


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
