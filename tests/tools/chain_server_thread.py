"""The local subnet's chain server on a thread of the test's process."""

from __future__ import annotations

import socket
import threading

import uvicorn

from distributed_training.localnet.chain_server import Ledger, build_server


class LocalChainServer:
    """``start`` returns when requests are answered. After a ``stop`` it serves the same state at
    the same port again."""

    def __init__(self, *, seconds_per_block: float = 1.0) -> None:
        self.ledger = Ledger(seconds_per_block=seconds_per_block)
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> LocalChainServer:
        # It listens from here on: the first client waits in its backlog.
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self._server = build_server(self.ledger)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, daemon=True
        )
        self._thread.start()
        return self

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(10)
        self._server = self._thread = None

    def __enter__(self) -> LocalChainServer:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
