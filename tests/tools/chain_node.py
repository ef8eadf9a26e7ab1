"""A node to connect to: JSON-RPC over a real websocket on loopback, with faults.

The SDK's client, its connection (framing, correlation of replies, its own reconnect and resending)
and its mapping of errors run as in production, block numbers through the node's own methods. What a
real node encodes by SCALE needs the chain's metadata (megabytes that only a node has): those reads
go over the same websocket as JSON and are answered by a :class:`~.chain_substrate.LedgerSubstrate`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import suppress
from typing import Any

from bittensor._substrate import RpcSubstrate
from bittensor._transport.interface import SubstrateConnection
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from distributed_training.common.ports import free_ports
from tests.tools.chain_memory import MemoryLedger
from tests.tools.chain_substrate import LedgerSubstrate


class Node:
    """``silent``: reads requests and answers none. ``stop`` closes every connection and the port,
    ``start`` opens the same port again."""

    def __init__(self, ledger: MemoryLedger, netuid: int) -> None:
        self.substrate = LedgerSubstrate(ledger, netuid)
        self.silent = False
        (self.port,) = free_ports(1)  # no connection gets it between a stop and a start
        self.accepted = 0
        self.methods: list[str] = []
        self._open: set[ServerConnection] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: Any = None
        self.start()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def start(self) -> None:
        async def start() -> None:
            # A client that was abandoned never answers the close of its connection.
            self._server = await serve(self._talk, "127.0.0.1", self.port, close_timeout=1)

        self._run(start())

    def stop(self) -> None:
        async def stop() -> None:
            self._server.close()
            await self._server.wait_closed()

        if self._server is not None:
            self._run(stop())
            self._server = None

    def drop(self) -> None:
        """Cut every connection without a closing frame, as a lost network does."""

        async def drop() -> None:
            for connection in list(self._open):
                connection.transport.abort()

        self._run(drop())

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    async def _talk(self, connection: ServerConnection) -> None:
        self.accepted += 1
        self._open.add(connection)
        try:
            with suppress(ConnectionClosed):
                async for message in connection:
                    request = json.loads(message)
                    self.methods.append(request["method"])
                    if not self.silent:
                        answer = await self._answer(request["method"], request["params"])
                        reply = {"jsonrpc": "2.0", "id": request["id"], **answer}
                        await connection.send(json.dumps(reply))
        finally:
            self._open.discard(connection)

    async def _answer(self, method: str, params: list[Any]) -> dict[str, Any]:
        height = self.substrate.ledger.height
        if method == "chain_getHeader":
            return {"result": {"number": hex(height), "parentHash": f"0x{height - 1:064x}"}}
        if method == "chain_getBlockHash":
            return {"result": f"0x{params[0]:064x}"}
        if method in ("chain_getHead", "chain_getFinalizedHead"):
            return {"result": f"0x{height:064x}"}
        if method.startswith("ledger_"):
            return {"result": await getattr(self.substrate, method[7:])(*params)}
        return {"error": {"code": -32601, "message": f"no such method: {method}"}}


class _Connection(SubstrateConnection):
    async def initialize(self) -> None:
        await self._session.connect()  # without the metadata


class NodeSubstrate(RpcSubstrate):
    """The SDK's chain access by websocket; reads of storage as JSON, see the module."""

    def _interface(self, endpoint: str, fallbacks: list[str]) -> SubstrateConnection:
        return _Connection(endpoint, fallback_urls=fallbacks, retry_forever=self.retry_forever)

    async def _ask(self, name: str, *params: Any) -> Any:
        return await self._read(lambda raw: raw._session.request(f"ledger_{name}", list(params)))

    async def query(self, module: str, item: str, params: Any = None, **_: Any) -> Any:
        return await self._ask("query", module, item, params)

    async def query_map(self, module: str, item: str, params: Any = None, **_: Any) -> Any:
        return [tuple(pair) for pair in await self._ask("query_map", module, item, params)]

    async def runtime_call(self, api: str, method: str, params: list[Any], **_: Any) -> Any:
        return await self._ask("runtime_call", api, method, params)
