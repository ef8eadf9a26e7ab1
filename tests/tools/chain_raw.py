"""Send raw bytes, as a client or a server that breaks the rules of HTTP does."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def request(path: str, headers: dict[str, str], body: bytes = b"", method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


@contextmanager
def trickle() -> Iterator[int]:
    """Yield the port of a server whose answer's head arrives byte by byte and never ends."""
    ended = threading.Event()

    def drip(accepted: socket.socket) -> None:
        with accepted, suppress(OSError):
            for byte in itertools.chain(b"HTTP/1.1 200 OK\r\n", itertools.cycle(b"x")):
                accepted.send(bytes([byte]))
                if ended.wait(0.02):
                    return

    def serve(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                accepted, _ = server.accept()
                threading.Thread(target=drip, args=(accepted,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        try:
            yield server.getsockname()[1]
        finally:
            ended.set()
            server.shutdown(socket.SHUT_RDWR)
